"""Plain tables that read well on a terminal and are Markdown at the same time."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An aligned Markdown table; the first column is left-aligned, the others right-aligned."""
    widths = [
        max(3, len(header[i]), *(len(row[i]) for row in rows)) if rows else max(3, len(header[i]))
        for i in range(len(header))
    ]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = "| " + " | ".join("-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)) + " |"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])
