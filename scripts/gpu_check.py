"""Everything that only a machine with a GPU can show: kernels bit for bit, optimizers, GB/s against a copy.

python scripts/gpu_check.py --record scripts/records/gpu_<device>_<yyyy-mm>.md       (--rehearse: without a GPU)
"""

import sys

if __name__ == "__main__":
    from gpu_check.main import main

    sys.exit(main(sys.argv[1:]))
