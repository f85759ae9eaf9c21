"""Hostile frames: random bytes, flipped bits, extreme scales and wrong lengths, for every codec; and frames that were
spoilt on the way to one rank, for every optimizer.

Promised of a codec: what it calls finite decodes to finite values, both kernels decode the same bits, and a frame of
another length or type is a ValueError or TypeError which leaves the output as it was. Promised of an optimizer: the
replicas stay the same to the bit, or a ReplicaError names the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random

import torch
from torch import Tensor

from faults.case import AS_PROMISED, CRASH, HUNG, OTHER, SILENT, Case, Outcome, Promise, Tools, first_line, judge
from faults.ranks import Rank, call_in_fork, sim_ranks
from faults.training import OPTIMIZERS, Training
from onebit.comm import Bf16Codec, Codec, IdentityCodec, Int4Codec, Int8Codec, SignCodec, SimTransport, Work
from onebit.comm.kernels import cpu

_CODECS: dict[str, tuple[Codec, Codec]] = {
    "identity": (IdentityCodec(), IdentityCodec()),
    "bf16": (Bf16Codec(), Bf16Codec()),
    "sign": (SignCodec(), SignCodec(kernel="reference")),
    "sign, blocks of 64": (SignCodec(64), SignCodec(64, kernel="reference")),
    "int8": (Int8Codec(), Int8Codec(kernel="reference")),
    "int4": (Int4Codec(), Int4Codec(kernel="reference")),
}
"""Every codec as it runs here, and its reference."""

_SCALES = (0x0000, 0x8000, 0x0001, 0x0080, 0x3F80, 0xBF80, 0x7F7F, 0xFF7F, 0x7E80, 0x7F80, 0xFF80, 0x7FC0, 0x7F81)
"""bfloat16: zeros, the least, 1, -1, the largest, a quarter of it, infinities, NaNs."""


def _random_bytes(codec: Codec, k: int, n: int, random: Random) -> Tensor:
    return _tensor(random.randbytes(k * codec.frame_bytes(n))).view(k, -1)


def _flipped(codec: Codec, k: int, n: int, random: Random) -> Tensor:
    frames = torch.empty(k, codec.frame_bytes(n), dtype=torch.uint8)
    codec.encode(torch.randn(k, n, generator=torch.Generator().manual_seed(random.getrandbits(30))), None, frames, None)
    for _ in range(random.choice((1, 2, 8))):
        frames[random.randrange(k), random.randrange(frames.shape[1])] ^= 1 << random.randrange(8)
    return frames


def _extreme(codec: Codec, k: int, n: int, random: Random) -> Tensor:
    """Extreme 16-bit words everywhere, so also where scales are; bytes of one value before them."""
    frames = _random_bytes(codec, k, n, random)
    words = frames.view(torch.int16)
    chosen = torch.tensor([random.choice(_SCALES) for _ in range(words.numel())], dtype=torch.int32)
    words.copy_(chosen.to(torch.int16).view_as(words))
    if random.random() < 0.7:
        frames[:, : frames.shape[1] * 3 // 4] = random.choice((0x00, 0x7F, 0x80, 0xFF, 0x88))
    return frames


_HOSTILE: dict[str, Callable[[Codec, int, int, Random], Tensor]] = {
    "random bytes": _random_bytes,
    "bits flipped": _flipped,
    "extreme scales": _extreme,
}


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _contents(name: str, kind: str, tools: Tools) -> Iterator[Outcome]:
    count = 30 if tools.quick else 300
    seed = tools.random.getrandbits(30)
    end = call_in_fork(lambda: _count_wrong(name, kind, count, Random(seed)))
    if end.what != "returned":
        verdict = {"running": HUNG, "died": CRASH}.get(end.what, SILENT)
        yield Outcome(f"{kind}, seed {seed}", verdict, first_line(end.text), count=count)
        return
    wrong: dict[str, int] = end.value  # type: ignore[assignment]
    yield Outcome(kind, count=count - sum(wrong.values()))
    yield from (Outcome(kind, SILENT, what, count=times) for what, times in wrong.items())


def _count_wrong(name: str, kind: str, count: int, random: Random) -> dict[str, int]:
    """What is wrong with how many of the frames."""
    codec, reference = _CODECS[name]
    wrong: dict[str, int] = {}
    for _ in range(count):
        k, n = random.choice((1, 2, 3)), codec.block * random.choice((1, 2, 5, 16))
        what = _what_is_wrong(codec, reference, _HOSTILE[kind](codec, k, n, random), n)
        if what:
            wrong[what] = wrong.get(what, 0) + 1
    return wrong


def _what_is_wrong(codec: Codec, reference: Codec, frames: Tensor, n: int) -> str:
    out, expected = torch.zeros(len(frames), n), torch.zeros(len(frames), n)
    codec.decode(frames, out)
    reference.decode(frames, expected)
    mean = torch.zeros(n)
    codec.decode_mean(frames[:1], mean)
    if bool(codec.is_finite(frames, n)) and not bool(out.isfinite().all()):
        return "is_finite, but decodes to what is not finite"
    if not _same_bits(out, expected):
        return "decodes to other bits than the reference"
    if not _same_bits(mean, out[0]):
        return "the mean of one frame is not the frame"
    return ""


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """NaNs count as equal."""
    return torch.equal(a.nan_to_num(7.0, 8.0, 9.0), b.nan_to_num(7.0, 8.0, 9.0)) and torch.equal(a.isnan(), b.isnan())


# ---------------------------------------------------------------- frames of another length


def _shapes(frames: Tensor) -> dict[str, Tensor]:
    """The frames in forms that no receiver asked for; memory beyond the whole ones is not touched by these."""
    K, B = frames.shape
    forms = {f"{B + d} bytes instead of {B}": _resized(frames, B + d) for d in (-16, -4, -2, -1, 1, 2, 16, 2048)}
    return forms | {
        "no bytes": frames[:, :0],
        "half the bytes": _resized(frames, B // 2),
        "32-bit words": frames.view(torch.int32),
        "one dimension": frames.view(-1),
        "three dimensions": frames.view(K, 1, B),
    }


def _resized(frames: Tensor, B: int) -> Tensor:
    resized = torch.zeros(len(frames), max(B, 0), dtype=torch.uint8)
    least = min(B, frames.shape[1])
    resized[:, :least] = frames[:, :least]
    return resized


def _lengths(name: str, tools: Tools) -> Iterator[Outcome]:
    seed = tools.random.getrandbits(30)
    for form in _shapes(torch.zeros(2, 64, dtype=torch.uint8)):
        number = list(_shapes(torch.zeros(2, 64, dtype=torch.uint8))).index(form)
        end = call_in_fork(lambda number=number: _accepted(name, number, Random(seed)))
        if end.what != "returned":
            verdict = {"running": HUNG, "died": CRASH}.get(end.what, SILENT)
            yield Outcome(form, verdict, first_line(end.text) or f"signal {end.number}")
            continue
        for what, problem in end.value.items():  # type: ignore[union-attr]
            function, form_here = what.split(": ")
            verdict = SILENT if problem == "accepted" else OTHER if problem else AS_PROMISED
            yield Outcome(f"{form_here} to {function}", verdict, problem)


def _accepted(name: str, number: int, random: Random) -> dict[str, str]:
    """ "function: form" -> what is wrong with how it took that form; empty: refused, as it must be."""
    codec, reference = _CODECS[name]
    found = {}
    n = 4 * codec.block * (1 if codec.block > 8 else 8)
    for which, one in (("", codec), (" of the reference", reference)):
        frames = _flipped(codec, 2, n, random)
        form, given = list(_shapes(frames).items())[number]
        calls: dict[str, Callable[[Tensor], object]] = {
            "decode": lambda out, one=one, given=given: one.decode(given, out),
            "decode_mean": lambda out, one=one, given=given: one.decode_mean(given, out[0]),
            "is_finite": lambda out, one=one, given=given: one.is_finite(given, n),
        }
        for function, call in calls.items():
            out = torch.full((2, n), 7.0)
            problem = ""
            try:
                call(out)
                problem = "accepted"
            except (ValueError, TypeError):
                problem = "" if bool((out == 7.0).all()) else "refused, after it had written"
            except Exception as error:
                problem = f"refused by a {type(error).__name__}: {first_line(str(error))}"
            found[f"{function}{which}: {form}"] = problem
    return found


# ---------------------------------------------------------------- spoilt on the way


class Spoiling(SimTransport):
    """A transport that spoils one row that this rank receives, of the first large operation of a kind after `spoil`."""

    def __init__(self, transport: SimTransport):
        super().__init__(transport.network, transport.rank)
        self._phase, self._spoil = "", lambda row: None

    def spoil(self, phase: str, spoil: Callable[[Tensor], None]) -> None:
        """phase: "up" (what this rank owns comes in), "down" (the averages come back) or "vote" (a small message)."""
        self._phase, self._spoil = phase, spoil

    def all_to_all(self, out_WB: Tensor, in_WB: Tensor) -> Work:
        return self._watch("up", super().all_to_all(out_WB, in_WB), out_WB)

    def all_gather(self, out_WB: Tensor, in_B: Tensor) -> Work:
        phase = "vote" if in_B.nbytes < 100 else "down"
        return self._watch(phase, super().all_gather(out_WB, in_B), out_WB)

    def _watch(self, phase: str, work: Work, out_WB: Tensor) -> Work:
        if phase != self._phase:
            return work
        self._phase = ""
        return _Spoilt(work, lambda: self._spoil(out_WB[(self.rank + 1) % self.world_size]))


class _Spoilt:
    def __init__(self, work: Work, spoil: Callable[[], None]):
        self._work, self._spoil = work, spoil

    def wait(self) -> None:
        self._work.wait()
        self._spoil()

    def is_ready(self) -> bool:
        return self._work.is_ready()


_RANKS, _STEPS, _VICTIM = 3, 24, 1


def _spoilt(name: str, phase: str, tools: Tools) -> Iterator[Outcome]:
    """One rank receives a spoilt row, in the warm-up and after it."""
    for step in tools.some([2, 3, 9, 14], 1, None):
        for what in tools.some(["a bit flipped", "random bytes"], 1):
            seed = tools.random.getrandbits(30)

            def spoil(row: Tensor, what: str = what, seed: int = seed) -> None:
                random = Random(seed)
                if what == "random bytes":
                    row.copy_(_tensor(random.randbytes(len(row))))
                else:
                    row[random.randrange(len(row) * 7 // 8)] ^= 1 << random.randrange(8)

            def work(transport: SimTransport, rank: Rank, step: int = step, spoil: Callable = spoil) -> object:
                own = Spoiling(transport)
                training = Training(name, own, check_replicas_every=1)
                for k in range(_STEPS):
                    if k == step and transport.rank == _VICTIM:
                        own.spoil(phase, lambda row: (rank.note_fault(), spoil(row)))
                    training.step(k)
                return training.fingerprint()

            ends = sim_ranks(_RANKS, work)
            if any(end.seconds is not None for end in ends.values()):  # else nothing of this kind was sent
                yield _judge_spoilt(f"{what}, step {step}, phase {phase}", ends)


def _judge_spoilt(fault: str, ends: dict) -> Outcome:
    if all(end.what == "returned" for end in ends.values()):
        values = {str(end.value) for end in ends.values()}
        wrong = "parameters are not finite" if "nan" in values else "replicas differ" if len(values) > 1 else ""
        return Outcome(fault, SILENT if wrong else AS_PROMISED, f"{wrong} and nothing is said" if wrong else "")
    # A spoilt row concerns two ranks: who received it, and who seems to have sent it.
    others = {(_VICTIM + 1) % _RANKS, 0}
    return judge(fault, ends, Promise(r"Error: ", frozenset(), others | {_VICTIM}))


def cases() -> Iterator[Case]:
    for name in _CODECS:
        for kind in _HOSTILE:
            yield Case(
                f"{name}: {kind}",
                "what is_finite accepts decodes to finite values; the kernel and the reference decode the same bits",
                "frames of 1 to 3 rows and 1 to 16 blocks",
                f"is_finite, decode, decode_mean, by {'the C++ kernel' if cpu.is_built() else 'the reference'}",
                partial(_contents, name, kind),
                is_quick=True,
                cost_s=1.0,
            )
        yield Case(
            f"{name}: wrong lengths",
            "ValueError or TypeError, and the output as it was",
            "frames shorter, longer, of other types and dimensions",
            "decode, decode_mean, is_finite, of the kernel and of the reference",
            partial(_lengths, name),
            is_quick=name in ("identity", "int8"),
            cost_s=1.5,
        )
    for name in (name for name, kind in OPTIMIZERS.items() if not kind.is_dense):
        for phase in ("up", "down", "vote"):
            yield Case(
                f"{name}: spoilt on the way, {phase}",
                "the replicas stay the same to the bit, or an error names the rank",
                "one row that rank 1 receives is flipped in a bit, or random; in the warm-up and behind it",
                "parameters of all ranks after 24 steps, or their errors; votes every step",
                partial(_spoilt, name, phase),
                is_quick=name == "OnebitAdam" and phase == "down",
                cost_s=4.0,
            )
