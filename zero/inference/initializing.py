"""`init_inference`: from a model, trained or in files, to an engine that serves it."""

from __future__ import annotations

import copy
import importlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ... import comm
from ...agreement.replicas import differing
from ...checkpoint.files import CheckpointError
from ...comm import PeerError, SimTransport, Transport
from ...comm.messages import raise_on_all_ranks
from ..checkpoint.weights import error_of_safetensors
from ..checkpoint.whole import read_checkpoint_weights
from ..compression.packing import is_compressed, read_compressed
from ..compression.techniques import ActivationQuantization
from ..grid import Grid
from ..parallel import divided
from ..parallel.experts import is_experts
from ..parallel.model_plan import patterns
from ..precision import meets_activations
from .calibration import Batch, calibrate
from .codes import serve_codes
from .config import InferenceConfig, read_inference_config
from .encoded import decoder_of
from .engine import InferenceEngine, cache_name, longest, outputs_of, why_no_decoding
from .experts import quantize_experts
from .layers import quantize, serve_linears
from .packed import Matrix
from .pipeline import Elsewhere, Together, cut, outline_of
from .rope import turn_by_row
from .split import plan_of, split

log = logging.getLogger(__name__)
_LOADING = threading.Lock()
"""Only one thread may be in `from_pretrained`: it changes functions of torch and of its own classes while it loads. Of
two at a time the second would keep the first one's, and no model of the process would tie its weights any more."""


class HasModule(Protocol):
    """An engine that has a module."""

    module: nn.Module


@runtime_checkable
class Trains(HasModule, Protocol):
    """An engine that trains its module, on all ranks of a grid."""

    grid: Grid

    def synchronise(self) -> None:
        """Make replicas equal that differ. All ranks."""


