"""The presets that `adaptive` picks from, in one table, and the rules that pick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .signals import Signals


@dataclass(frozen=True, slots=True)
class Preset:
    """One way to place pages.

    Attributes:
        name: what it is called in logs and figures.
        fill: share of the host budget that plans leave filled; what is below 1 is room that pages are begun in without
            a wait.
        window: share of the host budget that is always for the newest pages.
        sink_tokens: tokens at the start of each stream that stay.
        swaps: most pages that come back from disk in one plan, as a share of all.
        when: the rule in words.
    """

    name: str
    fill: float
    window: float
    sink_tokens: int
    swaps: float
    when: str


CONSERVATIVE: Final = Preset("conservative", 1.0, 0.0, 32, 0.05, "the guard found too much mass on what had left")
BALANCED: Final = Preset("balanced", 1.0, 0.0, 32, 0.02, "nothing else applies")

PRESETS: Final = (
    CONSERVATIVE,
    BALANCED,
    Preset("roomy", 1.0, 0.0, 32, 0.05, "less than 70 % of the budget is used"),
    Preset(
        "code", 1.0, 0.0, 64, 0.03, "more than 25 % of the newest text looks like code: names come back from far away"
    ),
    Preset(
        "dialogue", 1.0, 0.05, 256, 0.02, "at least 4 turns per 1,000 words: the first turn and the newest ones matter"
    ),
    Preset("local", 1.0, 0.1, 32, 0.01, "more than 80 % of the mass is on the newest tenth of the context"),
    Preset(
        "document", 1.0, 0.0, 32, 0.04, "attention is spread evenly (entropy above 0.85) over more than 8,192 tokens"
    ),
    Preset("slow", 0.95, 0.0, 32, 0.0, "fewer than 3 tokens/s: nothing comes back from disk but by being read"),
)

Rule = Callable[[Signals], bool]

# in this order: the first that applies is taken
RULES: Final[tuple[tuple[str, Rule], ...]] = (
    ("roomy", lambda s: s.memory_use < 0.7),
    ("slow", lambda s: 0 < s.decode_per_s < 3),
    ("code", lambda s: s.code_share > 0.25),
    ("dialogue", lambda s: s.turns_per_1000 >= 4),
    ("local", lambda s: s.locality > 0.8),
    ("document", lambda s: s.entropy > 0.85 and s.n_tokens > 8192),
)


def pick(signals: Signals) -> Preset:
    """The preset whose rule applies first."""
    name = next((name for name, applies in RULES if applies(signals)), BALANCED.name)
    return by_name(name)


def by_name(name: str) -> Preset:
    """Raises KeyError."""
    return _BY_NAME[name]


_BY_NAME: Final = {preset.name: preset for preset in PRESETS}
