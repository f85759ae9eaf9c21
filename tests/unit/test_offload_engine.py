"""An engine whose parameters lie in files (`offload_param`, device nvme): as the resident engine, to the bit."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from family import same
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from onebit import zero
from onebit.comm import SimTransport
from onebit.zero import Offload
from onebit.zero.checkpoint.files import CheckpointError
from onebit.zero.forms import choose
from onebit.zero.grid import GridShape
from onebit.zero.offload import StoreError, files
from onebit.zero.parallel.turns import groups_of

WIDTH, SUMS = 16, 2


def net(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width))


@pytest.fixture
def _refused() -> Iterator[None]:
    """Of an engine that is refused its process group stays, as nobody has it to close."""
    yield
    torch.distributed.destroy_process_group()


def started(
    away: Path | None, model: nn.Module | None = None, *, dtype: str = "bf16", name: str = "AdamW", **more: object
) -> zero.Engine:
    """away: the folder of parameters; None: they are resident, sharded over one rank."""
    blocks = {"zero_optimization": {"stage": 3}, "optimizer": {"type": name, "params": {"lr": 1e-2}}}
    if away is not None:
        param = {"device": "nvme", "nvme_path": str(away), "buffer_count": 3}
        blocks["zero_optimization"] = {"stage": 3, "offload_param": param}
    if dtype != "fp32":
        blocks[dtype] = {"enabled": True}
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": SUMS, **blocks}
    weights = more.pop("weights", None)
    return zero.initialize(model=net() if model is None else model, config=config | more, weights=weights)[0]


def train(engine: zero.Engine, steps: int, first: int = 0) -> list[Tensor]:
    """Losses, then all parameters."""
    found = []
    for micro in range(SUMS * first, SUMS * (first + steps)):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(micro))
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.detach())
    return found + [x.float() for x in whole(engine)]


def whole(engine: zero.Engine) -> list[Tensor]:
    """In the type computed in."""
    dtype = engine.config.dtype
    state = engine.module.state_dict()
    return [(x.full_tensor() if hasattr(x, "full_tensor") else x).to(dtype).clone() for x in state.values()]


class TestTraining:
    @pytest.mark.parametrize("name", ["AdamW", "Lamb"])
    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_is_the_resident_engines(self, dtype: str, name: str, tmp_path: Path) -> None:
        resident = started(None, dtype=dtype, name=name)
        expected = train(resident, 4)
        resident.close()
        engine = started(tmp_path, dtype=dtype, name=name)
        assert isinstance(engine.optimizer, Offload) and engine.optimizer.mode == "full"
        assert same(train(engine, 4), expected)
        assert engine.optimizer.stats.read_bytes > 0
        engine.close()

    def test_clips_by_the_norm(self, tmp_path: Path) -> None:
        resident = started(None, gradient_clipping=0.01)
        train(resident, 1)
        norm = resident.get_global_grad_norm()
        resident.close()
        engine = started(tmp_path, gradient_clipping=0.01)
        train(engine, 1)
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-6) and norm > 0.01
        engine.close()

    def test_a_step_that_is_not_finite_is_skipped(self, tmp_path: Path) -> None:
        engine = started(tmp_path)
        before = whole(engine)
        for _ in range(SUMS):
            engine.backward(engine(torch.ones(4, WIDTH)).float().sum() * float("inf"))
            engine.step()
        assert engine.skipped_steps == 1 and same(whole(engine), before)
        engine.close()

    def test_a_model_on_meta_is_filled_in_the_files(self, tmp_path: Path) -> None:
        pytest.importorskip("safetensors")
        source = net().bfloat16()
        zero.export_weights(source, tmp_path / "weights", SimTransport(), max_file_bytes=1000)
        expected = train(resident := started(None, source.float()), 3)
        resident.close()
        with torch.device("meta"):
            model = net()
        engine = started(tmp_path / "nvme", model, weights=tmp_path / "weights")
        assert same(train(engine, 3), expected)
        engine.close()

    def test_stages_of_one_rank(self, tmp_path: Path) -> None:
        results = []
        for away in (None, tmp_path):
            torch.manual_seed(0)
            layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)]
            stages = zero.PipelineModule(layers=layers, loss_fn=nn.functional.mse_loss, num_stages=1)
            engine = started(away, stages, dtype="fp32")
            batches = iter([(torch.full((4, WIDTH), float(k)), torch.ones(4, 4)) for k in range(3 * SUMS)])
            results.append([engine.train_batch(batches), engine.train_batch(batches), engine.eval_batch(batches)])
            engine.close()
        assert same(*results)


class TestShares:
    """`offload_optimizer` with a ratio. Here both memories are the host's: what FSDP2 does with each block is seen."""

    @staticmethod
    def started(ratio: float, model: nn.Module | None = None, **more: object) -> zero.Engine:
        block = {"device": "cpu", "ratio": ratio, "pin_memory": False}
        stage = {"stage": more.pop("stage", 3), "offload_optimizer": block}
        return started(None, model, zero_optimization=stage, gradient_clipping=0.1, **more)

    @staticmethod
    def share(engine: zero.Engine) -> float:
        """Of the elements, whose shards FSDP2 offloads."""
        numels = {True: 0, False: 0}
        for module in engine.module.modules():
            for group in groups_of(module):
                is_away = isinstance(group.offload_policy, CPUOffloadPolicy)
                numels[is_away] += sum(p.sharded_param.numel() for p in group.fsdp_params)
        return numels[True] / sum(numels.values())

    @pytest.mark.slow
    @pytest.mark.pairwise
    @pytest.mark.parametrize(("ratio", "share"), [(0.0, 0.0), (0.3, 272 / 576), (1.0, 1.0)])
    @pytest.mark.parametrize("stage", [1, 2, 3])
    @pytest.mark.parametrize("name", ["AdamW", "LaProp", "Lion"])
    def test_train_to_the_same_bits(self, name: str, stage: int, ratio: float, share: float) -> None:
        resident = started(None, name=name, zero_optimization={"stage": stage}, gradient_clipping=0.1)
        expected = train(resident, 3)
        resident.close()
        engine = self.started(ratio, name=name, stage=stage)
        assert stage < 3 or self.share(engine) == share
        assert same(train(engine, 3), expected)
        engine.close()

    @pytest.mark.parametrize(("ratio", "later"), [(0.3, 1.0), (0.0, 0.3)])
    def test_load_each_others_checkpoints(self, ratio: float, later: float, tmp_path: Path) -> None:
        first = self.started(ratio)
        train(first, 2)
        first.save_checkpoint(tmp_path)
        expected = train(first, 2, first=2)
        first.close()
        second = self.started(later)
        assert second.load_checkpoint(tmp_path)[0] is not None
        assert same(train(second, 2, first=2), expected)
        second.close()

    def test_a_model_on_meta_is_filled_in_both(self) -> None:
        results = []
        for ratio in (0.3, 1.0):
            with torch.device("meta"):
                model = net()
            engine = self.started(ratio, model, weights="reset_parameters")
            results.append(train(engine, 2))
            engine.close()
        assert same(*results)

    @pytest.mark.parametrize(
        ("name", "more", "text"),
        [
            ("Lamb", {}, "Adam, AdamW, LaProp and Lion step each where it is"),
            ("OneBitAdam", {}, "Adam, AdamW, LaProp and Lion step each where it is"),
            ("AdamW", {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}, "state of all shards"),
            ("AdamW", {"offload_param": {"device": "cpu"}}, "all shards in host memory, and they are the masters"),
        ],
    )
    def test_what_knows_no_shares_says_so(self, name: str, more: dict, text: str) -> None:
        block = {"device": "cpu"} | more.pop("offload_optimizer", {}) | {"ratio": 0.5}
        made = {
            "train_batch_size": 4,
            "optimizer": {"type": name, "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3, "offload_optimizer": block, **more},
        }
        shape = GridShape((1, 1, 1, 1))
        config = zero.read_config(made, world_size=1)
        assert [text in line for line in choose(config, shape).without_effect(config, shape)] == [True]


_FAILING_DISK = """
import logging, os, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from onebit.zero.offload import mapped
from test_offload_engine import TestOneBit, train
logging.basicConfig(level=logging.INFO)
make, kept = mapped.make_file, []
def keeping(*args):
    fd, direct = make(*args)
    kept.append(os.dup(fd))
    return fd, direct
mapped.make_file = keeping
engine = TestOneBit.started(Path({folder!r}), freeze_step=2)
train(engine, 4)
for fd in kept:
    os.ftruncate(fd, 0)
train(engine, 1)
"""


class TestOneBit:
    """`offload_optimizer` with nvme: state in mapped files, bits as with state in memory."""

    @staticmethod
    def started(away: Path | None, name: str = "OneBitAdam", **params: object) -> zero.Engine:
        block = {"device": "none"} if away is None else {"device": "nvme", "nvme_path": str(away)}
        return started(
            None,
            optimizer={"type": name, "params": {"lr": 1e-2, **params}},
            zero_optimization={"stage": 3, "offload_optimizer": block},
            onebit={"compression": "always", "block": 64, "bucket_cap_mb": 0.001},
        )

    @staticmethod
    def mapped_bytes(folder: Path) -> int:
        """Of files in the folder, which have no names, that this process has mapped."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        ranges = [line.split()[0].split("-") for line in lines if f"{folder}/onebit-offload-0" in line]
        return sum(int(end, 16) - int(start, 16) for start, end in ranges)

    @pytest.mark.parametrize(
        ("name", "params"),
        [
            ("OneBitAdam", {"freeze_step": 3}),
            ("OneBitLamb", {"freeze_step": 3}),
            ("OneBitMuon", {"freeze_step": 3, "head": ""}),
            ("ZeroOneAdam", {"local_step_scaler": 2, "local_step_clipper": 2}),
        ],
    )
    def test_trains_to_the_bits_of_resident_state(self, name: str, params: dict, tmp_path: Path) -> None:
        expected = train(resident := self.started(None, name, **params), 6)
        resident.close()
        engine = self.started(tmp_path, name, **params)
        before = self.mapped_bytes(tmp_path)
        assert same(train(engine, 6), expected) and not list(tmp_path.iterdir())
        assert before >= 2 * 4 * 576 and self.mapped_bytes(tmp_path) >= before
        engine.close()

    def test_files_go_with_the_state(self, tmp_path: Path) -> None:
        engine = self.started(tmp_path, freeze_step=2)
        train(engine, 4)
        engine.close()
        del engine
        gc.collect()
        assert self.mapped_bytes(tmp_path) == 0

    @pytest.mark.parametrize("saved_after", [2, 4])
    @pytest.mark.parametrize(("saves_away", "loads_away"), [(True, True), (True, False), (False, True)])
    def test_resumed_is_uninterrupted(
        self, saves_away: bool, loads_away: bool, saved_after: int, tmp_path: Path
    ) -> None:
        nvme = tmp_path / "nvme"
        first = self.started(nvme if saves_away else None, freeze_step=3)
        train(first, saved_after)
        first.save_checkpoint(tmp_path / "run")
        expected = train(first, 3, first=saved_after)
        first.close()
        second = self.started(nvme if loads_away else None, freeze_step=3)
        assert second.load_checkpoint(tmp_path / "run")[0] is not None
        assert same(train(second, 3, first=saved_after), expected)
        assert (self.mapped_bytes(nvme) > 0) == (saves_away or loads_away)
        second.close()

    @pytest.mark.usefixtures("_refused")
    def test_a_full_disk_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(fd: int, *_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(files.os, "posix_fallocate", full)
        with pytest.raises(StoreError, match="is full: it has"):
            self.started(tmp_path)

    @pytest.mark.processes
    def test_a_disk_that_fails_below_mapped_state_says_where(self, tmp_path: Path) -> None:
        text = _FAILING_DISK.format(paths=sys.path, folder=str(tmp_path))
        done = subprocess.run([sys.executable, "-c", text], timeout=120, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGBUS
        assert "a bus error means that its disk has failed" in done.stderr
        assert "Fatal Python error: Bus error" in done.stderr and "in compressed_step" in done.stderr

    @pytest.mark.usefixtures("_refused")
    def test_local_steps_are_refused_by_name(self, tmp_path: Path) -> None:
        block = {"device": "nvme", "nvme_path": str(tmp_path)}
        with pytest.raises(ValueError, match="local steps keep anchors and differences in memory"):
            started(
                None, zero_optimization={"stage": 1, "offload_optimizer": block}, onebit={"local_steps": {"every": 4}}
            )


class TestCheckpoints:
    @pytest.mark.slow
    @pytest.mark.pairwise
    @pytest.mark.parametrize(("name", "dtype"), [("AdamW", "fp32"), ("AdamW", "bf16"), ("Lamb", "bf16")])
    @pytest.mark.parametrize(("saves_away", "loads_away"), [(True, True), (True, False), (False, True)])
    def test_resumed_is_uninterrupted(
        self, saves_away: bool, loads_away: bool, name: str, dtype: str, tmp_path: Path
    ) -> None:
        first = started(tmp_path if saves_away else None, dtype=dtype, name=name)
        train(first, 2)
        first.save_checkpoint(tmp_path / "run")
        expected = train(first, 2, first=2)
        first.close()
        second = started(tmp_path if loads_away else None, net(), dtype=dtype, name=name)
        with torch.no_grad():
            for p in second.module.parameters():
                p.zero_()
        assert second.load_checkpoint(tmp_path / "run")[0] is not None
        assert same(train(second, 2, first=2), expected)
        second.close()

    def test_of_other_layers_are_refused(self, tmp_path: Path) -> None:
        first = started(tmp_path)
        first.save_checkpoint(tmp_path / "run")
        first.close()
        second = started(tmp_path, nn.Sequential(net(), nn.Linear(WIDTH, 3)))
        before = whole(second)
        with pytest.raises(CheckpointError):
            second.load_checkpoint(tmp_path / "run")
        assert same(whole(second), before)
        second.close()

    def test_weights_are_exported(self, tmp_path: Path) -> None:
        load_file = pytest.importorskip("safetensors.torch").load_file
        engine = started(tmp_path)
        train(engine, 1)
        engine.save_16bit_model(tmp_path)
        found = load_file(tmp_path / "model.safetensors")
        assert same([found[name] for name, _ in engine.module.named_parameters()], whole(engine))
        engine.close()


class TestKeys:
    @pytest.mark.parametrize(
        ("zero_block", "more", "text"),
        [
            ({"offload_param": {"device": "nvme"}}, {}, "needs nvme_path, a folder on a local disk"),
            ({"offload_optimizer": {"device": "nvme", "nvme_path": "/elsewhere"}}, {}, "are in one folder"),
            ({}, {"fp16": {"enabled": True}}, 'enable "bf16" in place of "fp16"'),
        ],
    )
    @pytest.mark.usefixtures("_refused")
    def test_are_refused_by_name(self, zero_block: dict, more: dict, text: str, tmp_path: Path) -> None:
        given = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
        with pytest.raises(ValueError, match=text):
            started(None, dtype="fp32", zero_optimization={"stage": 3, **given, **zero_block}, **more)

    def test_where_the_state_lies_is_said(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        param = {"device": "nvme", "nvme_path": str(tmp_path)}
        blocks = {"stage": 3, "offload_param": param, "offload_optimizer": {"device": "cpu"}}
        with caplog.at_level(logging.WARNING):
            started(None, zero_optimization=blocks).close()
        assert "state is in files of offload_param.nvme_path" in caplog.text

    @pytest.mark.parametrize(
        ("sizes", "text"),
        [
            ((1, 2, 2, 1), "each rank has files of all parameters and state"),
            ((2, 1, 1, 1), "shards are in host memory, as with cpu"),
            ((1, 1, 1, 2), "shards are in host memory, as with cpu"),
        ],
    )
    def test_what_several_ranks_do_is_said(self, sizes: tuple[int, ...], text: str) -> None:
        param = {"device": "nvme", "nvme_path": "/nvme"}
        adamw = {"type": "AdamW", "params": {"lr": 1e-2}}
        made = {"train_batch_size": 4, "optimizer": adamw, "zero_optimization": {"stage": 3, "offload_param": param}}
        shape = GridShape(sizes)
        config = zero.read_config(made, world_size=shape.world_size)
        assert [text in line for line in choose(config, shape).without_effect(config, shape)] == [True]

    def test_one_bit_keeps_shards_in_memory(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        param = {"device": "nvme", "nvme_path": str(tmp_path)}
        blocks = {"stage": 3, "offload_param": param}
        with caplog.at_level(logging.WARNING):
            engine = started(None, zero_optimization=blocks, optimizer={"type": "OneBitAdam", "params": {"lr": 1e-2}})
        assert "shards are in host memory, as with cpu" in caplog.text and not list(tmp_path.iterdir())
        engine.close()