def init_inference(
    model: nn.Module | HasModule | str | Path,
    config: object = None,
    *,
    transport: Transport | None = None,
    calibration: Batch | Iterable[Batch] | None = None,
    **keywords: object,
) -> InferenceEngine:
    """Make an engine that serves a model: split over ranks, in another dtype or packed, compiled. All ranks call it.

    The model itself is not changed. Weights that need no change are shared with it, so training it further changes
    what is served. A short run compares the split model, and decoding over the cache, with the whole model.

    Args:
        model: A module, an engine that trains one, or the name or folder of a model of transformers. Replicas of an
            engine that differ are made equal first, as by `engine.synchronise()`; among members that come and go, call
            that before, on all of them.
        config: The options as a dict, a JSON file or an `InferenceConfig`; None (default) for defaults.
        transport: Between all ranks; each tp_size or pp_size consecutive ranks serve together. None (default): with one
            of them above 1 the launcher's ranks, otherwise this rank alone.
        calibration: Samples by which weights in int4 are rounded (GPTQ): a list of batches, each a tensor of tokens
            [B, T] or a dict of the model's keywords, without padding, the same on all ranks. None (default): each
            weight to nearest.
        **keywords: The keys of `InferenceConfig`, instead of or besides `config`.

    Raises:
        ValueError: On all ranks: ranks hold different weights, or the split model or the decoding over the cache
            computes something else than the whole model.
        TypeError: The model or an option has the wrong type.
        CheckpointError: Weights cannot be read, or are of another model.
    """
    read = read_inference_config(config, **keywords)
    if isinstance(model, Trains) and not model.grid.transport.ranks_change:
        model.synchronise()
    W, P = read.tensor_parallel.tp_size, read.pipeline_parallel.pp_size
    if calibration is not None and read.weight_bits != 4:
        raise ValueError('calibration is for weights in int4: write dtype "int4", or leave calibration out')
    if calibration is not None and P > 1:
        raise ValueError(
            "calibration takes a block after the other on every rank, and pp_size divides them: remove one"
        )
    group = _group(transport, "pp_size" if P > 1 else "tp_size", max(W, P))
    served = _skeleton(_module(model))
    if read.enable_cuda_graph and read.weight_bits and any(is_experts(module) for module in served.modules()):
        raise ValueError(
            "enable_cuda_graph with packed experts: each step looks up which of them run, and cannot be replayed; "
            "remove one of the two options"
        )
    if read.enable_cuda_graph and decoder_of(served) is not served:
        raise ValueError(
            f"enable_cuda_graph with {type(served).__name__}: its decoder reads inputs of many lengths, and cannot be "
            "replayed; remove the option"
        )
    if read.checkpoint is not None:
        problem = None
        try:
            _load(served, read)
        except (CheckpointError, OSError, ValueError) as error:
            problem = f"rank {group.rank}: {error}"
        raise_on_all_ranks(group, problem, CheckpointError)
    turn_by_row(served)
    _check_weights(served, group)
    if calibration is not None and _is_packed(served):
        raise ValueError("calibration is for weights in floats, and these are packed already: leave calibration out")
    if W > 1 or read.weight_bits or _is_packed(served):
        _leave_fast_path(served)
    expected, whole, ranks = _probe(served), None, Together(group)
    if P > 1:
        name = type(served).__name__
        why = why_no_decoding(served) if decoder_of(served) is served else "it encodes inputs"
        if expected is None or why is not None:
            why = why or "it takes no tokens"
            raise ValueError(
                f"pp_size divides the layers of decoders, and {name} is none: {why}; use tp_size, or one rank"
            )
        ranks = cut(served, outline_of(served, a_few_tokens(served), P), group)
        _compare([expected], lambda: [ranks.share(_on_tokens(served))], tolerance(expected), group, _BY_LAYERS)
    if W > 1:
        plan = plan_of(served, read.injection_policy, W)
        if expected is None:
            whole = _skeleton(served)
            _recast(whole, read.compute_dtype)
        split(served, plan, group)
        if expected is not None:
            _compare([expected], lambda: [_on_tokens(served)], tolerance(expected, served), group)
        _say_what_stays(served, group, 3, "whole on every rank: no tensor plan names them", plan)
    elif read.injection_policy is not None:
        plan_of(served, read.injection_policy, W)
    _recast(served, read.compute_dtype)
    if not read.weight_bits:
        serve_linears(served)
    engine = InferenceEngine(served, read, ranks)
    if whole is not None:
        engine.before_first_call = partial(_check_first_call, whole, engine)
    if expected is not None and why_no_decoding(served) is None:
        _check_cache(InferenceEngine(served, read, ranks))
    if read.weight_bits:
        for module in list(served.modules()):
            if is_experts(module):
                quantize_experts(module)
        if calibration is not None:
            calibrate(served, calibration, group)
        quantize(served, read.weight_bits, has_int8_inputs=read.quant.activation.enabled)
        _say_what_stays(served, group, 2, "in floats: they are neither linear layers, embeddings nor known experts")
    return engine


def _group(transport: Transport | None, key: str, ranks: int) -> Transport:
    """The transport between the ranks that serve together."""
    if transport is None:
        transport = comm.init() if ranks > 1 else SimTransport()
    comm.check_transport(transport)
    W = transport.world_size
    if W % ranks:
        raise ValueError(
            f"{key} is {ranks} and there are {W} ranks: start a multiple of it, torchrun --nproc-per-node={ranks}"
        )
    if ranks == W:
        return transport
    first = transport.rank // ranks * ranks
    return transport.split(range(first, first + ranks))


