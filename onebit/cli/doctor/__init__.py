"""`onebit doctor`: what is installed, what the network passes, what a step will take and whether one bit pays.

`installed.py`: this machine. `links.py`: every pair of nodes. `contenders.py`: real training steps of a few matrices.
`samples.py`: these, timed on the network at hand. `prediction.py`: from the samples to a model of any size, without
tensors or a network. `command.py`: the command line.
"""
