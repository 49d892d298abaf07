"""The quality table for people, JSON and CSV for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final

from ..measuring.stock import MARK, Stock
from ..measuring.table import markdown
from ..sizes import format_bytes
from .readings import Readings
from .rows import RowResult
from .run import Evaluation, EvaluationPlan

_QUALITY: Final = ("mean KL (nats)", "its 95 % interval", "99th pct KL", "same top-1", "perplexity", "ratio")
DASH: Final = "-"


def _number(write: Callable[[float], str], value: float | None) -> str:
    return DASH if value is None else write(value)


def _share(value: float | None) -> str:
    return _number(lambda x: f"{100 * x:.3g} %", value)


_RATE: Final = "tokens/s"
# Columns of what was read; one that no row has anything in is left out of the table.
_COSTS: Final[tuple[tuple[str, Callable[[Readings], str]], ...]] = (
    ("KV read/token", lambda r: _number(lambda x: format_bytes(round(x)), r.ram_bytes)),
    ("disk/token", lambda r: _number(lambda x: format_bytes(round(x)), r.disk_bytes or None)),
    ("values read", lambda r: _share(r.values_read)),
    ("mass skipped", lambda r: _share(r.omitted)),
    ("at most", lambda r: _share(r.omitted_bound)),
    ("eviction hits", lambda r: _share(r.hit_rate)),
    ("recall", lambda r: _share(r.recall)),
    (_RATE, lambda r: _number(lambda x: f"{x:.3g}", r.per_s)),
)


def _quality(row: RowResult, reference: RowResult) -> list[str]:
    d, is_reference = row.divergence, row is reference
    kl = [f"{d.mean_kl:.2e}", f"{d.kl_low:.1e} .. {d.kl_high:.1e}", f"{d.p99_kl:.2e}", f"{100 * d.same_top:.1f} %"]
    ratio = DASH if is_reference else f"{perplexity_ratio(row, reference):.4f}"
    return [*([DASH] * 4 if is_reference else kl), f"{d.perplexity:.4f}", ratio]


def perplexity_ratio(row: RowResult, reference: RowResult) -> float:
    return row.divergence.perplexity / reference.divergence.perplexity


def table(result: Evaluation, slow: frozenset[str] = frozenset()) -> str:
    """The Markdown table, the reference first. Rates of `slow` rows, slow builds of stock, are marked."""
    rows = (result.reference, *result.rows)
    costs = shown_columns([row.readings for row in rows], [row.name in slow for row in rows])
    cells = [
        [
            row.name + (" (reference)" if row is result.reference else ""),
            *_quality(row, result.reference),
            *(column[i] for _, column in costs),
        ]
        for i, row in enumerate(rows)
    ]
    return markdown(("KV cache", *_QUALITY, *(title for title, _ in costs)), cells)


def shown_columns(costs: Sequence[Readings], slow: Sequence[bool]) -> list[tuple[str, list[str]]]:
    """Title and cells of every column of costs in which one of the rows has something; rates of slow rows marked."""
    columns = [
        (
            title,
            [
                write(cost) + (MARK if title == _RATE and is_slow else "")
                for cost, is_slow in zip(costs, slow, strict=True)
            ],
        )
        for title, write in _COSTS
    ]
    return [(title, cells) for title, cells in columns if any(cell != DASH for cell in cells)]


def footnote(plan: EvaluationPlan) -> str:
    """What the table's numbers are about, in a line."""
    weights = "weights widened to F32" if plan.f32_weights else "the model's own weights"
    return (
        f"{plan.n_tokens:,} tokens one at a time after a prefix of {plan.n_prefix:,} in batches of "
        f"{plan.n_batch:,}, {weights}"
    )


def stock_lines(stock: Stock, slow: frozenset[str]) -> str:
    """How stock was built, and what the mark means where there is one."""
    return f"stock: {stock.build.line()}" + (f"\n{stock.footnote()}" if slow else "")


def to_json(
    plan: EvaluationPlan, result: Evaluation, stock: Stock | None = None, slow: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Everything in the table and the plan behind it, without the per-token lists (the rows file holds those)."""
    return {
        "stock": None if stock is None else stock.to_dict(),
        "model": str(plan.model),
        "n_prefix": plan.n_prefix,
        "n_tokens": plan.n_tokens,
        "n_batch": plan.n_batch,
        "f32_weights": plan.f32_weights,
        "reference": _values(result.reference, result.reference, slow),
        "rows": [_values(row, result.reference, slow) for row in result.rows],
        "failures": [{"name": name, "error": error} for name, error in result.failures],
    }


def _values(row: RowResult, reference: RowResult, slow: frozenset[str]) -> dict[str, Any]:
    return {
        "name": row.name,
        **asdict(row.divergence),
        "perplexity_ratio": perplexity_ratio(row, reference),
        "prefill_s": row.prefill_s,
        "decode_s": row.decode_s,
        **asdict(row.readings),
        "slow_build": row.name in slow,
    }


def to_csv(result: Evaluation, slow: frozenset[str] = frozenset()) -> str:
    """One line per row with a header line, the reference first; empty where nothing was measured."""
    out = io.StringIO()
    rows = [_values(row, result.reference, slow) for row in (result.reference, *result.rows)]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