def _module(model: object) -> nn.Module:
    if isinstance(model, str | Path):
        try:
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise ImportError("a model by its name needs transformers: pip install onebit[transformers]") from error
        config = transformers.AutoConfig.from_pretrained(model)
        if not config.architectures:
            raise ValueError(f"the configuration of {model} names no class; construct the model, and pass it")
        if (kind := getattr(transformers, config.architectures[0], None)) is None:
            raise ValueError(
                f"transformers has no {config.architectures[0]}, the class of {model}; construct the model"
            )
        try:
            with _LOADING:
                found, about = kind.from_pretrained(model, output_loading_info=True)
        except error_of_safetensors() as error:
            raise CheckpointError(f"the weights of {model} cannot be read: {error}") from error
        if missing := sorted(about["missing_keys"]):
            raise CheckpointError(
                f"{model} lacks weights ({', '.join(missing[:3])}), which transformers has drawn at random: "
                f"copy all of its files, or save it again from a {config.architectures[0]}"
            )
        return cast(nn.Module, found)
    module = model if isinstance(model, nn.Module) else getattr(model, "module", model)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"expected a module, an engine or a name of transformers, got {type(module).__name__}; instead of a "
            "PipelineModule pass the plain model, with checkpoint="
        )
    if divided.has_parts(module):
        divided.complete(module)
    if name := next((name for name, p in module.named_parameters() if isinstance(p, DTensor)), None):
        raise ValueError(
            f"{name} is sharded: this rank has only a part; save a checkpoint, and pass a plain model and checkpoint="
        )
    return module


def _skeleton(model: nn.Module) -> nn.Module:
    """A copy of the modules around the same tensors, without gradients."""
    tensors = [*model.parameters(), *model.buffers()]
    served = copy.deepcopy(model, {id(x): x for x in tensors}).eval()
    _recast(served, None)
    return served


