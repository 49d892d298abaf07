"""The simulator: budgets hold at every step, what is gone stays gone, and its figures are those of the trace."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvtier.cli import main
from kvtier.errors import BudgetError, UsageError
from kvtier.policies import Budgets, PageStats, Plan, registry
from kvtier.policies.base import DISK, GONE, HOST
from kvtier.simulator.engine import TraceEngine
from kvtier.simulator.run import Setting, make, simulate
from kvtier.trace import Trace

from .traces import synthetic, write_synthetic

POLICIES = (*registry.BUILT_IN, "oracle")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return synthetic(tmp_path_factory.mktemp("traces") / "t", n_steps=260)


@pytest.mark.parametrize("lossy", [True, False], ids=["lossy", "disk"])
@pytest.mark.parametrize("name", POLICIES)
def test_budgets_hold_and_what_is_gone_stays_gone(name: str, lossy: bool, trace: Trace) -> None:
    setting = Setting(0.4, lossy, warmup=32)
    budget = int(trace.codes[0].size * 0.4) * trace.header.page_bytes
    gone_before = np.zeros(trace.codes.shape[1:], bool)
    seen = 0

    def look(engine: TraceEngine) -> None:
        nonlocal gone_before, seen
        begun = int(trace.n_pages[engine.n_steps - 1])
        gone = engine.tier == GONE
        gone[:, begun:] = False
        assert not (gone_before & ~gone).any()
        gone_before = gone
        assert not gone[:, 0].any()
        assert not gone[:, begun - 2 : begun].any()
        if engine.n_steps > setting.warmup:
            seen += 1
            assert engine.host_bytes() <= budget
            assert gone.any() == lossy
            assert (engine.tier == DISK).any() != lossy

    result = simulate(trace, make(name, trace), setting, look)
    assert seen == len(result.recalls) == trace.n_steps - setting.warmup
    assert 0 < result.eviction_hit_rate < 1
    assert result.recall == (pytest.approx(1 - result.eviction_hit_rate) if lossy else 1.0)
    assert result.worst_recall <= result.recall + 1e-6


def test_everything_kept_misses_nothing(trace: Trace) -> None:
    result = simulate(trace, make("h2o", trace), Setting(1.0))
    assert (result.eviction_hit_rate, result.recall, result.n_moved) == (0.0, 1.0, 0)


def test_figures_are_the_traces_own(trace: Trace) -> None:
    """Brute force: the mass of the pages that the engine lists as gone, step by step."""
    expected: list[float] = []

    def look(engine: TraceEngine) -> None:
        mass = trace.mass(engine.n_steps - 1)
        begun = int(trace.n_pages[engine.n_steps - 1])
        lost = [
            sum(float(mass[layer, p]) for p in range(begun) if engine.tier[layer, p] == GONE) / float(mass[layer].sum())
            for layer in range(3)
        ]
        expected.append(sum(lost) / 3)

    result = simulate(trace, make("lru", trace), Setting(0.3, warmup=32), look)
    assert np.allclose(result.hit_rates, expected[32:], atol=1e-5)


def test_the_oracle_is_a_bound(trace: Trace) -> None:
    rates = {name: simulate(trace, make(name, trace), Setting(0.3)).eviction_hit_rate for name in POLICIES}
    assert all(rates["oracle"] <= rate for rate in rates.values()), rates
    assert rates["static"] > rates["h2o"]


def test_the_same_seed_gives_the_same_result(trace: Trace) -> None:
    for name in POLICIES:
        first, second = (simulate(trace, make(name, trace, 3), Setting(0.3, seed=3)) for _ in range(2))
        assert np.array_equal(first.hit_rates, second.hit_rates)


def test_observed_mass_is_of_what_is_left(trace: Trace) -> None:
    engine = TraceEngine(trace, Budgets())
    engine.move(0, [3], "none")
    for _ in range(200):
        engine.step()
    stats = engine.stats()
    assert 3 not in stats.page[stats.array == 0]
    assert stats.mass_mean[stats.array == 0].sum() == pytest.approx(1, abs=0.05)


def test_moves_beyond_the_budget_are_refused(trace: Trace) -> None:
    engine = TraceEngine(trace, Budgets(1 << 40, 2_000))
    with pytest.raises(BudgetError):
        engine.move(0, [3, 4, 5], "disk")
    assert (engine.tier[0, :20] == HOST).all()


class _Resurrects:
    """Asks for a protected page to go."""

    name = "resurrects"

    def plan(self, stats: PageStats, budgets: Budgets) -> Plan:
        return Plan(stats.mass_mean, np.array([0]), np.array([GONE], np.uint8))


def test_a_bad_plan_is_an_error_here(trace: Trace) -> None:
    from kvtier.errors import PolicyError

    with pytest.raises(PolicyError, match="protected"):
        simulate(trace, _Resurrects(), Setting(0.5))


def test_budgets_too_small_and_traces_too_short(trace: Trace) -> None:
    with pytest.raises(UsageError, match="protected"):
        simulate(trace, make("lru", trace), Setting(0.01))
    with pytest.raises(UsageError, match="warming up"):
        simulate(trace, make("lru", trace), Setting(0.5, warmup=1000))


def test_command(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "t")
    run = CliRunner().invoke(
        main, ["simulate", str(path), "--policy", "lru,oracle", "--keep", "50%,0.3", "--json", "--per-step"]
    )
    assert run.exit_code == 0, run.stderr
    results = json.loads(run.stdout)
    assert [(r["policy"], r["setting"]["keep"]) for r in results] == [
        ("lru", 0.5),
        ("lru", 0.3),
        ("oracle", 0.5),
        ("oracle", 0.3),
    ]
    assert len(results[0]["recalls"]) == 200 - 64
    table = CliRunner().invoke(main, ["simulate", str(path), "--keep", "0.5", "--policy", "all,lru"]).stdout
    assert [sum(line.split()[:1] == [name] for line in table.splitlines()) for name in POLICIES] == [1] * len(POLICIES)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--policy best", ("'best'", "lru", "oracle")),
        ("--policy ,", ("no policy", "lru", "oracle", "all")),
        ("--per-step", ("--per-step", "Add --json")),
    ],
)
def test_bad_arguments(words: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    run = CliRunner().invoke(main, ["simulate", str(write_synthetic(tmp_path / "t")), *words.split()])
    assert run.exit_code == 2
    assert all(part in run.stderr for part in parts), run.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "lfu"], "sink_window"),
        (["--policy", ","], "no policy is named"),
        (["--keep", "1.5"], "not above 0"),
        (["--keep", "half"], "no list of shares"),
        (["--keep", "nan"], "not above 0"),
        (["--keep", "0.001"], "protected"),
        (["--warmup", "100000"], "warming up"),
    ],
)
def test_bad_input(tmp_path: Path, options: list[str], words: str) -> None:
    run = CliRunner().invoke(main, ["simulate", str(write_synthetic(tmp_path / "t", n_steps=70)), *options])
    assert run.exit_code == 2
    assert words in run.stderr
