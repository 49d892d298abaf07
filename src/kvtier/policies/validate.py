"""Is a plan one that can be carried out? Used on every plan before it is applied, whoever made it."""

from __future__ import annotations

import numpy as np

from ..errors import PolicyError
from ..figures import TIERS
from .base import ARRAYS, DISK, GONE, HOST, Budgets, PageStats, Plan


def check_plan(plan: object, stats: PageStats, budgets: Budgets) -> Plan:
    """The plan, if it keeps the contract. Raises PolicyError that says which part it breaks.

    The contract: keep has one finite number per page; moves name existing pages, each once, never a protected one
    except to the host; tiers are host, disk (if there is one) or gone; pages to the host come from the disk; afterwards
    host and disk hold no more than before or than their budgets.
    """
    if not isinstance(plan, Plan):
        raise PolicyError(f"it answered {type(plan).__name__} instead of a Plan")
    _check_shapes(plan, len(stats))
    indices, to_tier = plan.indices, plan.to_tier
    if len(indices) == 0:
        return plan
    if indices.min() < 0 or indices.max() >= len(stats):
        raise PolicyError(f"a move names page {indices.max() if indices.min() >= 0 else indices.min()} of {len(stats)}")
    if len(np.unique(indices)) < len(indices):
        raise PolicyError("two moves name the same page")
    allowed = (to_tier == HOST) | (to_tier == GONE) | ((to_tier == DISK) & (budgets.disk_bytes > 0))
    if not allowed.all():
        tier = int(to_tier[~allowed][0])
        raise PolicyError(f"a move goes to tier {TIERS[tier] if 0 <= tier < len(TIERS) else tier}, which is not there")
    if stats.protected[indices[to_tier != HOST]].any():
        raise PolicyError("a move takes a protected page off the host")
    _check_budgets(plan, stats, budgets)
    return plan


def _check_shapes(plan: Plan, n: int) -> None:
    for name, kind, shape in (
        ("keep", np.floating, (n,)),
        ("indices", np.integer, None),
        ("to_tier", np.integer, None),
    ):
        value = getattr(plan, name)
        if not isinstance(value, np.ndarray) or value.ndim != 1 or not np.issubdtype(value.dtype, kind):
            raise PolicyError(f"{name} of its plan is no one-dimensional array of {kind.__name__} type")
        if shape is not None and value.shape != shape:
            raise PolicyError(f"{name} of its plan has {len(value)} entries for {n} pages")
    if not np.isfinite(plan.keep).all():
        raise PolicyError("keep of its plan has values that are not finite")
    if len(plan.indices) != len(plan.to_tier):
        raise PolicyError(f"its plan has {len(plan.indices)} pages to move and {len(plan.to_tier)} places")


def _check_budgets(plan: Plan, stats: PageStats, budgets: Budgets) -> None:
    after = stats.tier.copy()
    after[plan.indices] = plan.to_tier
    for tier, budget in ((HOST, budgets.host_bytes), (DISK, budgets.disk_bytes)):
        held = int(stats.bytes[after == tier].sum())
        before = int(stats.bytes[stats.tier == tier].sum())
        if held > budget and held > before:
            raise PolicyError(f"{TIERS[tier]} would hold {held:,} bytes of {budget:,}")


def check_stats(stats: PageStats) -> None:
    """For tests and engines: all arrays have the same length. Raises PolicyError."""
    lengths = {name: len(getattr(stats, name)) for name in ARRAYS}
    if len(set(lengths.values())) > 1:
        raise PolicyError(f"arrays of different lengths: {lengths}")
