"""What a configuration answered to the prompts of one task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..readings import LEVELS, Readings, readings


@dataclass(frozen=True, slots=True)
class PromptAnswer:
    """One answer, and what the tokens fed one at a time for it cost.

    `log_p` is the mean log-probability (nats) of the expected tokens, `score` the share of the answers in the text.
    """

    depth: float | None
    log_p: float
    score: float
    is_exact: bool
    text: str
    n_steps: int
    decode_s: float
    reading: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PromptAnswer:
        """From what the measuring process or `to_dict` gave.

        Raises KeyError, TypeError or ValueError for anything else.
        """
        depth = None if data["depth"] is None else float(data["depth"])
        reading = {str(key): float(value) for key, value in data["reading"].items()}
        figures = float(data["log_p"]), float(data["score"]), bool(data["is_exact"]), str(data["text"])
        return cls(depth, *figures, int(data["n_steps"]), float(data["decode_s"]), reading)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TaskRow:
    """All answers of one configuration to one task."""

    name: str
    task: str
    answers: tuple[PromptAnswer, ...]

    @property
    def score(self) -> float:
        return float(np.mean([answer.score for answer in self.answers]))

    @property
    def log_p(self) -> float:
        return float(np.mean([answer.log_p for answer in self.answers]))


def total_readings(rows: Sequence[TaskRow]) -> Readings:
    """Over all tasks of one configuration."""
    counts: dict[str, float] = {}
    answers = [answer for row in rows for answer in row.answers]
    for answer in answers:
        for key, value in answer.reading.items():
            before = counts.get(key, 0.0)
            counts[key] = max(before, value) if key.startswith(LEVELS) else before + value
    return readings(counts, sum(answer.n_steps for answer in answers), sum(answer.decode_s for answer in answers))
