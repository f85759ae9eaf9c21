"""One file per optimizer: its JSON parameters, its construction, its memory and traffic, its flag of the script.

`base.py` has the contract, `OptimizerEntry`; `../optimizers.py` the registry, a line for each entry.
"""
