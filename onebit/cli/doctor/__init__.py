"""`onebit doctor`: lists what is installed, measures the network, predicts a step and whether one bit pays.

`installed.py`: this machine. `installation.py`: the package. `links.py`: every pair of nodes. `contenders.py`: real
training steps of a few matrices. `samples.py`: times them on the network at hand. `prediction.py`: from the samples to
a model of any size, without tensors or a network. `command.py`: the command line.
"""
