"""Any codec that a momentum can travel in takes the sign codec's place, in every optimizer of the family."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from family import FAMILY, flat, make, model, train
from family_contract import World, check_another_world, check_resume, trained
from torch import Tensor

from onebit.comm import (
    FusedCodec,
    Int8Codec,
    Log4Codec,
    SignCodec,
    SimTransport,
    codec_named,
    momentum_codecs,
    run_ranks,
)

pytestmark = pytest.mark.slow

OTHERS = [name for name in momentum_codecs() if name != "sign"]
STEPS = 22


@dataclass(frozen=True)
class PlainSign(FusedCodec):
    """The sign frames, with the fused steps that a codec has which brings none of its own."""

    name = "sign"
    block: int = 256

    def frame_bytes(self, n: int) -> int:
        return SignCodec(self.block).frame_bytes(n)

    def encode(self, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None) -> None:
        SignCodec(self.block).encode(x_KN, error_KN, frames_KB, counts_KJ)

    def decode(self, frames_KB: Tensor, out_KN: Tensor, *, weight: float = 1.0, keep: float = 0.0) -> None:
        SignCodec(self.block).decode(frames_KB, out_KN, weight=weight, keep=keep)

    def decode_mean(self, frames_KB: Tensor, out_N: Tensor) -> None:
        SignCodec(self.block).decode_mean(frames_KB, out_N)

    def is_finite(self, frames_KB: Tensor, n: int) -> Tensor:
        return SignCodec(self.block).is_finite(frames_KB, n)


def run(name: str, codec: FusedCodec, transport: SimTransport) -> Tensor:
    net = model()
    train(transport, range(STEPS), net, make(name, net, transport, codec=codec))
    return flat(net).clone()


@pytest.mark.parametrize("name", FAMILY)
def test_the_plain_fused_steps_give_the_bits_of_the_kernels(name: str) -> None:
    kernels = run_ranks(3, lambda transport: run(name, SignCodec(), transport))
    plain = run_ranks(3, lambda transport: run(name, PlainSign(), transport))
    assert all(torch.equal(a, b) for a, b in zip(kernels, plain, strict=True))


@pytest.mark.parametrize("codec", OTHERS)
@pytest.mark.parametrize(("world", "name"), [((2, 2), "OnebitAdam"), *(((3, None), name) for name in FAMILY)])
def test_replicas_stay_the_same_and_a_resumed_run_goes_on_as_if_nothing_had_been(
    world: World, name: str, codec: str
) -> None:
    check_resume(name, world, 12, codec=codec_named(codec, 256))


@pytest.mark.parametrize("codec", OTHERS)
@pytest.mark.parametrize("name", FAMILY)
def test_another_world_goes_on_and_another_codec_is_refused_by_name(name: str, codec: str) -> None:
    options = {"codec": codec_named(codec, 256)}
    check_another_world(name, (3, None), (2, None), 14, **options)
    states = [state for state, _, _ in trained((3, None), name, 14, **options)]

    def refuse(transport: SimTransport) -> None:
        with pytest.raises(ValueError, match=f"codec is {codec} there and sign here"):
            make(name, model(), transport).load_state_dicts(copy.deepcopy(states))

    run_ranks(2, refuse)


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("codec", [Int8Codec(), "sign", Log4Codec])
def test_a_codec_that_momentum_cannot_travel_in_is_refused(name: str, codec: object) -> None:
    with pytest.raises(TypeError, match=r"codec must be one that momentum can travel in, log4 or sign.* warmup_codec"):
        make(name, model(), SimTransport(), codec=codec)
