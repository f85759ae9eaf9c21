"""Write on: bytes from a trained GPT of train.py, or tokens of a transformers model, as they are made.

python scripts/train.py --steps 300 --checkpoint runs/gpt
python scripts/generate.py runs/gpt --prompt "def main(" --new 200
torchrun --nproc-per-node 2 scripts/generate.py runs/gpt --tp 2
torchrun --nproc-per-node 2 scripts/generate.py runs/llama --pp 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from train.model import SIZES, build_model
from train.model_layers import as_gpt

from onebit import comm
from onebit.checkpoint.archive import load_archive
from onebit.checkpoint.files import CheckpointError
from onebit.zero import init_inference, read_checkpoint_weights


def read_model(folder: Path, size: str) -> nn.Module:
    """The GPT of a run of train.py, in any layout. Raises CheckpointError where it is none, or of another size."""
    shared = sorted(folder.glob("step_*/shared.pt"))
    latest = folder / "latest"
    if shared:
        name = latest.read_text().strip() if latest.is_file() else shared[-1].parent.name
        weights = load_archive(folder / name / "shared.pt")["model"]
    else:
        weights = as_gpt(read_checkpoint_weights(folder))
    model = build_model(size, seed=0)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder} is no run of train.py --size {size}; give the --size that it was trained with"
        ) from error
    return model


def open_model(args: argparse.Namespace) -> tuple[nn.Module | str, Callable[[str], Tensor], Callable[[list[int]], str]]:
    """(a model, text to tokens, tokens to text)."""
    if (args.model / "config.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.model)
        return str(args.model), lambda text: tokenizer(text, return_tensors="pt").input_ids[0], tokenizer.decode
    model = read_model(args.model, args.size)
    return model, lambda text: torch.tensor(list(text.encode())), lambda tokens: bytes(tokens).decode(errors="replace")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="generate.py", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("model", type=Path, help="a folder of checkpoints of train.py, or of transformers")
    add("--size", choices=SIZES, default="small", help="of train.py's GPT")
    add("--prompt", default="def ")
    add("--new", type=int, default=100, metavar="TOKENS")
    add("--dtype", choices=("fp32", "bf16", "int8"))
    add("--tp", type=int, default=1, metavar="RANKS", help="compute each layer together on this many ranks")
    add("--pp", type=int, default=1, metavar="RANKS", help="divide the layers among this many ranks; of transformers")
    add("--compile", action="store_true", help="the decode step; takes a minute first")
    add("--temperature", type=float, help="draw at it; else the likeliest token is taken")
    add("--top-k", type=int, default=0)
    add("--top-p", type=float, default=1.0)
    add("--seed", type=int)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    transport = comm.init()
    try:
        model, encode, decode = open_model(args)
        keys = {"dtype": args.dtype, "kernel_inject": args.compile, "tensor_parallel": {"tp_size": args.tp}}
        keys |= {"pipeline_parallel": {"pp_size": args.pp}}
        engine = init_inference(model, keys, transport=transport)
        how = {} if args.temperature is None else {"do_sample": True, "temperature": args.temperature}
        how |= {"top_k": args.top_k, "top_p": args.top_p} if how else {}
        stream = engine.stream([encode(args.prompt)], max_new_tokens=args.new, seed=args.seed, **how)
        write = sys.stdout.write if transport.rank == 0 else lambda text: len(text)
        write(args.prompt)
        tokens: list[int] = []
        for (token,) in stream:
            written = decode(tokens)
            tokens += [] if token is None else [token]
            write(decode(tokens)[len(written) :])
            sys.stdout.flush()
        write("\n")
    except (CheckpointError, ImportError, ValueError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    transport.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
