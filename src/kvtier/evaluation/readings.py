"""What decoding cost beside quality: bytes read, time, and what of the attention was left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

# Figures that are the largest or the latest of something; of all others the difference over the scored tokens counts.
LEVELS: Final = ("peak_", "max_")


@dataclass(frozen=True, slots=True)
class Readings:
    """Figures per token fed on its own; None where the engine does not measure it.

    Attributes:
        ram_bytes: keys and values that attention read, bytes per token. For stock: all cells that the token sees.
        disk_bytes: what the disk tier read, bytes per token.
        per_s: tokens per second.
        values_read: share of the values whose keys were scored that were read, with bounded fidelity.
        omitted, omitted_bound: attention mass that was left out, mean over all queries, heads and layers, and the mean
            of what bounds it; max_omitted: the most that one of them left out since the context was begun.
        hit_rate: eviction hit rate, the share of the attention mass of the exact step that lies on pages which are not
            in RAM.
        recall: information recall, the share of that mass that is still answered: what lies on pages that are gone for
            good is not, nor is what was left out. Both are measured against a reference that is an exact step of
            kvtier.
    """

    ram_bytes: float | None
    disk_bytes: float | None
    per_s: float | None
    values_read: float | None = None
    omitted: float | None = None
    omitted_bound: float | None = None
    max_omitted: float | None = None
    hit_rate: float | None = None
    recall: float | None = None


def counts_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """What was counted between two moments, of the figures that are numbers."""
    return {
        name: float(value if name.startswith(LEVELS) else value - before[name])
        for name, value in after.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def readings(counts: Mapping[str, float], n_tokens: int, seconds: float) -> Readings:
    """The figures per token from what `counts_between` counted over `n_tokens`."""

    def per_token(*names: str) -> float | None:
        if n_tokens == 0 or not all(name in counts for name in names):
            return None
        return sum(counts[name] for name in names) / n_tokens

    def ratio(part: str, whole: str) -> float | None:
        return counts[part] / counts[whole] if counts.get(whole) and part in counts else None

    omitted, gone = ratio("omitted_sum", "recall_rows"), ratio("gone_mass_sum", "mass_steps")
    return Readings(
        ram_bytes=per_token("k_bytes_read", "v_bytes_read") if "k_bytes_read" in counts else per_token("cell_bytes"),
        disk_bytes=per_token("disk_read_bytes"),
        per_s=n_tokens / seconds if seconds > 0 else None,
        values_read=ratio("tokens_read", "tokens_seen"),
        omitted=omitted,
        omitted_bound=ratio("bound_sum", "recall_rows"),
        max_omitted=counts.get("max_omitted") if counts.get("recall_rows") else None,
        hit_rate=ratio("evicted_mass_sum", "mass_steps"),
        recall=None if gone is None else max(0.0, 1.0 - gone - (omitted or 0.0)),
    )
