"""One file for each optimizer: its JSON parameters, how it is built, what it holds and sends, its training-script flag.

`base.py` has the contract, `OptimizerEntry`; `../optimizers.py` the registry, a line for each entry.
"""
