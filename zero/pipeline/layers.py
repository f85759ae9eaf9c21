"""A model as a list of layers, which a pipeline cuts into stages; the classes that DeepSpeed's users know.

    net = PipelineModule(
        [TiedLayerSpec("bytes", nn.Embedding, 256, 512),
         *(LayerSpec(Block, size) for _ in range(8)),
         LayerSpec(nn.LayerNorm, 512),
         TiedLayerSpec("bytes", nn.Embedding, 256, 512, forward_fn=lambda table, x: F.linear(x, table.weight))],
        loss_fn=next_byte_loss,
    )

A rank builds only the layers of its own stages. Parameters are named after their layer's place in the list
("layers.3.weight") or the key of a tie ("tied.bytes.weight"), and their initial values depend only on that place. So
neither depends on the number of stages. `run.py` runs the stages.
"""

from __future__ import annotations

import inspect
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NoReturn, cast

import torch
from torch import Tensor, nn

from ..activations import checkpoint
from ..sequence.stages import Batch, ComputesPieces, Split, TargetPiece

_log = logging.getLogger(__name__)

Loss = Callable[[object, object], Tensor]


class LayerSpec:
    """A layer that is only built on the ranks that need it.

    Args:
        typename: The layer's class, or a function that makes it.
        *module_args: Its positional arguments.
        **module_kwargs: Its keyword arguments.

    Raises:
        TypeError: `typename` is no class or function.
    """

    def __init__(self, typename: Callable[..., nn.Module], *module_args: object, **module_kwargs: object):
        if not callable(typename) or isinstance(typename, nn.Module):
            raise TypeError(f"LayerSpec takes a class and the arguments to build it with, got {typename!r}")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Build a new layer.

        Args:
            log: Whether to log it. Default False.
        """
        if log:
            _log.info("building %s", self.kind)
        return self.typename(*self.module_args, **self.module_kwargs)

    @property
    def kind(self) -> str:
        """The name of the layer's class."""
        return getattr(self.typename, "__name__", type(self.typename).__name__)


class TiedLayerSpec(LayerSpec):
    """A layer that occurs more than once: all layers with one key are one module, on any number of stages.

    Args:
        key: The name of the tie, without a dot; it becomes part of the parameters' names.
        typename: The layer's class, or a function that makes it.
        *module_args: Its positional arguments.
        forward_fn: Called with the module and its input instead of the module's forward. None (default) for forward.
        tied_weight_attr: DeepSpeed's name of the tied weights; no effect, all of the module's are tied.
        **module_kwargs: Its keyword arguments.

    Raises:
        ValueError: The key holds a dot.
        TypeError: `typename` is no class or function.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *module_args: object,
        forward_fn: Callable[..., object] | None = None,
        tied_weight_attr: str | Sequence[str] | None = None,
        **module_kwargs: object,
    ):
        super().__init__(typename, *module_args, **module_kwargs)
        if "." in key:
            raise ValueError(f"a key becomes a part of parameters' names and must not contain a dot, got {key!r}")
        self.key, self.forward_fn = key, forward_fn


Call = Callable[..., object]  # a module, or a function without parameters
Layer = LayerSpec | nn.Module | Call


class Stage(nn.Module):
    """Consecutive layers. `calls` lists them in order: modules of the two dicts, or functions.

    The activations of `interval` calls at a time are recomputed in the backward pass; 0 keeps all. `recompute` does it,
    or torch's checkpoint, if all calls of an interval may be recomputed. Without `may_recompute` those intervals are
    that have parameters, as in DeepSpeed: one of nn.ReLU(inplace=True) alone cannot be. `first` is the place of the
    first call in the whole list, for errors.
    """

    def __init__(
        self,
        layers: nn.ModuleDict,
        tied: nn.ModuleDict,
        calls: Sequence[Call],
        interval: int,
        first: int = 0,
        recompute: Call | None = None,
        may_recompute: Sequence[bool] | None = None,
    ):
        super().__init__()
        self.layers, self.tied = layers, tied
        self._calls = [(first + k, call, takes_tuple(call)) for k, call in enumerate(calls)]
        self._interval, self._recompute = interval, recompute or checkpoint
        self._may_recompute = may_recompute
        self._has_parameters = [isinstance(call, nn.Module) and any(True for _ in call.parameters()) for call in calls]
        self.split: Split | None = None

    def forward(self, *inputs: object) -> object:
        """Run the layers in sequence. `takes_tuple` decides how a layer gets a tuple. A single input is no tuple."""
        interval = self._interval if self.training and torch.is_grad_enabled() else 0
        received = tuple(map(_modifiable, inputs))
        value = unmarked(received if len(received) > 1 else received[0])
        for k in range(0, len(self._calls), interval or len(self._calls)):
            calls = self._calls[k : k + (interval or len(self._calls))]
            if interval and self._is_recomputed(slice(k, k + interval)):
                is_tuple = isinstance(value, tuple)
                several = value if isinstance(value, tuple) else (value,)
                value = self._recompute(partial(_run_spread, calls, is_tuple), *several)
            else:
                value = _run(calls, value)
        if isinstance(value, Tensor) and value.dim() == 0:
            return value.reshape(1)  # a loss: torch concatenates the outputs of micro-batches
        if isinstance(value, tuple) and len(value) == 1:
            return value[0], torch.zeros(_MARK, dtype=torch.bool, device=value[0].device)
        return value

    def _is_recomputed(self, interval: slice) -> bool:
        if self._may_recompute is None:
            return any(self._has_parameters[interval])
        return all(self._may_recompute[interval])

    def split_sequences(self, split: Split) -> None:
        """From now on compute pieces of sequences, of the batches that `cut` returns."""
        self.split = split
        for module in self.modules():
            if isinstance(module, ComputesPieces):
                module.compute_pieces(split)

    def cut(self, batches: list[Batch]) -> list[Batch]:
        """This rank's pieces of whole micro-batches; the same batches if sequences are not split."""
        return batches if self.split is None else self.split.cut(batches, shifts=False)

    def blocks(self) -> list[nn.Module]:
        """The untied layers with parameters, which may be gathered one at a time."""
        return [layer for layer in self.layers.values() if any(True for _ in layer.parameters())]


