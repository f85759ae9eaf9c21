"""What the ranks of test_train.py's --zero tests do: many runs of train.py in one start of processes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

from train import layout_method  # noqa: F401  (once, before the ranks are forked: two seconds for each of them otherwise)
from train import run as train_run

from onebit.comm import init
from onebit.comm.messages import gather_bytes


def runs(corpus: str, arguments: Sequence[list[str]], step: int | None = None) -> list[int | str]:
    """train.py with each of these, one after the other: its exit codes, or what went wrong. corpus: a pickled one.

    step: what is to be resumed is resumed from there, whatever came behind it.
    """
    text = pickle.loads(Path(corpus).read_bytes())
    train_run.read_corpus = lambda: text
    transport, ends = init("gloo", levels=1), []
    for one in arguments:
        args = train_run.parse_args(one)
        if step is not None and args.resume:
            (args.checkpoint / "latest").write_text(f"step_{step:08d}\n")  # by all ranks, the same
            gather_bytes(transport, b"written")
        try:
            ends.append(train_run.train(args, transport, lambda: False))
        except (train_run.CheckpointError, ValueError) as error:
            ends.append(f"{type(error).__name__}: {error}")
    transport.close()
    return ends
