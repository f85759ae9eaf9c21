"""`onebit launch` before it starts anything: hostfiles, the choice of slots, variables, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebit.cli import UserError, main
from onebit.cli.launch.hosts import choose_slots, exported, parse_environment, parse_hostfile

TWO = {"worker-0": 4, "worker-1": 4}
ALL = {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3]}


def test_a_hostfile_has_a_line_for_each_host() -> None:
    text = (
        "\n  worker-1 slots=2\n\tuser@10.0.0.7\tslots=16  # rack 2\n#worker-3 slots=3\nlocalhost slots=1 max_slots=8\n"
    )
    assert list(parse_hostfile(text, "hosts").items()) == [("worker-1", 2), ("user@10.0.0.7", 16), ("localhost", 1)]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("worker-1 slots=1", "line 3: worker-1 has a line already"),
        *((line, "line 3: expected `HOST slots=N`") for line in (
            "this is bad slots=1", "missingslots", "w slots=0", "w slots=-1", "w slots=two", "w slots=2 and more",
            "w slots = 2", "w slots=10000", "-oProxyCommand=id slots=1")),
    ],
)  # fmt: skip
def test_other_lines_are_refused_by_number(line: str, complaint: str) -> None:
    with pytest.raises(UserError, match=f"^hosts, {complaint}"):
        parse_hostfile(f"# ours\nworker-1 slots=2\n{line}\n", "hosts")


def test_an_empty_hostfile_is_refused() -> None:
    with pytest.raises(UserError, match="hosts names no host"):
        parse_hostfile("# none\n\n", "hosts")


# The cases are those of DeepSpeed's documentation and of its tests.
@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, ALL),
        ({"include": "worker-0@worker-1:0,2"}, {"worker-0": [0, 1, 2, 3], "worker-1": [0, 2]}),
        ({"include": "worker-1:3,0"}, {"worker-1": [0, 3]}),
        ({"include": "worker-1@worker-0"}, ALL),
        ({"include": "worker-0:1,1"}, {"worker-0": [1]}),
        ({"include": "worker-0:1@worker-0:0,1"}, {"worker-0": [0, 1]}),
        ({"include": "worker-0@worker-0:1"}, {"worker-0": [1]}),
        ({"exclude": "worker-1:0"}, {"worker-0": [0, 1, 2, 3], "worker-1": [1, 2, 3]}),
        ({"exclude": "worker-1"}, {"worker-0": [0, 1, 2, 3]}),
        ({"exclude": "worker-0:0,1@worker-1:3"}, {"worker-0": [2, 3], "worker-1": [0, 1, 2]}),
        ({"exclude": "worker-0:0,1,2,3"}, {"worker-1": [0, 1, 2, 3]}),
        ({"num_nodes": 1}, {"worker-0": [0, 1, 2, 3]}),
        ({"num_gpus": 2}, {"worker-0": [0, 1], "worker-1": [0, 1]}),
        ({"num_nodes": 1, "num_gpus": 1}, {"worker-0": [0]}),
    ],
)
def test_slots_are_chosen_as_deepspeed_does(options: dict, chosen: dict[str, list[int]]) -> None:
    assert list(choose_slots(TWO, **options).items()) == list(chosen.items())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"include": "worker-0", "exclude": "worker-1"}, "give one of them"),
        ({"include": "worker-0", "num_nodes": 1}, "do not go with"),
        ({"exclude": "worker-0", "num_gpus": 1}, "do not go with"),
        ({"include": "jeff"}, "no host 'jeff' in worker-0 slots=4, worker-1 slots=4"),
        ({"exclude": "jeff:0"}, "no host 'jeff'"),
        ({"exclude": "worker-1@worker-0:1@5"}, "no host '5'"),
        ({"include": "worker-1:4"}, "no slot 4 on worker-1, which has 0 to 3"),
        ({"exclude": "worker-1:0,99"}, "no slot 99"),
        ({"include": "worker-1:"}, "expected HOST or HOST:SLOT,SLOT"),
        ({"include": "worker-1:0-2"}, "got 'worker-1:0-2'"),
        ({"include": "worker-0@"}, "no host ''"),
        ({"exclude": "worker-0@worker-1"}, "leaves no slot"),
        ({"num_nodes": 3}, "expected 1 to 2"),
        ({"num_nodes": 0}, "expected 1 to 2"),
        ({"num_gpus": 5}, "expected 1 to 4"),
    ],
)
def test_what_a_choice_cannot_mean_is_named(options: dict, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        choose_slots(TWO, **options)


@given(st.dictionaries(st.sampled_from("abcde"), st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=5))
def test_what_is_included_and_what_is_excluded_is_everything(named: dict[str, set[int]]) -> None:
    pool = dict.fromkeys("edcba", 4)
    text = "@".join(f"{host}:{','.join(map(str, slots))}" for host, slots in named.items())
    included = choose_slots(pool, include=text)
    assert {host: set(slots) for host, slots in included.items()} == named
    if any(len(named.get(host, ())) < 4 for host in pool):
        excluded = choose_slots(pool, exclude=text)
        assert {h: sorted(included.get(h, []) + excluded.get(h, [])) for h in pool} == {h: [0, 1, 2, 3] for h in pool}
        assert list(excluded) == [host for host in pool if host in excluded]


def test_variables_of_the_launcher_and_of_files() -> None:
    environment = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/lib", "HOME": "/root", "WANDB_API_KEY": "secret"}
    assert exported(environment, Path("/job")) == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/job:/lib"}
    assert exported({}, Path("/job")) == {"PYTHONPATH": "/job"}
    assert parse_environment("# ours\n\nA=1\n B = x=y $HOME 'z' \nC=\n", "f") == {
        "A": "1",
        "B": "x=y $HOME 'z'",
        "C": "",
    }
    for line in ("export A=1", "A", "=1", "-x=1"):
        with pytest.raises(UserError, match="f, line 2: expected KEY=VALUE"):
            parse_environment(f"A=1\n{line}\n", "f")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--hostfile", "missing"], "--hostfile missing cannot be read"),
        (["--hostfile", "local"], "w cannot reach it by this name; give --master_addr"),
        (["--hostfile", "remote", "--ssh", "no-such-ssh -v"], "--ssh no-such-ssh -v: no such command"),
        (["--num_gpus", "2", "--include", "localhost:0"], "do not go with"),
        (["--num_gpus", "2", "--num_nodes", "2"], "--num_nodes 2: expected 1 to 1"),
    ],
)
def test_a_launch_that_cannot_be_ends_with_one_line(
    options: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("local").write_text("localhost slots=1\nw slots=1\n")
    Path("remote").write_text("v slots=1\nw slots=1\n")
    assert main(["launch", *options, "train.py"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("onebit launch: ") and complaint in said


def test_without_a_gpu_and_a_hostfile_a_launch_asks_for_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["launch", "train.py"]) == 1 and "give --hostfile FILE, or --num_gpus N" in capsys.readouterr().err


def test_deepspeeds_option_for_no_local_rank_is_taken(capsys: pytest.CaptureFixture) -> None:
    assert main(["launch", "--hostfile", "missing", "--no_local_rank", "train.py"]) == 1
    assert "--hostfile missing cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["launch", "--bind_cores_to_rank", "train.py"])
    assert "onebit launch: error: unrecognized arguments: --bind_cores_to_rank" in capsys.readouterr().err


def test_visible_gpus_are_not_chosen_twice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert main(["launch", "--include", "localhost:1,3", "train.py"]) == 1
    assert "unset CUDA_VISIBLE_DEVICES" in capsys.readouterr().err
