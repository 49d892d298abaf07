"""What a task asks, and how its text is brought to a length in tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from ...errors import UsageError

Count = Callable[[str], int]  # how many tokens a text has

_CLOSE: Final = 0.98  # of the room; a text that fills this much of it is long enough
_MOST_TRIES: Final = 24


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question about a text.

    Attributes:
        task, index: what it belongs to.
        depth: where in the text the answer lies, 0..1; None where it is all over the text.
        context: the text, processed in batches.
        question: what follows it, fed one token at a time.
        expected: the right continuation of the question, beginning with a blank.
        answers: what must occur in a right answer, in any order.
        n_predict: most tokens of an answer.
    """

    task: str
    index: int
    depth: float | None
    context: str
    question: str
    expected: str
    answers: tuple[str, ...]
    n_predict: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of prompt.

    Attributes:
        write: (seed text, index, size) -> prompt; the same prompt for the same arguments. A larger size is a longer
            text.
        least: the smallest size.
        most: the largest size, or None.
        depths: where the answers of the prompts lie, in turn; empty if the task chooses itself.
    """

    name: str
    write: Callable[[str, int, int], Prompt]
    least: int = 1
    most: int | None = None
    depths: tuple[float, ...] = ()


def n_tokens_of(prompt: Prompt, count: Count) -> int:
    """Tokens of the prompt and of the longest answer to it."""
    n_expected = count(prompt.expected)
    return count(prompt.context + prompt.question) + max(prompt.n_predict, n_expected) + 1


def sized(task: Task, seed: str, index: int, n_tokens: int, count: Count) -> Prompt:
    """The longest prompt found that leaves room for its answer within `n_tokens`. Raises UsageError if none does.

    Its length is a straight line of the size, nearly: each try is a step along it.
    """
    low, prompt = task.least, task.write(seed, index, task.least)
    t_low = n_tokens_of(prompt, count)
    if t_low > n_tokens:
        raise UsageError(
            f"{task.name} needs {t_low:,} tokens at least; {n_tokens:,} are asked for", "Give a longer --length."
        )
    high: int | None = None if task.most is None else task.most + 1
    slope, n_try = 0.0, 0
    while t_low < _CLOSE * n_tokens and (high is None or high - low > 1) and n_try < _MOST_TRIES:
        n_try += 1
        step = max(1, int(0.995 * (n_tokens - t_low) / slope)) if slope > 0 else low
        size = low + step if high is None or low + step < high else (low + high) // 2
        tried = task.write(seed, index, size)
        t = n_tokens_of(tried, count)
        if t > n_tokens:
            high = size
            continue
        slope = max((t - t_low) / (size - low), 0.0)
        low, t_low, prompt = size, t, tried
    if task.most is not None and low >= task.most and t_low < _CLOSE * n_tokens:
        raise UsageError(
            f"{task.name} comes to {t_low:,} tokens at most; {n_tokens:,} are asked for",
            "Give a longer text (-f FILE), or a shorter --length.",
        )
    return prompt
