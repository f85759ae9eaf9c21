"""Random layerwise token dropping: a layer runs on some of a sequence's tokens, the others pass it by.

    dropping = drop_tokens(model, "transformer.h.*", Root(first=128, last=1024, total_steps=50_000, multiple=8))
    for batch in loader:
        model(**batch).loss.backward(); optimizer.step(); dropping.advance()

In training, and while the schedule keeps fewer tokens than a sequence has, each layer draws positions for every sample,
in order, runs on these, and scatters its output over its input. Inputs that run along the sequence are gathered with
it: masks by rows and columns, position ids, rotary angles. So causal and bidirectional layers, padded or not, are
treated alike. Real tokens are kept before padding.

Modules stay where they are: their class gets another `forward`, so that names in state dicts, FSDP2, tensor plans and
activation checkpoints see the modules they know. Positions are a function of (seed, step, layer's name, data rank,
number of the call in the step). A number drawn from torch's generator marks each call, as dropout draws its masks:
activation checkpointing restores the generator, so that a recomputation finds its own positions.
Source: arXiv 2211.11586.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import torch
from torch import Tensor, nn

from .pacing import Pacing

_CURRENT: ContextVar[Tensor | None] = ContextVar("positions", default=None)
_POSITIONAL = ("position", "rotary", "rope", "freqs", "cos", "sin", "angles", "token_type", "segment")
# What belongs to another sequence, of an encoder or a cache.
_FOREIGN = ("encoder_", "cross_", "memory", "past", "cache", "layer_past")


def current_positions() -> Tensor | None:
    """int64 [batch, kept], inside a layer that drops tokens: where its tokens stand in the sequence; None elsewhere.

    For layers that make rotary angles or position biases themselves, out of the length of their input.
    """
    return _CURRENT.get()


@dataclass(frozen=True)
class LayerCall:
    """What a layer is called with. parts: see `TokenDropping`."""

    kept: Tensor  # int64 [B, r], in order
    length: int
    sequence_dim: int


class TokenDropping:
    """The layers that drop tokens, and how many they keep. `drop_tokens` makes it.

    step: of the training, from 0; `advance` goes on to the next. seed, data_rank: see the module. parts: of how many
    ranks each holds a part of the sequence, in order (sequence-parallel slices); each then keeps as many tokens of its
    part. part: which of them this is. sequence_dim: of hidden states [B, S, D]: 1; [S, B, D]: 0.
    """

    def __init__(
        self,
        pacing: Pacing,
        *,
        seed: int = 1234,
        data_rank: int = 0,
        sequence_dim: int = 1,
        mask_name: str | None = None,
        parts: int = 1,
        part: int = 0,
    ):
        if sequence_dim not in (0, 1):
            raise ValueError(
                f"sequence_dim is 1 for [batch, sequence, ...] and 0 for [sequence, batch, ...], got {sequence_dim}"
            )
        self.pacing, self.seed, self.data_rank, self.sequence_dim = pacing, seed, data_rank, sequence_dim
        self.mask_name, self.parts, self.part = mask_name, parts, part
        self.layers: dict[str, nn.Module] = {}
        self.step = 0
        self._kept = pacing(1)
        self._calls: dict[str, dict[int, int]] = {}
        self._lengths: dict[int, tuple[str, int]] = {}
        self._passes: dict[str, int] = {}

    @property
    def kept(self) -> int:
        """Tokens of a sequence that the layers keep in this step."""
        return self._kept

    def advance(self, step: int | None = None) -> None:
        """On to the next step, or to this one: after every optimizer step, and after loading a checkpoint."""
        self.step = self.step + 1 if step is None else step
        self._kept = self.pacing(self.step + 1)
        self._calls.clear()
        self._lengths.clear()
        self._passes.clear()

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self.seed = state_dict["seed"]
        self.advance(state_dict["step"])

    def layer_tokens(self, length: int, layers: int) -> int:
        """What a sequence of this length costs a model of this many layers, in tokens times layers."""
        kept = min(self.kept, length)
        return length * (layers - len(self.layers)) + kept * len(self.layers)

    # ---------------------------------------------------------------- a layer's call

    def run(self, name: str, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The layer on the tokens that it keeps; its output in the shape that it has without dropping."""
        hidden = _hidden_of(name, args, kwargs)
        length = hidden.shape[self.sequence_dim]
        if not _is_in_backward():
            self._check_lengths(name, length)
        whole = length * self.parts
        kept = self.kept - self.kept % self.parts
        if kept >= whole:
            return forward(*args, **kwargs)
        if kept < 1:
            raise ValueError(f"{name} would keep {self.kept} of {whole} tokens; keep at least {self.parts}")
        number = self._number(name)
        names = _argument_names(layer, forward, len(args))
        given = [*zip(names, args, strict=True), *kwargs.items()]
        padding = self._padding(given, hidden.shape[1 - self.sequence_dim], whole)
        positions = self._draw(name, number, hidden, whole, kept, padding)
        mine = positions
        if self.parts > 1:
            mine = positions[:, self.part * kept // self.parts :][:, : kept // self.parts] - self.part * length
        call = LayerCall(positions, whole, self.sequence_dim)
        rows = _rows(mine, hidden, self.sequence_dim)
        rest, few = _parted(hidden, rows)
        gathered = {
            key: few if value is hidden else self._gathered(name, key, value, call, layer) for key, value in given
        }
        called = [gathered[key] for key in names], {key: gathered[key] for key in kwargs}
        token = _CURRENT.set(positions)
        try:
            output = forward(*called[0], **called[1])
        finally:
            _CURRENT.reset(token)
        return self._scattered(name, rest, rows, output)

    def _number(self, name: str) -> int:
        """Which call of this layer in the step; a recomputation has the number of what it computes again."""
        marker = int(torch.randint(2**62, (), device="cpu"))
        calls = self._calls.setdefault(name, {})
        if marker not in calls and _is_in_backward():
            raise RuntimeError(
                f"{name} is computed again with other random numbers: checkpoint activations with "
                "preserve_rng_state=True, so that it keeps the same tokens"
            )
        return calls.setdefault(marker, len(calls))

    def _check_lengths(self, name: str, length: int) -> None:
        """Of the layers in one forward pass."""
        number = self._passes[name] = self._passes.get(name, -1) + 1
        first, known = self._lengths.setdefault(number, (name, length))
        if known != length:
            raise ValueError(
                f"layers disagree in the length of a sequence: {first} has {known} tokens, {name} {length}; drop "
                "tokens in layers of one length alone, by a narrower pattern"
            )

    def _draw(self, name: str, number: int, hidden: Tensor, whole: int, kept: int, padding: Tensor | None) -> Tensor:
        """int64 [B, kept], ascending; of every part of the sequence as many."""
        key = f"{self.seed}/{self.step}/{name}/{self.data_rank}/{number}".encode()
        generator = torch.Generator(hidden.device)
        generator.manual_seed(int.from_bytes(sha256(key).digest()[:8], "big") >> 1)
        batch = hidden.shape[1 - self.sequence_dim]
        order = torch.rand(batch, whole, generator=generator, device=hidden.device, dtype=torch.float32)
        if padding is not None:
            order = order + padding
        each = order.view(batch, self.parts, whole // self.parts).topk(
            kept // self.parts, dim=2, largest=False, sorted=False
        )
        begins = torch.arange(self.parts, device=hidden.device)[:, None] * (whole // self.parts)
        return (each.indices + begins).flatten(1).sort(dim=1).values

    # ---------------------------------------------------------------- what goes in

    def _is_mask(self, name: str) -> bool:
        if name.startswith(_FOREIGN):
            return False
        return name == self.mask_name or "mask" in name

    def _padding(self, given: Iterable[tuple[str, object]], batch: int, length: int) -> Tensor | None:
        """float [B, S], 1 where a token is padding, as far as a mask says so."""
        for name, value in given:
            if not self._is_mask(name) or not isinstance(value, Tensor) or value.shape[-1] != length:
                continue
            hides = _hides(name, value)
            if value.dim() == 2 and value.shape[0] == batch and not _is_square(name, value, batch):
                return hides.float()
            if value.dim() == 4 and value.shape[0] == batch:
                return hides.all(dim=2).all(dim=1).float()
        return None

    def _gathered(self, layer_name: str, name: str, value: object, call: LayerCall, layer: nn.Module) -> object:
        """An argument as the layer has it with fewer tokens."""
        if isinstance(value, list | tuple):
            parts = [self._gathered(layer_name, name, inner, call, layer) for inner in value]
            if hasattr(value, "_fields"):
                return cast("type[Any]", type(value))(*parts)
            return parts if isinstance(value, list) else tuple(parts)
        if type(value).__name__ == "BlockMask":
            raise ValueError(
                f"{layer_name} is given a BlockMask as {name}, which cannot be gathered; use another attention "
                "(attn_implementation='sdpa')"
            )
        if not isinstance(value, Tensor) or name.startswith(_FOREIGN) or call.length not in value.shape:
            return value
        if self._is_mask(name):
            return _gather_mask(layer_name, name, value, call, layer)
        return _gather_positions(layer_name, name, value, call)

    # ---------------------------------------------------------------- what comes out

    def _scattered(self, name: str, rest: Tensor, rows: Tensor, output: Any) -> Any:
        several = output if isinstance(output, tuple | list) else (output,)
        first = several[0] if several else None
        if not isinstance(first, Tensor) or first.dim() != rest.dim():
            raise ValueError(
                f"{name} gives a {type(output).__name__}; token dropping needs a layer whose output, or the first of "
                "several, has the shape of its hidden states"
            )
        expected = list(rest.shape)
        expected[self.sequence_dim] = rows.shape[self.sequence_dim]
        if list(first.shape) != expected:
            raise ValueError(
                f"{name} makes {tuple(first.shape)} of hidden states {tuple(expected)}: the tokens that it drops have "
                "no place in that; leave it out of the pattern"
            )
        whole = _joined(rest.to(first.dtype), rows, first)
        if isinstance(output, Tensor):
            return whole
        return type(output)([whole, *several[1:]]) if isinstance(output, list) else (whole, *several[1:])


# ---------------------------------------------------------------- modules


class _Dropping(nn.Module):
    """Mixed into a layer's class: its forward, on fewer tokens."""

    _token_dropping: tuple[TokenDropping, str, type[nn.Module]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        dropping, name, _ = self._token_dropping
        forward = super().forward
        if not self.training:
            return forward(*args, **kwargs)
        return dropping.run(name, self, forward, args, kwargs)


def drop_tokens(
    model: nn.Module,
    layers: str | Sequence[str],
    pacing: Pacing,
    *,
    seed: int = 1234,
    data_rank: int = 0,
    sequence_dim: int = 1,
    mask_name: str | None = None,
    parts: int = 1,
    part: int = 0,
) -> TokenDropping:
    """Let these layers of the model drop tokens, in place.

    layers: names, or a pattern of names ("transformer.h.*": part by part, as fnmatch has it), of which all but the
    first and the last layer are taken. pacing: tokens kept at step t, from 1. Others: see `TokenDropping`. Call before
    FSDP2 shards the model. Raises ValueError where a name matches nothing, layers are nested or drop tokens already.
    """
    names = middle_layers(model, layers) if isinstance(layers, str) else list(layers)
    options: dict[str, Any] = {"seed": seed, "data_rank": data_rank, "sequence_dim": sequence_dim}
    dropping = TokenDropping(pacing, mask_name=mask_name, parts=parts, part=part, **options)
    arm(dropping, model, names)
    return dropping


def arm(dropping: TokenDropping, model: nn.Module, names: Sequence[str], *, is_stage: bool = False) -> None:
    """Give these modules to the dropping. is_stage: the model holds some of the layers alone. Raises ValueError."""
    modules = dict(model.named_modules())
    missing = [name for name in names if name not in modules]
    if missing and not is_stage:
        raise ValueError(f"token dropping: the model has no layer {missing[0]!r}; it has {_some(modules)}")
    for name in names:
        if (outer := next((other for other in names if name.startswith(other + ".")), None)) is not None:
            raise ValueError(f"token dropping: {name} lies within {outer}, which drops tokens itself; name one of them")
    for name in names:
        if name not in modules:
            continue
        layer = modules[name]
        if isinstance(layer, _Dropping):
            raise ValueError(f"token dropping: {name} drops tokens already; call this once")
        kind = type(layer)
        layer._token_dropping = (dropping, name, kind)
        layer.__class__ = type(f"Dropping{kind.__name__}", (_Dropping, kind), {"__module__": kind.__module__})
        dropping.layers[name] = layer


def disarm(dropping: TokenDropping) -> None:
    """Give the layers their class back. Raises RuntimeError after FSDP2, whose classes are built on these."""
    for name, layer in dropping.layers.items():
        if _Dropping not in type(layer).__bases__:
            raise RuntimeError(f"{name} is sharded since it drops tokens; call model.eval(), which keeps all")
    for layer in dropping.layers.values():
        layer.__class__ = cast(_Dropping, layer)._token_dropping[2]
        del layer._token_dropping
    dropping.layers.clear()


def middle_layers(model: nn.Module, pattern: str, *, with_ends: bool = False) -> list[str]:
    """The modules that match, in order, without the first and the last. Raises ValueError where none is left."""
    wanted = pattern.split(".")
    names = [name for name, _ in model.named_modules() if name]
    found = [
        name
        for name in names
        if len(parts := name.split(".")) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
    ]
    if not found:
        raise ValueError(f"token dropping: {pattern!r} matches no layer; the model has {_some(names)}")
    if len(found) < 3:
        raise ValueError(
            f"token dropping: {pattern!r} matches {', '.join(found)}; the first and the last layer keep all tokens, so "
            "that three are needed, or a list of names"
        )
    return found if with_ends else found[1:-1]


def stack_of(model: nn.Module, layers: int) -> list[str]:
    """The names of the model's `layers` layers: of its only list of this many modules of one class.

    Raises ValueError where there is none, or several.
    """
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            inner = dict(module.named_children())
            kinds: dict[str, list[str]] = {}
            for child, part in inner.items():
                kinds.setdefault(type(part).__name__, []).append(f"{name}.{child}" if name else child)
            found |= {
                f"{name or 'the model'} ({kind})": members for kind, members in kinds.items() if len(members) == layers
            }
    if len(found) != 1:
        what = f"{len(found)} of them: {', '.join(found)}" if found else "none"
        raise ValueError(
            f"random_ltd.total_layer_num is {layers}: expected one list of so many layers of one class in the model, "
            f'found {what}; write the layers\' names as "random_ltd": {{"layer_name": "transformer.h.*"}}'
        )
    return next(iter(found.values()))


def _some(names: Iterable[str]) -> str:
    """A few names that stand for all: numbers as *."""
    said = dict.fromkeys(
        ".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names if name
    )
    return ", ".join(list(said)[:12]) + (", ..." if len(said) > 12 else "")


# ---------------------------------------------------------------- tensors


def _hidden_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    hidden = args[0] if args else kwargs.get("hidden_states")
    if type(hidden).__name__ == "DTensor" or not isinstance(hidden, Tensor) or hidden.dim() < 3:
        got = f"a tensor of shape {tuple(hidden.shape)}" if type(hidden) is Tensor else type(hidden).__name__
        raise ValueError(
            f"{name} is called with {got}; token dropping needs hidden states, a plain tensor [batch, length, width], "
            "as the first argument or as hidden_states="
        )
    return hidden


def _argument_names(layer: nn.Module, forward: Callable[..., Any], count: int) -> list[str]:
    """Of the positional arguments."""
    kind = type(layer)
    names = _NAMES.get(kind)
    if names is None:
        taken = inspect.signature(forward).parameters.values()
        names = [p.name for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        _NAMES[kind] = names
    return [names[k] if k < len(names) else f"argument {k}" for k in range(count)]


_NAMES: dict[type, list[str]] = {}


def _rows(positions: Tensor, x: Tensor, sequence_dim: int) -> Tensor:
    """positions [B, r] as numbers of x's rows: [B, r] of [B·S, ...], or [r, B] of [S·B, ...].

    Whole rows: elementwise gather and scatter take ten times as long on a CPU, in backward above all.
    """
    samples = torch.arange(len(positions), device=x.device)
    if sequence_dim == 1:
        return positions + x.shape[1] * samples[:, None]
    return positions.t() * x.shape[1] + samples


def _parted(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """x for `_joined` alone, and its rows: what a layer is given."""
    rest, few = _Parted.apply(x.flatten(0, 1), rows.flatten())  # type: ignore[no-untyped-call]
    return rest.view(x.shape), few.view(*rows.shape, *x.shape[2:])


def _joined(rest: Tensor, rows: Tensor, few: Tensor) -> Tensor:
    """What `_parted` has left, with these in place of its rows."""
    joined: Tensor = _Joined.apply(rest.flatten(0, 1), rows.flatten(), few.flatten(0, 1))  # type: ignore[no-untyped-call]
    return joined.view(rest.shape)


class _Parted(torch.autograd.Function):
    """Rows that differ. The gradient of what is left counts in the other rows alone: in these it is overwritten.

    So one copy does in backward what torch's own operations do in four, of which the sum row by row alone takes 7 ms
    for 1024 rows and a copy 0.1 ms.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        return x.view_as(x), x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, of_rest: Tensor, of_few: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return of_rest.index_copy(0, rows, of_few), None


class _Joined(torch.autograd.Function):
    """index_copy into what `_Parted` has left, whose gradient in these rows means nothing there."""

    @staticmethod
    def forward(ctx: Any, rest: Tensor, rows: Tensor, few: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rest.index_copy(0, rows, few)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        (rows,) = ctx.saved_tensors
        return gradient, None, gradient.index_select(0, rows)


def _index(positions: Tensor, x: Tensor, sequence_dim: int) -> Tensor:
    """positions [B, r] for gather and scatter of x along its sequence."""
    index = positions if sequence_dim == 1 else positions.t()
    index = index.view(*index.shape, *[1] * (x.dim() - 2))
    return index.expand(*index.shape[:2], *x.shape[2:])


def _is_square(name: str, mask: Tensor, batch: int) -> bool:
    """Of a mask [n, n]: whether its rows are tokens, not samples."""
    return mask.shape[0] == mask.shape[1] and (
        mask.shape[0] != batch or name in ("src_mask", "attn_mask", "causal_mask")
    )


def _hides(name: str, mask: Tensor) -> Tensor:
    """Where it hides a token: of masks to be added, of true or 1 where seen, of torch's key padding masks."""
    if mask.dtype.is_floating_point:
        return mask <= torch.finfo(mask.dtype).min / 2 if mask.dim() > 2 or bool((mask < 0).any()) else mask == 0
    return mask.bool() if "key_padding" in name else ~mask.bool()


def _gather_mask(layer_name: str, name: str, mask: Tensor, call: LayerCall, layer: nn.Module) -> Tensor:
    """By rows and columns: [B, S], [S, S], [B, 1|S, S], [B|1, heads|1, 1|S, S]."""
    positions, (batch, kept), length = call.kept, call.kept.shape, call.length
    if mask.dim() == 2 and not _is_square(name, mask, batch):
        return mask.expand(batch, -1).gather(1, positions)
    if mask.dim() == 2:
        each = mask[positions[:, :, None], positions[:, None, :]]
        if not bool((each == each[:1]).all()):
            raise ValueError(
                f"{layer_name}: {name} of shape {tuple(mask.shape)} is another mask for each sample's tokens; give one "
                "for each sample, [batch, 1, sequence, sequence]"
            )
        return each[0]
    if mask.dim() not in (3, 4) or mask.shape[-1] != length or mask.shape[0] not in (1, batch):
        raise ValueError(
            f"{layer_name}: {name} of shape {tuple(mask.shape)} is no mask of {batch} sequences of {length} tokens: "
            "expected [batch, sequence], [sequence, sequence] or [batch, heads or 1, sequence, sequence]"
        )
    middle = (1,) * (mask.dim() - 2)
    mask = mask.expand(batch, *mask.shape[1:])
    if mask.shape[-2] == length:
        rows = positions.view(batch, *middle[:-1], kept, 1).expand(batch, *mask.shape[1:-2], kept, length)
        mask = mask.gather(-2, rows)
    columns = positions.view(batch, *middle, kept).expand(batch, *mask.shape[1:-1], kept)
    return mask.gather(-1, columns)


def _gather_positions(layer_name: str, name: str, x: Tensor, call: LayerCall) -> Tensor:
    """What has a value for each token: [B|1, S, ...], [S, B|1, ...], [B|1, 1, S, D], or ids [S]."""
    positions, (batch, kept), length = call.kept, call.kept.shape, call.length
    is_positional = any(word in name for word in _POSITIONAL)
    if x.dim() == 1:
        return x[positions] if is_positional else x
    dims = [d for d, size in enumerate(x.shape) if size == length]
    by_batch, by_sequence = x.shape[0] in (1, batch), x.shape[1] in (1, batch)
    if call.sequence_dim == 0 and x.shape[0] == length and by_sequence:
        x = x.expand(length, batch, *x.shape[2:])
        return x.gather(0, _index(positions, x, 0))
    if by_batch and x.shape[1] == length:
        x = x.expand(batch, *x.shape[1:])
        return x.gather(1, _index(positions, x, 1))
    if by_batch and x.dim() == 4 and x.shape[2] == length:
        x = x.expand(batch, *x.shape[1:])
        return x.gather(2, positions[:, None, :, None].expand(batch, x.shape[1], kept, x.shape[3]))
    if is_positional or dims[0] < 2:
        raise ValueError(
            f"{layer_name}: {name} of shape {tuple(x.shape)} runs along the sequence of {length} tokens, and it is not "
            "known how: expected [batch or 1, sequence, ...], or as hidden states [sequence, batch, ...]"
        )
    return x


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
