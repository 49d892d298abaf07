"""One policy over one trace with one budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..figures import UNLIMITED
from ..policies.apply import apply_plan
from ..policies.base import PLAN_STEPS, Budgets, Observation, Observer, Policy
from ..policies.registry import create
from ..policies.validate import check_plan
from ..trace import Trace
from .engine import StepFigures, TraceEngine
from .oracle import Oracle

ORACLE: Final = "oracle"
WARMUP_STEPS: Final = 64
WINDOW_STEPS: Final = 64  # of the worst stretch that is reported


@dataclass(frozen=True, slots=True)
class Setting:
    """How a simulation is run.

    Attributes:
        keep: share of all pages at the end of the trace that the host holds, 0..1.
        lossy: what leaves the host is gone; else it goes to a disk without limit.
        every: steps between plans.
        warmup: steps before the budget holds, so that the policy has seen something; they do not count.
        seed: of the policy.
    """

    keep: float
    lossy: bool = True
    every: int = PLAN_STEPS
    warmup: int = WARMUP_STEPS
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """What a policy did to a trace, as shares of the exact mass over all counted steps.

    Attributes:
        eviction_hit_rate: mass on pages that had been evicted from the host.
        recall: mass on pages that were still held, on the host or on disk.
        worst_recall: the smallest mean recall over WINDOW_STEPS steps in a row.
        n_moved: pages moved by plans; plan_us: median time of a plan, validation not counted.
        hit_rates, recalls: float32 [counted steps], step by step.
    """

    policy: str
    setting: Setting
    eviction_hit_rate: float
    recall: float
    worst_recall: float
    n_moved: int
    plan_us: float
    hit_rates: npt.NDArray[np.float32] = field(repr=False)
    recalls: npt.NDArray[np.float32] = field(repr=False)


def simulate(
    trace: Trace, policy: Policy, setting: Setting, on_step: Callable[[TraceEngine], None] | None = None
) -> Result:
    """Run a policy over a trace.

    Raises PolicyError for a plan that breaks the contract, UsageError for a trace too short.
    """
    if trace.n_steps <= setting.warmup:
        raise UsageError(
            f"the trace has {trace.n_steps:,} steps, and {setting.warmup:,} are for warming up",
            "Record a longer one, or take a smaller --warmup.",
        )
    n_pages = int(np.prod(trace.codes.shape[1:]))
    host = int(n_pages * setting.keep) * max(1, trace.header.page_bytes)
    _check_protected(trace, setting, host)
    disk = 0 if setting.lossy else UNLIMITED
    engine = TraceEngine(trace, Budgets(UNLIMITED, disk))
    met: list[StepFigures] = []
    times: list[float] = []
    n_moved = 0
    for step in range(trace.n_steps):
        if step == setting.warmup:
            engine.set_budgets(Budgets(host, disk))
        if step % setting.every == 0:
            stats, budgets = engine.stats(), engine.budgets()
            if isinstance(policy, Observer) and step > setting.warmup:
                last = met[-setting.every :]
                policy.observe(
                    Observation(
                        hit_rate=sum(m.evicted for m in last) / len(last),
                        recall=1 - sum(m.gone for m in last) / len(last),
                    )
                )
            start = time.perf_counter()
            plan = policy.plan(stats, budgets)
            times.append(time.perf_counter() - start)
            n_moved += apply_plan(engine, stats, check_plan(plan, stats, budgets))[0]
        met.append(engine.step())
        if on_step is not None:
            on_step(engine)
    counted = met[setting.warmup :]
    hit_rates = np.array([m.evicted for m in counted], np.float32)
    recalls = 1 - np.array([m.gone for m in counted], np.float32)
    window = min(WINDOW_STEPS, len(recalls))
    worst = np.convolve(recalls, np.full(window, 1 / window), "valid").min()
    return Result(
        policy.name,
        setting,
        float(hit_rates.mean()),
        float(recalls.mean()),
        float(worst),
        n_moved,
        float(np.median(times)) * 1e6,
        hit_rates,
        recalls,
    )


def _check_protected(trace: Trace, setting: Setting, host: int) -> None:
    least = 3 * trace.codes.shape[1] * max(1, trace.header.page_bytes)  # first and newest pages of each layer
    if host < least:
        share = 3 / trace.codes.shape[2]
        raise UsageError(
            f"{setting.keep:g} of the pages do not hold those that are protected",
            f"Keep at least {share:.3f}, or record a longer trace.",
        )


def make(name: str, trace: Trace, seed: int = 0) -> Policy:
    """A policy by name for one trace; "oracle" too. Raises UsageError for an unknown one."""
    return Oracle(trace) if name.strip().lower() == ORACLE else create(name, seed, (ORACLE,))


def compare(
    traces: Sequence[Trace],
    names: Sequence[str],
    settings: Sequence[Setting],
    progress: Callable[[str], None] = lambda _text: None,
) -> list[list[Result]]:
    """Every policy with every setting over every trace: lists of results, one per trace, policy by policy."""
    table = []
    for name in names:
        for setting in settings:
            progress(f"{name} at {setting.keep:.0%}")
            # under the name as it was given: parameters are a part of it
            table.append(
                [replace(simulate(trace, make(name, trace, setting.seed), setting), policy=name) for trace in traces]
            )
    return table
