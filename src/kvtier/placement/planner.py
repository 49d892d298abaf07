"""Asks a policy for plans and checks them. A policy is somebody else's code: one that raises, answers nonsense or takes
too long is reported once and replaced by the built-in default.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ..errors import PolicyError
from ..policies.base import (
    Budgets,
    Observation,
    Observer,
    PageStats,
    Plan,
    Policy,
)
from ..policies.registry import DEFAULT, create
from ..policies.validate import check_plan

# A sound policy takes a thousandth of it; on a machine with too much to do it may wait as long as it works.
TIME_LIMIT_S: Final = 5.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Call:
    """One question to a policy, answered by a thread that may never come back."""

    stats: PageStats
    budgets: Budgets
    seen: Observation | None
    done: threading.Event = field(default_factory=threading.Event)
    plan: object = None
    error: BaseException | None = None


class _Caller:
    """A daemon thread that asks one policy. It is left behind if the policy hangs, and ends with the process."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._call: _Call | None = None
        self._wake = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._serve, name=f"kvtier-policy-{policy.name}", daemon=True)
        self._thread.start()

    def ask(self, stats: PageStats, budgets: Budgets, seen: Observation | None, limit_s: float) -> object:
        """The policy's answer. Raises what it raised, or PolicyError if it takes longer than `limit_s`."""
        call = _Call(stats, budgets, seen)
        with self._wake:
            self._call = call
            self._wake.notify()
        if not call.done.wait(limit_s):
            raise PolicyError(f"it took more than {limit_s:g} s")
        if call.error is not None:
            raise PolicyError(f"it raised {type(call.error).__name__}: {call.error}") from call.error
        return call.plan

    def end(self, wait_s: float) -> None:
        with self._wake:
            self._ended = True
            self._wake.notify()
        self._thread.join(wait_s)

    def _serve(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._call is not None or self._ended)
                call, self._call = self._call, None
            if call is None:
                return
            try:
                if call.seen is not None and isinstance(self._policy, Observer):
                    self._policy.observe(call.seen)
                call.plan = self._policy.plan(call.stats, call.budgets)
            except BaseException as err:
                call.error = err
            call.done.set()


class Planner:
    """A policy with its replacement: always gives a checked plan, whatever the policy does."""

    def __init__(
        self, policy: Policy, limit_s: float = TIME_LIMIT_S, report: Callable[[str], None] = _log.warning
    ) -> None:
        self.problem = ""
        self.policy = policy
        self._limit_s = limit_s
        self._report = report
        self._caller = _Caller(policy)
        self._first = True

    def plan(self, stats: PageStats, budgets: Budgets, seen: Observation | None = None) -> Plan:
        """Raises PolicyError only if the built-in default fails too."""
        # the first call may have to load the policy's tables
        limit_s = self._limit_s * 4 if self._first else self._limit_s
        self._first = False
        try:
            return check_plan(self._caller.ask(stats, budgets, seen, limit_s), stats, budgets)
        except PolicyError as err:
            if self.problem:
                raise
            self.problem = err.message
        self._caller.end(0.0)
        failed, self.policy = self.policy, create(DEFAULT)
        self._report(
            f"the policy '{failed.name}' is not used any more: {self.problem}. '{self.policy.name}' carries on"
        )
        self._caller = _Caller(self.policy)
        return self.plan(stats, budgets, seen)

    def end(self) -> None:
        self._caller.end(self._limit_s)
