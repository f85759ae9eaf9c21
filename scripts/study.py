"""Loss and traffic of the optimizers against their dense twins, and what few bits between pipeline stages cost.

python scripts/study.py --task byte-lm digits --ranks 4 --results runs/study.jsonl --record scripts/records/study.md
python scripts/study.py activations --results runs/activations.jsonl        (the stages)
python scripts/study.py local-steps --results runs/local.jsonl              (local steps)
python scripts/study.py compression --results runs/compression.jsonl        (models that shrink)
torchrun --nproc-per-node 2 scripts/study.py ddp-hooks                      (hooks of DDP; all take --help)
python scripts/study.py sparse-attention retrieval --results runs/far.jsonl (what a layout sees; byte-lm: its loss)
python scripts/study.py data-efficiency --results runs/data.jsonl           (half the tokens; --cost: their own time)
"""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["activations"]:
        from study.activations import main

        main(sys.argv[2:])
    elif sys.argv[1:2] == ["local-steps"]:
        from study.local_steps import main

        main(sys.argv[2:])
    elif sys.argv[1:2] == ["compression"]:
        from study.compression import main

        main(sys.argv[2:])
    elif sys.argv[1:2] == ["data-efficiency"]:
        from study.data_efficiency import main

        main(sys.argv[2:])
    elif sys.argv[1:2] == ["ddp-hooks"]:
        from study.ddp_hooks import main

        main(sys.argv[2:])
    elif sys.argv[1:2] == ["sparse-attention"]:
        from study.sparse_attention import main

        main(sys.argv[2:])
    else:
        from study.main import main

        main(sys.argv[1:])
