"""Every backend in the registry has what the contract says; those that run on this host give the reference's bits.

Those for GPUs give them in an interpreter (test_triton.py), emulated (test_cuda_source.py), and on a GPU
(scripts/gpu_check.py, which reads the same list). Tolerance: none.
"""

from __future__ import annotations

import importlib
import inspect

import kernel_cases
import pytest
import torch
from kernel_inputs import with_isa

from onebit.comm import CODECS, kernels
from onebit.comm.kernels import contract, cpu, reference
from onebit.comm.kernels.arguments import INT4, INT8, LOG4, SIGN
from onebit.comm.kernels.library import ISAS

FUNCTIONS = {
    frame: [name for name in vars(protocol) if not name.startswith("_")]
    for frame, protocol in contract.CONTRACTS.items()
}
each_frame_of_each_backend = pytest.mark.parametrize(
    ("name", "frame"), [(name, frame) for name, backend in kernels.BACKENDS.items() for frame in backend.FRAMES]
)
# What belongs to GPUs alone: frames that start at multiples of 8 bytes.
CASES = [name for name in kernel_cases.CASES if name != "the_edge_rejects_what_the_kernel_cannot_take"]


@pytest.mark.parametrize("name", kernels.BACKENDS)
def test_a_backend_says_what_it_is(name: str) -> None:
    backend = kernels.BACKENDS[name]
    assert backend.NAME == name != "auto"
    assert backend.SERVES is None or torch.device(backend.SERVES).type == backend.SERVES
    assert (
        {"sign"} <= set(backend.FRAMES) <= set(contract.CONTRACTS) == {frame.name for frame in (SIGN, INT8, INT4, LOG4)}
    )
    why = backend.why_not()
    if why:
        with pytest.raises(ImportError) as raised:
            kernels.select(name, torch.device(backend.SERVES or "cpu"))
        assert str(raised.value) == why
    else:
        assert backend.describe()


def test_the_reference_computes_every_frame_and_serves_every_device() -> None:
    assert reference.SERVES is None and set(reference.FRAMES) == set(contract.CONTRACTS) and not reference.why_not()
    assert list(kernels.BACKENDS)[-1] == "reference", "what stands behind it would never be chosen"
    assert set(FUNCTIONS["sign"]) == {
        "encode",
        "decode",
        "decode_mean",
        "encode_mean",
        "encode_momentum",
        "apply",
        "local_step",
        "correct_residual",
        "momentum_sums",
        "owner_step",
        "encode_gradients",
        "step_masters",
    }


@each_frame_of_each_backend
def test_its_functions_take_what_the_contract_says(name: str, frame: str) -> None:
    """By the same names, in the same order; further options have defaults."""
    backend = kernels.BACKENDS[name]
    if (why := backend.why_not()) and name == "triton":
        pytest.skip(why)
    module = importlib.import_module(backend.FRAMES[frame], kernels.__name__)
    for function in FUNCTIONS[frame]:
        expected = inspect.signature(getattr(contract.CONTRACTS[frame], function)).parameters.copy()
        expected.pop("self")
        got = dict(inspect.signature(getattr(module, function)).parameters)
        extra = [got.pop(each) for each in list(got) if each not in expected]
        assert [(p.name, p.kind) for p in got.values()] == [(p.name, p.kind) for p in expected.values()], function
        assert all(p.default is not inspect.Parameter.empty for p in extra), function


@each_frame_of_each_backend
def test_codecs_take_its_name_for_the_frames_it_computes(name: str, frame: str) -> None:
    assert CODECS[frame](kernel=name).kernel == name  # type: ignore[call-arg]


@pytest.mark.parametrize("frame", contract.CONTRACTS)
def test_codecs_refuse_the_name_of_a_backend_that_lacks_their_frame(frame: str) -> None:
    lacking = [name for name, backend in kernels.BACKENDS.items() if frame not in backend.FRAMES]
    for name in (*lacking, "none of them"):
        with pytest.raises(ValueError, match="kernel must be one of auto, cpu"):
            CODECS[frame](kernel=name)  # type: ignore[call-arg]


@pytest.mark.skipif(not cpu.is_built(), reason=f"needs the C++ kernel: {cpu.why_not()}")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("isa", ISAS[1:])
def test_what_runs_on_this_host_gives_the_bits_of_the_reference(isa: str, case: str) -> None:
    if isa not in cpu.available_isas():
        pytest.skip(f"needs a machine with {isa}")
    kernel_cases.CASES[case](with_isa(isa))


def test_auto_takes_the_first_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its line in the registry: nothing else names a backend."""
    for missing in ([], ["cpu"], ["cupy"], ["cupy", "triton"]):
        with monkeypatch.context() as patch:
            for name, backend in kernels.BACKENDS.items():
                patch.setattr(backend, "why_not", lambda there=name not in missing: "" if there else "missing")
            for device in ("cpu", "cuda", "mps"):
                for frame in contract.CONTRACTS:
                    expected = next(
                        name
                        for name, backend in kernels.BACKENDS.items()
                        if backend.SERVES in (device, None) and frame in backend.FRAMES and name not in missing
                    )
                    assert kernels._best(device, frame) == expected
