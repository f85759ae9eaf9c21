"""Train a small GPT on Python's standard library, on any number of ranks, with dense AdamW or with a one-bit optimizer.

mpirun -np 4 python scripts/train.py --optimizer onebit-adam --steps 200      (or torchrun, srun, or alone)
torchrun --nproc-per-node 4 scripts/train.py --zero 2 --dtype bf16            (state sharded inside each node)
python scripts/train.py plot a.csv b.csv --out loss.png                       (draws what --csv wrote)
python scripts/train.py corpus --manifest text.json                           (writes what --manifest reads)
"""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["plot"]:
        from train.plot import main

        main(sys.argv[2:])
    elif sys.argv[1:2] == ["corpus"]:
        from train.corpus import main

        main(sys.argv[2:])
    else:
        from train.run import main

        sys.exit(main())
