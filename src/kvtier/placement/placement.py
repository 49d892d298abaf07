"""Runs a policy beside generation: a thread of its own gathers figures every few tokens and applies the plan made.

Generation never waits for a plan and never fails because of one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from ..errors import BusyError, KvtierError
from ..policies.apply import Compacting, Engine, FollowingEngine, ObservingEngine, apply_plan
from ..policies.base import (
    PLAN_STEPS,
    Observer,
    Policy,
    Telling,
)
from .planner import TIME_LIMIT_S, Planner

COMPACT_TOKENS: Final = 1000  # from one compaction to the next

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlacementFigures:
    """What was done so far. `problem` is what the policy did wrong, empty while it is in charge."""

    policy: str
    state: str = ""  # what the policy says of itself, such as the preset that `adaptive` has picked
    n_plans: int = 0
    n_moved: int = 0
    n_refused: int = 0  # moves that the engine did not carry out
    slowest_s: float = 0.0  # longest time that a plan took
    problem: str = ""


class Placement:
    """Asks a policy every `every` tokens and applies its plans, in a thread that `stop` ends."""

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        every: int = PLAN_STEPS,
        limit_s: float = TIME_LIMIT_S,
        report: Callable[[str], None] = _log.warning,
    ) -> None:
        self._engine: Final = engine
        self._planner: Final = Planner(policy, limit_s, report)
        self._every: Final = every
        self._report: Final = report
        self._n_since = self._n_uncompacted = 0
        self._wake = threading.Condition()
        self._due = self._ended = self._busy = self._is_told = False
        self._figures = PlacementFigures(policy.name)
        self._thread = threading.Thread(target=self._run, name="kvtier-placement", daemon=True)
        self._thread.start()

    @property
    def figures(self) -> PlacementFigures:
        return self._figures

    @property
    def policy(self) -> Policy:
        """The policy in charge."""
        return self._planner.policy

    def advance(self, n_tokens: int) -> None:
        """Tokens were decoded; every so many of them a plan is made, in the thread. Returns at once."""
        self._n_since += n_tokens
        self._n_uncompacted += n_tokens
        if self._n_since >= self._every:
            self._n_since = 0
            with self._wake:
                self._due = not self._ended
                self._wake.notify_all()

    def settle(self, timeout_s: float = 10.0) -> bool:
        """Wait until no plan is due or under way; False if it takes longer."""
        with self._wake:
            return self._wake.wait_for(lambda: not (self._due or self._busy), timeout_s)

    def stop(self) -> None:
        """End the thread; a plan under way is finished first. May be called twice."""
        with self._wake:
            self._ended = True
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._planner.end()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._busy = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._due or self._ended)
                if self._ended:
                    self._due = False
                    self._wake.notify_all()
                    return
                self._due, self._busy = False, True
            try:
                self._plan_once()
            except KvtierError as err:
                # of the figures or of the built-in default: the next plan may do better, generation goes on either way
                self._note(n_refused=self._figures.n_refused + 1)
                _log.debug("no plan this time: %s", err)
            except Exception:  # a bug, of ours or of a policy: whoever waits for a plan must not wait for ever
                self._note(n_refused=self._figures.n_refused + 1)
                _log.exception("no plan this time")

    def _plan_once(self) -> None:
        stats = self._engine.stats()
        if not len(stats):
            return
        budgets = self._engine.budgets()
        engine, policy = self._engine, self._planner.policy
        seen = engine.observation() if isinstance(policy, Observer) and isinstance(engine, ObservingEngine) else None
        start = time.perf_counter()
        plan = self._planner.plan(stats, budgets, seen)
        took_s = time.perf_counter() - start
        n_moved, refused = apply_plan(self._engine, stats, plan)
        if isinstance(engine, FollowingEngine):
            engine.follow(stats, plan)
        wrong = [err for err in refused if not isinstance(err, BusyError)]  # what is in use may move next time
        if wrong and not self._is_told:
            self._is_told = True
            self._report(f"a move that the policy wanted was refused (said once): {wrong[0].message}")
        if self._n_uncompacted >= COMPACT_TOKENS and isinstance(self._engine, Compacting):
            self._n_uncompacted = 0
            self._engine.compact()
        f = self._figures
        self._note(
            policy=self._planner.policy.name,
            state=self._planner.policy.state if isinstance(self._planner.policy, Telling) else "",
            n_plans=f.n_plans + 1,
            n_moved=f.n_moved + n_moved,
            n_refused=f.n_refused + len(refused),
            slowest_s=max(f.slowest_s, took_s),
            problem=self._planner.problem,
        )

    def _note(self, **changes: object) -> None:
        self._figures = replace(self._figures, **changes)  # type: ignore[arg-type]
