"""Local steps: any optimizer on each rank, parameter differences in one-bit frames every N steps.

`local_steps.py` has the optimizer, built from these parts:

    options.py          its options, checked
    wrapped.py          a torch optimizer around another one
    replica.py          this rank's parameters, their masters, and the anchors
    inner_step.py       a step of this rank alone
    inner_state.py      checks of the inner optimizer's state, once a round
    rounds.py           votes (`round_vote.py`) and exchanges of all ranks
    fragment.py         the recursion of one bucket
    interval_policy.py  when rounds are due (`intervals.py`), and the measurement of the network
    buffers.py          the mean of the model's buffers
    stats.py            counts and bytes of the last step
    state.py            the saved state
"""
