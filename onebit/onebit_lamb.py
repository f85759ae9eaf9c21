"""1-bit LAMB (Li et al., HiPC 2022, arXiv 2104.06069): LAMB for a short warm-up, then one-bit momentum.

`LambRule` is the rule of 1-bit Adam (`onebit_adam.py`) with a coefficient for each layer; the dense optimizer is in
`lamb.py`.
Shape legend: L layers (parameters), K of them in a bucket, W ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .arithmetic.adam import normalised
from .arithmetic.schedule import DenseSteps, long_warmup
from .arithmetic.squares import norms, portable_norm
from .checkpoint.parameter_state import ParameterState
from .comm import Codec
from .comm.messages import gather_tensors, sum_in_order
from .lamb import check_trust_options, trust_ratio
from .layout.bucket import Bucket
from .layout.flat import Layout
from .onebit_adam import AdamRule
from .optimizer import CommonOptions, CompressedOptimizer
from .rule import codec_of_gradients
from .step.bucket_step import Answer, Decision, Meeting
from .usage.contract import State, check_is_number, eps_of
from .usage.signature import shows_all_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Coefficients:
    """Bounds of c_l, and the factor of its moving average. Raises ValueError."""

    most: float
    least: float
    beta: float

    def __post_init__(self) -> None:
        check_trust_options(self.least, self.most)
        if not 0.0 <= check_is_number("OnebitLamb", "coeff_beta", self.beta) < 1.0:
            raise ValueError(f"coeff_beta must be in [0, 1), got {self.beta}")

    def trust_ratio(self, weight_norm: Tensor, update_norm: Tensor) -> Tensor:
        """LAMB's trust ratio, within the bounds."""
        return trust_ratio(weight_norm, update_norm, min_coeff=self.least, max_coeff=self.most)


@dataclass(frozen=True)
class Factors:
    """Bounds of r_l, and the largest relative change of it in a step. Raises ValueError."""

    most: float
    least: float
    threshold: float

    def __post_init__(self) -> None:
        for name, value in (("max", self.most), ("min", self.least), ("threshold", self.threshold)):
            check_is_number("OnebitLamb", f"factor_{name}", value)
        if not (0.0 < self.least <= 1.0 <= self.most and self.threshold >= 0.0):
            raise ValueError(
                "expected 0 < factor_min <= 1 <= factor_max and factor_threshold >= 0, got "
                f"{self.least}, {self.most}, {self.threshold}"
            )

    def follow(self, factor: Tensor, fresh: Tensor) -> Tensor:
        """The next r_l, from the last one and the moving average f_l."""
        target = fresh.rsqrt().clamp(self.least, self.most)
        target = torch.maximum(target, factor * (1.0 - self.threshold))
        return torch.minimum(target, factor * (1.0 + self.threshold))


class DenseLayers(Meeting):
    """A dense step: the buffer holds m̂/D + wd·p. The answer: None; `layers["coeff"]` is c_l."""


