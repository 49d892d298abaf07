"""Why a case of test-backend-ops may be answered with "not supported": each such case is covered by one of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .upstream import OpCase

PAGE_FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")


@dataclass(frozen=True)
class Reason:
    op: str
    title: str
    why: str
    covers: Callable[[dict[str, str]], bool]


REASONS = (
    Reason(
        "SET_ROWS",
        "rows that are not F32",
        "new keys and values are computed in F32 by llama.cpp and handed over as such; a cache never receives F16 rows",
        lambda v: v["type_src"] != "f32",
    ),
    Reason(
        "SET_ROWS",
        "destination types that are no page format",
        f"pages hold {', '.join(name.upper() for name in PAGE_FORMATS)}, and a plain tensor of another type has no "
        "page to go through (a cache with such a nominal type works: its pages are stored in a format of ours)",
        lambda v: v["type_dst"] not in PAGE_FORMATS,
    ),
)


def reason_of(case: OpCase) -> Reason | None:
    """The first reason that covers an unsupported case."""
    return next((reason for reason in REASONS if reason.op == case.op and reason.covers(case.values)), None)
