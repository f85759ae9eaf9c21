#!/usr/bin/env python3
"""An Ethernet cluster on one machine: emulated hosts on a link as slow as you say, and the bytes they really sent.

Each host is a set of anonymous Linux namespaces (network, processes, mounts, host name, shared memory) whose first
process starts commands asked of it over a Unix socket, much as sshd would; a further one is the switch. Nothing gets
a name outside, and the kernel ends everything inside as soon as the switch's first process ends, which watches this
script: even after `kill -9` nothing is left. Needs Linux and iproute2, no torch. `python scripts/cluster.py --help`.
"""

import sys

from cluster.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
