"""Faults injected, and what follows compared with what is promised.

`main.py` runs the sections: `saves`, `damage`, `frames`, `storms`, `disagreement`, `starts`, `peers`, `runs`,
`members`, `cables`, each a file with a table of cases. `case.py` is what a case is and who judges it; `running.py`,
`report.py` run and tell. `ranks.py`, `training.py`, `setups.py`, `kinds.py`, `hostile.py` and `shim.c` are what cases
are made of; `filesystem.py` serves tests.
"""
