"""The command `onebit`: what it accepts, what it refuses and how, with rich and without."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onebit import cli
from onebit.cli import COMMANDS, UserError, bench, main
from onebit.cli.numbers import MODELS, amount, model_size, number, rate, seconds
from onebit.cli.output import PLAIN, Screen, Table, write_json
from onebit.comm import CODECS, run_ranks
from onebit.version import VERSION

TABLE = Table("Title", ("name", "s/step"), [["OnebitAdam", "0.4"], ["DDP", "12.5"]])


def test_every_command_lists_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit) as end:
            main([name, "--help"])
        assert end.value.code == 0
        assert f"onebit {name}" in capsys.readouterr().out


def test_usage_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"onebit {VERSION}\n"
    assert main([]) == 2
    assert "usage: onebit COMMAND" in capsys.readouterr().err
    assert main(["docter"]) == 2
    assert "no command 'docter'" in capsys.readouterr().err


def test_an_interrupt_ends_a_command_that_is_still_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*names: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    assert main(["plan"]) == 130


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["plan", "--params", "many", "--hosts", "4"], "340m or 1.5e9, got 'many'"),
        (["plan", "--params", "1b", "--hosts", "4", "--link", "none"], 'got "none"'),
        (["doctor", "--compute", "0.3"], "add --params 340m"),
        (["doctor", "--model", "gpt5"], "gpt2-medium"),
        (["doctor", "--params", "1m", "--compute", "-1"], "at least 0, got '-1'"),
        (["doctor", "--params", "1m", "--model", "gpt2"], "not allowed with"),
        (["plan", "--params", "1b", "--hosts", "0"], "got 1e+09 parameters, 0 hosts of 1 ranks and 1e+09 bit/s\n"),
        (
            ["plan", "--params", "1b", "--hosts", "2", "--rows", "4"],
            "--rows and --memory belong to serving: add --serve",
        ),
        (["plan", "--params", "1b", "--hosts", "2", "--kv", "int8"], "belong to a split sequence: add --sequence"),
        (
            ["plan", "--params", "1b", "--hosts", "2", "--serve", "2x64", "--device-gb", "8"],
            "one of --serve, --sequence and offload",
        ),
        (["layout", "fixed", "--block", "0"], "--block: expected at least 1, got 0"),
        (["emulate", "--hosts", "2"], "no command"),
        (["launch", "--num_gpus", "0", "train.py"], "--num_gpus: expected at least 1, got 0"),
        (["run", "--", "true"], "--join"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    said = capsys.readouterr().err
    assert end.value.code == 2 and f"onebit {arguments[0]}: error: " in said and complaint in said


def test_what_cannot_be_done_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == (
        "onebit doctor: RANK=0 is set, WORLD_SIZE is not; set both, or neither (a single process)\n"
    )
    assert main(["layout", "dense", "--length", "64", "--png", "/nowhere/x.png"]) == 1
    assert capsys.readouterr().err == (
        "onebit layout: --png /nowhere/x.png cannot be written: No such file or directory\n"
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["dense", "--length", "1g"], "at most 8,192 blocks"),
        (["nothing.json"], "No such file"),
        (["notes.txt"], "notes.txt': Expecting value"),
        (["list.json"], "list.json': 'list' object"),
    ],
)
def test_a_layout_that_cannot_be_drawn(
    words: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("dense, I think")
    Path("list.json").write_text("[1]")
    assert main(["layout", *words]) == 1
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--version"], ["plan", "--params", "1b", "--hosts", "2"]])
def test_output_may_be_closed_full_or_unread(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(words) == 0
    sys.stdout.close()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(words) == 1
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        assert main(words) == 141
    assert capsys.readouterr().err == (
        "onebit: output cannot be written: No space left on device; free some, or write elsewhere\n"
    )


def test_output_may_lack_characters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with io.TextIOWrapper(io.BytesIO(), encoding="latin-1") as latin:
        monkeypatch.setattr(sys, "stdout", latin)
        assert main(["layout", "dense", "--length", "64"]) == 1
    assert capsys.readouterr().err == (
        "onebit: output in latin-1 cannot have these characters; set PYTHONIOENCODING=utf-8\n"
    )


def test_the_doctor_says_what_is_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(file)]) == 0
    text, found = capsys.readouterr().out, json.loads(file.read_text())
    assert found["ranks"] == 1 and found["facts"]["launcher"] == "a single process: rank 0 of 1"
    assert "kernels that run" in found["facts"] and "One rank: there is no network" in text
    assert main(["doctor", "--json", str(tmp_path / "no" / "x.json")]) == 1
    assert "cannot be written: No such file" in capsys.readouterr().err


def test_a_narrow_terminal_cuts_no_cell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    prose = "; ".join(f"fact-{k}" for k in range(40))
    Screen().table(Table("Facts", ("", ""), [["a name that is somewhat longer", prose]], 2))
    said = capsys.readouterr().out
    assert "a name that is somewhat longer" in said and all(f"fact-{k}" in said for k in range(40)), said
    assert max(map(len, said.splitlines())) <= 60
    Screen().table(Table("Numbers", ["heading"] * 30, [[f"{k}.12345" for k in range(30)]]))
    said = capsys.readouterr().out
    assert all(f" {k}.12345 " in said for k in range(30)), said


def test_without_rich_tables_are_plain_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("onebit.cli.output.has_rich", lambda: False)
    screen = Screen()
    screen.table(TABLE)
    screen.table(TABLE)
    text = capsys.readouterr().out
    assert text.count(PLAIN) == 1 and text.count(TABLE.text()) == 2
    assert TABLE.text().splitlines()[1:] == [
        "name        s/step", "----------  ------", "OnebitAdam     0.4", "DDP           12.5",
    ]  # fmt: skip


def test_a_file_is_old_or_new_for_those_who_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a full disk, of which nothing stays but the old file."""
    file = tmp_path / "numbers.json"
    write_json(file, 1)
    write = Path.write_text

    def full(path: Path, text: str, **options: Any) -> int:
        write(path, text[:1], **options)
        assert json.loads(file.read_text()) == 1
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(UserError, match=r"--json .*numbers\.json cannot be written: No space left on device"):
            write_json(file, [2, 3])
    assert json.loads(file.read_text()) == 1 and list(tmp_path.iterdir()) == [file]

    def full_of_bytes(path: Path, data: bytes) -> int:
        write(path, "P")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full_of_bytes)
        assert main(["layout", "dense", "--length", "64", "--png", str(tmp_path / "x.png")]) == 1
    assert list(tmp_path.iterdir()) == [file]
    link = tmp_path / "link.json"
    link.symlink_to(file)
    write_json(link, 4)
    assert link.is_symlink() and json.loads(file.read_text()) == 4


