"""The tasks of study.py by name."""

from __future__ import annotations

from functools import cache

from study.denoise import Denoise
from study.divided import MixedBytes, MixedDigits, MixedSums, UnlikeBytes, UnlikeDigits, UnlikeSums
from study.tasks import ByteLM, DemoLM, Digits, LargeLM, MaskedLM, Task, TenMillionLM

ALIKE: list[type[Task]] = [ByteLM, DemoLM, MaskedLM, Digits]
DIVIDED: list[type[Task]] = [UnlikeBytes, MixedBytes, UnlikeDigits, MixedDigits, UnlikeSums, MixedSums]
TASKS: dict[str, type[Task]] = {task.name: task for task in (*ALIKE, *DIVIDED, Denoise, TenMillionLM, LargeLM)}


@cache
def load_task(name: str) -> Task:
    """The task with its data, read once per process. Raises ImportError where a package is missing."""
    return TASKS[name]()
