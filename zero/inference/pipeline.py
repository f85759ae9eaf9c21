"""Pipeline parallelism for inference: each rank keeps consecutive layers, and sends the next one what they give.

1. `outline_of` runs a few tokens through the whole model and finds its list of layers, and what runs before and after
   them. What cannot be cut between layers is refused by name. Nothing has been sent or changed by then.
2. `cut` leaves each rank its own layers. Rank 1 has the first ones and the embeddings, rank 0 the last ones, the last
   norm and the head: rank 0 chooses tokens, and so reads the logits where they are made. A table that is also the head
   is on both. Everywhere else `Elsewhere` takes the place of a module, so that the model's own forward runs: it makes
   masks and positions on every rank, and hooks before a rank's first layer and after its last one receive and send.
3. A pass of T new tokens in B rows sends B·T·D elements from each rank to the next, except from rank 0, in the dtype of
   the embeddings, and waits for nobody: a rank begins its next pass at once. What rank 0 decides (`tell`) goes around
   in the same way, before the pass that it asks for.

Shape legend: B rows, T new tokens of a row, D features, V logits.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...comm import Transport
from ...comm.messages import raise_on_all_ranks
from ...comm.transports.base import Work
from ...comm.transports.edge import as_bytes
from ..pipeline.layers import balance
from .packed import Matrix
from .requests import Choice

T = TypeVar("T")


class Together:
    """The ranks of an engine that compute every layer together: each of them has the logits.

    Attributes:
        transport: Between these ranks.
        stages: Passes that must be under way to keep every rank busy.
    """

    stages = 1

    def __init__(self, transport: Transport):
        self.transport = transport

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that this rank has sent to the others."""
        return self.transport.sent_bytes

    def tell(self, message: Tensor) -> None:
        """Send a message from rank 0 to all others, which `hear` it."""
        if self.transport.world_size > 1:
            self.transport.broadcast(message, 0).wait()

    def hear(self, message: Tensor) -> None:
        """Receive what rank 0 tells into this tensor, of the same shape and dtype. Raises PeerError if it is lost."""
        self.tell(message)

    def flush(self) -> None:
        """Wait until all that this rank has sent is received."""

    def choose(self, choice: Choice, logits_BV: Tensor) -> Tensor:
        """Rank 0's choice of each row's next token, int64 [B], on all ranks. All raise if a rule fails."""
        chosen_B = choice.choose(logits_BV)  # on all ranks, so that all raise
        self.tell(chosen_B)
        return chosen_B

    def share(self, output: T) -> T:
        """A model's output, or its logits, with rank 0's logits on all ranks."""
        return output


class Pipeline(Together):
    """The ranks of a pipeline, as a ring: rank 1 has the first layers, rank 0 the last ones. See the module."""

    def __init__(self, transport: Transport):
        """All ranks of the transport construct it together."""
        super().__init__(transport)
        W, rank = transport.world_size, transport.rank
        # A transport for each link: its two ranks launch in one order, whatever happens elsewhere on the ring.
        # A rank that is in none splits alone: torch names a group by how many its ranks have made, and waits for others
        # of that name.
        pairs = [sorted((k, (k + 1) % W)) for k in range(W)]
        links = [transport.split(pair if rank in pair else [rank]) for pair in pairs]
        self._previous, self._next = links[(rank - 1) % W], links[rank]
        self._sending: deque[Work] = deque()
        self.stages = W

    @property
    def sent_bytes(self) -> int:
        return self.transport.sent_bytes + self._next.sent_bytes

    def tell(self, message: Tensor) -> None:
        self.send(message)

    def hear(self, message: Tensor) -> None:
        self.receive(message)
        if self.transport.rank != self.stages - 1:
            self.send(message)

    def flush(self) -> None:
        while self._sending:
            self._sending.popleft().wait()

    def choose(self, choice: Choice, logits_BV: Tensor) -> Tensor:
        chosen_B, problem = torch.full((len(logits_BV),), -1, dtype=torch.int64, device=logits_BV.device), None
        if self.transport.rank == 0:
            try:
                chosen_B = choice.choose(logits_BV)
            except (RuntimeError, ValueError, IndexError) as error:
                problem = f"rank 0 cannot choose a token: {error}"
            self.tell(chosen_B)
        else:
            self.hear(chosen_B)
        self.flush()  # this may be the last token, after which a rank may end
        if int(chosen_B[0]) < 0:
            raise_on_all_ranks(self.transport, problem, ValueError)
        return chosen_B

    def share(self, output: T) -> T:
        logits = (output if isinstance(output, Tensor) else cast(Any, output).logits).contiguous()
        self.transport.broadcast(logits, 0).wait()
        if isinstance(output, Tensor):
            return cast(T, logits)
        cast(Any, output).logits = logits
        return output

    def send(self, x: Tensor) -> None:
        """Send a copy of x to the next rank, which receives it in its own time."""
        data = as_bytes(x.clone(memory_format=torch.contiguous_format))
        self._sending.append(self._next.shift(data.new_empty(0), data, 1))
        # Rank 0 has at most two passes for each stage under way, so that no ring of ranks waits here for each other.
        if len(self._sending) > 2 * self.stages:
            self._sending.popleft().wait()

    def receive(self, out: Tensor) -> None:
        """Fill a contiguous tensor with what the previous rank sends. Raises PeerError if that rank is lost."""
        data = as_bytes(out)
        self._previous.shift(data, data.new_empty(0), 1).wait()


