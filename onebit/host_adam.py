"""`HostAdam`: Adam and AdamW for parameters in host memory, one pass over memory for each, with small states.

The arithmetic of a step is in `onebit/host/`, in C++ if the library is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .host import EightBitVariance, adam_, empty_variance, from_eight_bits, to_eight_bits
from .host.variance import seed_of
from .model_parallel import local
from .moments import DenseOptimizer
from .usage.contract import (
    Group,
    State,
    check_options,
    check_parameters,
    eps_of,
    listed_parameters,
    load_checked,
)
from .usage.gradients import refuse_sparse

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

_MOMENTS = (torch.float32, torch.bfloat16)
_VARIANCES = (torch.float32, torch.uint8)
_NO_FORM = {
    "amsgrad": "a running maximum of the variance would be a third state",
    "capturable": "a step runs on the host, which no CUDA graph records",
    "differentiable": "the kernel has no derivative",
}


class HostAdam(DenseOptimizer):
    """AdamW, or Adam with decoupled_weight_decay=False, for parameters in host memory. Sends nothing.

    In float32 it equals torch.optim.AdamW to a few last bits: see `onebit/host/reference.py`. Other types and states:

    - Parameters in bfloat16 or float16 get float32 masters, which the step moves; the parameter is its master, rounded
      to nearest. If other code has changed a parameter, its master takes the new value.
    - m in bfloat16 takes 2 bytes instead of 4.
    - v in 8 bits takes 1.016 bytes, on a logarithmic scale with stochastic rounding that depends only on the step and
      the element. A gradient that is not finite spoils its element, and halts its block of 256.

    It loads the states of torch.optim.Adam and AdamW; with float32 throughout, they load its states.

    Args:
        params: Parameters or groups, in host memory.
        lr: Learning rate. Default 1e-3.
        betas: Decay of m and v. Default (.9, .999).
        eps: Added to the denominator. Default 1e-8.
        weight_decay: Weight decay. Default 1e-2.
        decoupled_weight_decay: Whether to use AdamW's weight decay instead of an L2 term. Default True.
        bias_correction: Whether m and v are corrected for their start from zero. Default True.
        moment_dtype: dtype of m: torch.float32 (default) or torch.bfloat16.
        variance_dtype: dtype of v: torch.float32 (default) or torch.uint8.
        maximize: Whether to move along the gradient instead of against it. Default False.
        foreach: Accepted without effect: in torch it selects an implementation.
        fused: Accepted without effect, as foreach.
        amsgrad: Not available; must be False.
        capturable: Not available; must be False.
        differentiable: Not available; must be False.

    Raises:
        ValueError: An option is not available or out of its range, or a parameter is not in host memory.
        TypeError: A parameter has an unsupported dtype.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
        moment_dtype: torch.dtype = torch.float32,
        variance_dtype: torch.dtype = torch.float32,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ):
        for name, dtype, allowed in (
            ("moment_dtype", moment_dtype, _MOMENTS),
            ("variance_dtype", variance_dtype, _VARIANCES),
        ):
            if dtype not in allowed:
                raise ValueError(f"{name} must be {' or '.join(map(str, allowed))}, got {dtype}")
        self.moment_dtype, self.variance_dtype, self.bias_correction = moment_dtype, variance_dtype, bias_correction
        self._versions: dict[Tensor, int] = {}  # of narrow parameters, as the last step left them
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }  # torch.optim.AdamW's, so that each loads the other's groups
        super().__init__(listed_parameters(type(self).__name__, params), defaults)

    def add_param_group(self, param_group: Group) -> None:
        """As torch's. Raises ValueError/TypeError as the constructor does, and then changes nothing."""
        super().add_param_group(param_group)
        g, group = len(self.param_groups) - 1, self.param_groups[-1]
        named = [(p, f"parameter {k} of group {g}") for k, p in enumerate(group["params"])]
        try:
            _check_forms(f"group {g}", group)
            check_options(f"group {g}", group)
            check_parameters(0, named)
            for p, name in named:
                self._check_place(p, name)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_place(self, p: Tensor, name: str) -> None:
        if p.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"{name} is on {p.device}; HostAdam steps parameters in host memory. Give it host copies, or use "
                "torch.optim.AdamW(fused=True)"
            )
        if self.variance_dtype == torch.uint8 and hasattr(p, "to_local"):
            raise ValueError(
                f"{name} is a DTensor; the scales of a variance in 8 bits belong to one shard, which checkpoints of "
                "DTensors cannot express. Leave variance_dtype=torch.float32"
            )

    def state_bytes(self) -> int:
        """Bytes of moments and masters held by this process."""
        held = (x for entry in self.state.values() for name, x in entry.items() if name != "step")
        return sum(local(x).nbytes for x in held)

    def __getstate__(self) -> State:
        own = {name: getattr(self, name) for name in ("moment_dtype", "variance_dtype", "bias_correction")}
        return super().__getstate__() | own | {"_versions": {}}

    # ---------------------------------------------------------------- step

    def _step_group(self, group: Group) -> None:
        _check_forms("a param group", group)
        for p in group["params"]:
            if p.grad is not None:
                self._step_parameter(p, group)

    def _step_parameter(self, p: Tensor, group: Group) -> None:
        assert p.grad is not None
        grad = local(refuse_sparse("HostAdam", p.grad))
        entry = self.state[p] or self._new_entry(p)
        held = local(p).detach()
        if grad.dtype not in _MOMENTS:
            grad = grad.float()
        is_narrow = held.dtype != torch.float32
        if is_narrow and "master" not in entry:  # the parameter was float32 in the last step
            entry["master"] = p.detach().to(torch.float32, memory_format=torch.contiguous_format)
        if is_narrow and self._versions.get(p) != held._version:
            _follow_(local(entry["master"]), held)
        here = held if held.is_contiguous() else held.contiguous()
        adam_(
            (local(entry["master"]) if is_narrow else here).view(-1),
            grad.contiguous().view(-1),
            local(entry["exp_avg"]).view(-1),
            _variance_of(entry),
            lr=float(group["lr"]),
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            eps=eps_of(group),
            weight_decay=float(group["weight_decay"]),
            step=int(entry["step"]) + 1,
            is_decoupled=group["decoupled_weight_decay"],
            bias_correction=self.bias_correction,
            grad_scale=-1.0 if group["maximize"] else 1.0,
            out=here.view(-1) if is_narrow else None,
        )
        entry["step"] += 1
        if here is held:
            torch.autograd.graph.increment_version(held)
        else:
            held.copy_(here)
        if is_narrow:
            self._versions[p] = held._version

    def _new_entry(self, p: Tensor) -> State:
        check_parameters(0, [(p, "a parameter")])  # it may have come into its group without add_param_group
        self._check_place(p, "a parameter")
        entry: State = {
            "step": torch.tensor(0.0, dtype=torch.float32, device="cpu"),
            "exp_avg": _zeros(p, self.moment_dtype),
        }
        if self.variance_dtype == torch.uint8:  # not as exp_avg_sq, which torch's AdamW would take for a variance
            entry["exp_avg_sq_codes"] = _zeros(p, torch.uint8)
            entry["exp_avg_sq_scales"] = empty_variance(p.numel()).scales
        else:
            entry["exp_avg_sq"] = _zeros(p, torch.float32)
        if p.dtype != torch.float32:
            entry["master"] = p.detach().to(torch.float32, memory_format=torch.contiguous_format)
        self.state[p] = entry
        return entry

    # ---------------------------------------------------------------- states

    def load_state_dict(self, state_dict: State) -> None:
        """As torch's, but states keep this optimizer's types. States of torch.optim.Adam and AdamW load, too.

        A state of another moment_dtype or variance_dtype is converted. If it has no masters, those of bfloat16 and
        float16 parameters are made from the parameters.

        Args:
            state_dict: From `state_dict()`.

        Raises:
            ValueError: It does not fit. Nothing has changed.
        """
        saved = load_checked(self, state_dict, self._check_loadable)
        for p, entry in self._saved_entries(saved):
            self.state[p] = self._converted(p, entry)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._versions.clear()

    def _converted(self, p: Tensor, there: State) -> State:
        entry = self._new_entry(p)
        entry["step"].fill_(float(there["step"]))
        local(entry["exp_avg"]).copy_(local(there["exp_avg"]))
        if "master" in entry and "master" in there:
            local(entry["master"]).copy_(local(there["master"]))
        v, to = _variance_of(there), _variance_of(entry)
        if isinstance(to, EightBitVariance) and isinstance(v, EightBitVariance):
            to.codes.copy_(v.codes)
            to.scales.copy_(v.scales)
            return entry
        values = from_eight_bits(v) if isinstance(v, EightBitVariance) else v.float()
        if isinstance(to, EightBitVariance):
            to_eight_bits(values, to, seed=seed_of(int(there["step"])))
        else:
            to.copy_(values)
        return entry

    def _check_loadable(self, state: State) -> None:
        where = "cannot load this optimizer state: "
        sizes, expected = ([len(g["params"]) for g in groups] for groups in (state["param_groups"], self.param_groups))
        if sizes != expected:
            raise ValueError(f"{where}it has groups of {sizes} parameters, this optimizer of {expected}")
        for g, group in enumerate(state["param_groups"]):
            if missing := [key for key in ("lr", "betas", "eps", "weight_decay") if key not in group]:
                raise ValueError(f"{where}its group {g} has no {missing[0]}: it is not of Adam's family")
            _check_forms(f"{where}its group {g}", group)
        for p, entry in self._saved_entries(state):
            _check_entry(where, entry, p)

    def _saved_entries(self, state: State) -> Iterator[tuple[Tensor, State]]:
        """(parameter, its saved state), of those that have one."""
        for group, there in zip(self.param_groups, state["param_groups"], strict=True):
            for p, key in zip(group["params"], there["params"], strict=True):
                if state["state"].get(key):
                    yield p, state["state"][key]


