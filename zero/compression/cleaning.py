"""Makes compression permanent: plain modules with smaller weights, and the facts that a packed file needs.

1. Every weight becomes the output of its parametrizations, in their order; quantized ones keep their scales.
2. Dropped rows, heads and channels are removed from their module, and from the modules related to it.
3. Modules get their new sizes, attention its new number of heads.

Activation quantization stays, as a plain submodule and its hook: without it the model would compute other values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .armed import Armed, activation_of, disarm
from .matrices import Form, is_compressible, set_sizes
from .plan import Pruned
from .quantizers import Scales
from .techniques import ACTIVATIONS, Pruning, WeightQuantization, take_quantized

_CLEANED = "_onebit_cleaned"
_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "num_key_value_heads")
_WIDTHS = ("all_head_size", "split_size", "inner_dim")


@dataclass
class Cleaned:
    """Facts about a cleaned model. scales: of quantized weights, by the weight's name. sizes: attributes that have
    changed, by module. pruned: weights with zeros.
    """

    scales: dict[str, tuple[Form, Scales]] = field(default_factory=dict)
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)
    pruned: set[str] = field(default_factory=set)


@dataclass
class _Cut:
    """The part of a module to keep: bool per output, and per input; None: all."""

    rows: Tensor | None = None
    inputs: Tensor | None = None


@torch.no_grad()
def clean(armed: Armed) -> nn.Module:
    """Make the compression permanent, in place, and return the model. Its optimizer does not train the new parameters.

    Raises ValueError, before anything is changed, if weights are sharded.
    """
    model = armed.model
    for name, p in model.named_parameters():
        if hasattr(p, "placements"):
            raise ValueError(
                f"{name} is sharded over ranks, and cleaning needs whole weights: build the plain model, arm it with "
                "init_compression, load engine.module_state_dict() of the trained one into it, and clean that"
            )
    cleaned, ties = Cleaned(), _ties(armed)
    for one, pruning in armed.pruning:
        pruning(armed.original(one.name))  # computes what is kept; related modules read it
    cuts = _cuts(armed)
    for name, module in list(model.named_modules()):
        if is_compressible(module) and parametrize.is_parametrized(module):
            _make_permanent(module, name, cleaned)
    for name, cut in cuts.items():
        _cut(model.get_submodule(name), name, cut, cleaned)
    for one, pruning in armed.pruning:
        if one.unit == "head" and one.related and pruning.kept is not None:
            _tell_heads(model, one, int(pruning.kept.sum()), cleaned)
    for first, *others in ties:
        for other in others:
            model.get_submodule(other).weight = model.get_submodule(first).weight
    for module in list(model.modules()):
        if (activation := activation_of(module)) is None:
            continue
        activation.without(())
        if activation.is_on:
            activation.offset = None
        else:
            _drop_activation(module)
    disarm(armed)
    model.__dict__[_CLEANED] = cleaned
    return model


def cleaned_in(model: nn.Module) -> Cleaned:
    """The facts that cleaning has recorded of a model, or of models inside it, by their names from here on."""
    found = Cleaned()
    for name, module in model.named_modules():
        own: Cleaned | None = module.__dict__.get(_CLEANED)
        if own is None:
            continue
        prefix = f"{name}." if name else ""
        found.scales |= {prefix + weight: of_weight for weight, of_weight in own.scales.items()}
        found.sizes |= {(prefix + part).rstrip("."): sizes for part, sizes in own.sizes.items()}
        found.pruned |= {prefix + weight for weight in own.pruned}
    return found


def mark_cleaned(model: nn.Module, cleaned: Cleaned) -> None:
    """Record the facts of a model that was read from a file."""
    model.__dict__[_CLEANED] = cleaned


def _ties(armed: Armed) -> list[list[str]]:
    """Names of modules that share a weight."""
    holders: dict[int, list[str]] = {}
    for name, module in armed.model.named_modules():
        if not is_compressible(module):
            continue
        weight = armed.original(name) if parametrize.is_parametrized(module) else module.weight
        holders.setdefault(id(weight), []).append(name)
    return [names for names in holders.values() if len(names) > 1]


def _make_permanent(module: nn.Module, name: str, cleaned: Cleaned) -> None:
    stack = module.get_submodule("parametrizations.weight")
    assert isinstance(stack, parametrize.ParametrizationList)
    for technique in stack:
        if isinstance(technique, WeightQuantization) and technique.bits is not None and technique.mix == 0:
            scales, _ = technique.quantized(stack.original)
            cleaned.scales[f"{name}.weight"] = (technique.form, scales)
        if isinstance(technique, Pruning) and technique.density < 1:
            cleaned.pruned.add(f"{name}.weight")
    requires_grad = stack.original.requires_grad
    value = module.weight
    assert isinstance(value, Tensor)
    value = value.detach().clone()
    # A deepcopy shares its class with this module, and torch takes the property "weight" out of it: out of one of ours.
    kind = type(module)
    module.__class__ = type(kind.__name__, kind.__bases__, dict(kind.__dict__))
    # Not remove_parametrizations(leave_parametrized=True) alone: it writes into the parameter, which ties may share.
    parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
    module.weight = nn.Parameter(value, requires_grad=requires_grad)


def _cuts(armed: Armed) -> dict[str, _Cut]:
    cuts: dict[str, _Cut] = {}
    for one, pruning in armed.pruning:
        if not one.related or one.unit == "element" or pruning.kept is None:
            continue
        kept, form = pruning.kept.bool(), pruning.units.form
        if one.unit == "row":
            cuts.setdefault(one.name, _Cut()).rows = kept
            for other in one.related:
                cut = cuts.setdefault(other, _Cut())
                if other in one.readers:
                    cut.inputs = kept
                else:
                    cut.rows = kept
            continue
        kept_inputs = kept.repeat_interleave(form.inputs // one.heads)
        cuts.setdefault(one.name, _Cut()).inputs = kept_inputs
        for other in one.related:
            rows = Form.of(armed.model.get_submodule(other)).rows
            cuts.setdefault(other, _Cut()).rows = _rows_of_heads(kept, rows, one, form.inputs)
    return cuts


def _rows_of_heads(kept: Tensor, rows: int, one: Pruned, inputs: int) -> Tensor:
    """Which outputs of a module that computes q, k or v, or all of them, belong to these heads."""
    if rows == 3 * inputs and one.layout == "blocks":
        return kept.repeat_interleave(inputs // one.heads).repeat(3)
    return kept.repeat_interleave(rows // one.heads)


def _cut(module: nn.Module, name: str, cut: _Cut, cleaned: Cleaned) -> None:
    """Keep the outputs and inputs of a module that are kept."""
    if not is_compressible(module):
        _cut_norm(module, name, cut, cleaned)
        return
    form, weight = Form.of(module), module.weight
    assert isinstance(weight, nn.Parameter)
    matrix_RC, columns = form.matrix(weight), None
    if cut.rows is not None:
        matrix_RC = matrix_RC[cut.rows]
    if cut.inputs is not None:
        columns = form.columns_of(cut.inputs)
        matrix_RC = matrix_RC[:, columns]
    smaller = form.without(cut.rows, cut.inputs)
    module.weight = _parameter(smaller.weight(matrix_RC), weight)
    if cut.rows is not None and isinstance(bias := getattr(module, "bias", None), nn.Parameter):
        module.bias = _parameter(bias[cut.rows], bias)
    if (known := cleaned.scales.get(f"{name}.weight")) is not None:
        cleaned.scales[f"{name}.weight"] = (smaller, known[1].without(cut.rows, columns))
    cleaned.sizes.setdefault(name, {}).update(set_sizes(module, smaller))


def _cut_norm(module: nn.Module, name: str, cut: _Cut, cleaned: Cleaned) -> None:
    """A BatchNorm between: it keeps the features that the next module takes."""
    kept = cut.inputs
    assert kept is not None
    for own in ("weight", "bias"):
        if isinstance(p := getattr(module, own), nn.Parameter):
            setattr(module, own, _parameter(p[kept], p))
    for own in ("running_mean", "running_var"):
        if isinstance(x := getattr(module, own), Tensor):
            setattr(module, own, x[kept].clone())
    left = int(kept.sum())
    module.num_features = left  # type: ignore[assignment]
    cleaned.sizes.setdefault(name, {})["num_features"] = left


def _parameter(value: Tensor, like: nn.Parameter) -> nn.Parameter:
    """With memory of its own: a view would keep all of the weight before."""
    return nn.Parameter(value.detach().clone(memory_format=torch.contiguous_format), requires_grad=like.requires_grad)


def _tell_heads(model: nn.Module, one: Pruned, left: int, cleaned: Cleaned) -> None:
    """Set the number of heads, and some modules' total width, in the modules that hold these matrices."""
    inputs = Form.of(model.get_submodule(one.name)).inputs
    # Of queries first: an attribute that counts them may then equal the former number of keys.
    counts: list[tuple[tuple[str, ...], int, int]] = [
        (_HEADS, one.heads * one.queries, left * one.queries),
        (_HEADS, one.heads, left),
    ]
    counts.append((_WIDTHS, inputs // left * one.heads, inputs))
    for holder in sorted({name.rpartition(".")[0] for name in (one.name, *one.related)}):
        module, told = model.get_submodule(holder), set[str]()
        for names, old, new in counts:
            for name in names:
                if name not in told and module.__dict__.get(name) == old:
                    told.add(name)
                    setattr(module, name, new)
                    cleaned.sizes.setdefault(holder, {})[name] = new


def _drop_activation(module: nn.Module) -> None:
    """Remove a quantization whose offset was never reached."""
    delattr(module, ACTIVATIONS)
    hooks = module._forward_pre_hooks
    for number in [k for k, hook in hooks.items() if hook is take_quantized]:
        del hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)
