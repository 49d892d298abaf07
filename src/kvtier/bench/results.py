"""What a benchmark found: times per round, and the figures derived from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..measuring.figures import Spread, paired_ratio, rates, total_ratio
from ..measuring.stock import Stock
from .plan import STOCK_F16, STOCK_Q8_0

Times = dict[str, list[float]]  # configuration -> seconds of each round or chunk, all in the same order


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one decode step reads: the weights, the keys and values of the cells, and how many of those from disk.

    What kvtier's attention reads is counted; for stock it is every cell that the step sees.
    """

    weight_bytes: int
    kv_bytes: int
    disk_bytes: float = 0.0

    def roof(self, memory_bytes_per_s: float, disk_bytes_per_s: float = 0.0) -> float:
        """Tokens per second if nothing but these bytes had to move."""
        seconds = (self.weight_bytes + self.kv_bytes) / memory_bytes_per_s
        if self.disk_bytes > 0 and disk_bytes_per_s > 0:
            seconds = max(seconds, self.disk_bytes / disk_bytes_per_s)
        return 1.0 / seconds


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Decode at one context with one number of threads.

    `cpu_seconds` is processor time of the measured process: with one thread it is its work alone, whatever else the
    machine does; with several it holds their waiting for each other, too, and compares nothing.
    """

    context: int
    n_threads: int
    block_tokens: int
    seconds: Times
    cpu_seconds: Times
    traffic: dict[str, Traffic]
    filled: dict[str, str]

    def rate(self, name: str) -> Spread:
        return rates(self.seconds[name], self.block_tokens)

    def ratio(self, name: str, baseline: str) -> Spread:
        return paired_ratio(self.seconds[baseline], self.seconds[name])

    def cpu_ratio(self, name: str, baseline: str) -> Spread:
        return paired_ratio(self.cpu_seconds[baseline], self.cpu_seconds[name])


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """Prefill of one prompt, chunk by chunk; `sampled` when only some chunks were computed."""

    n_tokens: int
    n_threads: int
    chunk_tokens: int
    sampled: bool
    seconds: Times
    cpu_seconds: Times

    def rate(self, name: str) -> float:
        times = self.seconds[name]
        return self.chunk_tokens * len(times) / sum(times)

    def ratio(self, name: str, baseline: str) -> Spread:
        return total_ratio(self.seconds[baseline], self.seconds[name])

    def cpu_ratio(self, name: str, baseline: str) -> Spread:
        return total_ratio(self.cpu_seconds[baseline], self.cpu_seconds[name])


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One run of the benchmark.

    `busy` is the share of the processors that others used just before it, 0..1. `stock` says how the baselines were
    built; without it nothing is known of that.
    """

    model: str
    memory_bytes_per_s: dict[int, float]
    disk_bytes_per_s: float
    busy: float = 0.0
    decode: tuple[DecodeResult, ...] = ()
    prefill: PrefillResult | None = None
    failures: tuple[tuple[str, str], ...] = ()
    machine: dict[str, str] = field(default_factory=dict)
    stock: Stock | None = None

    def slow(self, name: str) -> bool:
        """Whether the row of this name is a baseline that another build of stock would make faster."""
        config = next((config for config in (STOCK_F16, STOCK_Q8_0) if config.name == name), None)
        return config is not None and self.stock is not None and self.stock.is_slow(config)


BASELINES = (STOCK_F16.name, STOCK_Q8_0.name)