class LambRule(AdamRule):
    """1-bit Adam's steps, with each layer's move multiplied by c_l and r_l (see `OnebitLamb`)."""

    kind = "1-bit LAMB"
    of_parameters: ClassVar[tuple[str, ...]] = (*AdamRule.of_parameters, "layers")
    can_be_delayed: ClassVar[bool] = False  # `_observed` would have to wait for the landing, and is not in the state

    def __init__(
        self,
        schedule: DenseSteps,
        warmup_codec: Codec,
        *,
        bias_correction: bool,
        variance_floor: float,
        coefficients: Coefficients,
        factors: Factors,
    ):
        super().__init__(schedule, warmup_codec, bias_correction=bias_correction, variance_floor=variance_floor)
        self.coefficients, self.factors = coefficients, factors
        self._observed: dict[int, Tensor] = {}  # by bucket, what `observe` has found in this step

    def options(self) -> dict[str, object]:
        return super().options() | {"coefficients": self.coefficients, "factors": self.factors}

    # ---------------------------------------------------------------- a step of one bucket

    def observe(self, bucket: Bucket, scale: float, own: float) -> None:
        """This rank's part of an estimate of ‖ḡ/D‖² of each layer: ‖g_i/D‖² and <g_i/D, m̂/D>, float32 [K, 2]."""
        if not self._follows_variance:
            return
        update = self.last_average(bucket).mul_(self._correction(bucket))
        views = (bucket.layout.views(flat) for flat in (bucket.flat["denominator"], update))
        table = torch.zeros(len(bucket.params), 2, device=bucket.device, dtype=torch.float32)
        for row, g, D, u in zip(table, bucket.masked_gradients(), *views, strict=True):
            if g is not None:
                y = normalised(g.float() * scale, D, own).flatten()
                row[0], row[1] = torch.dot(y, y), torch.dot(y, u.flatten())
        self._observed[bucket.index] = table

    @property
    def _follows_variance(self) -> bool:
        return isinstance(self.schedule.freeze_step, int)

    def weights(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        weight = bucket.layers["coeff"] * float(bucket.group["lr"])
        return weight * bucket.layers["factor"], weight * bucket.group["weight_decay"]

    def dense_weights(self, bucket: Bucket) -> Generator[Meeting, Answer, tuple[Tensor, Tensor]]:
        if (decay := bucket.group["weight_decay"]) != 0.0:
            torch._foreach_add_(bucket.views, bucket.local_values, alpha=decay)
        yield DenseLayers()
        weight = bucket.layers["coeff"] * float(bucket.group["lr"])
        return weight, torch.zeros_like(weight)  # the decay is in the buffer

    def moves(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        weight_K, decay_K = self.weights(bucket)
        return -weight_K.mul_(self._correction(bucket)), 1.0 - decay_K

    # ---------------------------------------------------------------- exchanges for all layers together

    def prepare_commit(self, decision: Decision) -> None:
        super().prepare_commit(decision)
        observed, self._observed = self._observed, {}
        buckets = [b for b in self.buckets if b.index in observed and not self.averages_gradients(b)]
        if buckets:
            mine_L2 = torch.cat([observed[bucket.index] for bucket in buckets])
            if (factor := float(decision.clip_factor)) != 1.0:  # y is proportional to g, unless that is far beyond D
                mine_L2 *= mine_L2.new_tensor([factor * factor, factor])
            self._follow_variance(buckets, mine_L2)

    def meet(self, buckets: Sequence[Bucket], meetings: Sequence[Meeting]) -> Sequence[Answer]:
        self._measure(buckets)
        return [None] * len(buckets)

    def _follow_variance(self, buckets: Sequence[Bucket], mine_L2: Tensor) -> None:
        """r_l from every rank's part of the estimate. Sends 8 bytes per layer to each peer."""
        W, transport = self.placement.world_size, self.placement.transport
        replica = self.parts.total_of_rows(mine_L2, [p for bucket in buckets for p in bucket.params])
        square_L, product_L = (sum_in_order(gather_tensors(transport, replica)) / W).unbind(1)
        if transport.ranks_change:
            self.parts.agree(True)  # another rank of this member may have lost the epoch just here, and writes nothing
        estimate_L = square_L / W + (1.0 - 1.0 / W) * product_L.clamp(min=0.0)
        for bucket, estimate_K in zip(buckets, _split(estimate_L, buckets), strict=True):
            layers, beta2 = bucket.layers, bucket.group["betas"][1]
            layers["fresh"].lerp_(estimate_K.to(bucket.device) / layers["numel"], 1.0 - beta2)
            layers["factor"] = self.factors.follow(layers["factor"], layers["fresh"])

    def _measure(self, buckets: Sequence[Bucket]) -> None:
        """c_l of a dense step: in warm-up a trust ratio; in a refresh the mean ratio, scaled with the layer's norm."""
        table_L3 = self._layer_norms(buckets)
        for bucket, table_K3 in zip(buckets, _split(table_L3, buckets), strict=True):
            layers = bucket.layers
            weight_norm, update_norm, momentum_norm = table_K3.to(bucket.device).unbind(1)
            if bucket.phase == "warmup":
                layers["coeff"] = self.coefficients.trust_ratio(weight_norm, update_norm)
                layers["warmup_norm"] = weight_norm
                self._remember(bucket, ((momentum_norm > 0) & (update_norm > 0)).float())
            else:
                growth = weight_norm / layers["warmup_norm"]
                growth = torch.where(layers["warmup_norm"] > 0, growth, torch.ones_like(growth))
                layers["coeff"] = (self._mean_ratio(bucket) * growth).clamp(
                    self.coefficients.least, self.coefficients.most
                )

    def _layer_norms(self, buckets: Sequence[Bucket]) -> Tensor:
        """‖p‖ and ‖u‖ of each layer, and in warm-up ‖m‖, float32 [L, 3]. Rank k mod W measures ‖p‖ and ‖u‖ of layer k.

        So they have the same bits everywhere. Each rank measures ‖m‖ itself: only whether it is 0 matters. Norms of a
        sharded layer are over all its shards. Members that come and go measure everything themselves, in an order that
        gives the same bits on all machines: m is written, and a lost member must not leave the step half done.
        """
        W, rank = self.placement.world_size, self.placement.transport.rank
        pairs = [pair for bucket in buckets for pair in zip(bucket.local_values, bucket.views, strict=True)]
        if self.placement.transport.ranks_change:
            held_L2 = torch.stack([portable_norm(x) for pair in pairs for x in pair]).view(-1, 2)
        else:
            mine = torch.zeros(-(-len(pairs) // W), 2, device=buckets[0].device, dtype=torch.float32)
            for k, (p, u) in enumerate(pairs[rank::W]):
                mine[k] = norms([p, u])
            held_L2 = gather_tensors(self.placement.transport, mine).transpose(0, 1).reshape(-1, 2)[: len(pairs)]
        momentum_L = torch.cat([_momentum_norms(bucket).to(held_L2.device) for bucket in buckets])
        held_L3 = torch.cat([held_L2, momentum_L.unsqueeze(1)], 1)
        return self.parts.norms(held_L3, [p for bucket in buckets for p in bucket.params])

    def _remember(self, bucket: Bucket, lives: Tensor) -> None:
        """Add this step to the moving average of c_l, for layers that have a momentum."""
        layers, beta = bucket.layers, self.coefficients.beta
        layers["mean_ratio"] = beta * layers["mean_ratio"] + (1.0 - beta) * lives * layers["coeff"]
        layers["ratio_total"] = beta * layers["ratio_total"] + (1.0 - beta) * lives

    def _mean_ratio(self, bucket: Bucket) -> Tensor:
        """c̄_l, the moving average without bias."""
        layers = bucket.layers
        total = layers["ratio_total"]
        of_ones = self.coefficients.trust_ratio(layers["warmup_norm"], layers["numel"].sqrt())
        return torch.where(total > 0, layers["mean_ratio"] / total, of_ones)

    def freeze(self, bucket: Bucket) -> None:
        super().freeze(bucket)
        bucket.layers["coeff"] = self._mean_ratio(bucket)

    # ---------------------------------------------------------------- state

    def allocate(self, bucket: Bucket, phase: str) -> None:
        super().allocate(bucket, phase)
        if phase == "warmup" or not bucket.layers:
            K, device = len(bucket.params), bucket.device
            names = ("mean_ratio", "ratio_total", "warmup_norm", "coeff")
            bucket.layers = {name: torch.zeros(K, device=device, dtype=torch.float32) for name in names}
            bucket.layers |= {name: torch.ones(K, device=device, dtype=torch.float32) for name in ("fresh", "factor")}
            bucket.layers["numel"] = _numels(bucket)

    def record(self) -> State:
        return super().record() | {"layers": [dict(bucket.layers) for bucket in self.buckets]}

    def load_record(self, record: State) -> None:
        super().load_record(record)
        for bucket, layers in zip(self.buckets, record["layers"], strict=True):
            bucket.layers = {name: values.to(bucket.device, copy=True) for name, values in layers.items()}

    def take_apart(self, record: State, index: int, layout: Layout, states: Sequence[ParameterState]) -> None:
        super().take_apart(record, index, layout, states)
        for k, one in enumerate(states):
            one.numbers |= {name: table_K[k] for name, table_K in record["layers"][index].items()}

    def put_together(self, of_buckets: Sequence[tuple[Bucket, Sequence[ParameterState]]]) -> State:
        found, layers = super().put_together(of_buckets), []
        for _, states in of_buckets:
            names = [name for name in states[0].numbers if name != "step"]
            layers.append({name: torch.stack([one.numbers[name] for one in states]) for name in names})
        return found | {"layers": layers}

    def adopt_dense_state(self) -> None:
        """Take the trust ratios from the moments of a dense LAMB, as in its last step."""
        self._count_from_the_first()
        for bucket in self.buckets:
            group = bucket.group
            total = self._total(bucket)
            D = (bucket.flat["exp_avg_sq"] / total).sqrt_().add_(eps_of(group))
            torch.div(self.momentum(bucket), D, out=bucket.buffer)
            torch._foreach_add_(bucket.views, bucket.local_values, alpha=group["weight_decay"])
        self._measure(self.buckets)
        super().adopt_dense_state()


@shows_all_options(CommonOptions)
class OnebitLamb(CompressedOptimizer):
    """LAMB whose data-parallel traffic is about two bits per parameter and step, after a short warm-up.

    Used like `OnebitAdam`, with the same momentum m/D. Layer l moves by p ← p - lr·c_l·(r_l·m̂/D + wd·p):

    - In warm-up, r_l = 1 and c_l is LAMB's `trust_ratio`(‖p‖, ‖m̂/D + wd·p‖); c̄_l is its moving average, without bias.
    - After it, ‖m̂/D‖ is known only with the noise of compression. If freeze_step is a number, as in the paper:
      c_l = c̄_l, and r_l follows the change that D would have made. With freeze_step "auto" D is refreshed: r_l = 1, and
      each refresh sets c_l = c̄_l · ‖p‖/‖p in the last warm-up step‖, as parameters are known exactly. Both norms are
      those before the step has moved p.

    r_l = 1/√f_l within [factor_min, factor_max], changing by at most factor_threshold of itself per step. f_l is the
    moving average (β2, from 1) of the mean square of ḡ/D over the layer. The paper takes ḡ from differences of decoded
    momenta, which contain ten times their noise, and the largest element; here it is estimated from the ranks' own
    gradients, as `step/clip.py` estimates a norm. The paper's r_l multiplies the weight decay as well.

    A layer that had no momentum in any warm-up step takes ‖p‖/√numel for c̄_l, the ratio of an update of ones, with its
    ‖p‖ in the last warm-up step; 1 if that is zero. If layers of a hundredth of their group or more join later, "auto"
    refreshes the group's D in each of the 100 steps that follow.

    State and traffic as `OnebitAdam`; another 8 bytes per layer travel to each peer in a dense step, 8·W if freeze_step
    is a number. Layer l is measured by rank l mod W only: the same bits even if machines differ. No host
    synchronisation. Source: arXiv 2104.06069.

    Args:
        params: Parameters or groups, the same on all ranks.
        lr: Learning rate. Default 1e-3.
        betas: Decay of momentum and variance. Default (.9, .999).
        eps: Added to D. Default 1e-8.
        weight_decay: Weight decay. Default 0.
        max_coeff: Largest c_l. Default 10.
        min_coeff: Smallest c_l. Default .01.
        coeff_beta: Decay of the moving average c̄_l. Default .9.
        factor_max: Largest r_l. Default 4.
        factor_min: Smallest r_l. Default .5.
        factor_threshold: Largest relative change of r_l per step. Default .1.
        freeze_step: Warm-up steps. "auto" (default): 100 and the refresh that follows at once, so 101; then refreshes
            as in `long_warmup`.
        warmup_codec: Format of gradients, as in `OnebitAdam`. Default None: `Int8Codec`.
        bias_correction: Whether m and v are corrected for their start from zero. Default True.
        variance_floor: Least variance, as in `OnebitAdam`. Default .01.
        **common: See `CommonOptions`.

    Raises:
        ValueError: An option is out of its range, or parameters differ between ranks.
        TypeError: An option has the wrong type, or a parameter an unsupported dtype.
    """

    def __init__(
        self,
        params: object,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        freeze_step: int | str = "auto",
        warmup_codec: Codec | None = None,
        bias_correction: bool = True,
        variance_floor: float = 0.01,
        **common: Unpack[CommonOptions],
    ):
        rule = LambRule(
            long_warmup(freeze_step),
            codec_of_gradients(warmup_codec, common.get("codec")),
            bias_correction=bias_correction,
            variance_floor=variance_floor,
            coefficients=Coefficients(max_coeff, min_coeff, coeff_beta),
            factors=Factors(factor_max, factor_min, factor_threshold),
        )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, rule, **common)


def _numels(bucket: Bucket) -> Tensor:
    """Elements of each layer, all its shards together, float32 [K]."""
    return torch.tensor([float(p.numel()) for p in bucket.params], device=bucket.device, dtype=torch.float32)


def _momentum_norms(bucket: Bucket) -> Tensor:
    """‖m‖ of this rank's part of each layer, float32 [K]; zeros after the warm-up, when m is not kept in full."""
    if bucket.phase != "warmup":
        return torch.zeros(len(bucket.params), device=bucket.device, dtype=torch.float32)
    return norms(bucket.layout.views(bucket.flat["exp_avg"]))


def _split(per_layer: Tensor, buckets: Sequence[Bucket]) -> Sequence[Tensor]:
    return torch.split(per_layer, [len(bucket.params) for bucket in buckets])
