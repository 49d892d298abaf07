"""One matrix over all policies: plans are valid, budgets are held, the same calls give the same plans."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import PolicyError, UsageError
from kvtier.figures import UNLIMITED
from kvtier.policies import Budgets, PageStats, Plan, Policy, check_plan, create, names, place, registry
from kvtier.policies.adaptive import Adaptive
from kvtier.policies.base import ARRAYS, DISK, GONE, HOST
from kvtier.policies.delta import Delta
from kvtier.policies.features import FEATURES
from kvtier.policies.h2o import H2o
from kvtier.policies.looks import LayerLook, Shape, Tracker
from kvtier.policies.scorer import Scorer, shipped
from kvtier.policies.sink_window import SinkWindow
from kvtier.policies.validate import check_stats

from .traces import random_stats

POLICIES = tuple(registry.BUILT_IN)
BUDGETS = {
    "no limit": Budgets(),
    "lossy": Budgets(40_000, 0),
    "disk": Budgets(40_000, UNLIMITED),
    "small disk": Budgets(40_000, 20_000),
    "less than what is protected": Budgets(3_000, 0),
}


def after(stats: PageStats, plan: Plan) -> PageStats:
    """The pages as they are when the plan was carried out."""
    tier = stats.tier.copy()
    tier[plan.indices] = plan.to_tier
    left = tier != GONE
    arrays = {name: getattr(stats, name)[left] for name in ARRAYS}
    return PageStats(
        **{**arrays, "tier": tier[left]},
        clock=stats.clock + 16,
        n_tokens=stats.n_tokens + 16,
        page_tokens=stats.page_tokens,
    )


def held(stats: PageStats, tier: int) -> int:
    return int(stats.bytes[stats.tier == tier].sum())


@pytest.mark.parametrize("budgets", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("name", POLICIES)
def test_plans_are_valid_and_budgets_held(name: str, budgets: Budgets) -> None:
    policy = create(name)
    stats = random_stats(np.random.default_rng(1), 4, 25, on_disk=0.1 if budgets.disk_bytes else 0.0)
    for _ in range(4):
        check_stats(stats)
        stats = after(stats, check_plan(policy.plan(stats, budgets), stats, budgets))
        protected = int(stats.bytes[stats.protected].sum())
        assert held(stats, HOST) <= max(budgets.host_bytes, protected)
        assert held(stats, DISK) <= budgets.disk_bytes


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(
    seed=st.integers(0, 1 << 32),
    n_layers=st.integers(1, 5),
    n_pages=st.integers(1, 40),
    host=st.integers(0, 200_000),
    disk=st.integers(0, 200_000),
    zero_mass=st.booleans(),
)
def test_any_figures_give_a_valid_plan(
    name: str, seed: int, n_layers: int, n_pages: int, host: int, disk: int, zero_mass: bool
) -> None:
    budgets = Budgets(host, disk)
    stats = random_stats(
        np.random.default_rng(seed), n_layers, n_pages, on_disk=0.3 if disk else 0.0, zero_mass=zero_mass
    )
    stats = after(stats, place(stats, Budgets(UNLIMITED, disk), np.ones(len(stats), np.float32)))
    plan = check_plan(create(name).plan(stats, budgets), stats, budgets)
    held_after = after(stats, plan)
    assert held(held_after, HOST) <= max(host, int(stats.bytes[stats.protected].sum()))
    moved = stats.tier[plan.indices] != plan.to_tier
    assert moved.all()


@pytest.mark.parametrize("name", POLICIES)
def test_no_pages_no_plan(name: str) -> None:
    stats = random_stats(np.random.default_rng(0), 1, 0)
    assert len(check_plan(create(name).plan(stats, Budgets(0, 0)), stats, Budgets(0, 0)).indices) == 0


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_calls_give_the_same_plans(name: str) -> None:
    def run() -> list[bytes]:
        policy, plans = create(name, seed=5), []
        stats = random_stats(np.random.default_rng(9), 3, 60)
        for _ in range(5):
            plan = policy.plan(stats, Budgets(60_000, 0))
            plans.append(plan.keep.tobytes() + plan.indices.tobytes() + plan.to_tier.tobytes())
            stats = after(stats, plan)
        return plans

    assert run() == run()


@pytest.mark.parametrize("name", POLICIES)
def test_figures_are_left_alone(name: str) -> None:
    stats = random_stats(np.random.default_rng(2), 3, 30)
    before = {field: getattr(stats, field).copy() for field in ARRAYS}
    create(name).plan(stats, Budgets(30_000, 0))
    assert all(np.array_equal(before[field], getattr(stats, field)) for field in ARRAYS)


def test_what_each_policy_keeps() -> None:
    """The page that each policy lets go first, of pages that differ in one figure."""
    base = random_stats(np.random.default_rng(3), 1, 20)
    flat = {name: np.full(20, 0.5, np.float32) for name in ("mass_mean", "mass_max", "uses", "key_novelty", "idle")}
    base = replace(base, **flat)
    middle = np.arange(1, 18)

    def first_to_go(name: str, **figures: np.ndarray) -> int:
        plan = create(name).plan(replace(base, **figures), Budgets(19_000, 0))
        assert len(plan.indices) >= 1
        return int(middle[np.argmin(plan.keep[middle])])

    one = np.full(20, 0.5, np.float32)
    one[7] = 0.1
    assert first_to_go("lru", idle=1 - one) == 7
    assert first_to_go("h2o", mass_mean=one) == 7
    assert first_to_go("key_diversity", key_novelty=one) == 7
    assert first_to_go("retention", mass_mean=one) == 7
    assert first_to_go("sink_window") == 2  # pages 0 and 1 are the sink's 64 tokens
    assert first_to_go("static") == 17  # the newest that is not protected


def test_place_brings_back_what_is_worth_it_and_no_more() -> None:
    stats = random_stats(np.random.default_rng(4), 1, 50)
    tier = stats.tier.copy()
    tier[10:20] = DISK
    stats = replace(stats, tier=tier)
    keep = np.full(50, 1.0, np.float32)
    keep[12], keep[13], keep[30] = 5.0, 1.1, 0.5
    full = Budgets(
        int(stats.bytes[tier == HOST].sum()) + 1000, UNLIMITED
    )  # room for the page that is begun next, and no more
    plan = place(stats, full, keep, swaps=0.1)
    assert dict(zip(plan.indices.tolist(), plan.to_tier.tolist(), strict=True)) == {30: DISK, 12: HOST}
    roomy = place(stats, Budgets(UNLIMITED, UNLIMITED), keep, swaps=1.0)
    assert sorted(roomy.indices.tolist()) == list(range(10, 20))


BAD_PLANS = {
    "no plan": (lambda n: "evict everything", "instead of a Plan"),
    "keep too short": (
        lambda n: Plan(np.zeros(n - 1, np.float32), np.zeros(0, np.int64), np.zeros(0, np.uint8)),
        "entries for",
    ),
    "keep not finite": (
        lambda n: Plan(np.full(n, np.nan, np.float32), np.zeros(0, np.int64), np.zeros(0, np.uint8)),
        "finite",
    ),
    "keep a list": (
        lambda n: Plan([0.0] * n, np.zeros(0, np.int64), np.zeros(0, np.uint8)),
        "no one-dimensional array",
    ),
    "page out of range": (
        lambda n: Plan(np.zeros(n, np.float32), np.array([n]), np.array([GONE], np.uint8)),
        "names page",
    ),
    "negative page": (
        lambda n: Plan(np.zeros(n, np.float32), np.array([-1]), np.array([GONE], np.uint8)),
        "names page -1",
    ),
    "twice": (lambda n: Plan(np.zeros(n, np.float32), np.array([5, 5]), np.array([GONE, GONE], np.uint8)), "same page"),
    "no such tier": (lambda n: Plan(np.zeros(n, np.float32), np.array([5]), np.array([77], np.uint8)), "not there"),
    "a tier below the first": (lambda n: Plan(np.zeros(n, np.float32), np.array([5]), np.array([-10])), "tier -10"),
    "large page": (
        lambda n: Plan(np.zeros(n, np.float32), np.array([1 << 63], np.uint64), np.array([GONE], np.uint8)),
        "names page",
    ),
    "no disk": (lambda n: Plan(np.zeros(n, np.float32), np.array([5]), np.array([DISK], np.uint8)), "tier disk"),
    "protected": (lambda n: Plan(np.zeros(n, np.float32), np.array([0]), np.array([GONE], np.uint8)), "protected"),
    "lengths": (
        lambda n: Plan(np.zeros(n, np.float32), np.array([5, 6]), np.array([GONE], np.uint8)),
        "2 pages to move and 1",
    ),
    "floats as indices": (
        lambda n: Plan(np.zeros(n, np.float32), np.array([5.0]), np.array([GONE], np.uint8)),
        "indices",
    ),
}


@pytest.mark.parametrize("bad", BAD_PLANS, ids=BAD_PLANS)
def test_nonsense_is_refused(bad: str) -> None:
    make, words = BAD_PLANS[bad]
    stats = random_stats(np.random.default_rng(5), 2, 20)
    with pytest.raises(PolicyError, match=words):
        check_plan(make(len(stats)), stats, Budgets(30_000, 0))


def test_any_type_of_whole_number_will_do() -> None:
    stats = random_stats(np.random.default_rng(5), 2, 20)
    free = np.flatnonzero(~stats.protected & (stats.tier == HOST))[:2]
    plan = Plan(np.zeros(len(stats), np.float64), free.astype(np.uint64), np.array([GONE, GONE], np.int16))
    assert check_plan(plan, stats, Budgets(30_000, 0)) is plan


def test_a_plan_that_overfills_a_tier_is_refused() -> None:
    stats = random_stats(np.random.default_rng(5), 1, 20, on_disk=0.5)
    disk = np.flatnonzero(stats.tier == DISK)
    plan = Plan(np.zeros(20, np.float32), disk, np.full(len(disk), HOST, np.uint8))
    with pytest.raises(PolicyError, match="host would hold"):
        check_plan(plan, stats, Budgets(10_000, UNLIMITED))
    with pytest.raises(PolicyError, match="disk would hold"):
        some = np.flatnonzero((stats.tier == HOST) & ~stats.protected)
        check_plan(Plan(plan.keep, some, np.full(len(some), DISK, np.uint8)), stats, Budgets(30_000, 5_000))


def test_unknown_name_lists_what_exists() -> None:
    with pytest.raises(UsageError) as caught:
        create("lfu")
    assert all(name in str(caught.value) for name in POLICIES)
    assert create("Sink-Window").name == "sink_window"


def test_parameters_follow_the_name(tmp_path: Path) -> None:
    sinks = create("sink-window:sink-tokens=1k")
    assert isinstance(sinks, SinkWindow) and sinks.sink_tokens == 1024
    delta = create("delta : scorer = off : forecast_share=1")
    assert isinstance(delta, Delta) and delta.scorer is None and delta.forecast_share == 1.0
    forecast, plain = create("delta:forecast-share=1"), create("delta")
    assert isinstance(forecast, Delta) and forecast.scorer is not None
    assert isinstance(plain, Delta) and plain.scorer is None
    weights = tmp_path / "mine.npz"
    shipped().save(weights)
    adaptive = create(f"adaptive:scorer={weights}")
    assert isinstance(adaptive, Adaptive) and adaptive.delta.scorer is not None
    assert np.array_equal(adaptive.delta.scorer.w1, shipped().w1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lru:keep=3", "'lru' has no parameter 'keep'.*\n.*it takes none"),
        ("delta:sinks=3", "no parameter 'sinks'.*\n.*scorer, forecast_share"),
        ("delta:forecast-share=2", "forecast_share is '2': it must lie between 0 and 1"),
        ("delta:forecast-share=nan", "forecast_share is 'nan': it must"),
        ("delta:forecast-share=much", "forecast_share is 'much'"),
        ("delta:scorer", "'scorer' is no parameter"),
        ("delta:scorer=off:scorer=off", "given twice"),
        ("delta:scorer=/nowhere/x.npz", "scorer: the scorer /nowhere/x.npz cannot be read.*\n.*scorer train"),
        ("sink_window:sink-tokens=-1", "sink_tokens: '-1'|sink_tokens is '-1'"),
    ],
)
def test_a_bad_parameter_names_the_value_and_the_way_out(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        create(text)


class _Theirs:
    name = "theirs"
    parameters: ClassVar = {"power": float}

    def __init__(self, seed: int, power: float = 1.0) -> None:
        self.seed, self.power = seed, power

    def plan(self, stats: PageStats, budgets: Budgets) -> Plan:
        return place(stats, budgets, stats.mass_max)


def _no_policy(seed: int) -> object:
    return object()


def test_third_parties_register_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(group: str) -> list[EntryPoint]:
        assert group == "kvtier.policies"
        registered = {"theirs": "_Theirs", "bad": "_no_policy", "missing": "_Nothing", "lru": "_Theirs"}
        return [EntryPoint(name, f"{__name__}:{value}", group) for name, value in registered.items()]

    monkeypatch.setattr(registry, "entry_points", found)
    assert names() == (*POLICIES, "bad", "missing", "theirs")
    theirs = create("theirs:power=2", seed=3)
    assert isinstance(theirs, _Theirs) and (theirs.seed, theirs.power) == (3, 2.0)
    with pytest.raises(UsageError, match="power is 'x'"):
        create("theirs:power=x")
    assert not isinstance(create("lru"), _Theirs)
    with pytest.raises(PolicyError, match="no `name`"):
        create("bad")
    with pytest.raises(PolicyError, match="cannot be made: AttributeError"):
        create("missing")


def _look(tier: list[int], mean: list[float]) -> LayerLook:
    n = len(tier)
    none = np.zeros(0, np.float32)
    return LayerLook(
        7,
        2,
        n,
        np.array(tier, np.uint8),
        np.full(n, 10, np.int64),
        np.array(mean, np.float32),
        np.array(mean, np.float32),
        none,
        none,
        none,
    )


def test_looks_tell_idle_and_uses() -> None:
    tracker = Tracker(Shape(n_layers=5, page_tokens=32))
    stats = tracker.stats([_look([HOST, HOST, HOST, GONE], [0.6, 0.3, 0.5, 0.0])], 96, 96)
    assert stats.array.tolist() == [7, 7, 7]
    assert stats.age.tolist() == [64, 32, 0]
    assert stats.uses.tolist() == [1, 0, 1]
    assert stats.protected.tolist() == [True, True, True]
    stats = tracker.stats([_look([HOST, GONE, HOST, HOST], [0.2, 0.0, 0.5, 0.4])], 120, 120)
    assert stats.page.tolist() == [0, 2, 3]
    assert stats.age.tolist() == [88, 24, 0]
    assert stats.idle.tolist() == [24, 0, 0]
    assert stats.uses.tolist() == [0.5, 1, 1]
    assert stats.layer_depth.tolist() == [0.5] * 3
    assert stats.key_norm.tolist() == [0.0] * 3


def test_a_text_that_was_taken_back_is_forgotten() -> None:
    tracker, h2o = Tracker(Shape(n_layers=5, page_tokens=32)), H2o()
    for clock in (192, 208):
        stats = tracker.stats([_look([HOST] * 6, [0.1, 0.6, 0.1, 0.1, 0.05, 0.05])], clock, 192)
        h2o.plan(stats, Budgets(1_000, 0))
    assert stats.uses.tolist() == [0, 1, 0, 0, 0, 0]
    stats = tracker.stats([_look([HOST] * 5 + [GONE], [0.1, 0.1, 0.6, 0.1, 0.1, 0.0])], 368, 150)
    assert stats.uses.tolist() == [0, 0, 1, 0, 0]
    assert stats.mass_long.tolist() == pytest.approx([0.1, 0.1, 0.6, 0.1, 0.1])
    keep = h2o.plan(stats, Budgets(1_000, 0)).keep
    assert keep[2] > keep[1]
    # told with every look from then on: a policy that was not asked at the very one learns of it all the same
    tracker.stats([_look([HOST] * 2 + [GONE] * 4, [0.5, 0.5, 0, 0, 0, 0])], 384, 50)
    stats = tracker.stats([_look([HOST] * 6, [0.3, 0.3, 0.0, 0.4, 0.0, 0.0])], 510, 176)
    keep = h2o.plan(stats, Budgets(1_000, 0)).keep
    assert stats.n_taken_back == 2 and keep[3] > keep[2]


def test_every_policy_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "policies.md").read_text(encoding="utf-8")
    assert all(f"\n| `{name}` |" in page for name in POLICIES)


def test_the_example_of_the_documents_is_a_policy() -> None:
    page = (Path(__file__).parents[1] / "docs" / "policies.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, type] = {}
    exec(compile(code, "docs", "exec"), names)
    stats = random_stats(np.random.default_rng(0), 2, 30)
    policy = names["Peaks"]()
    assert isinstance(policy, Policy)
    assert len(check_plan(policy.plan(stats, Budgets(30_000, 0)), stats, Budgets(30_000, 0)).indices) > 0


def test_delta_meets_the_forecast_half_way() -> None:
    stats = replace(random_stats(np.random.default_rng(0), 2, 30), mass_sharp=np.zeros(60, np.float32))
    w3 = np.zeros((1, 8), np.float32)
    w3[0, -1] = np.log(9)  # nine times the present mass, whatever the page
    nine = Scorer(np.zeros((15, len(FEATURES) + 1), np.float32), np.zeros((7, 16), np.float32), w3)
    present = Delta(scorer=None).keep(stats)
    assert present.std() > 0
    np.testing.assert_allclose(
        Delta(scorer=nine).keep(stats), 3 * present, rtol=0.05
    )  # the scorer's floor counts for small masses
    nothing = replace(stats, mass_mean=np.zeros(60, np.float32))
    assert np.isfinite(Delta(scorer=nine).keep(nothing)).all()


def test_delta_keeps_what_is_sharp_of_equal_mass() -> None:
    stats = random_stats(np.random.default_rng(0), 1, 20)
    names = ("mass_mean", "mass_max", "mass_long", "uses", "idle", "age", "key_norm", "value_norm", "key_novelty")
    alike = {name: np.full(20, 0.05, np.float32) for name in names}
    sharp = np.full(20, 0.05 / 32**0.5, np.float32)
    sharp[7] = 0.05
    keep = create("delta").plan(replace(stats, **alike, mass_sharp=sharp), Budgets(15_000, 0)).keep
    free = np.flatnonzero(~stats.protected)
    assert free[np.argmax(keep[free])] == 7
    assert keep[7] / keep[8] == pytest.approx(32**0.5, rel=1e-3)
