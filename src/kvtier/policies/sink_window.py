"""Attention sinks and a window of the newest tokens (StreamingLLM, Xiao et al. 2023, arXiv:2309.17453)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..sizes import parse_tokens
from .base import Budgets, PageStats, Plan, place
from .parameters import Parse


@dataclass(slots=True)
class SinkWindow:
    """The first `sink_tokens` of a stream and its newest pages stay: everything else leaves by age, oldest first."""

    seed: int = 0
    sink_tokens: int = 64
    name: str = "sink_window"
    parameters: ClassVar[Mapping[str, Parse]] = {"sink_tokens": parse_tokens}

    def plan(self, stats: PageStats, budgets: Budgets) -> Plan:
        recency = 1.0 / (1.0 + stats.age)
        sink = stats.position * stats.page_tokens < self.sink_tokens
        return place(stats, budgets, np.where(sink, np.float32(2.0), recency).astype(np.float32))