# ---------------------------------------------------------------- cutting a model


class Elsewhere(nn.Module):
    """In place of a module that another rank has: it gives zeros, or whatever comes, in the shape of its output.

    Attributes:
        width: Features of the output.
        dtype: Of the output, if the input is tokens.
    """

    def __init__(self, module: nn.Module, width: int, dtype: torch.dtype):
        super().__init__()
        # Models ask some layers for what they are, by attributes such as attention_type.
        self.__dict__.update({name: x for name, x in vars(module).items() if isinstance(x, str | int | float)})
        self.width, self.dtype = width, dtype

    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor:
        if not x.is_floating_point():
            return torch.zeros(*x.shape, self.width, dtype=self.dtype, device=x.device)
        if x.dim() != 3:  # OPT makes positions of the mask, and adds them
            return x.new_zeros(self.width)
        return x[..., :1].expand(*x.shape[:-1], self.width)


@dataclass(frozen=True)
class Outline:
    """A decoder as its list of layers.

    Attributes:
        layers: The list's name.
        before: Modules with weights that run before the layers, by name, with the features of their outputs.
        after: The same for those that run after them.
        width: Features of what one layer gives the next.
        dtype: Its dtype.
    """

    layers: str
    before: dict[str, int]
    after: dict[str, int]
    width: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Call:
    name: str
    x: object
    others: list[Tensor]
    out: object


def outline_of(model: nn.Module, tokens: Tensor, stages: int) -> Outline:
    """Find where a decoder can be cut.

    Args:
        model: The whole model.
        tokens: int64 [1, T] of two different ones.
        stages: How many ranks will divide the layers.

    Raises:
        ValueError: It is no list of layers that hand on one tensor, or has fewer layers than stages.
    """
    kind = type(model).__name__
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        raise ValueError(f"pp_size divides the layers of decoders of transformers, and {kind} is none: use tp_size")
    lists = [(name, module) for name, module in model.named_modules() if type(module) is nn.ModuleList]
    layers, blocks = max(lists, key=lambda found: len(found[1]), default=("", nn.ModuleList()))
    names = [f"{layers}.{k}" for k in range(len(blocks))]
    if len(blocks) < stages:
        raise ValueError(
            f"pp_size is {stages}, and {kind} has {len(blocks)} layers in one list: use at most as many stages"
        )
    outer: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = name.startswith((f"{layers}.", *(f"{other}." for other in outer)))
        if name and not is_inside and not f"{layers}.".startswith(f"{name}.") and _weights_of(module):
            outer[name] = module
    calls = _calls_of(model, tokens, {**outer, **dict(zip(names, blocks, strict=True))})
    order = [call.name for call in calls]
    at = [k for k, name in enumerate(order) if name in set(names)]
    if not at or order[at[0] : at[-1] + 1] != names:
        raise ValueError(f"{kind} does not run {layers}.0 to {len(names) - 1} one after the other: use tp_size")
    chain = calls[at[0] : at[-1] + 1]
    for call, following in pairwise(chain):
        if following.x is not call.out or not isinstance(call.out, Tensor):
            raise ValueError(
                f"{following.name} of {kind} does not take the one tensor that {call.name} gives: use tp_size"
            )
    others = _calls_of(model, tokens.min() + tokens.max() - tokens, dict(zip(names, blocks, strict=True)))
    for call, other in zip(chain, others, strict=True):
        if not all(map(torch.equal, call.others, other.others)):
            raise ValueError(
                f"{call.name} of {kind} takes more of the tokens than what the layer before it gives, and only the "
                "first rank has that: use tp_size"
            )
    first = chain[0].x
    assert isinstance(first, Tensor)
    widths = {call.name: call.out.shape[-1] for call in calls if isinstance(call.out, Tensor)}
    before = {name: widths[name] for name in order[: at[0]]}
    after = {name: widths[name] for name in order[at[-1] + 1 :]}
    return Outline(layers, before, after, first.shape[-1], first.dtype)


