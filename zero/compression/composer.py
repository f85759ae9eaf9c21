"""`init_compression` and `redundancy_clean`: a DeepSpeed JSON's block "compression_training", laid into a model.

    model = onebit.zero.init_compression(model, "ds.json", teacher)     # before the optimizer or initialize()
    ...                                                                 # train; the scheduler follows the steps
    onebit.zero.redundancy_clean(model, "ds.json")                      # plain modules again, smaller
    onebit.zero.export_compressed(model, "small.safetensors")           # quantized weights packed

`config.py` reads the block, `plan.py` finds the modules and says what is wrong, `armed.py` lays the techniques in,
`cleaning.py` makes them permanent.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from .armed import arm, armed_in
from .cleaning import clean
from .config import compression_in
from .layers import student_initialization
from .plan import plan_of

M = TypeVar("M", bound=nn.Module)


def init_compression(model: M, config: object, teacher: nn.Module | None = None) -> M:
    """Lay the techniques of a configuration into a model, in place; the model.

    Before its optimizer is made, before it is sharded, on all ranks with the same weights. Weights become
    parametrizations: their names in a state dict end in ".parametrizations.weight.original" until they are cleaned, and
    learned masks ("topk") are parameters more. config: a DeepSpeed JSON, its content, or a `Config`. teacher: of the
    layer reduction; it is not changed.

    Raises ValueError and TypeError, before anything is changed: see `read_compression` and `plan_of`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected a torch.nn.Module, got {type(model).__name__}; call init_compression(model, config) before "
            "initialize(), whose engine then schedules it"
        )
    compression = compression_in(config)
    if armed_in(model) is not None:
        raise ValueError("the model has techniques already; call init_compression once")
    plan = plan_of(model, compression)
    reduction = compression.layer_reduction
    if reduction is not None:
        if teacher is None:
            raise ValueError("layer_reduction copies layers of a teacher: pass init_compression(..., teacher=)")
        student_initialization(model, bare(teacher), reduction)
    arm(model, compression, plan)
    return model


def redundancy_clean(model: M, config: object = None) -> M:
    """Make the compression of a model permanent, in place; the model. Its optimizer knows other parameters then.

    Where techniques are at this step: one whose offset was not reached leaves no trace. Modules are plain again and,
    where related modules are named, smaller. config: None, or the one that the model was armed with. Raises ValueError
    where the model is not armed, where its weights are sharded, and on another configuration.
    """
    armed = armed_in(model)
    if armed is None:
        raise ValueError("the model has no techniques: call init_compression(model, config) before it is trained")
    if config is not None and compression_in(config) != armed.compression:
        raise ValueError("this configuration is not the one that init_compression was given; pass that one, or none")
    clean(armed)
    return model


def bare(model: object) -> nn.Module:
    """The model in an engine or a wrapper."""
    inside = getattr(model, "module", model)
    if not isinstance(inside, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    return inside