def _modifiable(value: object) -> object:
    """A copy of an activation that was received, a leaf: a first layer such as ReLU(inplace=True) must not write it."""
    if isinstance(value, Tensor) and value.is_leaf and value.requires_grad:
        return value.clone()
    return value


class Stages(nn.Module):
    """The stages of a rank with several. Parameters have the same names as in their stage."""

    def __init__(self, stages: Sequence[Stage]):
        super().__init__()
        self.layers, self.tied = nn.ModuleDict(), nn.ModuleDict()
        for stage in stages:
            self.layers.update(dict(stage.layers.items()))
            self.tied.update(dict(stage.tied.items()))
        self.parts = tuple(stages)  # a tuple is not registered, so no parameter gets a second name

    def train(self, mode: bool = True) -> Stages:
        for stage in self.parts:
            stage.train(mode)
        return super().train(mode)


def parts_of(model: nn.Module) -> Sequence[nn.Module]:
    """The modules that are FSDP2 roots: a rank's pipeline stages, or the model."""
    return model.parts if isinstance(model, Stages) else (model,)


def takes_tuple(call: Call) -> bool | None:
    """Whether a layer gets a tuple as its one argument, as DeepSpeed's layers do, or else one argument per element.

    The signature decides. A single positional parameter gets the tuple: `forward(self, inputs)`. Two or more without a
    default get its elements: `forward(self, x, mask)`. None: it could be both, as in `forward(self, x, mask=None)` and
    `forward(self, *inputs)`, or is unknown, as for some functions of torch.
    """
    try:
        parameters = inspect.signature(call.forward if isinstance(call, nn.Module) else call).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if sum(p.default is p.empty for p in positional) > 1:
        return False
    return True if len(positional) == 1 and all(p.kind is not p.VAR_POSITIONAL for p in parameters) else None


_MARK = (1,) * 7
"""The shape of a second tensor that goes with a tuple of one, which torch's stages would send as its element."""


def unmarked(value: object) -> object:
    """What the last layer of a stage has returned, by what its stage returns: the same, or a tuple of one."""
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[1], Tensor):
        return value
    return value[:1] if value[1].dtype == torch.bool and value[1].shape == _MARK else value


def _run_spread(calls: Sequence[tuple[int, Call, bool | None]], is_tuple: bool, *inputs: object) -> object:
    """`_run` with the elements of a tuple as arguments, among which checkpoints look for tensors."""
    return _run(calls, inputs if is_tuple else inputs[0])


def _run(calls: Sequence[tuple[int, Call, bool | None]], value: object) -> object:
    for k, call, gets_tuple in calls:
        if isinstance(value, tuple) and len(value) > 1 and gets_tuple is None:
            raise TypeError(
                f"layer {k} ({_kind(call)}) gets a tuple of {len(value)}, and could take it as one argument or as "
                f"{len(value)}; give it one parameter, forward(self, inputs), for the tuple, or a parameter without "
                "default for each element"
            )
        value = call(*value) if isinstance(value, tuple) and not gets_tuple else call(value)
    return value


