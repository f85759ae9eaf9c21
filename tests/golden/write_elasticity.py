"""The batches that DeepSpeed 0.19.6's elasticity chooses: 100 random blocks, each for one number of ranks.

    pip download --no-deps deepspeed==0.19.6 && tar xzf deepspeed-0.19.6.tar.gz
    python tests/golden/write_elasticity.py deepspeed-0.19.6/deepspeed tests/golden/elasticity_deepspeed_0.19.6.json

A case is [block, data-parallel ranks, answer]; the answer is [batch, numbers of ranks that divide it, micro-batch], or
null for an error. Left out are batches of 0, DeepSpeed's answer if max_train_batch_size is too small for the ranks,
and what it crashes on: no number of nodes between the bounds.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType


def module(name: str, **names: object) -> None:
    sys.modules[name] = made = ModuleType(name)
    vars(made).update(names)


def block_of(rng: random.Random) -> dict[str, object]:
    block: dict[str, object] = {
        "enabled": True,
        "max_train_batch_size": rng.randint(20, 600),
        "micro_batch_sizes": [rng.randint(1, 20) for _ in range(rng.randint(1, 4))],
        "version": rng.choice([0.1, 0.2]),
        "prefer_larger_batch": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        block |= {"min_gpus": rng.randint(1, 8), "max_gpus": rng.randint(8, 100)}
    if block["version"] == 0.2 and rng.random() < 0.5:
        block["num_gpus_per_node"] = rng.choice([2, 4])
    return block


if __name__ == "__main__":
    root = Path(sys.argv[1])
    module("deepspeed", __path__=[str(root)])
    module("deepspeed.elasticity", __path__=[str(root / "elasticity")])
    module("deepspeed.git_version_info", version="0.19.6")
    module("deepspeed.utils", logger=logging.getLogger("deepspeed"))
    theirs = import_module("deepspeed.elasticity.elasticity")
    rng, cases = random.Random(6), list[object]()
    while len(cases) < 100:
        block = block_of(rng)
        ranks = rng.randint(1, 12) * int(str(block.get("num_gpus_per_node", 1)))
        try:
            answer = theirs.compute_elastic_config({"elasticity": block}, "0.19.6", world_size=ranks)
        except (ValueError, theirs.ElasticityError):
            answer = None
        except TypeError:
            continue
        if answer is None or answer[0] > 0:
            cases.append([block, ranks, answer])
    Path(sys.argv[2]).write_text(json.dumps(cases, default=int).replace("], [{", "],\n[{") + "\n")
