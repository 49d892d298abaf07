"""What the online memory does with pages: its parts, switched on and off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..errors import SettingsError
from .levels import SUB

MEMORY_POLICIES: Final = ("delta", "adaptive")
MOST_SHARE: Final = 0.5  # of the budget, for anything but pages


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """What the online memory does with a page before it is gone.

    Attributes:
        compress: pages are kept in fewer bits before they are dropped.
        online_share: share of the host budget for the online state, for example 0.01; 0: none, since with it
            distributions lie further from the exact ones than without (docs/lossy.md).
        low_rank: dimensions of the streaming cache: pages that leave go there in groups, as far as its share of the
            budget reaches; a multiple of
            32, 0: none, since pages of four bits are worth as much (docs/lossy.md).
        low_rank_share: share of the host budget for it.
        spread: the online state keeps the spread of its cells' keys.
        slack: share of the host budget that stays free for frames of other formats.
    """

    compress: bool = True
    online_share: float = 0.0
    spread: bool = False
    slack: float = 0.03
    low_rank: int = 0
    low_rank_share: float = 0.12

    def __post_init__(self) -> None:
        if self.low_rank < 0 or self.low_rank % SUB:
            raise SettingsError(
                f"low_rank is {self.low_rank}, which is not a multiple of {SUB}", f"Take {SUB}, or 0 for none."
            )
        for name, value in (
            ("online_share", self.online_share),
            ("slack", self.slack),
            ("low_rank_share", self.low_rank_share),
        ):
            if not 0.0 <= value <= MOST_SHARE:
                raise SettingsError(
                    f"{name} is {value}, which is not between 0 and {MOST_SHARE}",
                    "Take a small share of the budget, such as 0.01.",
                )


def memory_for(policy: str) -> MemorySettings:
    """What goes with a policy: the simple ones drop pages as they are, which is their baseline."""
    return MemorySettings() if policy in MEMORY_POLICIES else MemorySettings(compress=False)