class PipelineModule:
    """A list of layers and a loss: the model that `onebit.zero.initialize` can cut into pipeline stages.

    The first layer gets a micro-batch's inputs; the last one's output goes to the loss. All ranks construct it with
    the same arguments, and each builds only the layers of its stages in `initialize`.

    What a layer returns is the next one's input: a tensor, or a tuple of tensors. A layer with one parameter gets the
    tuple, as in DeepSpeed (`forward(self, inputs)`); one with several gets its elements (`forward(self, x, mask)`). If
    the signature allows both, the first tuple raises TypeError, unless it is a tuple of one, which is spread.

    Args:
        layers: LayerSpecs, modules (already built, on every rank), or functions without parameters.
        num_stages: Stages of the pipeline; None (default) for the configuration's.
        topology: DeepSpeed's topology, whose axis "pipe" gives num_stages; None by default.
        loss_fn: Called as loss_fn(output, target); returns the mean over the micro-batch. None (default): the last
            layer returns the loss itself, of targets that are among the inputs, too.
        seed_layers: No effect: initial values always depend on a layer's place.
        seed_fn: Not supported; must be None.
        base_seed: Seed of the initial values, 1234 by default.
        partition_method: How consecutive layers are divided among stages: "parameters" (default) with equally many
            parameters, "uniform" with equally many layers, "type:REGEX" with equally many layers of matching class, or
            "time" with equal times, which rank 0 measures on `example`.
        activation_checkpoint_interval: Layers whose activations are recomputed together in the backward pass; 0
            (default) keeps all activations.
        activation_checkpoint_func: Called with a function and its inputs, to run it and recompute its activations; None
            (default) for torch's checkpoint, without reentrance.
        checkpointable_layers: Names of classes: only intervals of such layers are recomputed. None (default) for
            intervals with parameters.
        dynamic_shape: Not supported; must be False. Steps may differ in shape, micro-batches of a step may not.
        example: The inputs of a micro-batch, for partition_method "time"; None by default.

    Raises:
        TypeError: loss_fn cannot be called, or a layer is no LayerSpec, module or function.
        ValueError: There are no layers, a module occurs twice, or an argument is out of range or not supported.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        num_stages: int | None = None,
        topology: object = None,
        loss_fn: Loss | None = None,
        seed_layers: bool = True,
        seed_fn: None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Call | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        example: object = None,
    ):
        _refuse_absent(seed_fn=seed_fn, dynamic_shape=dynamic_shape)
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"expected loss_fn, called as loss_fn(output, target) by the last stage, got {loss_fn!r}")
        if topology is not None:
            num_stages = _stages_of(topology, num_stages)
        if not layers:
            raise ValueError("a pipeline needs at least one layer")
        for k, layer in enumerate(layers):
            if not callable(layer) and not isinstance(layer, LayerSpec):
                raise TypeError(f"layer {k}: expected a LayerSpec, a module or a function, got {type(layer).__name__}")
        modules = [id(layer) for layer in layers if isinstance(layer, nn.Module)]
        if len(set(modules)) < len(modules):
            raise ValueError("a module is in the list of layers twice; tie it with TiedLayerSpec")
        if activation_checkpoint_interval < 0:
            raise ValueError(f"activation_checkpoint_interval must be at least 0, got {activation_checkpoint_interval}")
        if checkpointable_layers is not None and not {*checkpointable_layers} & {_kind(layer) for layer in layers}:
            raise ValueError(
                f"checkpointable_layers {[*checkpointable_layers]} are the classes of no layer: {_kinds(layers)}"
            )
        self.layers, self.loss_fn, self.num_stages = list(layers), loss_fn or _loss_of_last_layer, num_stages
        self.partition_method = partition_method
        self.activation_checkpoint_interval, self.base_seed = activation_checkpoint_interval, base_seed
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self.example = example
        self.is_filled_later = False  # set by `initialize(weights=...)`: specs are then built on "meta"
        self._whole: Stage | None = None
        self._check_timing(partition_method)

    @property
    def loss_of_pieces(self) -> Loss:
        """The loss of a `TargetPiece`, for split sequences: loss_fn is a mean in which each token counts once."""

        def loss(output: object, piece: object) -> Tensor:
            if not isinstance(piece, TargetPiece):
                raise TypeError(
                    "sequences are split over ranks, so a target is a tensor with a value for each token, by which "
                    "the ranks' losses are weighed; these batches have none"
                )
            return self.loss_fn(output, piece.target) * (piece.target.shape[1] / piece.tokens)

        return loss

    def outline(self) -> Stage:
        """All layers under their names, without values (device "meta") for those not built yet. Made once.

        Its parameters stand for the model's: pass them in model_parameters or to an optimizer, or freeze them.
        """
        if self._whole is None:

            def build(k: int) -> nn.Module:
                layer = self.layers[k]
                if isinstance(layer, nn.Module):
                    return layer
                with torch.device("meta"):
                    return cast(LayerSpec, layer).build()

            self._whole = self._stage(range(len(self.layers)), {}, build)
        return self._whole

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the whole model; see `outline`."""
        return self.outline().parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the whole model with their names; see `outline`."""
        return self.outline().named_parameters()

    def __getattr__(self, name: str) -> NoReturn:
        """Raise AttributeError; for attributes of nn.Module it tells what to do instead."""
        if hasattr(nn.Module, name):
            raise AttributeError(
                f"a PipelineModule has no {name!r}: it is a list of layers, and each rank builds its own in "
                "initialize(); do it in the layers, or on engine.module"
            )
        raise AttributeError(f"PipelineModule has no attribute {name!r}")

    def __len__(self) -> int:
        return len(self.layers)

    def stages(self, parts: Sequence[range]) -> list[Stage]:
        """Build these parts of the model. Layers tied between them are built once."""
        tied: dict[str, nn.Module] = {}
        made = [self._stage(part, tied, self._build) for part in parts]
        if self._whole is not None:
            frozen = {name for name, p in self._whole.named_parameters() if not p.requires_grad}
            for stage in made:
                for name, p in stage.named_parameters():
                    p.requires_grad_(p.requires_grad and name not in frozen)
        return made

    def _stage(self, layers: range, built: dict[str, nn.Module], build: Callable[[int], nn.Module]) -> Stage:
        named, tied, calls = nn.ModuleDict(), nn.ModuleDict(), []
        for k in layers:
            layer = self.layers[k]
            if isinstance(layer, TiedLayerSpec):
                if layer.key not in built:
                    built[layer.key] = build(self._first_of(layer.key))
                tied[layer.key] = built[layer.key]
                calls.append(_tied_call(layer, tied[layer.key]))
            elif isinstance(layer, LayerSpec | nn.Module):
                named[str(k)] = build(k)
                calls.append(named[str(k)])
            else:
                calls.append(layer)
        interval, recompute = self.activation_checkpoint_interval, self.activation_checkpoint_func
        names = self.checkpointable_layers
        may_recompute = None if names is None else [_kind(self.layers[k]) in names for k in layers]
        return Stage(named, tied, calls, interval, layers.start, recompute, may_recompute)

    def cut(self, stages: int, method: str | None = None) -> list[range]:
        """The layers of each stage.

        Raises:
            ValueError: As `check_cut`.
        """
        method = method or self.partition_method
        self._check_timing(method)
        return balance(self._weights(method), stages)

    def check_cut(self, stages: int, method: str | None = None) -> None:
        """Raise ValueError if there are fewer layers than stages, or the method is unknown. Runs no layer."""
        method = method or self.partition_method
        self._check_timing(method)
        balance([1.0] * len(self.layers) if method == "time" else self._weights(method), stages)

    def _check_timing(self, method: str) -> None:
        if method == "time" and self.example is None:
            raise ValueError(
                'the partition "time" runs the layers: pass example=, the inputs of a micro-batch, to PipelineModule'
            )

    def _weights(self, method: str) -> list[float]:
        if method == "uniform":
            return [1.0] * len(self.layers)
        if method in ("parameters", "best"):
            return [float(self._numel(k)) for k in range(len(self.layers))]
        if method == "time":
            return self.seconds()
        if method.startswith("type:"):
            pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
            found = [float(pattern.search(_kind(layer)) is not None) for layer in self.layers]
            if not any(found):
                raise ValueError(f"partition_method {method!r} matches none of the layers: {_kinds(self.layers)}")
            return found
        raise ValueError(f'partition_method must be "parameters", "uniform", "time" or "type:REGEX", got {method!r}')

    def _numel(self, k: int) -> int:
        layer = self.layers[k]
        if isinstance(layer, LayerSpec):
            with torch.device("meta"):
                layer = layer.build()
        return sum(p.numel() for p in layer.parameters()) if isinstance(layer, nn.Module) else 0

    def seconds(self, repeats: int = 3) -> list[float]:
        """The seconds of each layer, forward and backward: the shortest of `repeats` runs, on the CPU."""
        value, found = self.example, []
        for k in range(len(self.layers)):
            (stage,), best = self.stages([range(k, k + 1)]), float("inf")
            inputs = [_leaf(x) for x in (value if isinstance(value, tuple) else (value,))]
            for _ in range(repeats):
                began = time.perf_counter()
                value = stage(*inputs)
                values = value if isinstance(value, tuple) else (value,)
                outputs = [x for x in values if isinstance(x, Tensor) and x.requires_grad]
                if outputs:
                    torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
                best = min(best, time.perf_counter() - began)
            found.append(best)
        return found

    def _build(self, k: int) -> nn.Module:
        """Build layer k. Its random values depend only on k; the process's generators do not advance."""
        layer = self.layers[k]
        if isinstance(layer, nn.Module):
            return layer
        if self.is_filled_later:
            with torch.device("meta"):
                return cast(LayerSpec, layer).build()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.base_seed + k)
            return cast(LayerSpec, layer).build()

    def _first_of(self, key: str) -> int:
        return next(k for k, layer in enumerate(self.layers) if isinstance(layer, TiedLayerSpec) and layer.key == key)


