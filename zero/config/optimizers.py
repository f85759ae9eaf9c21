"""The block "optimizer": the six optimizers by the peer's names and hyper-parameters, and what they are here.

    choice = config.optimizer
    optimizer = build_optimizer(choice, model.parameters(), transport=transport, **config.optimizer_options())

Hyper-parameters mean what their names say: Adam under `adam_w_mode` (the default) decays as AdamW does, without it by
an L2 term in the gradient; `bias_correction` acts in all of them. The one-bit optimizers' decay is decoupled, as the
peer's is whatever its documentation says, so `"adam_w_mode": false` is refused there: the decay would be averaged into
the momentum and be compressed with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch

from ...comm import Codec, Transport
from ...lamb import Lamb
from ...model_parallel import ModelParallelGroup
from ...onebit_adam import OnebitAdam
from ...onebit_lamb import OnebitLamb
from ...zero_one_adam import ZeroOneAdam
from .reader import Reading, nearest, read_block, read_object, refuse_unknown, write_block
from .schema import ANYTHING, BOOL, FLOAT, INT, PAIR, STEPS, TEXT, Inert, check_block, key, keys_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ...optimizer import CommonOptions

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
_ONEBIT = _COMMON | {
    "cuda_aware": Inert(BOOL, _TRANSPORT, fine=(False,)),
    "comm_backend_name": Inert(TEXT, _TRANSPORT),
    "deepspeed": Inert(ANYTHING, "the optimizer needs no engine"),
}


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


@dataclass(frozen=True)
class OnebitAdamParams(AdamParams):
    """freeze_step: warm-up steps, passed on as it stands; "auto", or absent: `onebit.OnebitAdam`'s own rule.

    Where sharding is across nodes it can only shorten the 64 steps of warm-up: nothing freezes.
    """

    inert: ClassVar[Mapping[str, Inert]] = _ONEBIT

    freeze_step: int | str = key("auto", STEPS, fill="freeze_step", least=1)


@dataclass(frozen=True)
class ZeroOneAdamParams(AdamParams):
    """See `onebit.ZeroOneAdam`; absent keys are its defaults, not the peer's, whose variance rests at step 100,000.

    var_freeze_step: "auto": the variance is refreshed ever more rarely, without an end. Where sharding is across nodes
    it shortens the warm-up as freeze_step does, and a numeric local_step_scaler counts from it.
    """

    inert: ClassVar[Mapping[str, Inert]] = _ONEBIT

    var_freeze_step: int | str = key("auto", STEPS, fill="var_freeze_step", least=0)
    var_update_scaler: int = key(16, INT, least=1)
    local_step_scaler: int | str = key("auto", STEPS, least=1)
    local_step_clipper: int | str = key(1, STEPS, least=1)


@dataclass(frozen=True)
class LambParams(AdamParams):
    """min_coeff, max_coeff: bounds of the trust ratio."""

    max_coeff: float = key(10.0, FLOAT, least=0)
    min_coeff: float = key(0.01, FLOAT, least=0)


@dataclass(frozen=True)
class OnebitLambParams(LambParams):
    """See `onebit.OnebitLamb`; freeze_step as in `OnebitAdamParams`."""

    inert: ClassVar[Mapping[str, Inert]] = _ONEBIT

    freeze_step: int | str = key("auto", STEPS, fill="freeze_step", least=1)
    coeff_beta: float = key(0.9, FLOAT, least=0, below=1)
    factor_max: float = key(4.0, FLOAT, least=1)
    factor_min: float = key(0.5, FLOAT, above=0, most=1)
    factor_threshold: float = key(0.1, FLOAT, least=0)


# The peer's names; it reads them without regard to letter case.
OPTIMIZERS: Mapping[str, type[AdamParams]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "Lamb": LambParams,
    "OneBitAdam": OnebitAdamParams,
    "ZeroOneAdam": ZeroOneAdamParams,
    "OneBitLamb": OnebitLambParams,
}
ONE_BIT = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")


@dataclass(frozen=True)
class OptimizerChoice:
    """Which optimizer, with what. Raises ValueError where the two cannot go together."""

    type: str
    params: AdamParams

    def __post_init__(self) -> None:
        p = self.params
        if type(p) is not OPTIMIZERS.get(self.type):
            raise ValueError(f"optimizer.type {self.type!r} does not go with {type(p).__name__}")
        if self.type == "AdamW" and not p.adam_w_mode:
            raise ValueError(
                '"AdamW" with "adam_w_mode": false contradicts itself; "Adam" with it decays by an L2 term'
            )
        if self.type not in ("Adam", "AdamW") and not p.adam_w_mode:
            raise ValueError(
                f'"adam_w_mode": false asks for an L2 term in the gradient, {self.type} decays decoupled from it, as '
                'AdamW does; leave adam_w_mode out, or choose "Adam"'
            )
        if self.type not in ("Adam", "AdamW") and p.amsgrad:
            raise ValueError(f"{self.type} has no amsgrad form; leave it out")
        if self.is_l2 and not p.bias_correction:
            raise ValueError('"Adam" with "adam_w_mode": false has no form without bias correction; leave out one')
        if not p.bias_correction and p.amsgrad:
            raise ValueError("amsgrad has no form without bias correction; leave out one")
        if isinstance(p, LambParams) and p.min_coeff > p.max_coeff:
            raise ValueError(f"expected min_coeff <= max_coeff, got {p.min_coeff:g} and {p.max_coeff:g}")

    @property
    def is_one_bit(self) -> bool:
        """Whether the optimizer does the data-parallel traffic itself; otherwise whoever steps it averages first."""
        return self.type in ONE_BIT

    @property
    def is_l2(self) -> bool:
        """Whether weight decay is a term of the gradient."""
        return self.type == "Adam" and not self.params.adam_w_mode


class Choice(Protocol):
    """A block {"type": ..., "params": {...}}."""

    @property
    def type(self) -> str: ...
    @property
    def params(self) -> object: ...


C = TypeVar("C")


def read_choice(given: object, where: str, types: Mapping[str, type[C]], reading: Reading) -> tuple[str, C]:
    """A block {"type": ..., "params": {...}}: the name as it is spelled in `types`, and the parameters."""
    data = read_object(given, where, reading)
    stray = [name for name in data if name not in ("type", "params", "legacy_fusion")]
    refuse_params_outside(stray, where, data.get("type"), types, reading)
    name = next((t for t in types if t.lower() == str(data.get("type")).lower()), None)
    if name is None:
        found = nearest(str(data.get("type")), types)
        advice = f'did you mean "{found}"?' if found else "known: " + ", ".join(types)
        got = f'"{data["type"]}"' if "type" in data else "nothing"
        raise ValueError(f"{reading.at(where, 'type')}: expected the name of a known {where}, got {got}; {advice}")
    if data.get("legacy_fusion"):
        reading.warnings.append(f"{reading.at(where, 'legacy_fusion')} has no effect: there is one form of the step")
    params = data.get("params")
    return name, read_block(types[name], {} if params is None else params, f"{where}.params", reading)


def refuse_params_outside(
    stray: list[str], where: str, name: object, types: Mapping[str, type], reading: Reading
) -> None:
    """Raise ValueError on keys beside "type" and "params"; many are hyper-parameters that were written too far out."""
    for key_name in stray:
        if any(key_name in keys_of(cls) for cls in types.values()):
            raise ValueError(f'{reading.at(where)}: unknown key "{key_name}"; it belongs in "{where}.params"')
    refuse_unknown(stray, ["type", "params", "legacy_fusion"], where, reading)


def read_optimizer(given: object, reading: Reading) -> OptimizerChoice:
    """The block "optimizer"."""
    name, params = read_choice(given, "optimizer", OPTIMIZERS, reading)
    try:
        return OptimizerChoice(name, params)
    except ValueError as wrong:
        raise ValueError(f"{reading.at('optimizer')}: {wrong}") from wrong


def write_choice(choice: Choice) -> dict[str, object]:
    """The block as it would stand in a file."""
    return {"type": choice.type, "params": write_block(choice.params)}


def build_optimizer(
    choice: OptimizerChoice,
    params: object,
    *,
    gradient_codec: Codec | None = None,
    variance_floor: float = 0.01,
    **common: Unpack[CommonOptions],
) -> torch.optim.Optimizer:
    """The optimizer of the choice. One-bit ones: all ranks construct it together, with the same arguments.

    gradient_codec: what gradients travel in, in warm-up and variance steps (None: eight bits). common: see
    `onebit.optimizer.CommonOptions`, the transport among them. Adam, AdamW and Lamb take none of these, but Lamb the
    model_parallel_group: they step on the gradients they find, which whoever steps them averages and clips before
    (`onebit.dense`).
    """
    p = choice.params
    adam: dict[str, Any] = {"lr": p.lr, "betas": p.betas, "eps": p.eps, "weight_decay": p.weight_decay}
    wire: dict[str, Any] = {"bias_correction": p.bias_correction, "variance_floor": variance_floor, **common}
    if isinstance(p, OnebitAdamParams):
        return OnebitAdam(params, **adam, freeze_step=p.freeze_step, warmup_codec=gradient_codec, **wire)
    if isinstance(p, ZeroOneAdamParams):
        return ZeroOneAdam(
            params,
            **adam,
            var_freeze_step=None if isinstance(p.var_freeze_step, str) else p.var_freeze_step,
            var_update_scaler=p.var_update_scaler,
            local_step_scaler=p.local_step_scaler,
            local_step_clipper=p.local_step_clipper,
            variance_codec=gradient_codec,
            **wire,
        )
    if isinstance(p, OnebitLambParams):
        return OnebitLamb(
            params,
            **adam,
            freeze_step=p.freeze_step,
            warmup_codec=gradient_codec,
            max_coeff=p.max_coeff,
            min_coeff=p.min_coeff,
            coeff_beta=p.coeff_beta,
            factor_max=p.factor_max,
            factor_min=p.factor_min,
            factor_threshold=p.factor_threshold,
            **wire,
        )
    return _build_dense(choice, params, adam, common.get("model_parallel_group"))


def _build_dense(
    choice: OptimizerChoice,
    params: object,
    adam: dict[str, Any],
    model_parallel_group: ModelParallelGroup | Transport | None,
) -> torch.optim.Optimizer:
    p = choice.params
    if isinstance(p, LambParams):
        bounds: dict[str, Any] = {"max_coeff": p.max_coeff, "min_coeff": p.min_coeff}
        return Lamb(
            params, **adam, **bounds, bias_correction=p.bias_correction, model_parallel_group=model_parallel_group
        )
    if not p.bias_correction:
        # torch's AdamW always corrects. LAMB whose trust ratios are all 1 is AdamW, and need not.
        return Lamb(
            params,
            **adam,
            max_coeff=1.0,
            min_coeff=1.0,
            bias_correction=False,
            model_parallel_group=model_parallel_group,
        )
    if choice.is_l2:
        return torch.optim.Adam(params, **adam, amsgrad=p.amsgrad)  # type: ignore[arg-type]
    return torch.optim.AdamW(params, **adam, amsgrad=p.amsgrad)  # type: ignore[arg-type]
