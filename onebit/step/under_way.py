"""The record of a compressed step that is exchanged while the next step computes (`delay=1`).

The optimizer sends step t, returns, and lands it at the beginning of step t + 1: verdict, errors, momentum, parameters.
Meanwhile the parameters look ahead: they stand where β1·m alone would take them, as for Nesterov's gradient, near the
point at which the next gradient will count. `delayed.py` leaves and lands the step. When a state is loaded, the same
frames are sent again; if the number of ranks has changed, what was sent is added to the residuals instead.

Among members that come and go, members that have not landed the step at a loss take over the state of one that has. If
there is none, all send the same frames again in the new world, where each counts 1/W', and what else has changed goes
into the next residual: r + e' - e, for a worker error e that became e'. A newcomer gets the state before that step, and
has no gradient in it; what the lost member has sent is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..agreement.step_vote import Ballot, Header, StepVote, options_of
from ..comm import FusedCodec, codec_named
from ..layout.bucket import Bucket
from ..layout.flat import lay_out
from ..usage.contract import Group, State

NAME = "under_way"


def check_delay(name: str, rule: object, delay: int) -> None:
    """Raise ValueError if a rule's steps cannot land this many steps later.

    Args:
        name: Name of the optimizer, for the message.
        rule: Its rule.
        delay: Steps between sending and landing.
    """
    if delay not in (0, 1):
        raise ValueError(f"delay must be 0 or 1 (land a step at the end of the next), got {delay!r}")
    if delay and not getattr(rule, "can_be_delayed", False):
        raise ValueError(f"{name} has no delay: a step of it cannot land in the next; give delay=0, or take OnebitAdam")


@dataclass(frozen=True)
class Lookahead:
    """How far parameters look ahead: p - weight·m/D.

    Attributes:
        weights: The weight of each bucket.
        seen: For each parameter, whether the last step has moved it; only these look ahead.
    """

    weights: Sequence[float]
    seen: Sequence[bool]


@dataclass
class StepUnderWay:
    """A step that was sent and has not landed.

    Attributes:
        ballot: Its vote.
        clip_factor: Factor by which its gradients were multiplied.
        sent: For each bucket, a copy of the frames that this rank sent.
        ahead: How far parameters look ahead until it lands. Default None: not at all.
        gradients: Number of gradients of the next step that have been computed. Default 0.
        in_second_phase: Number of buckets that have been brought to their second phase. Default 0.
    """

    ballot: Ballot
    clip_factor: float
    sent: Sequence[Tensor]
    ahead: Lookahead | None = None
    gradients: int = 0
    in_second_phase: int = 0

    @property
    def options(self) -> list[Group]:
        """For each group, the numbers with which the step was sent."""
        return options_of(self.ballot.header.numbers)

    def due(self, parameters: int) -> range:
        """Count another gradient of the next step, and return the buckets whose second phase is to be launched now.

        The first bucket's is launched with the first gradient; the last one's while a bucket's share of the gradients
        has yet to come.

        Args:
            parameters: Number of parameters, hence of gradients in a step.
        """
        self.gradients += 1
        buckets = len(self.sent)
        return self.until(min(1 + self.gradients * buckets // parameters, buckets))

    def until(self, bucket: int) -> range:
        """The buckets before this one whose second phase has not been launched. From here on they count as launched."""
        first, self.in_second_phase = self.in_second_phase, max(self.in_second_phase, bucket)
        return range(first, self.in_second_phase)

    # ---------------------------------------------------------------- states

    def record(self, buckets: Sequence[Bucket]) -> State:
        """The step as plain numbers and tensors, for a state. `DelayedSteps.send_again` takes it back."""
        header, residuals = self.ballot.header, [b.ef.worker_next for b in buckets if b.ef is not None]
        return {
            "step": header.step,
            "kind": header.kind,
            "numbers": list(header.numbers),
            "present": list(self.ballot.mine.present[: sum(len(bucket.params) for bucket in buckets)]),
            "clip_factor": self.clip_factor,
            "buckets": [
                {"sent": sent, "residual": residual} for sent, residual in zip(self.sent, residuals, strict=True)
            ],
        }


def vote_of(record: State, frozen: int, note: bytes) -> tuple[Header, StepVote]:
    """The header and vote of this rank in the step of a record.

    Args:
        record: From `StepUnderWay.record`.
        frozen: Number of parameters that are not trained.
        note: As in the vote.
    """
    header = Header(record["step"], record["kind"], tuple(record["numbers"]))
    return header, StepVote(header.summary(), [*record["present"], *[False] * frozen], note=note)


def check_record(where: str, record: State, buckets: Sequence[Bucket], codec: FusedCodec) -> None:
    """Raise ValueError if a record does not belong to a step of these buckets.

    Args:
        where: Beginning of the message, which names the state.
        record: From `StepUnderWay.record`.
        buckets: All buckets.
        codec: Format of the frames that were sent.
    """
    for bucket, saved in zip(buckets, record["buckets"], strict=True):
        rows = bucket.hierarchy.own.stop - bucket.hierarchy.own.start
        expected = rows, codec.frame_bytes(bucket.layout.chunk)
        if (found := tuple(saved["sent"].shape)) != expected or saved["residual"].numel() != rows * bucket.layout.chunk:
            raise ValueError(
                f"{where}the frames under way of the bucket that begins with {bucket.names[0]} have shape {found}, "
                f"expected {expected}: it is damaged"
            )


def fold_into_error(state: State) -> State:
    """The state as if the step under way had not been sent: its gradients become residuals, and count in the next step.

    e ← e + (1-β1)·g/D, which is what was sent plus its residual, without β1·m/D. A bucket in which this is not finite
    is left as it is. States for another number of ranks, or for another division of the parameters, begin so. The
    model's parameters stay ahead, by lr·β1·m̂/D.

    Args:
        state: From `state_dict()`. Not modified.
    """
    record = state.get("onebit")
    if record is None or NAME not in record:
        return state
    under_way, record = record[NAME], {name: value for name, value in record.items() if name != NAME}
    entries = {key: dict(entry) for key, entry in state["state"].items()}
    group_of = {key: g for g, group in enumerate(state["param_groups"]) for key in group["params"]}
    options = options_of(under_way["numbers"])
    for saved, its in zip(record["buckets"], under_way["buckets"], strict=True):
        beta1 = options[group_of[saved["params"][0]]]["betas"][0]
        _add_to_errors(record, saved, its, beta1, [entries[key] for key in saved["params"]])
    return {**state, "state": entries, "onebit": record}


def _add_to_errors(record: State, saved: State, its: State, beta1: float, entries: Sequence[State]) -> None:
    """Give these entries of a bucket's parameters the worker errors of `fold_into_error`."""
    shapes = [entry["worker_error"].shape for entry in entries]
    W, L = record["world_size"], record.get("local_size", 1)
    layout, codec = lay_out(shapes, record["block"], W), codec_named(record["codec"], record["block"])
    own = slice(record["rank"] % L * (W // L), (record["rank"] % L + 1) * (W // L))
    sent_WN = torch.zeros(W, layout.chunk, dtype=torch.float32, device="cpu")
    codec.decode(its["sent"].cpu(), sent_WN[own])
    sent_WN[own] += its["residual"].cpu().float().view(-1, layout.chunk)
    if not bool(sent_WN.isfinite().all()):
        return
    momentum_WN = torch.zeros(W, layout.chunk, dtype=torch.float32, device="cpu")
    codec.decode(saved["frames"].cpu()[own], momentum_WN[own])
    sent_WN.sub_(momentum_WN, alpha=beta1)
    for entry, view in zip(entries, layout.views(sent_WN.view(-1)), strict=True):
        error = entry["worker_error"]
        entry["worker_error"] = view.to(error.device, error.dtype).clone()