def _refuse_absent(**asked: object) -> None:
    """Raise ValueError if an argument of DeepSpeed's asks for something that is not supported."""
    remedies = {
        "seed_fn": "pass base_seed=: initial values depend on it and on a layer's place",
        "dynamic_shape": "micro-batches of one step have one shape; steps may differ in it",
    }
    for name, value in asked.items():
        if value:
            raise ValueError(f"{name}={value!r} is not here: {remedies[name]}")


def _stages_of(topology: object, num_stages: int | None) -> int:
    """The stages of a topology like DeepSpeed's ProcessTopology.

    Raises:
        ValueError: It also divides layers, or contradicts num_stages.
        TypeError: It is no topology.
    """
    ask = getattr(topology, "get_dim", None)
    if ask is None:
        raise TypeError(f"topology= is a {type(topology).__name__} without get_dim; pass num_stages=")
    if (ask("model") or 1) > 1:
        raise ValueError(
            f"the topology divides layers over {ask('model')} ranks: layers divided by the script are not supported; "
            'pass whole layers, initialize(tensor_plan=...) and "onebit": {"tensor": ...}'
        )
    stages = int(ask("pipe") or 1)
    if num_stages not in (None, stages):
        raise ValueError(f"num_stages is {num_stages}, but the topology has {stages} stages; pass one of them")
    return stages


