"""The quality table for people, JSON and CSV for programs."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import Any

from ..measuring.table import markdown
from .rows import RowResult
from .run import Evaluation, EvaluationPlan

_HEADER = ("KV cache", "mean KL (nats)", "99th pct KL", "largest KL", "same top-1", "perplexity")


def _cells(row: RowResult, is_reference: bool) -> list[str]:
    d = row.divergence
    kl = ["-"] * 3 if is_reference else [f"{d.mean_kl:.2e}", f"{d.p99_kl:.2e}", f"{d.max_kl:.2e}"]
    top = "-" if is_reference else f"{100 * d.same_top:.1f} %"
    return [row.name + (" (reference)" if is_reference else ""), *kl, top, f"{d.perplexity:.4f}"]


def table(result: Evaluation) -> str:
    """The Markdown table, the reference first."""
    return markdown(_HEADER, [_cells(result.reference, True), *(_cells(row, False) for row in result.rows)])


def to_json(plan: EvaluationPlan, result: Evaluation) -> dict[str, Any]:
    """Everything in the table and the plan behind it, without the per-token lists (the rows file holds those)."""
    rows = [
        {"name": row.name, **asdict(row.divergence), "prefill_s": row.prefill_s, "decode_s": row.decode_s}
        for row in result.rows
    ]
    return {
        "model": str(plan.model),
        "n_prefix": plan.n_prefix,
        "n_tokens": plan.n_tokens,
        "f32_weights": plan.f32_weights,
        "reference": {"name": result.reference.name, "perplexity": result.reference.divergence.perplexity},
        "rows": rows,
        "failures": [{"name": name, "error": error} for name, error in result.failures],
    }


def to_csv(result: Evaluation) -> str:
    """One line per row with a header line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["name", "n_tokens", "mean_kl", "p99_kl", "max_kl", "same_top", "perplexity"])
    for row in result.rows:
        d = row.divergence
        writer.writerow([row.name, d.n_tokens, d.mean_kl, d.p99_kl, d.max_kl, d.same_top, d.perplexity])
    return out.getvalue()