def _check_forms(where: str, options: Group) -> None:
    for key, reason in _NO_FORM.items():
        if options.get(key):
            raise ValueError(f"{where}: {key}={options[key]!r} is not supported ({reason}); leave {key}=False")


def _zeros(p: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(p, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False)


def _variance_of(entry: State) -> Tensor | EightBitVariance:
    if "exp_avg_sq_codes" in entry:
        return EightBitVariance(entry["exp_avg_sq_codes"].reshape(-1), entry["exp_avg_sq_scales"])
    v: Tensor = local(entry["exp_avg_sq"])
    return v.reshape(-1)


def _check_entry(where: str, entry: State, p: Tensor) -> None:
    """Raise ValueError unless it is Adam's of this parameter, or ours with a variance in 8 bits."""
    shapes = {"exp_avg": p.shape, "exp_avg_sq": p.shape}
    if "exp_avg_sq_codes" in entry:
        shapes = {"exp_avg": p.shape, "exp_avg_sq_codes": p.shape}
        shapes["exp_avg_sq_scales"] = empty_variance(p.numel()).scales.shape
    if missing := [name for name in ("step", *shapes) if name not in entry]:
        raise ValueError(f"{where}a parameter has {', '.join(sorted(entry))} there and no {missing[0]}: not Adam's")
    for name, shape in shapes.items():
        if entry[name].shape != shape:
            raise ValueError(f"{where}{name} has shape {tuple(entry[name].shape)}, expected {tuple(shape)}")


def _follow_(master: Tensor, parameter: Tensor) -> None:
    """Take over values that other code has written into a narrow parameter; unchanged elements keep their master."""
    is_same = master.to(parameter.dtype) == parameter
    master.copy_(torch.where(is_same, master, parameter.float()))
