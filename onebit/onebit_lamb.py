"""1-bit LAMB (Li et al., HiPC 2022, arXiv 2104.06069): LAMB for a short warm-up, then one-bit momentum.

The dense optimizer is in `lamb.py`, what this shares with 1-bit Adam in `frozen_variance.py`. Shape legend: L layers
(parameters), K of them in a bucket, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .adam import normalised
from .base import CommonOptions
from .bucket import Bucket
from .comm import Codec
from .comm.messages import gather_tensors, sum_in_order
from .frozen_variance import FrozenVarianceOptimizer
from .lamb import check_trust_options, norms, trust_ratio

if TYPE_CHECKING:
    from typing_extensions import Unpack


class OnebitLamb(FrozenVarianceOptimizer):
    """LAMB whose data-parallel traffic is about two bits per parameter and step, after a short warm-up.

    Used as `OnebitAdam` is, whose momentum m/D it shares. Layer l moves by p ← p - lr·c_l·(r_l·m̂/D + wd·p):

    - warm-up: r_l = 1 and c_l is LAMB's `trust_ratio`(‖p‖, ‖m̂/D + wd·p‖); its moving average c̄_l starts, without
    bias.
    - then, as ‖m̂/D‖ is no longer known without the noise of compression: freeze_step a number, as in the paper:
      c_l = c̄_l, and r_l says how D would have changed. freeze_step "auto", where D is refreshed: r_l = 1, and each
      refresh sets c_l = c̄_l · ‖p‖/‖p at the end of warm-up‖, as parameters are known exactly.

    r_l = 1/√f_l within [factor_min, factor_max], changing by at most factor_threshold of itself per step, where f_l is
    the moving average (β2, from 1) of the mean square of ḡ/D over the layer. The paper takes ḡ from differences of
    decoded momenta, which hold ten times their noise, and the largest element; here it is estimated from the ranks' own
    gradients, as `clip.py` estimates a norm. And the paper's r_l multiplies the weight decay as well.

    A layer that had no momentum in any warm-up step takes ‖p‖/√numel for c̄_l, the ratio of an update of ones.

    Arguments as in `OnebitAdam` and `CommonOptions`, and: max_coeff, min_coeff: bounds of c_l. coeff_beta: of its
    moving average. factor_max, factor_min, factor_threshold: see r_l. No host synchronisation for any of them.

    State and traffic as `OnebitAdam`; another 8 bytes per layer travel to each peer in a dense step, 8·W where
    freeze_step is a number. Layer l is measured by rank l mod W alone: the same bits on unlike machines.
    """

    kind = "1-bit LAMB"

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
        check_trust_options(min_coeff, max_coeff)
        if not 0.0 <= coeff_beta < 1.0:
            raise ValueError(f"coeff_beta must lie in [0, 1), got {coeff_beta}")
        if not (0.0 < factor_min <= 1.0 <= factor_max and factor_threshold >= 0.0):
            raise ValueError(
                "expected 0 < factor_min <= 1 <= factor_max and factor_threshold >= 0, got "
                f"{factor_min}, {factor_max}, {factor_threshold}"
            )
        self.max_coeff, self.min_coeff, self.coeff_beta = max_coeff, min_coeff, coeff_beta
        self.factor_max, self.factor_min, self.factor_threshold = factor_max, factor_min, factor_threshold
        self._observed: dict[int, Tensor] = {}  # bucket -> ‖g_i/D‖² and <g_i/D, m̂/D> of this step, [K, 2]
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            freeze_step=freeze_step,
            warmup_codec=warmup_codec,
            bias_correction=bias_correction,
            variance_floor=variance_floor,
            **common,
        )

    def _options(self) -> list[str]:
        names = ("max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold")
        return [*super()._options(), *(f"option {name} = {getattr(self, name)}" for name in names)]

    def _allocate(self, bucket: Bucket, phase: str) -> None:
        super()._allocate(bucket, phase)
        if phase == "warmup" or not bucket.layers:
            K, device = len(bucket.params), bucket.device
            names = ("mean_ratio", "ratio_total", "warmup_norm", "coeff")
            bucket.layers = {name: torch.zeros(K, device=device) for name in names}
            bucket.layers |= {name: torch.ones(K, device=device) for name in ("fresh", "factor")}
            bucket.layers["numel"] = _numels(bucket)

    # ---------------------------------------------------------------- before it is sent

    def _observe(self, bucket: Bucket, grads: Sequence[Tensor | None], scale: float, own: float) -> None:
        """Note this rank's part of an estimate of ‖ḡ/D‖² of each layer: ‖g_i/D‖² and <g_i/D, m̂/D>."""
        if not self._follows_variance:
            return
        update = self._last_average(bucket).mul_(self._momentum_correction(bucket, self._count(bucket)))
        triples = zip(
            grads,
            bucket.layout.views(bucket.flat["denominator"]),
            bucket.layout.views(update),
            strict=True,
        )
        table = torch.zeros(len(grads), 2, device=bucket.device)
        for row, (g, D, u) in zip(table, triples, strict=True):
            if g is not None:
                y = normalised(g.float() * scale, D, own).flatten()
                row[0], row[1] = torch.dot(y, y), torch.dot(y, u.flatten())
        self._observed[bucket.index] = table

    @property
    def _follows_variance(self) -> bool:
        return isinstance(self.rule.freeze_step, int)

    # ---------------------------------------------------------------- a step that is good

    def _before_move(self) -> None:
        """c_l and r_l of every layer. Dense steps: bucket.x ← m̂/D + wd·p."""
        dense = [bucket for bucket in self._buckets if self._was_dense(bucket)]
        compressed = [bucket for bucket in self._buckets if not self._was_dense(bucket)]
        if compressed and self._follows_variance:
            self._follow_variance(compressed)
        for bucket in dense:
            decay = self.param_groups[bucket.group_index]["weight_decay"]
            if decay != 0.0:
                torch._foreach_add_(bucket.x_views, bucket.held, alpha=decay)
        if dense:
            self._measure(dense)

    def _weights_of_layers(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        group, layers = self.param_groups[bucket.group_index], bucket.layers
        weight = layers["coeff"] * float(group["lr"])
        if self._was_dense(bucket):  # the decay is in bucket.x
            return weight, torch.zeros_like(weight)
        return weight * layers["factor"], weight * group["weight_decay"]

    def _follow_variance(self, buckets: Sequence[Bucket]) -> None:
        """r_l from every rank's part of the estimate, and its place in the update."""
        W = self.transport.world_size
        mine = torch.cat([self._observed[bucket.index] for bucket in buckets])
        replica = self.model_parallel_group.total_of_rows(mine, [p for bucket in buckets for p in bucket.params])
        square_L, product_L = (sum_in_order(gather_tensors(self.transport, replica)) / W).unbind(1)
        estimate_L = square_L / W + (1.0 - 1.0 / W) * product_L.clamp(min=0.0)
        for bucket, estimate_K in zip(buckets, _split(estimate_L, buckets), strict=True):
            layers, beta2 = bucket.layers, self.param_groups[bucket.group_index]["betas"][1]
            layers["fresh"].lerp_(estimate_K.to(bucket.device) / layers["numel"], 1.0 - beta2)
            before = layers["factor"]
            factor = layers["fresh"].rsqrt().clamp(self.factor_min, self.factor_max)
            factor = torch.maximum(factor, before * (1.0 - self.factor_threshold))
            layers["factor"] = torch.minimum(factor, before * (1.0 + self.factor_threshold))

    def _measure(self, buckets: Sequence[Bucket]) -> None:
        """c_l of a dense step: a trust ratio in warm-up, in a refresh the mean one scaled with the layer's norm."""
        table_L3 = self._layer_norms(buckets)
        for bucket, table_K3 in zip(buckets, _split(table_L3, buckets), strict=True):
            layers = bucket.layers
            weight_norm, update_norm, momentum_norm = table_K3.to(bucket.device).unbind(1)
            if bucket.phase == "warmup":
                layers["coeff"] = self._trust_ratio(weight_norm, update_norm)
                layers["warmup_norm"] = weight_norm
                self._remember(bucket, (momentum_norm > 0) & (update_norm > 0))
            else:
                growth = weight_norm / layers["warmup_norm"]
                growth = torch.where(layers["warmup_norm"] > 0, growth, torch.ones_like(growth))
                layers["coeff"] = (self._mean_ratio(bucket) * growth).clamp(self.min_coeff, self.max_coeff)

    def _layer_norms(self, buckets: Sequence[Bucket]) -> Tensor:
        """‖p‖ and ‖u‖ of each layer, and in warm-up ‖m‖, float32 [L, 3]. Rank k mod W measures ‖p‖ and ‖u‖ of layer k.

        So they have the same bits everywhere; of ‖m‖ all that matters is whether it is 0. A sharded layer's are those
        of all its shards.
        """
        W, rank = self.transport.world_size, self.transport.rank
        pairs = [pair for bucket in buckets for pair in zip(bucket.held, bucket.x_views, strict=True)]
        mine = torch.zeros(-(-len(pairs) // W), 2, device=buckets[0].device)
        for k, (p, u) in enumerate(pairs[rank::W]):
            mine[k] = norms([p, u])
        held_L2 = gather_tensors(self.transport, mine).transpose(0, 1).reshape(-1, 2)[: len(pairs)]
        momentum_L = torch.cat([_momentum_norms(bucket).to(held_L2.device) for bucket in buckets])
        held_L3 = torch.cat([held_L2, momentum_L.unsqueeze(1)], 1)
        return self.model_parallel_group.norms(held_L3, [p for bucket in buckets for p in bucket.params])

    def _trust_ratio(self, weight_norm: Tensor, update_norm: Tensor) -> Tensor:
        return trust_ratio(weight_norm, update_norm, min_coeff=self.min_coeff, max_coeff=self.max_coeff)

    def _remember(self, bucket: Bucket, lives: Tensor) -> None:
        """The moving average of c_l takes in this step, for layers that have a momentum."""
        layers, beta = bucket.layers, self.coeff_beta
        layers["mean_ratio"] = beta * layers["mean_ratio"] + (1.0 - beta) * lives * layers["coeff"]
        layers["ratio_total"] = beta * layers["ratio_total"] + (1.0 - beta) * lives

    def _mean_ratio(self, bucket: Bucket) -> Tensor:
        """c̄_l."""
        layers = bucket.layers
        total = layers["ratio_total"]
        of_ones = self._trust_ratio(layers["warmup_norm"], layers["numel"].sqrt())
        return torch.where(total > 0, layers["mean_ratio"] / total, of_ones)

    def _freeze(self, bucket: Bucket, m: Tensor, v: Tensor) -> None:
        super()._freeze(bucket, m, v)
        bucket.layers["coeff"] = self._mean_ratio(bucket)

    # ---------------------------------------------------------------- checkpoints

    def _extra_state(self) -> dict:
        return super()._extra_state() | {"layers": [dict(bucket.layers) for bucket in self._buckets]}

    def _load_extra_state(self, record: dict) -> None:
        super()._load_extra_state(record)
        for bucket, layers in zip(self._buckets, record["layers"], strict=True):
            bucket.layers = {name: values.to(bucket.device, copy=True) for name, values in layers.items()}
            bucket.layers["numel"] = _numels(bucket)

    def _adopt_dense_state(self) -> None:
        """The moments of a dense LAMB give the trust ratios of its last step."""
        for bucket in self._buckets:
            group, step = self.param_groups[bucket.group_index], self._count(bucket)
            total = 1.0 - group["betas"][1] ** step if self.bias_correction and step > 0 else 1.0
            D = (bucket.flat["exp_avg_sq"] / total).sqrt_().add_(group["eps"])
            torch.div(self.momentum(bucket), D, out=bucket.x)
            torch._foreach_add_(bucket.x_views, bucket.held, alpha=group["weight_decay"])
        self._measure(self._buckets)
        super()._adopt_dense_state()


def _numels(bucket: Bucket) -> Tensor:
    """Elements of each layer, all its shards together, float32 [K]."""
    return torch.tensor([float(p.numel()) for p in bucket.params], device=bucket.device)


def _momentum_norms(bucket: Bucket) -> Tensor:
    """‖m‖ of what this rank holds of each layer, float32 [K]; zeros once it is not kept as it is."""
    if bucket.phase != "warmup":
        return torch.zeros(len(bucket.params), device=bucket.device)
    return norms(bucket.layout.views(bucket.flat["exp_avg"]))


def _split(per_layer: Tensor, buckets: Sequence[Bucket]) -> Sequence[Tensor]:
    return per_layer.split([len(bucket.params) for bucket in buckets])
