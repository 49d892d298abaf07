"""The tables of a run of tasks, and the same for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from ...measuring.stock import Stock
from ...measuring.table import markdown
from ..report import DASH, shown_columns
from . import NEEDLE
from .results import TaskRow, total_readings
from .run import TaskEvaluation, TaskPlan

_CELL: Final = "KV cache"


def tables(result: TaskEvaluation, slow: frozenset[str] = frozenset()) -> str:
    """Scores, log-probabilities, and the needle by depth, as Markdown. Rates of `slow` rows are marked."""
    parts = [
        "Answers found, %, and points above or below the reference:\n\n" + _scores(result, slow),
        "Mean log-probability of an expected token, nats, and the difference to the reference:\n\n" + _log_ps(result),
    ]
    needles = [row for rows in (result.reference, *result.rows) for row in rows if row.task == NEEDLE]
    if needles:
        parts.append("The needle by depth: log-probability, and answers that are exact:\n\n" + _depths(needles))
    return "\n\n".join(parts)


def _names(result: TaskEvaluation) -> list[str]:
    return [f"{result.reference[0].name} (reference)", *(rows[0].name for rows in result.rows)]


def _versus(values: Sequence[Sequence[float]], write: str, write_difference: str) -> list[list[str]]:
    """Cells: the first row as it is, the others with their difference to it."""
    first = values[0]
    return [
        [
            format(x, write) + ("" if row is first else f" ({format(x - y, write_difference)})")
            for x, y in zip(row, first, strict=True)
        ]
        for row in values
    ]


def _scores(result: TaskEvaluation, slow: frozenset[str]) -> str:
    configs = (result.reference, *result.rows)
    values = [[100 * row.score for row in rows] for rows in configs]
    with_mean = [[*row, float(np.mean(row))] for row in values] if len(values[0]) > 1 else values
    header = [_CELL, *(row.task for row in result.reference), *(["mean"] if len(values[0]) > 1 else [])]
    costs = shown_columns([total_readings(rows) for rows in configs], [rows[0].name in slow for rows in configs])
    cells = _versus(with_mean, ".1f", "+.1f")
    lines = [
        [name, *row, *(column[i] for _, column in costs)]
        for i, (name, row) in enumerate(zip(_names(result), cells, strict=True))
    ]
    return markdown([*header, *(title for title, _ in costs)], lines)


def _log_ps(result: TaskEvaluation) -> str:
    configs = (result.reference, *result.rows)
    cells = _versus([[row.log_p for row in rows] for rows in configs], ".3f", "+.3f")
    header = [_CELL, *(row.task for row in result.reference)]
    return markdown(header, [[name, *row] for name, row in zip(_names(result), cells, strict=True)])


def _depths(needles: Sequence[TaskRow]) -> str:
    depths = sorted({answer.depth for row in needles for answer in row.answers if answer.depth is not None})
    lines = []
    for row in needles:
        cells = []
        for depth in depths:
            answers = [answer for answer in row.answers if answer.depth == depth]
            log_p = np.mean([answer.log_p for answer in answers])
            cells.append(
                f"{log_p:.2f}, {sum(answer.is_exact for answer in answers)}/{len(answers)}" if answers else DASH
            )
        lines.append([row.name, *cells])
    return markdown([_CELL, *(f"{100 * depth:.0f} %" for depth in depths)], lines)


def footnote(plan: TaskPlan) -> str:
    """What the tables are about, in a line."""
    weights = "weights widened to F32" if plan.f32_weights else "the model's own weights"
    return f"{plan.n_samples} prompts a task, {plan.n_tokens:,} tokens with their answers, seed {plan.seed}, {weights}"


def to_json(
    plan: TaskPlan, result: TaskEvaluation, stock: Stock | None = None, slow: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Everything, down to the single answers."""
    return {
        "stock": None if stock is None else stock.to_dict(),
        "model": str(plan.model),
        "tasks": list(plan.tasks),
        "n_tokens": plan.n_tokens,
        "n_samples": plan.n_samples,
        "seed": plan.seed,
        "f32_weights": plan.f32_weights,
        "reference": _config_values(result.reference, result.reference, slow),
        "rows": [_config_values(rows, result.reference, slow) for rows in result.rows],
        "failures": [{"name": name, "error": error} for name, error in result.failures],
    }


def _config_values(rows: Sequence[TaskRow], reference: Sequence[TaskRow], slow: frozenset[str]) -> dict[str, Any]:
    tasks = [
        {**_task_values(row, exact), "answers": [asdict(answer) for answer in row.answers]}
        for row, exact in zip(rows, reference, strict=True)
    ]
    return {"name": rows[0].name, "tasks": tasks, **asdict(total_readings(rows)), "slow_build": rows[0].name in slow}


def _task_values(row: TaskRow, reference: TaskRow) -> dict[str, Any]:
    return {
        "task": row.task,
        "n_prompts": len(row.answers),
        "score": row.score,
        "points": 100 * (row.score - reference.score),
        "exact": float(np.mean([answer.is_exact for answer in row.answers])),
        "log_p": row.log_p,
        "log_p_difference": row.log_p - reference.log_p,
    }


def to_csv(result: TaskEvaluation) -> str:
    """One line per configuration and task with a header line, the reference first."""
    out = io.StringIO()
    lines = [
        {"name": row.name, **_task_values(row, exact), **asdict(total_readings([row]))}
        for rows in (result.reference, *result.rows)
        for row, exact in zip(rows, result.reference, strict=True)
    ]
    writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()
