"""Local steps: any optimizer on each rank, parameter differences in one-bit frames every so many steps.

`local_steps.py` is the optimizer, `fragment.py` the recursion of one bucket; `intervals.py` says when, `round_vote.py`
what ranks tell each other before a round, `state.py` what is saved.
"""
