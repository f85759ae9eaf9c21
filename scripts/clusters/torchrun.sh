#!/bin/bash
# One node's ranks, by torchrun. Run it on every node, with the same words, rank 0's host first:
#
#   torchrun.sh 0 2 node1 train.py --lr 1e-3    on node1
#   torchrun.sh 1 2 node1 train.py --lr 1e-3    on node2
#
# The words: this node's number, how many nodes there are, the host of node 0, the script and its arguments.
# RANKS_PER_NODE: how many ranks on each (default: 1). PORT: of the first host, free there (default: 29500).
set -euo pipefail
if [ $# -lt 4 ]; then
  echo "usage: torchrun.sh NODE NODES FIRST_HOST SCRIPT [ARGUMENT...], on every node" >&2
  exit 2
fi
node=$1 nodes=$2 first=$3
shift 3
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec torchrun --nnodes "$nodes" --node-rank "$node" --nproc-per-node "${RANKS_PER_NODE:-1}" \
  --master-addr "$first" --master-port "${PORT:-29500}" "$@"
