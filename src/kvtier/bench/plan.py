"""What one benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..formats import BY_NAME
from ..measuring.config import Configuration
from ..model.cachetypes import AUTO
from ..settings import KVSettings

STOCK_F16 = Configuration("stock f16")
STOCK_Q8_0 = Configuration("stock q8_0", type_k="q8_0", type_v="q8_0")
KVTIER_F16 = "kvtier f16"
KVTIER_Q8_0 = "kvtier q8_0"
KVTIER_QUARTER = "kvtier f16, 1/4 in RAM"


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Contexts and threads to measure, and how often.

    `contexts` are tokens already in the cache before the timed steps (0: empty). Every round times
    `block_tokens(context)` decode steps of each configuration. `prefill` is the prompt length whose prefill is
    measured (0: none), with the most threads of `threads`.

    With `computed`, kvtier's long contexts hold the text itself instead of some of its cells over and over: one
    configuration computes them, those with the same cache types load them. Stock's time does not depend on what cells
    hold. `fidelity` (bounded:EPS) adds rows of that fidelity, whose speed depends on what the cells hold: it needs
    `computed`.
    """

    model: Path
    contexts: tuple[int, ...] = (0, 8192, 32768)
    threads: tuple[int, ...] = (1, 2)
    rounds: int = 7
    prefill: int = 8192
    prefill_sampled: bool = False
    n_batch: int = 512
    stock_only: bool = False
    tiers: bool = True
    kv_dir: Path | None = None
    text: str = ""
    fidelity: str | None = None
    computed: bool = False

    def block_tokens(self, context: int) -> int:
        """Decode steps per block: long enough to outlast timer and scheduler noise, short enough to interleave."""
        return 32 if context < 2048 else 16 if context < 16384 else 8


def resident(fmt: str) -> Configuration:
    """kvtier with all pages in RAM."""
    settings = KVSettings(host_type_k=fmt, host_type_v=fmt)
    return Configuration(f"kvtier {fmt}", "kvtier", fmt, fmt, settings=settings.to_native())


def bounded(fidelity: str, fmt: str) -> Configuration:
    """kvtier that reads values by weight: keys in Q8_0, values in `fmt`, all in RAM."""
    settings = KVSettings(fidelity=fidelity, host_type_v=fmt).with_cache_types(None, None)
    return Configuration(f"kvtier {fmt} {fidelity}", "kvtier", AUTO, AUTO, settings=settings.to_native())


def bounded_quarter(cache_bytes: int, directory: Path, fidelity: str, fmt: str) -> Configuration:
    """Three quarters of the values on disk, as of the whole cache in `quarter`, beside the keys in Q8_0, which stay in
    RAM.

    `cache_bytes` are those of an f16 cache. Pages hold values alone, in `fmt`; the budget is a quarter of those, the
    keys and the means of the values.
    """
    keys, values = (int(cache_bytes / 2 * BY_NAME[kind].bits / BY_NAME["f16"].bits) for kind in ("q8_0", fmt))
    settings = KVSettings(
        host=int(keys * 1.06) + values // 4,
        disk=cache_bytes + (1 << 30),
        dir=directory,
        fidelity=fidelity,
        host_type_v=fmt,
    )
    name = f"kvtier {fmt} {fidelity}, 1/4 in RAM"
    return Configuration(name, "kvtier", AUTO, AUTO, settings=settings.with_cache_types(None, None).to_native())


def quarter(cache_bytes: int, directory: Path) -> Configuration:
    """kvtier with a host budget of a quarter of an f16 cache and the rest on disk, all in f16."""
    settings = KVSettings(
        host=cache_bytes // 4, disk=cache_bytes + (1 << 30), dir=directory, host_type_k="f16", host_type_v="f16"
    )
    return Configuration(KVTIER_QUARTER, "kvtier", settings=settings.with_cache_types("f16", "f16").to_native())


def resident_configurations(plan: BenchPlan) -> list[Configuration]:
    """Stock and kvtier configurations that need nothing measured first, baselines in front."""
    stock = [STOCK_F16, STOCK_Q8_0]
    if plan.stock_only:
        return stock
    rows = [*stock, resident("f16"), resident("q8_0")]
    if plan.fidelity is not None:
        rows += [bounded(plan.fidelity, "f16"), bounded(plan.fidelity, "q8_0")]
    return rows
