"""What `LocalSteps` says about its last step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LocalStats:
    """What the last step did. Bytes as payload this rank sent to others, without headers; times in milliseconds.

    phase: "local", or "round" where something was sent or has landed. interval: steps to the next round.
    bits_per_parameter: of the last step, to other nodes; mean_bits_per_parameter: of all steps of the run.
    rounds: so far. missed_rounds: those of them in which this rank's difference was owed and not counted.
    skipped_steps: inner steps that this rank left out, because its gradients were not finite. weight: this rank's in
    the last round. shadow_rounds: rounds of other ranks it has taken part in without batches of its own (`join`).
    """

    phase: str = "local"
    interval: int = 0
    sent_bytes: int = 0
    sent_bytes_inter_node: int = 0
    bits_per_parameter: float = 0.0
    mean_bits_per_parameter: float = 0.0
    comm_ms: float = 0.0
    rounds: int = 0
    missed_rounds: int = 0
    skipped_steps: int = 0
    weight: float = 1.0
    shadow_rounds: int = 0
