"""`init_compression` and `redundancy_clean`: install a DeepSpeed JSON's block "compression_training" in a model.

    model = onebit.zero.init_compression(model, "ds.json", teacher)     # before the optimizer or initialize()
    ...                                                                 # train; the scheduler follows the steps
    onebit.zero.redundancy_clean(model, "ds.json")                      # plain modules again, smaller
    onebit.zero.export_compressed(model, "small.safetensors")           # quantized weights packed

`config.py` reads the block, `plan.py` finds the modules and reports errors, `armed.py` installs the techniques,
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
    """Install the techniques of a configuration in a model, in place, and return the model. All ranks, same weights.

    Call it before the model's optimizer is made and before it is sharded. Weights become parametrizations: until
    `redundancy_clean`, their names in a state dict end in ".parametrizations.weight.original". Learned masks ("topk")
    are additional parameters.

    Args:
        model: The plain model.
        config: A DeepSpeed JSON (file or content) with "compression_training", or a `Config`.
        teacher: Teacher of the layer reduction; it is not changed. Default None.

    Raises:
        ValueError: The configuration is wrong, or does not fit the model. Nothing has changed.
        TypeError: A value has the wrong type, or model is not a module. Nothing has changed.
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
    """Make the compression of a model permanent, in place, and return the model.

    It uses the techniques' state at this step: one whose offset was not reached leaves no trace. Modules are plain
    again, and smaller if related modules are named. The old optimizer does not train the new parameters.

    Args:
        model: The model, also inside an engine.
        config: The configuration of `init_compression`, to check it. Default None: no check.

    Raises:
        ValueError: The model has no techniques, its weights are sharded, or config is another one.
    """
    armed = armed_in(model)
    if armed is None:
        raise ValueError("the model has no techniques: call init_compression(model, config) before you train it")
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
