"""Runs a policy beside generation: a thread of its own gathers figures every few tokens, asks for a plan, checks and
applies it.

A policy is somebody else's code. One that raises, answers nonsense or takes too long is reported once and replaced by
the built-in default; generation never waits for a plan and never fails because of one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ..errors import BusyError, KvtierError, PolicyError
from ..figures import UNLIMITED, Figures
from ..formats import BY_NAME
from ..native.kv import KVCache, LayerMass
from ..native.pagekeys import PageKeys
from ..policies.apply import Compacting, Engine, FollowingEngine, ObservingEngine, apply_plan
from ..policies.base import (
    GONE,
    HOST,
    PLAN_STEPS,
    Budgets,
    Floats,
    Indices,
    Observation,
    Observer,
    PageStats,
    Plan,
    Policy,
    Telling,
)
from ..policies.looks import LayerLook, Shape, Tracker
from ..policies.registry import DEFAULT, create
from ..policies.validate import check_plan
from ..settings import MASS_DECAY

TIME_LIMIT_S: Final = (
    5.0  # a sound policy takes a thousandth of it; on a machine with too much to do it may wait as long as it works
)
COMPACT_TOKENS: Final = 1000  # from one compaction to the next
TEXT_TOKENS: Final = 512  # of the newest text that policies are told of
RATE_STEPS: Final = 33

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


class KVEngine:
    """A model's KV cache as an engine. `advance` is told of every decoded token; `to_text` turns tokens into text."""

    def __init__(self, kv: KVCache, to_text: Callable[[Sequence[int]], str] = lambda _tokens: "") -> None:
        self._kv: Final = kv
        self._keys: Final = PageKeys(kv)
        self._to_text: Final = to_text
        self._newest: deque[int] = deque(maxlen=TEXT_TOKENS)
        self._times: deque[float] = deque(maxlen=RATE_STEPS)  # when the last single tokens were decoded
        self._n_seen = 0
        self._weights = 0.0  # what one step's mass sums to over all layers
        self._tracker: Tracker | None = None
        self._n_pages: dict[int, int] = {}  # by array

    def advance(self, tokens: Sequence[int]) -> None:
        self._n_seen += len(tokens)
        self._newest.extend(tokens)
        if len(tokens) == 1:
            self._times.append(time.perf_counter())
        else:
            self._times.clear()

    def observation(self) -> Observation:
        times = tuple(self._times)
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else 0.0
        lost = self._lost()
        return Observation(self._to_text(tuple(self._newest)), rate, lost, None if lost is None else 1.0 - lost)

    def _lost(self) -> float | None:
        """Share of the mass that pages had when they were dropped for good, as if they had it still; None where none is
        dropped.

        What attention would give them now cannot be measured any more. Mass fades with age, so this is rather too much.
        """
        if self._kv.settings.fidelity != "lossy" or self._weights <= 0:
            return None
        return min(1.0, self._kv.lost_mass() / self._weights)

    def stats(self) -> PageStats:
        """Raises NativeError if the caches change meanwhile."""
        layers = [self._kv.layer(i) for i in range(self._kv.n_layers)]
        shape = self._shape(layers)
        if self._tracker is None or self._tracker.shape != shape:
            self._tracker = Tracker(shape)
        pages = [self._kv.pages(i).tier for i in range(len(layers))]
        sizes = page_sizes(self._kv.figures, layers, pages)
        cells = max((layer.figures.cells_per_stream for layer in layers), default=0)
        self._keys.begin_look()
        keys = [self._keys.look(layer.figures, tier) for layer, tier in zip(layers, pages, strict=True)]
        looks = [
            LayerLook(
                array=layer.figures.array,
                layer=layer.figures.layer,
                pages_per_stream=layer.figures.n_pages // max(1, layer.figures.n_streams),
                tier=tier,
                bytes=np.full(len(tier), size, np.int64),
                mean=layer.page_mean.copy(),
                max=layer.page_max.copy(),
                key_norm=key_norm,
                value_norm=value_norm,
                key_novelty=key_novelty,
                sharp=np.sqrt(np.einsum("pt,pt->p", layer.token_mean, layer.token_mean)),
                weight=self._weight(layer),
                is_window=layer.figures.cells_per_stream < cells,
            )
            for layer, tier, size, (key_norm, value_norm, key_novelty) in zip(layers, pages, sizes, keys, strict=True)
        ]
        self._n_pages = {look.array: len(look.tier) for look in looks}
        self._weights = sum(look.weight for look in looks)
        return self._tracker.stats(looks, self._n_seen, self._n_tokens(looks))

    def _shape(self, layers: Sequence[LayerMass]) -> Shape:
        protect_first, protect_last = self._kv.settings.protected_pages
        return Shape(
            n_layers=1 + max((layer.figures.layer for layer in layers), default=0),
            page_tokens=layers[0].figures.page_tokens if layers else 1,
            protect_first=protect_first,
            protect_last=protect_last,
        )

    def _weight(self, layer: LayerMass) -> float:
        """What one step's mass sums to: the query heads, as far as the decayed mean of the steps so far tells."""
        decay = self._kv.settings.mass_decay
        part = 1 - (MASS_DECAY if decay is None else decay) ** max(1, layer.figures.n_mass_steps)
        return float(layer.page_mean.sum()) / part or 1.0

    def _n_tokens(self, looks: Sequence[LayerLook]) -> int:
        """Tokens of the longest stream: those seen, as far as the pages that are begun agree (context may be taken
        back)."""
        begun = 0
        for look in looks:
            there = np.flatnonzero(look.tier != GONE) % look.pages_per_stream
            begun = max(begun, int(there.max()) + 1 if len(there) else 0)
        tokens = self._tracker.shape.page_tokens if self._tracker else 1
        return min(max(self._n_seen, (begun - 1) * tokens + 1), begun * tokens)

    def budgets(self) -> Budgets:
        """Where what leaves the host has no place to go, no page can leave: then the host has no limit for a plan."""
        settings, tiers = self._kv.settings, self._kv.figures.tiers
        host, disk = tiers["host"].budget_bytes, tiers["disk"].budget_bytes
        if settings.disk is None:
            return Budgets(UNLIMITED if host is None or settings.fidelity != "lossy" else host, 0)
        return Budgets(UNLIMITED if host is None else host, UNLIMITED if disk is None else disk)

    def move(self, array: int, pages: Sequence[int], to_tier: str) -> int:
        return self._kv.move(array, pages, to_tier)

    def compact(self) -> None:
        self._kv.compact()

    def set_keep(self, array: int, pages: Indices, keep: Floats) -> None:
        """Pages without content, which may be begun before the next plan, are kept like the best."""
        scores = np.full(self._n_pages[array], keep.max(initial=0.0), np.float32)
        scores[pages] = keep
        self._kv.set_keep(array, scores)


def page_sizes(
    figures: Figures, layers: Sequence[LayerMass], tiers: Sequence[np.ndarray[tuple[int], np.dtype[np.uint8]]]
) -> list[int]:
    """Bytes of a page of each layer in RAM: the tier's bytes, shared out by what a cell of the layer holds."""
    weights = [f.page_tokens * f.n_head_kv * (f.d_k + f.d_v) for f in (layer.figures for layer in layers)]
    held = sum(weight * int(np.count_nonzero(tier == HOST)) for weight, tier in zip(weights, tiers, strict=True))
    used = figures.tiers["host"].used_bytes
    bytes_per_item = used / held if held and used else BY_NAME["f16"].bits / 8
    return [max(1, round(weight * bytes_per_item)) for weight in weights]


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
