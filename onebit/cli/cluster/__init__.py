"""Emulated hosts on Ethernet links of any rate, on one machine, and the bytes that they sent. Only standard library.

`queues.py`: the queue at a link's end, and its counters. `machine.py`: the namespaces, and the first process in each.
`hosts.py`: the class `Cluster`. `launchers.py`, `running.py`: commands on the hosts. `command.py`: the command line.
"""

from .hosts import Cluster, HostTraffic, Run, available
from .launchers import LAUNCHERS, MASTER_PORT, ClusterError
from .machine import BRIDGE, INTERFACE, MAX_HOSTS, NEW_NETWORK, SEARCH_PATH, SWITCH
from .queues import QueueCounters, parse_rate, queue_arguments, read_queue, sent_on_wire
from .running import TIMED_OUT

__all__ = [
    "BRIDGE",
    "INTERFACE",
    "LAUNCHERS",
    "MASTER_PORT",
    "MAX_HOSTS",
    "NEW_NETWORK",
    "SEARCH_PATH",
    "SWITCH",
    "TIMED_OUT",
    "Cluster",
    "ClusterError",
    "HostTraffic",
    "QueueCounters",
    "Run",
    "available",
    "parse_rate",
    "queue_arguments",
    "read_queue",
    "sent_on_wire",
]