def _recast(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Put new parameters in place of the model's, in dtype if given. The parameters of the given model stay.

    Buffers that checkpoints have, such as BatchNorm's statistics, get the dtype, too. Of others only those do that meet
    activations: see `meets_activations`.
    """
    made: dict[int, nn.Parameter] = {}
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            if id(p) not in made:
                x = p.detach()
                made[id(p)] = nn.Parameter(x.to(dtype) if dtype and x.is_floating_point() else x, requires_grad=False)
            module._parameters[name] = made[id(p)]
        if dtype and isinstance(module, Elsewhere):
            module.dtype = dtype
        elif dtype and not isinstance(module, ActivationQuantization | Matrix):
            for name, buffer in module._buffers.items():
                if buffer is None or not buffer.is_floating_point():
                    continue
                is_saved = name not in module._non_persistent_buffers_set
                if is_saved or meets_activations(module, name, width, dtype):
                    module._buffers[name] = buffer.to(dtype)


def _is_packed(model: nn.Module) -> bool:
    return any(isinstance(module, Matrix) for module in model.modules())


def _load(model: nn.Module, config: InferenceConfig) -> None:
    """Load weights from files, as new parameters or packed layers.

    Raises:
        CheckpointError: They cannot be read, or are of another model.
    """
    checkpoint = config.checkpoint
    given = dict(checkpoint) if isinstance(checkpoint, Mapping) else {"path": checkpoint}
    if unknown := given.keys() - {"path", "tag"}:
        raise ValueError(f'checkpoint: expected "path" and "tag", got {", ".join(sorted(unknown))}')
    path = Path(str(given.get("path")))
    if is_compressed(path):
        compressed = read_compressed(path)  # new parameters, too; modules shrink to the sizes in the file
        if config.compute_dtype is not None and not config.weight_bits:
            compressed.put(model)
        else:
            serve_codes(model, compressed, has_int8_inputs=config.quant.activation.enabled)
        return
    weights = read_checkpoint_weights(path, cast("str | None", given.get("tag")))
    places: dict[int, list[str]] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        places.setdefault(id(x), []).append(name)
    state: dict[str, Tensor] = {}
    for names in places.values():
        if (known := next((name for name in names if name in weights), None)) is None:
            raise CheckpointError(f"{path} is of another model: it has no {names[0]}")
        state |= dict.fromkeys(names, weights[known])
    if strange := sorted(weights.keys() - state.keys()):
        raise CheckpointError(f"{path} is of another model, which has no {strange[0]}")
    for name, x in model.state_dict().items():
        if state[name].shape != x.shape:
            shapes = f"shape {tuple(state[name].shape)} there and {tuple(x.shape)} here"
            raise CheckpointError(f"{path} is of another model: {name} has {shapes}")
    params = dict(model.named_parameters(remove_duplicate=False))
    if len(_float_dtypes(params)) == 1 < len(dtypes := _float_dtypes({name: state[name] for name in params})):
        # A run in 16 bits has float32 masters of the weights that it trains, and the frozen ones as they are.
        if any(dtype.itemsize == 1 for dtype in dtypes):
            found = ", ".join(sorted(map(str, dtypes)))
            raise CheckpointError(f"{path} has weights in {found}, which have no common type")
        widest = reduce(torch.promote_types, dtypes)
        state |= {name: state[name].to(widest) for name, p in params.items() if p.is_floating_point()}
    model.load_state_dict(state, assign=True)
    for first, *others in places.values():  # load_state_dict has assigned tied tensors separately
        for name in others:
            _put(model, name, model.state_dict(keep_vars=True)[first])


def _float_dtypes(tensors: Mapping[str, Tensor]) -> set[torch.dtype]:
    return {x.dtype for x in tensors.values() if x.is_floating_point()}


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    prefix, _, last = name.rpartition(".")
    module = model.get_submodule(prefix)
    if isinstance(tensor, nn.Parameter):
        module._parameters[last] = tensor
    else:
        module._buffers[last] = tensor


def _leave_fast_path(model: nn.Module) -> None:
    """Make torch's encoder call its linear layers: its fast path reads weights, which here are parts or packed."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


# -------------------------------------------------------------------------------- checks against silent errors


def _check_weights(model: nn.Module, transport: Transport) -> None:
    """Raise ValueError, on all ranks, if a tensor has no values, or ranks have different ones."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if name := next((name for name, x in named.items() if x.is_meta), None):
        raise ValueError(f"{name} has no values (device meta); pass checkpoint=, or make the model on a device")
    if transport.world_size > 1:
        names = list(named)
        for rank, places in differing(transport, [x.detach() for x in named.values()]).items():
            raise ValueError(
                f"rank {rank} has another {names[places[0]]} than rank 0: the ranks would serve parts of different "
                "models; load the same weights on all ranks, for example by checkpoint="
            )


@torch.no_grad()
def _probe(model: nn.Module) -> Tensor | None:
    """The model's output for a few tokens, [1, T, ...]; None for a model that takes other inputs."""
    has_tokens = any(isinstance(module, nn.Embedding) for module in model.modules())
    if not has_tokens and why_no_decoding(model) is not None:
        return None
    try:
        return _on_tokens(model)
    except (PeerError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        log.info("%s cannot be checked on a few tokens: %s", type(model).__name__, error)
        return None


def _on_tokens(model: nn.Module) -> Tensor:
    tokens = a_few_tokens(model)
    return outputs_of(model(tokens) if decoder_of(model) is model else model(tokens, decoder_input_ids=tokens))


def a_few_tokens(model: nn.Module) -> Tensor:
    """A few tokens that are in any vocabulary. No padding: M2M-100 does not count it as a position."""
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    one, other = [token for token in range(3) if token != padding][:2]
    tokens = [other, one, one, other, one, other, other, one][: longest(model)]
    return torch.tensor([tokens], device=next(model.parameters()).device, dtype=torch.int64)


_BY_ROWS = (
    'the tensor plan cuts what belongs together; name each fused layer "packed_colwise:PARTS", each layer whose '
    'outputs are cut "colwise", each layer that reads them "rowwise", and give all ranks the same inputs'
)
_BY_LAYERS = "it does more between its layers than hand on one tensor; use tp_size"


def _check_first_call(
    whole: nn.Module, engine: InferenceEngine, inputs: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """The same check on the inputs of the first call, for a model that `_probe` could not run."""
    with torch.random.fork_rng():
        state = torch.get_rng_state()
        expected = _tensors(whole(*copy.deepcopy(inputs), **copy.deepcopy(named)))

        def split_ones() -> list[Tensor]:
            torch.set_rng_state(state)
            return _tensors(engine.module(*copy.deepcopy(inputs), **copy.deepcopy(named)))

        allowed = 0.25 if engine.config.weight_bits else max((tolerance(x, whole) for x in expected), default=0.0)
        _compare(expected, split_ones, allowed, engine.transport)


def _tensors(out: object) -> list[Tensor]:
    return [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]


def _compare(
    whole: Sequence[Tensor],
    run: Callable[[], Sequence[Tensor]],
    allowed: float,
    transport: Transport,
    remedy: str = _BY_ROWS,
) -> None:
    """Raise ValueError, on all ranks, if the split model's outputs, from `run`, differ from the whole model's."""
    problem = None
    try:
        with torch.no_grad():
            got = run()
        if (shapes := [tuple(x.shape) for x in got]) != (right := [tuple(x.shape) for x in whole]):
            problem = f"outputs of shape {shapes} in place of {right}"
        elif not (off := max(map(distance, whole, got), default=0.0)) <= allowed:
            problem = f"other outputs than whole (off by {off:.2g} of the largest output)"
    except PeerError:
        raise
    except RuntimeError as error:  # of shapes, the same on all ranks
        problem = f"nothing: {error}"
    if problem is not None:
        problem = f"split over {transport.world_size} ranks the model gives {problem}: {remedy}"
    raise_on_all_ranks(transport, problem, ValueError)


def _say_what_stays(model: nn.Module, transport: Transport, dims: int, how: str, done: Iterable[str] = ()) -> None:
    """Warn if parameters that stay as they were hold more than a tenth of the model's bytes."""
    treated = tuple(f"{name}." for name in done)
    left = {
        name: p.nbytes
        for name, p in model.named_parameters()
        if p.dim() >= dims and p.is_floating_point() and not name.startswith(treated)
    }
    total = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    if transport.rank == 0 and sum(left.values()) > total / 10:
        log.warning("%s stay %s", patterns(left), how)


def _check_cache(engine: InferenceEngine) -> None:
    """Raise ValueError if decoding over the cache gives other logits than one pass over all tokens."""
    tokens = a_few_tokens(engine.module)[:, : engine.slots]
    T = tokens.shape[1]
    before = max(T - 2, 1)
    try:
        with torch.no_grad():
            whole = engine.ranks.share(_on_tokens(engine.module))
        logits = engine.step(tokens[:, :before], 0, tokens if engine.has_encoder else None)
        for slot in range(before, T):
            logits = engine.step(tokens[:, slot : slot + 1], slot)
    except (PeerError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model raises that takes no cache or mask of this form
        name, dtype = type(engine.module).__name__, next(engine.module.parameters()).dtype
        raise ValueError(f"{name} in {dtype} does not decode over a cache of keys and values: {error}") from error
    if not (off := distance(whole[:, T - 1], logits)) <= tolerance(whole, engine.module):
        raise ValueError(
            f"{type(engine.module).__name__} over a cache gives other outputs than in one pass (off by {off:.2g} of "
            f"the largest output): it does not use {cache_name(engine.module)}, position_ids and attention_mask as "
            "transformers do"
        )


def distance(expected: Tensor, got: Tensor) -> float:
    """The largest difference over the largest expected value."""
    return float((expected.float() - got.float()).abs().max() / expected.float().abs().max().clamp(min=1e-30))


def tolerance(x: Tensor, model: nn.Module | None = None) -> float:
    """The `distance` allowed from outputs x, of this model if it may be packed: products are then rounded to bfloat16.

    Far above what another order of sums makes, far below what a wrong plan makes.
    """
    is_exact = x.dtype == torch.float32 and (model is None or not _is_packed(model))
    return 1e-3 if is_exact else 0.1
