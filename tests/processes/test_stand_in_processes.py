"""transformers' and Lightning's Trainer with DeepSpeed, for which onebit.zero stands in; real libraries, two ranks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install onebit[transformers]")

import stand_in_ranks
from ranks import run_torchrun
from stand_in_ranks import CONFIGS, DENSE, LIGHTNING, SLICES, STEPS, one_process, plain_cases

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return found_with("transformers", tmp_path_factory.mktemp("stand_in"))


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    pytest.importorskip("lightning", reason="needs lightning: pip install onebit[lightning]")
    return found_with("lightning", tmp_path_factory.mktemp("lightning"))


def found_with(library: str, folder: Path) -> list[dict]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run([*torchrun, stand_in_ranks.__file__, str(folder), library], timeout_s=280)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def run(line: list[str], timeout_s: float) -> None:
    root, env = Path(__file__).resolve().parents[2], {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(line, cwd=root, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The same runs by Trainer's own AdamW under DistributedDataParallel."""
    return run_torchrun(2, plain_cases, str(tmp_path_factory.mktemp("plain")), timeout_s=280).check().results


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_run_is_that_of_trainer_alone(found: list[dict], plain: list[dict], name: str) -> None:
    facts, own = found[0][name], plain[0].get(name, plain[0][""])
    assert facts["losses"] == pytest.approx(own["losses"], abs=2e-5)
    assert facts["norms"] == pytest.approx(own["norms"], rel=1e-4)
    assert facts["evaluated"] == pytest.approx(own["evaluated"], abs=2e-5)
    # The engine has stepped its schedule when Trainer logs the rate, as DeepSpeed's has.
    assert own["rates"] == pytest.approx(facts["rates"]) or own["rates"][1:] == pytest.approx(facts["rates"][:-1])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_learns_resumes_to_the_bit_and_is_saved(found: list[dict], name: str) -> None:
    for rank in found:
        facts = rank[name]
        assert facts["engine"] == "DeepSpeedEngine" and len(facts["losses"]) == STEPS
        assert facts["losses"][-1] < facts["losses"][0] and all(map(math.isfinite, facts["norms"][-2:]))
        assert facts["same"] and facts["same losses"] and facts["saved"]
        assert facts["exported"]
    assert found[0][name]["digest"] == found[1][name]["digest"]


def test_slices_are_one_process(found: list[dict], tmp_path: Path) -> None:
    own = run_torchrun(1, one_process, str(tmp_path), timeout_s=120).check().results[0]
    for rank in found:
        assert rank[SLICES]["losses"] == pytest.approx(own["losses"], abs=2e-5)
        assert rank[SLICES]["norms"] == pytest.approx(own["norms"], rel=1e-4)


def test_the_file_sets_the_schedule(found: list[dict]) -> None:
    rates = found[0]["its schedule"]["rates"]
    assert rates[0] == 0 and max(rates) == pytest.approx(1e-2) and 0 < rates[-1] < rates[2]


def test_from_pretrained_at_stage_3_gives_every_rank_its_part(found: list[dict]) -> None:
    assert all(rank["from_pretrained"] for rank in found)


def test_an_encoder_generates_at_stage_3(found: list[dict]) -> None:
    assert all(rank["generated"] for rank in found)


@pytest.mark.parametrize("name", LIGHTNING)
def test_a_run_of_lightning_is_that_of_ddp_and_resumes_to_the_bit(lightning: list[dict], name: str) -> None:
    for rank in lightning:
        facts, alone = rank[name], rank[name]["alone"]
        assert facts["engine"] == "DeepSpeedEngine" and len(facts["losses"]) == len(alone["losses"]) == 8
        assert facts["same"] and facts["same losses"] and facts["same rates"]
        assert facts["tested"] == facts["evaluated"]
        if name == "its optimizer":
            assert max(facts["rates"]) == facts["rates"][-1] == pytest.approx(1e-2) and facts["rates"][2] < 1e-2
            continue
        near = 0.05 if "bf16" in name else 2e-5
        assert facts["losses"] == pytest.approx(alone["losses"], abs=near)
        assert facts["evaluated"] == pytest.approx(alone["evaluated"], abs=near)
        assert facts["rates"] == pytest.approx(alone["rates"])


LOOP = """
import sys
from pathlib import Path
import torch
from accelerate import Accelerator

accelerator, net = Accelerator(), torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
batches = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
engine, optimizer, batches = accelerator.prepare(net, optimizer, batches)
for x in batches:
    loss = engine(x).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.wait_for_everyone()
rank, weights = accelerator.process_index, engine.module_state_dict()
Path(sys.argv[1], str(rank)).write_text(f"{type(engine).__name__} {accelerator.num_processes} {weights}")
accelerator.end_training()
"""


def test_accelerate_launches_ranks(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    own = [sys.executable, "-m", "onebit.zero.deepspeed"]
    launch = [*own, "-m", "accelerate.commands.launch", "--use_deepspeed", "--zero_stage", "2"]
    ranks = ["--num_processes", "2", "--num_machines", "1", "--main_process_port", "0", "--mixed_precision", "no"]
    line = [*launch, *ranks, *own[1:], str(tmp_path / "loop.py"), str(tmp_path)]
    run(line, timeout_s=120)
    first, second = ((tmp_path / str(rank)).read_text() for rank in range(2))
    assert first == second and first.startswith("DeepSpeedEngine 2 ")
