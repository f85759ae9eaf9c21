"""Loss and traffic of the optimizers against their dense twins; by name, which models train, and which are served.

python scripts/study.py --task byte-lm digits --ranks 4 --results runs/study.jsonl --record scripts/records/study.md
python scripts/study.py NAME                    (below; all take --help)
"""

import importlib
import sys

STUDIES = {  # by name: the module that has its main(argv), and what it compares
    "inference-models": "study.inference_models",  # whose tokens served models of transformers give
    "models": "study.models",  # which models of transformers train in which form of the engine
}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in STUDIES:
        importlib.import_module(STUDIES[sys.argv[1]]).main(sys.argv[2:])
    else:
        importlib.import_module("study.main").main(sys.argv[1:])
