"""Numbers as people write them: 340m parameters, 1gbit, 8 M parameters of gpt2-medium."""

from __future__ import annotations

import argparse
import math
import re

from .cluster import parse_rate

MODELS = {
    "gpt2": 124e6, "gpt2-medium": 355e6, "gpt2-large": 774e6, "gpt2-xl": 1.56e9,
    "bert-base": 110e6, "bert-large": 336e6, "vit-b": 86e6, "vit-l": 304e6, "resnet50": 25.6e6,
    "llama-3.2-1b": 1.24e9, "llama-3.2-3b": 3.21e9, "llama-3.1-8b": 8.03e9,
}  # fmt: skip
"""Parameters of well-known models, by name."""
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}


def number(text: str) -> float:
    """For argparse: "340m", "1.5b", "1.5e9"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmgb]?)", text.lower())
    if match is None or not 1 <= (value := float(match[1]) * _UNITS[match[2]]) < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, such as 340m or 1.5e9, got {text!r}")
    return value


def model_size(text: str) -> float:
    """For argparse: the parameters of one of `MODELS`."""
    if text.lower() not in MODELS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(MODELS)}, got {text!r}; or give --params 340m")
    return MODELS[text.lower()]


def rate(text: str) -> float:
    """For argparse: bits per second of "1gbit", in tc's notation."""
    try:
        bits_per_s = parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if bits_per_s is None:
        raise argparse.ArgumentTypeError('expected a rate such as 1gbit or 100mbit, got "none"')
    return float(bits_per_s)


def seconds(text: str) -> float:
    """For argparse: seconds, at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"expected seconds, at least 0, got {text!r}")
    return value


def amount(text: str) -> float:
    """For argparse: a finite number, at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number, at least 0, got {text!r}")
    return value
