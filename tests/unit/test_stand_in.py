"""`import deepspeed` under `zero.stand_in()`: the package, its modules, its version; each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]

NAMES = """
import importlib.metadata, importlib.util, sys, warnings
warnings.simplefilter("error")
from onebit import zero
zero.stand_in()
zero.stand_in()
assert importlib.util.find_spec("deepspeed") is not None
assert importlib.metadata.version("deepspeed") == importlib.metadata.metadata("deepspeed")["Version"] == "0.19.6"
import deepspeed
assert deepspeed is zero and deepspeed.__version__ == "0.19.6" and deepspeed.__spec__.name == "onebit.zero"
deepspeed.utils.logging.logger  # Lightning asks for it, without an import of its own
import deepspeed.ops.adam, deepspeed.runtime.lr_schedules
from deepspeed import comm, DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME
from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.engine import DeepSpeedEngine as same
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.zero import GatheredParameters, partition_parameters
from deepspeed.runtime.zero.utils import is_zero_param
assert DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env" and same is DeepSpeedEngine
assert deepspeed.ops.adam is sys.modules["onebit.zero.ops.adam"] is sys.modules["deepspeed.ops.adam"]
assert checkpoint is deepspeed.checkpointing.checkpoint and RepeatingLoader is deepspeed.utils.RepeatingLoader
assert [LayerSpec, PipelineModule, TiedLayerSpec] == [deepspeed.pipe.LayerSpec, zero.PipelineModule, zero.TiedLayerSpec]
assert GatheredParameters is deepspeed.zero.GatheredParameters
assert comm is zero.comm and DeepSpeedEngine is zero.DeepSpeedEngine
specs = [deepspeed.ops.adam.__spec__, partition_parameters.__spec__]
assert [spec.name for spec in specs] == ["onebit.zero.ops.adam", "onebit.zero.runtime.zero.partition_parameters"]
for absent in ("deepspeed.xyzzy", "deepspeed.runtime.xyzzy", "deepspeed.checkpoint.xyzzy", "deepspeed.xyzzy.zyx"):
    try:
        importlib.import_module(absent)
    except ModuleNotFoundError as error:
        assert "deepspeed" in str(error) and "onebit" not in str(error), error
    else:
        raise AssertionError(absent)
assert "name='deepspeed'" not in repr(list(importlib.metadata.distributions(name="torch")))
with deepspeed.zero.Init():
    assert comm.get_rank() == 0 and comm.get_world_size() == 1
comm.destroy_process_group()
import torch
import logging
handler, lines = logging.Handler(), []
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("onebit").addHandler(handler)
config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
for more in ({}, {"gradient_clipping": 1.0}):
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(1, 1), config=config | more)
    engine.destroy()
assert [line[:47] for line in lines] == ["gradient_clipping is not in the configuration, "], lines
p = torch.nn.Parameter(torch.ones(1))
assert p.ds_status is partition_parameters.ZeroParamStatus.AVAILABLE and not is_zero_param(p)
deepspeed.zero.register_external_parameter(torch.nn.Linear(1, 1), p)
with deepspeed.zero.GatheredParameters([p, None], modifier_rank=0) as given:  # of a layer without a bias
    assert len(given) == 1
whole = torch.arange(4.0)
copied = clone_tensors_for_torch_save({"a": [whole[:2]], "b": 3})
assert copied["b"] == 3 and copied["a"][0].untyped_storage().nbytes() == 8 and torch.equal(copied["a"][0], whole[:2])
"""

LATE = """
import sys, types
sys.modules["accelerate"] = types.ModuleType("accelerate")
from onebit import zero
try:
    zero.stand_in()
except RuntimeError as error:
    assert "accelerate has been imported" in str(error) and "python -m onebit.zero.deepspeed" in str(error)
else:
    raise AssertionError
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended


def test_modules_and_version_are_found_by_deepspeeds_name() -> None:
    run("-c", NAMES)


def test_a_library_that_has_looked_already_is_named() -> None:
    run("-c", LATE)


@pytest.mark.parametrize("is_module", [False, True])
def test_a_script_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_module: bool) -> None:
    (tmp_path / "beside.py").write_text("x = 3\n")
    script = tmp_path / "train.py"
    script.write_text("import sys, beside, deepspeed\nprint(__name__, sys.argv[1:], beside.x, deepspeed.__name__)\n")
    if is_module:
        monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    ended = run("-m", "onebit.zero.deepspeed", *(["-m", "train"] if is_module else [str(script)]), "--deepspeed", "a")
    assert ended.stdout == "__main__ ['--deepspeed', 'a'] 3 onebit.zero\n"
    script.write_text("import sys\nprint(sys.path)\n")
    if sys.version_info >= (3, 11) and not is_module:  # python -P: neither the working directory nor the script's
        expected = run("-P", "-c", "import sys; print(sys.path)").stdout
        assert run("-P", "-m", "onebit.zero.deepspeed", str(script)).stdout == expected
    usage = subprocess.run([sys.executable, "-m", "onebit.zero.deepspeed"], capture_output=True, text=True, cwd=ROOT)
    assert usage.returncode == 2 and "usage: python -m onebit.zero.deepspeed {SCRIPT | -m MODULE}" in usage.stderr


SPAWNS = """
import sys
import deepspeed
from multiprocessing import get_context
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, k):
        return [k * k, deepspeed.__name__ == "onebit.zero", sys.argv[1] == "a"]

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=get_context(method))
        print([[int(x) for x in column] for column in next(iter(loader))])
"""


def test_annotations_of_a_script_are_objects(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def f(x: int): pass\nprint(f.__annotations__['x'] is int)\n")
    assert run("-m", "onebit.zero.deepspeed", str(script)).stdout == "True\n"


def test_processes_that_a_script_starts_anew_have_it_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNS)
    ended = run("-m", "onebit.zero.deepspeed", str(tmp_path / "train.py"), "a")
    assert ended.stdout == "[[0, 1, 4, 9], [1, 1, 1, 1], [1, 1, 1, 1]]\n" * 2
