"""Ranks on the hosts of a DeepSpeed hostfile, over ssh and torchrun.

`hosts.py`: the hostfile, the choice of slots, the environment file; no processes. `running.py`: one ssh for each host,
from start to end. `agent.py`: what runs on each host. `command.py`: the command line.
"""
