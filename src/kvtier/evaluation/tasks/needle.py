"""A needle in real text: one sentence with a number, at ten depths."""

from __future__ import annotations

import random
from bisect import bisect_left
from itertools import accumulate
from typing import Final

from . import words
from .prompts import Prompt, Task

DEPTHS: Final = tuple((2 * i + 1) / 20 for i in range(10))
_N_DIGITS: Final = 7


def needle_sentence(key: str, value: str) -> str:
    return f"The secret number of {key} is {value}."


def needle(text: str) -> Task:
    """The task over lines of `text`; a prompt's size is its number of lines, from a place that its seed decides."""
    lines = [line for line in text.splitlines() if line.strip()]

    def write(seed: str, index: int, size: int) -> Prompt:
        rng = random.Random(f"{seed}/needle/{index}")
        depth = DEPTHS[index % len(DEPTHS)]
        key, value = words.distinct_keys(rng, 1)[0], words.number(rng, _N_DIGITS)
        start = rng.randrange(len(lines))
        taken = [lines[(start + i) % len(lines)] for i in range(size)]
        at = line_at_depth(taken, depth)
        taken.insert(at, needle_sentence(key, value))
        return Prompt(
            "needle",
            index,
            depth,
            "\n".join(taken) + "\n",
            f"\nThe secret number of {key} is",
            f" {value}",
            (value,),
            _N_DIGITS + 5,
        )

    return Task("needle", write, least=10, most=max(10, len(lines)), depths=DEPTHS)


def line_at_depth(lines: list[str], depth: float) -> int:
    """The border between lines that is nearest to `depth` (0..1) of the characters."""
    ends = [0, *accumulate(len(line) + 1 for line in lines)]
    wanted = depth * ends[-1]
    i = min(bisect_left(ends, wanted), len(lines))
    return i - 1 if i > 0 and wanted - ends[i - 1] < ends[i] - wanted else i
