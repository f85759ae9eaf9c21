"""`OptimizerEntry`: all that the configuration, the plan and the training script know of an optimizer.

To add one write a file beside this one, and its line in `../optimizers.py`. The line joins the tests over the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Generic, TypedDict, TypeVar

import torch
from torch import nn

from ....comm import Codec
from ..schema import ANYTHING, BOOL, FLOAT, PAIR, TEXT, Inert, check_block, key

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
    """The arguments of every optimizer here."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class AdamParams:
    """What all of them take. Defaults are the peer's: no weight decay unless the file says so."""

    inert: ClassVar[Mapping[str, Inert]] = _COMMON

    lr: float = key(1e-3, FLOAT, fill="lr", asks=True, least=0)
    betas: tuple[float, float] = key((0.9, 0.999), PAIR, fill="betas", least=0, below=1)
    eps: float = key(1e-8, FLOAT, fill="eps", least=0)
    weight_decay: float = key(0.0, FLOAT, fill="weight_decay", least=0)
    bias_correction: bool = key(True, BOOL)
    amsgrad: bool = key(False, BOOL)
    adam_w_mode: bool = key(True, BOOL)

    def __post_init__(self) -> None:
        check_block(self)

    def check(self, name: str) -> None:
        """Raise ValueError where keys contradict each other, or ask for what the optimizer of this name has not."""
        if not self.adam_w_mode:
            raise ValueError(
                f'"adam_w_mode": false asks for an L2 term in the gradient, {name} decays decoupled from it, as '
                'AdamW does; leave adam_w_mode out, or choose "Adam"'
            )
        if self.amsgrad:
            raise ValueError(f"{name} has no amsgrad form; leave it out")

    @property
    def options(self) -> AdamOptions:
        """As arguments."""
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}


P = TypeVar("P", bound=AdamParams)


@dataclass(frozen=True)
class BuildOptions:
    """What an optimizer is built with beside its own parameters.

    gradient_codec: what gradients travel in; None: eight bits. common: the transport among them. model: whose
    parameters they are; None: not known.
    """

    gradient_codec: Codec | None
    variance_floor: float
    common: CommonOptions
    model: nn.Module | None = None


@dataclass(frozen=True)
class ShardedForm(Generic[P]):
    """The optimizer with its state sharded across nodes.

    warmup: the key that can shorten its warm-up. without_effect: keys of the plain form that say nothing here.
    counts_from_warmup: whether other keys count their steps from `warmup`'s, whatever it does to the warm-up.
    """

    build: Callable[[P, object, ShardedOptions], ShardedOnebitOptimizer]
    warmup: str
    without_effect: tuple[str, ...] = ()
    counts_from_warmup: Callable[[P], bool] = lambda params: False


@dataclass(frozen=True)
class Footprint:
    """What a rank holds and sends, in bytes per parameter of those that it holds, once any warm-up is over.

    moments: optimizer state without errors; sent: each way of an exchange. Both of a frame's bytes per parameter.
    dense_steps(steps): of a run's first steps, how many send gradients in place of momentum, with nothing said.
    """

    moments: Callable[[float], float]
    sent: Callable[[float], float]
    dense_steps: Callable[[int], int] = lambda steps: 0


@dataclass(frozen=True)
class OptimizerEntry(Generic[P]):
    """An optimizer. name: DeepSpeed's, read without regard to letter case. params: the keys of its block "params".

    build: makes it of the parameters to train, groups of them, or an iterator; all ranks. is_one_bit: it does the
    data-parallel traffic itself; otherwise whoever steps it averages gradients first. sharded: None where it has no
    such form. footprint: its rows in the plan; None: another entry's are its own. flag: its name as the training
    script's --optimizer; None: it has none. flag_keys: keys that have a flag of their own there, with its help.
    """

    name: str
    params: type[P]
    build: Callable[[P, object, BuildOptions], torch.optim.Optimizer]
    is_one_bit: bool = False
    sharded: ShardedForm[P] | None = None
    footprint: Footprint | None = None
    flag: str | None = None
    flag_keys: Mapping[str, str] = field(default_factory=dict)
