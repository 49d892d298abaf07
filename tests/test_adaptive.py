"""The controller and its guard: which preset when, why, and not to and fro."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.figures import UNLIMITED
from kvtier.policies import Budgets, PageStats, check_plan
from kvtier.policies.adaptive import PATIENCE, Adaptive
from kvtier.policies.base import DISK, Observation
from kvtier.policies.guard import CALM, WINDOW, Guard
from kvtier.policies.presets import BALANCED, CONSERVATIVE, PRESETS, RULES, pick
from kvtier.policies.signals import Signals, attention_signals, code_share, signals, turns_per_1000
from kvtier.simulator.engine import TraceEngine
from kvtier.simulator.run import Setting, simulate

from .texts import source_text
from .traces import random_stats, synthetic

PROSE = (
    "It was late in the evening when the two of them came back from the harbour, tired and wet. The rain had not "
    "stopped since noon; "
    "the streets were empty, and only the inn by the church still had a light in its window. They went in without a "
    "word. "
) * 20
CHAT = "".join(
    f"<|im_start|>user\nWhat is the capital of country {i}?<|im_end|>\n<|im_start|>assistant\nI do not "
    "know.<|im_end|>\n"
    for i in range(20)
)
NEUTRAL = Signals(
    memory_use=0.9, n_tokens=4000, decode_per_s=30, code_share=0.03, turns_per_1000=0, locality=0.5, entropy=0.6
)


def test_code_looks_like_code_and_prose_does_not() -> None:
    assert code_share(source_text()[:4000]) > 0.2
    assert code_share(PROSE) < 0.02
    assert code_share(CHAT) < 0.1
    assert code_share("too short") == 0


def test_turns_are_counted() -> None:
    assert turns_per_1000(CHAT) > 50
    assert turns_per_1000("Anna: How are you?\nJohn Smith: Well, thank you.\n" * 20) > 50
    assert turns_per_1000(PROSE) == 0


def test_attention_signals() -> None:
    stats = random_stats(np.random.default_rng(0), 3, 100)
    even = replace(stats, mass_mean=np.full(300, 0.01, np.float32))
    locality, entropy = attention_signals(even)
    assert entropy == pytest.approx(1, abs=1e-4)
    assert locality == pytest.approx(0.1, abs=0.02)
    peaked = replace(stats, mass_mean=(stats.age == 0).astype(np.float32))
    assert attention_signals(peaked) == pytest.approx((1, 0), abs=1e-4)
    assert attention_signals(random_stats(np.random.default_rng(0), 1, 0)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "balanced"),
        ({"memory_use": 0.3}, "roomy"),
        ({"decode_per_s": 1.0}, "slow"),
        ({"decode_per_s": 0.0}, "balanced"),  # not known is not slow
        ({"code_share": 0.4}, "code"),
        ({"turns_per_1000": 8.0}, "dialogue"),
        ({"locality": 0.9}, "local"),
        ({"entropy": 0.9, "n_tokens": 20_000}, "document"),
        ({"entropy": 0.9}, "balanced"),
    ],
)
def test_rules(change: dict[str, float], name: str) -> None:
    assert pick(replace(NEUTRAL, **change)).name == name


def test_the_table_is_sound() -> None:
    assert len({preset.name for preset in PRESETS}) == len(PRESETS)
    assert {name for name, _ in RULES} | {BALANCED.name, CONSERVATIVE.name} == {preset.name for preset in PRESETS}
    for preset in PRESETS:
        assert 0.5 <= preset.fill <= 1
        assert 0 <= preset.window <= 0.5
    page = (Path(__file__).parents[1] / "docs" / "policies.md").read_text(encoding="utf-8")
    assert all(f"`{preset.name}`" in page for preset in PRESETS)


def _run(policy: Adaptive, stats: PageStats, budgets: Budgets, n: int, seen: Observation | None = None) -> None:
    for _ in range(n):
        stats = replace(stats, clock=stats.clock + 16)
        if seen is not None:
            policy.observe(seen)
        check_plan(policy.plan(stats, budgets), stats, budgets)


def test_a_switch_takes_patience_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    policy, stats = Adaptive(), random_stats(np.random.default_rng(1), 3, 60)
    budgets = Budgets(int(stats.bytes.sum() * 1.05), 0)
    text = Observation(text=source_text()[:6000], decode_per_s=20)
    with caplog.at_level(logging.INFO):
        _run(policy, stats, budgets, PATIENCE - 1, text)
        assert policy.state == "balanced"
        _run(policy, stats, budgets, 1, text)
    assert policy.state == "code"
    (switch,) = policy.switches
    assert (switch.before, switch.after) == ("balanced", "code")
    assert "code" in switch.reason
    assert "preset code after balanced" in caplog.text
    _run(policy, stats, budgets, 20, text)
    assert len(policy.switches) == 1


def test_changing_minds_every_plan_switches_nothing() -> None:
    policy, stats = Adaptive(), random_stats(np.random.default_rng(1), 3, 60)
    budgets = Budgets(int(stats.bytes.sum() * 1.05), 0)
    for text in (source_text()[:6000], CHAT) * 10:
        _run(policy, stats, budgets, 1, Observation(text=text))
    assert policy.switches == []


def test_the_guard_trips_and_lets_go_with_hysteresis() -> None:
    guard = Guard()
    assert [guard.update(0.2, 0.99) for _ in range(WINDOW)] == [False] * (WINDOW - 1) + [True]
    assert "20.0%" in guard.reason
    between = [guard.update(0.04, 0.99) for _ in range(50)]
    assert all(between)  # below the limit, but not well below it
    calm = [guard.update(0.01, 0.99) for _ in range(WINDOW + CALM)]
    assert calm[0]
    assert not calm[-1]
    assert not guard.update(0.1, 0.8)  # one bad look is no bad window


@pytest.mark.parametrize(
    ("hit_rate", "recall", "trips"), [(0.051, 1.0, True), (0.0, 0.849, True), (0.049, 0.851, False)]
)
def test_the_guards_limits(hit_rate: float, recall: float, trips: bool) -> None:
    guard = Guard()
    for _ in range(WINDOW):
        guard.update(hit_rate, recall)
    assert guard.is_tripped == trips


def test_too_much_mass_on_disk_is_conservative_until_it_is_not() -> None:
    policy, stats = Adaptive(), random_stats(np.random.default_rng(1), 3, 60)
    budgets = Budgets(int(stats.bytes.sum()), UNLIMITED)
    tier = stats.tier.copy()
    tier[10:100][~stats.protected[10:100]] = DISK
    away = replace(stats, tier=tier, bytes=stats.bytes)
    _run(policy, away, budgets, WINDOW)
    assert policy.state == "conservative"
    assert "hit rate" in policy.switches[-1].reason
    _run(policy, stats, budgets, WINDOW + CALM)
    assert policy.state != "conservative"
    assert "conservative" in [switch.after for switch in policy.switches]


def test_figures_of_the_engine_come_first() -> None:
    policy, stats = Adaptive(), random_stats(np.random.default_rng(1), 3, 60)
    budgets = Budgets(int(stats.bytes.sum() * 1.05), 0)
    _run(policy, stats, budgets, WINDOW, Observation(hit_rate=0.3, recall=0.7))
    assert policy.state == "conservative"


def test_budgets_hold_through_switches(tmp_path: Path) -> None:
    trace, setting = synthetic(tmp_path / "t", n_steps=300), Setting(0.3)
    policy = Adaptive()
    budget = int(trace.codes[0].size * setting.keep) * trace.header.page_bytes

    def look(engine: TraceEngine) -> None:
        assert engine.host_bytes() <= budget or engine.n_steps <= setting.warmup

    result = simulate(trace, policy, setting, look)
    assert policy.switches
    assert policy.state == "conservative"  # a third of these pages is not enough
    assert result.recall > 0.5


def test_signals_without_a_budget() -> None:
    stats = random_stats(np.random.default_rng(1), 3, 60)
    assert signals(stats, Budgets(), Observation()).memory_use == 0
    assert signals(stats, Budgets(int(stats.bytes.sum()) * 2, 0), Observation()).memory_use == pytest.approx(0.5)
