"""Retrieval tasks: does a configuration still find what lies somewhere in a long context?

Prompts are made once from a seed, brought to a length in tokens, and put to every configuration alike. What is
compared is configurations, not models: a small model may be weak at a task and its cache still be exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from ...errors import UsageError
from . import ruler
from .needle import DEPTHS, needle
from .prompts import Count, Prompt, Task, sized

NEEDLE: Final = "needle"
GROUPS: Final = {"ruler": ruler.NAMES, "all": (NEEDLE, *ruler.NAMES)}
NAMES: Final = (NEEDLE, *ruler.NAMES)


def task_names(text: str) -> tuple[str, ...]:
    """Names of tasks from a list such as "needle,ruler", each once. Raises UsageError."""
    names: list[str] = []
    for word in filter(None, (part.strip().lower() for part in text.split(","))):
        if word not in NAMES and word not in GROUPS:
            raise UsageError(
                f"there is no task {word!r}", f"Tasks: {', '.join(NAMES)}; ruler is the last six of them, all is all."
            )
        names += GROUPS.get(word, (word,))
    if not names:
        raise UsageError("no task is named", f"Tasks: {', '.join(NAMES)}, ruler, all.")
    return tuple(dict.fromkeys(names))


def make_prompts(name: str, n_samples: int, n_tokens: int, seed: int, text: str, count: Count) -> list[Prompt]:
    """`n_samples` prompts of a task, each with its answer at most `n_tokens` long; the needle's ten depths equally
    often.

    Raises UsageError where the task or the text has no such length.
    """
    if name == NEEDLE:
        task, n_samples = needle(text), len(DEPTHS) * math.ceil(n_samples / len(DEPTHS))
    elif name == "cwe":
        task = _cwe(seed, n_tokens, count)
    else:
        (task,) = (task for task in ruler.SIMPLE if task.name == name)
    return [sized(task, str(seed), i, n_tokens, count) for i in range(n_samples)]


def _cwe(seed: int, n_tokens: int, count: Count) -> Task:
    """The task with as many occurrences of its words as the length allows."""
    for often, seldom in ruler.OCCURRENCES:
        task = ruler.cwe(often, seldom)
        try:
            sized(task, str(seed), 0, n_tokens * 9 // 10, count)  # later prompts may be a bit longer
        except UsageError:
            continue
        return task
    return task


__all__: Sequence[str] = ("DEPTHS", "GROUPS", "NAMES", "NEEDLE", "Prompt", "make_prompts", "sized", "task_names")