def test_other_ranks_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(is_quiet=True)
    screen.table(TABLE)
    screen.line("something")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "value"), [("340m", 3.4e8), ("1.5e9", 1.5e9), ("1.5B", 1.5e9), ("25k", 25e3), ("7", 7.0)]
)
def test_numbers_as_people_write_them(text: str, value: float) -> None:
    assert number(text) == value


@pytest.mark.parametrize("read", [number, rate, amount, seconds, model_size])
def test_other_texts_are_refused(read: object) -> None:
    for text in ("", "0x10", "fast", "-3", "nan"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"expected|write it"):
            read(text)  # type: ignore[operator]


@pytest.mark.parametrize(
    "words",
    [
        ["--params", "1e400"],
        ["--params", "1m", "--compute", "inf"],
        ["--params", "1m", "--device-gb", "nan"],
        ["--params", "1m", "--device-gb", "24", "--host-gb", "inf"],
        ["--params", "1m", "--serve", "12x768", "--memory", "nan"],
    ],
)
def test_a_plan_refuses_numbers_that_are_not_finite(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--hosts", "2", *words])
    assert f"argument {words[-2]}: expected" in capsys.readouterr().err


def test_models_by_name() -> None:
    assert model_size("GPT2-medium") == MODELS["gpt2-medium"] == 355e6


@pytest.mark.processes
def test_the_package_runs_as_a_module() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "onebit", "--version"], capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, f"onebit {VERSION}\n", "")


def test_errors_that_are_no_users_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "broken", ("no_such_module", ""))
    with pytest.raises(ModuleNotFoundError):
        main(["broken"])


def test_the_demo_compares_losses_and_traffic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "demo.json"
    assert main(["demo", "--ranks", "2", "--steps", "40", "--json", str(file)]) == 0
    adamw, onebit = (json.loads(file.read_text())[name] for name in ("AdamW", "OnebitAdam"))
    dense_bits, bits = (8 * run["last_bytes"] / run["parameters"] for run in (adamw, onebit))
    assert 32 <= dense_bits < 32.1 and 1 < bits < 1.5
    assert adamw["losses"][0] == onebit["losses"][0] and adamw["last_bytes"] * 40 == adamw["all_bytes"]
    for run in (adamw, onebit):
        assert sum(run["losses"][-10:]) < 0.8 * sum(run["losses"][:10])
    assert f"{dense_bits:.3g}" in capsys.readouterr().out


def test_the_bench_has_a_row_for_each_codec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert main(["bench", "--elements", "20k", "--repeats", "2", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert set(rows) == set(CODECS)
    assert all(row["encode_s"] > 0 and row["decode_s"] > 0 and row["exchange_s"] is None for row in rows.values())
    assert rows["sign"]["bytes_per_element"] * 8 == pytest.approx(1 + 16 / 256, rel=0.01)
    assert "log4" in capsys.readouterr().out


def test_the_bench_of_ranks_times_exchanges() -> None:
    every = run_ranks(2, lambda transport: bench.measure(transport, 5000, 2048, repeats=1))
    assert every[0].keys() == {*CODECS, "all-reduce"}
    assert all(row["exchange_s"] is not None and row["exchange_s"] > 0 for row in every[0].values())
    assert [row["exchange_s"] for row in every[0].values()] == [row["exchange_s"] for row in every[1].values()]
