"""Local steps: any optimizer on each rank, parameter differences in one-bit frames every N steps.

`local_steps.py` is the optimizer, put together from these:

    options.py          what it was constructed with
    wrapped.py          a torch optimizer around another one
    replica.py          this rank's parameters, their masters, and the anchors
    inner_step.py       a step of this rank alone
    inner_state.py      what a round finds wrong with the inner optimizer's state
    rounds.py           what ranks do together: votes (`round_vote.py`) and exchanges
    fragment.py         the recursion of one bucket
    interval_policy.py  when rounds are (`intervals.py`), and the network asked
    buffers.py          the mean of the model's buffers
    stats.py            what the last step did and sent
    state.py            what is saved
"""
