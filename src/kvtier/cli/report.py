"""What one `kvtier run` measured, as one value: for the table, for --json, for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..engine.generation import Timing
from ..engine.pace import ThreadFigures
from ..figures import Figures, TierFigures
from ..placement.placement import PlacementFigures
from ..sizes import format_bytes, format_rate, format_seconds

_PLACE: Mapping[str, str] = {
    "device": "in device memory",
    "host": "in RAM",
    "disk": "on disk",
    "remote": "on remote storage",
}
_FINISH = {"stop": "the model ended", "length": "-n reached", "context": "context full", "interrupted": "interrupted"}


@dataclass(frozen=True, slots=True)
class RunReport:
    """One generation and the state of the tiers after it. `n_layers` counts the layers with a paged cache."""

    model: str
    n_ctx: int
    n_ctx_train: int
    n_layers: int
    load_s: float
    timing: Timing
    figures: Figures
    placement: PlacementFigures | None = None
    threads: ThreadFigures | None = None

    def as_json(self, text: str) -> dict[str, Any]:
        """Plain values for json.dumps."""
        figures = asdict(self.figures)
        return {
            "model": self.model,
            "text": text,
            "n_ctx": self.n_ctx,
            "n_ctx_train": self.n_ctx_train,
            "load_s": self.load_s,
            **asdict(self.timing),
            "kv": {
                "n_layers": self.n_layers,
                **figures,
                "omitted": self.figures.omitted,
                "omitted_bound": self.figures.omitted_bound,
            },
            "policy": None if self.placement is None else asdict(self.placement),
            "threads": None if self.threads is None else asdict(self.threads),
        }

    def rows(self) -> list[tuple[str, str]]:
        """Lines of the table for people."""
        t = self.timing
        reused = f", {t.n_reused:,} of them from the cache" if t.n_reused else ""
        rows = [
            ("prompt", f"{t.n_prompt:,} tokens{reused}"),
            ("prefill", f"{format_rate(t.prefill_per_s)}, {format_seconds(t.prefill_s)}"),
            ("first token", format_seconds(t.ttft_s)),
            ("decode", f"{format_rate(t.decode_per_s)}, {t.n_generated:,} tokens ({_FINISH[t.finish]})"),
        ]
        if self.threads is not None:
            rows.append(("threads", _threads(self.threads)))
        decoded_any = t.n_generated > 0 or t.prefill_per_s is not None
        if self.placement is not None:
            p = self.placement
            moved = f", {p.n_moved:,} pages moved" if p.n_moved else ""
            rows.append(("policy", f"{p.policy}{f' ({p.state})' if p.state else ''}, {p.n_plans:,} plans{moved}"))
        return rows + (kv_rows(self.figures, self.n_layers) if decoded_any else [])


def kv_rows(figures: Figures, n_layers: int) -> list[tuple[str, str]]:
    """Lines about the tiers, for people."""
    if n_layers == 0:
        return [("kv cache", "no attention layer has written to it: nothing to tier")]
    rows = [
        (f"kv {_PLACE[name]}", _tier(tier)) for name, tier in figures.tiers.items() if name in _PLACE and _is_used(tier)
    ]
    if figures.n_gone:
        sums = f"; {format_bytes(figures.reserved_bytes)} sum them up" if figures.reserved_bytes else ""
        rows.append(("kv dropped for good", f"{figures.tiers['none'].n_pages:,} pages{sums}"))
    if figures.omitted is not None and figures.omitted_bound is not None:
        read = figures.tokens_read / max(1, figures.tokens_seen)
        rows.append(
            (
                "attention left out",
                f"{figures.omitted:.1%} on average ({figures.omitted_bound:.1%} at most); {read:.1%} of the values "
                "read",
            )
        )
    if figures.disk_reads or figures.disk_writes:
        share = (
            f", {100 * figures.n_prefetch_used / figures.n_prefetched:.0f} % of them used"
            if figures.n_prefetched
            else ""
        )
        rows += [
            ("disk reads", f"{figures.disk_reads:,} ({format_bytes(figures.disk_read_bytes)})"),
            ("disk writes", f"{figures.disk_writes:,} ({format_bytes(figures.disk_write_bytes)})"),
            ("pages read ahead", f"{figures.n_prefetched:,}{share}"),
            ("stalled on disk", format_seconds(figures.stall_us / 1e6)),
        ]
    return rows


def rate_line(t: Timing) -> str:
    """One line for people, for a turn of a conversation."""
    parts = [
        f"{t.n_prompt:,} tokens in",
        f"{t.n_generated:,} out",
        f"first after {format_seconds(t.ttft_s)}",
        format_rate(t.decode_per_s),
    ]
    return f"[{', '.join(parts)}, {_FINISH[t.finish]}]"


def _threads(figures: ThreadFigures) -> str:
    now = f"{figures.decode}"
    if figures.prefill != figures.decode:
        now += f", prefill {figures.prefill}"
    changes = f", changed {figures.n_changes:,} times" if figures.n_changes else ""
    return f"{now} of {figures.limit}{changes}" if figures.automatic else now


def _is_used(tier: TierFigures) -> bool:
    return tier.n_pages > 0 or tier.held_bytes > 0


def _tier(tier: TierFigures) -> str:
    formats = ", ".join(f"{name} {format_bytes(n)}" for name, n in tier.bytes_by_format.items() if n)
    budget = f" of {format_bytes(tier.budget_bytes)}" if tier.budget_bytes else ""
    return f"{format_bytes(tier.held_bytes)}{budget}: {tier.n_pages:,} pages" + (f" ({formats})" if formats else "")
