"""`OptimizerEntry`: everything that the configuration, the plan and the training script know of an optimizer.

To add one, write a file beside this one, and a line in `../optimizers.py`; the tests over the registry then cover it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Generic, TypedDict, TypeVar

import torch
from torch import nn

from ....comm import Codec
from ..schema import ANYTHING, BOOL, FLOAT, PAIR, TEXT, Block, Inert, key

if TYPE_CHECKING:
    from ....optimizer import CommonOptions
    from ...sharded.optimizer import ShardedOnebitOptimizer, ShardedOptions

_ONE_KERNEL = "torch chooses the kernel"
_TRANSPORT = "the transport is the transport given to build_optimizer, by default the launcher's (onebit.comm.init)"
_COMMON = {
    "torch_adam": Inert(BOOL, "torch's Adam is the one there is", fine=(True, False)),
    "eps_inside_sqrt": Inert(BOOL, "eps is added outside the root, as in the peer's one-bit optimizers", fine=(False,)),
    "max_grad_norm": Inert(FLOAT, 'write it as "gradient_clipping" at the top level', fine=(0.0,), refused=True),
    "set_grad_none": Inert(BOOL, "gradients are set to None", fine=(True,)),
    "fused": Inert(BOOL, _ONE_KERNEL),
    "foreach": Inert(BOOL, _ONE_KERNEL),
    "fp32_optimizer_states": Inert(BOOL, "moments are float32", fine=(True,)),
}
ONE_BIT_INERT = _COMMON | {
    "cuda_aware": Inert(BOOL, _TRANSPORT, fine=(False,)),
    "comm_backend_name": Inert(TEXT, _TRANSPORT),
    "deepspeed": Inert(ANYTHING, "the optimizer needs no engine"),
}
"""For `inert` of a one-bit optimizer's parameters."""


class AdamOptions(TypedDict):
    """The arguments of every optimizer of Adam's family."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class OptimizerParams(Block):
    """Keys of all optimizers. Defaults are DeepSpeed's: no weight decay unless the file has it."""

    inert: ClassVar[Mapping[str, Inert]] = _COMMON

    lr: float = key(1e-3, FLOAT, fill="lr", asks=True, least=0)
    weight_decay: float = key(0.0, FLOAT, fill="weight_decay", least=0)

    def check(self, name: str) -> None:
        """Raise ValueError if keys contradict each other, or ask for something that this optimizer does not have."""


@dataclass(frozen=True)
class AdamParams(OptimizerParams):
    """Keys of the family of Adam."""

    betas: tuple[float, float] = key((0.9, 0.999), PAIR, fill="betas", least=0, below=1)
    eps: float = key(1e-8, FLOAT, fill="eps", least=0)
    bias_correction: bool = key(True, BOOL)
    amsgrad: bool = key(False, BOOL)
    adam_w_mode: bool = key(True, BOOL)

    def check(self, name: str) -> None:
        if not self.adam_w_mode:
            raise ValueError(
                f'"adam_w_mode": false asks for an L2 term in the gradient, {name} decays decoupled from it, as '
                'AdamW does; leave adam_w_mode out, or choose "Adam"'
            )
        if self.amsgrad:
            raise ValueError(f"{name} has no amsgrad form; leave it out")

    @property
    def options(self) -> AdamOptions:
        """The keys as arguments of the optimizer."""
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}


P = TypeVar("P", bound=OptimizerParams)


@dataclass(frozen=True)
class BuildOptions:
    """Inputs of an optimizer's construction other than its hyper-parameters.

    gradient_codec: codec of gradients; None: eight bits. common: arguments of all one-bit optimizers, e.g. the
    transport. model: the model of the parameters; None: not known.
    """

    gradient_codec: Codec | None
    variance_floor: float
    common: CommonOptions
    model: nn.Module | None = None


@dataclass(frozen=True)
class ShardedForm(Generic[P]):
    """The optimizer with its state sharded across nodes.

    warmup: the key that can shorten its warm-up. without_effect: keys of the plain form that have no effect here.
    counts_from_warmup: whether other keys count their steps from the value of `warmup`, even if it is capped.
    """

    build: Callable[[P, object, ShardedOptions], ShardedOnebitOptimizer]
    warmup: str
    without_effect: tuple[str, ...] = ()
    counts_from_warmup: Callable[[P], bool] = lambda params: False


@dataclass(frozen=True)
class Footprint:
    """Memory and traffic of a rank after any warm-up, in bytes per parameter that it holds.

    moments: optimizer state without residuals; sent: each way of an exchange. Both are functions of a frame's bytes per
    parameter. dense_steps(steps): with default options, the number of the first steps that send gradients instead of
    momentum. gradients: their codec, by default.
    """

    moments: Callable[[float], float]
    sent: Callable[[float], float]
    dense_steps: Callable[[int], int] = lambda steps: 0
    gradients: str = "int8"


@dataclass(frozen=True)
class OptimizerEntry(Generic[P]):
    """An optimizer. name: DeepSpeed's, letter case ignored. params: the keys of its block "params".

    build: constructs it from the parameters to train, groups of them, or an iterator; all ranks. is_one_bit: it does
    the data-parallel traffic itself; if not, its caller averages gradients first. sharded: its sharded form; None:
    there is none. footprint: its rows in the plan; None: another entry's rows cover it. flag: its name for the training
    script's --optimizer; None: none. flag_keys: keys with a separate flag there, and its help.
    """

    name: str
    params: type[P]
    build: Callable[[P, object, BuildOptions], torch.optim.Optimizer]
    is_one_bit: bool = False
    sharded: ShardedForm[P] | None = None
    footprint: Footprint | None = None
    flag: str | None = None
    flag_keys: Mapping[str, str] = field(default_factory=dict)
