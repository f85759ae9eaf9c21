"""Placeholder until csrc/ is built."""


def is_built() -> bool:
    return False


def why_not_built() -> str:
    return "not written yet"


def describe() -> str:
    return ""