def balance(weights: Sequence[float], parts: int) -> list[range]:
    """Divide items into consecutive ranges, none of them empty, so that the heaviest range is as light as possible.

    Stages run at the pace of the slowest. Ties are broken by the least sum of squares. O(parts · len(weights)²).
    """
    n = len(weights)
    if not 1 <= parts <= n:
        raise ValueError(f"{n} layers cannot be divided among {parts} stages; use fewer stages")
    ends = [0.0]
    for weight in weights:
        ends.append(ends[-1] + weight)
    # best[k][j]: (heaviest, sum of squares, start of the last) of the first j in k parts
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]
    for k in range(1, parts + 1):
        row = {}
        for j in range(k, n - (parts - k) + 1):
            row[j] = min(
                (max(heavy, load), squares + load * load, i)
                for i, (heavy, squares, _) in best[-1].items()
                if i < j
                for load in [ends[j] - ends[i]]
            )
        best.append(row)
    found, j = [], n
    for k in range(parts, 0, -1):
        i = best[k][j][2]
        found.append(range(i, j))
        j = i
    return found[::-1]


def _tied_call(layer: TiedLayerSpec, module: nn.Module) -> Call:
    return module if layer.forward_fn is None else partial(layer.forward_fn, module)


def _kind(layer: Layer) -> str:
    if isinstance(layer, LayerSpec):
        return layer.kind
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", "a function")


def _kinds(layers: Sequence[Layer]) -> str:
    return ", ".join(dict.fromkeys(_kind(layer) for layer in layers))


def _loss_of_last_layer(output: object, target: object) -> Tensor:
    if not isinstance(output, Tensor) or output.numel() != 1:
        got = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(
            f"a PipelineModule without loss_fn: its last layer must return the loss, a tensor of one element, got {got}"
        )
    return output.reshape(())


def _leaf(x: object) -> object:
    return x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x
