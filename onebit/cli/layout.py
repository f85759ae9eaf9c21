"""`onebit layout`: draws a sparse attention layout, with its cost and how far a token sees through several layers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..zero.sparse_attention import SparsityConfig, build_layout, draw, reach, read_sparsity, save_picture
from ..zero.sparse_attention.config import BIDIRECTIONAL, MODES, UNIDIRECTIONAL
from . import UserError
from .numbers import number
from .output import Screen, Table, write_json, write_whole

_ABOUT = """\
Draws a layout of block-sparse attention: a row for each block of queries, a column for each block of keys. The table
shows the share of earlier tokens (of all tokens, if bidirectional) that reaches a token, by the number of layers.
"""

_MOST_BLOCKS = 8192


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="onebit layout", description=_ABOUT)
    add = parser.add_argument
    add("what", metavar="MODE", help=f"{', '.join(MODES)}; or the block of a DeepSpeed JSON, or a file with it")
    add("--length", type=number, default=4096, metavar="TOKENS", help="tokens of a sequence (default: 4096)")
    add("--block", type=int, metavar="TOKENS", help="tokens of a block (default: the JSON's, or 64)")
    add("--attention", choices=(UNIDIRECTIONAL, BIDIRECTIONAL), help="(default: the JSON's, or unidirectional)")
    add("--heads", type=int, default=1, help="number of heads to build (default: 1)")
    add("--head", type=int, default=0, help="head to draw, from 0 (default: 0)")
    add("--layers", type=int, default=4, help="largest number of layers in the table (default: 4)")
    add("--width", type=int, default=64, metavar="CHARACTERS", help="largest width of the drawing (default: 64)")
    add("--png", type=Path, metavar="FILE", help="write a picture of all heads to FILE")
    add("--json", type=Path, metavar="FILE", help="write the numbers to FILE; - is standard output")
    args = parser.parse_args(argv)
    for name in ("length", "block", "heads", "layers", "width"):
        if (given := getattr(args, name)) is not None and given < 1:
            parser.error(f"--{name}: expected at least 1, got {given:g}")
    if not 0 <= args.head < args.heads:
        parser.error(f"--head: expected one of the {args.heads} heads, from 0, got {args.head}")
    return args


def _config(args: argparse.Namespace) -> SparsityConfig:
    """The configuration of the argument: a mode's name, JSON or a file. Raises UserError."""
    text: str = args.what
    asked = {"block": args.block, "attention": args.attention}
    try:
        if text in MODES:
            given = {"mode": text, "block": 64}
        else:
            given = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
            given = given.get("sparse_attention", given)
        given = {"attention": UNIDIRECTIONAL} | given | {name: value for name, value in asked.items() if value}
        return read_sparsity(given)
    except (OSError, AttributeError, TypeError, ValueError) as wrong:
        modes = ", ".join(MODES)
        raise UserError(f"MODE: expected {modes}, or a JSON object or its file, got {text!r}: {wrong}") from wrong


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    config, length, screen = _config(args), int(args.length), Screen()
    if length > _MOST_BLOCKS * config.block:
        raise UserError(
            f"expected at most {_MOST_BLOCKS:,} blocks, as every two of them are compared, got --length {length:,} in "
            f"blocks of {config.block}; give a larger --block or fewer tokens"
        )
    layout = build_layout(config, args.heads, length)
    screen.line(draw(layout, args.head, args.width))
    rows = [
        [str(seen.layers), f"{100 * seen.share:.1f} %", f"{min(seen.farthest, length)}"]
        for seen in reach(layout, args.layers, args.head)
    ]
    title = (
        f"{config.mode}, {layout.rows} blocks of {config.block} tokens, {args.heads} heads: "
        f"{100 * layout.density:.1f} % of all blocks"
    )
    screen.table(Table(title, ("layers", "share that is seen", "tokens back"), rows))
    if args.png is not None:
        write_whole("--png", args.png, lambda part: save_picture(layout, part))
    numbers = {"density": layout.density, "blocks": layout.rows, "heads": args.heads}
    found = [asdict(seen) for seen in reach(layout, args.layers, args.head)]
    write_json(args.json, numbers | {"reach": found})
    return 0