@torch.no_grad()
def _calls_of(model: nn.Module, tokens: Tensor, modules: dict[str, nn.Module]) -> list[_Call]:
    """The calls of these modules in one pass over tokens, in their order."""
    calls: list[_Call] = []

    def record(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any], out: object, *, name: str) -> None:
        others = [x for x in tree_leaves((args[1:], named)) if isinstance(x, Tensor)]
        calls.append(_Call(name, args[0] if args else None, others, out))

    hooks = [
        module.register_forward_hook(partial(record, name=name), with_kwargs=True) for name, module in modules.items()
    ]
    try:
        model(tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _weights_of(module: nn.Module) -> set[int]:
    """The ids of a module's parameters and packed matrices, which tied modules share."""
    return {id(x) for x in (*module.parameters(), *module.modules()) if isinstance(x, nn.Parameter | Matrix)}


def cut(model: nn.Module, outline: Outline, transport: Transport) -> Pipeline:
    """Keep only this rank's layers, in place, so that the stages' ranges of weights are as even as can be.

    Returns:
        The ranks' links, which the model uses in every pass from now on.
    """
    pipeline, layers = Pipeline(transport), cast(nn.ModuleList, model.get_submodule(outline.layers))
    costs = [_nbytes(layer) for layer in layers]
    # Not those before the layers: a pass reads a few rows of a table, and the whole head.
    costs[-1] += sum(_nbytes(model.get_submodule(name)) for name in outline.after)
    own = balance(costs, pipeline.stages)[(transport.rank - 1) % pipeline.stages]
    is_first, is_last = own.start == 0, own.stop == len(layers)
    kept = set().union(*(_weights_of(model.get_submodule(name)) for name in outline.after if is_last))
    gone: dict[str, int] = {f"{outline.layers}.{k}": outline.width for k in range(len(layers)) if k not in own}
    for name, width in outline.before.items():
        if not is_first and not (kept & _weights_of(model.get_submodule(name))):
            gone[name] = width
    if not is_last:
        gone |= outline.after
    for name, width in gone.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Elsewhere(model.get_submodule(name), width, outline.dtype))
    number = _number_of(pipeline)
    if not is_first:
        layers[own.start].register_forward_pre_hook(partial(_receive_before, pipeline=number, width=outline.width))
    if not is_last:
        layers[own.stop - 1].register_forward_hook(partial(_send_after, pipeline=number))
    return pipeline


def _nbytes(module: nn.Module) -> int:
    return sum(x.nbytes for x in (*module.parameters(), *module.buffers()))


# ---------------------------------------------------------------- what stages send each other

# Custom operations, so that a compiled step keeps each as one call. Graphs cannot hold transports, only numbers.
_PIPELINES: weakref.WeakValueDictionary[int, Pipeline] = weakref.WeakValueDictionary()


def _number_of(pipeline: Pipeline) -> int:
    _PIPELINES[id(pipeline)] = pipeline
    return id(pipeline)


def _receive_before(_: nn.Module, inputs: tuple[Any, ...], *, pipeline: int, width: int) -> tuple[Any, ...]:
    """A forward pre-hook: the layer gets what the previous rank has sent."""
    return torch.ops.onebit.receive_activations(inputs[0], pipeline, width), *inputs[1:]


def _send_after(_: nn.Module, __: object, out: Tensor, *, pipeline: int) -> Tensor:
    """A forward hook: the next rank gets what the layer gives."""
    sent: Tensor = torch.ops.onebit.send_activations(out, pipeline)
    return sent


@torch.library.custom_op("onebit::receive_activations", mutates_args=())
def _receive(x: Tensor, pipeline: int, width: int) -> Tensor:
    """[..., width] of x's shape and dtype, from the previous rank."""
    out = x.new_empty(*x.shape[:-1], width)
    _PIPELINES[pipeline].receive(out)
    return out


@_receive.register_fake
def _(x: Tensor, pipeline: int, width: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], width)


@torch.library.custom_op("onebit::send_activations", mutates_args=())
def _send(x: Tensor, pipeline: int) -> Tensor:
    """Send x to the next rank. Returns one feature, because a compiler leaves out a call whose output nobody reads."""
    _PIPELINES[pipeline].send(x)
    return x[..., :1].clone(memory_format=torch.contiguous_format)


@_send.register_fake
def _(x: Tensor, pipeline: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], 1)
