"""The thread that runs a policy: whatever the policy does, plans are made, and stopping leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtier import Llama
from kvtier.errors import BusyError, InvalidArgumentError, UsageError
from kvtier.figures import UNLIMITED
from kvtier.measuring.config import Opening
from kvtier.measuring.engine import Engine
from kvtier.measuring.spec import parse_spec
from kvtier.placement.placement import Placement
from kvtier.placement.planner import TIME_LIMIT_S, Planner
from kvtier.policies import Budgets, PageStats, Plan, create, place
from kvtier.policies.base import GONE, HOST, PLAN_STEPS, Observation
from kvtier.policies.registry import DEFAULT
from kvtier.policies.validate import check_stats
from kvtier.settings import KVSettings
from kvtier.simulator.engine import TraceEngine

from .texts import source_text
from .traces import random_stats, synthetic


class Fails:
    """A policy that is sound until it is not."""

    name = "fails"

    def __init__(self, how: str, n_sound: int = 1) -> None:
        self.how = how
        self.n_sound = n_sound
        self.release = threading.Event()

    def plan(self, stats: PageStats, budgets: Budgets) -> Plan:
        self.n_sound -= 1
        if self.n_sound >= 0:
            return place(stats, budgets, stats.mass_mean)
        if self.how == "hangs":
            self.release.wait(60)
        if self.how == "raises":
            raise RuntimeError("out of ideas")
        if self.how == "exits":
            raise SystemExit(3)
        return Plan(stats.mass_mean, np.array([len(stats)]), np.array([GONE], np.uint8))  # nonsense


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before]
    for thread in left:
        thread.join(10)
    assert not [t.name for t in left if t.is_alive()]


@pytest.mark.parametrize(
    ("how", "words"),
    [("raises", "out of ideas"), ("nonsense", "names page"), ("hangs", "more than"), ("exits", "SystemExit")],
)
def test_a_bad_policy_is_reported_once_and_replaced(
    how: str, words: str, tmp_path: Path, no_threads_left: None
) -> None:
    engine = TraceEngine(synthetic(tmp_path / "t"), Budgets(50_000, UNLIMITED))
    said: list[str] = []
    policy = Fails(how)
    placement = Placement(engine, policy, every=16, limit_s=1.0 if how == "hangs" else TIME_LIMIT_S, report=said.append)
    for _ in range(5):
        for _ in range(16):
            engine.step()
        placement.advance(16)
        assert placement.settle()
    policy.release.set()
    placement.stop()
    assert len(said) == 1
    assert "'fails'" in said[0]
    assert DEFAULT in said[0]
    assert words in said[0]
    assert placement.policy.name == placement.figures.policy == DEFAULT
    assert words in placement.figures.problem
    assert placement.figures.n_plans == 5
    assert engine.host_bytes() <= 50_000


def test_every_plan_of_the_planner_is_checked() -> None:
    stats, budgets = random_stats(np.random.default_rng(0), 2, 30), Budgets(30_000, 0)
    planner = Planner(Fails("nonsense", n_sound=2), report=lambda _text: None)
    for _ in range(4):
        plan = planner.plan(stats, budgets)
        assert plan.indices.max() < len(stats)
    assert planner.problem
    planner.end()


def test_stop_ends_the_threads_at_once_and_twice(tmp_path: Path, no_threads_left: None) -> None:
    engine = TraceEngine(synthetic(tmp_path / "t"), Budgets(50_000, 0))
    placement = Placement(engine, Fails("raises", n_sound=100))
    engine.step()
    placement.advance(16)
    placement.stop()
    placement.stop()


def test_unknown_policy_is_refused_before_the_model_is_read() -> None:
    with pytest.raises(UsageError, match="no policy is called 'nix'"):
        Llama("/there/is/no/such.gguf", policy="nix")


@pytest.mark.parametrize("policy", ["h2o", Fails("raises")], ids=["h2o", "one that fails"])
def test_tokens_are_the_same_wherever_a_policy_puts_pages(
    smollm2_path: Path, tmp_path: Path, policy: object, no_threads_left: None
) -> None:
    def generate(**options: object) -> tuple[list[int], Llama]:
        llm = Llama(str(smollm2_path), n_ctx=1024, n_batch=256, n_ubatch=256, verbose=False, seed=1, **options)
        llm.eval(llm.tokenize(source_text().encode())[:700])
        tokens = []
        for i in range(70):
            if llm.placement is not None and i % PLAN_STEPS == PLAN_STEPS - 1:
                assert llm.placement.settle()  # a plan has until the next one is due
            tokens.append(llm.sample(temp=0.0))
            llm.eval([tokens[-1]])
        return tokens, llm

    plain, llm = generate()
    n_bytes = llm.kv.figures.tiers["host"].used_bytes
    llm.close()
    ours, llm = generate(kv_host=n_bytes // 2, kv_disk="1GiB", kv_dir=tmp_path, policy=policy)
    placement = llm.placement
    assert placement is not None
    assert placement.settle()
    assert ours == plain
    assert placement.figures.n_plans >= 4
    assert placement.figures.n_moved > 0
    assert bool(placement.figures.problem) == isinstance(policy, Fails)
    assert llm.kv.figures.tiers["host"].held_bytes <= n_bytes // 2
    llm.close()
    assert list(tmp_path.iterdir()) == []


class Listens:
    """Keeps what it is told."""

    name = "listens"

    def __init__(self) -> None:
        self.seen: list[Observation] = []
        self.stats: list[PageStats] = []

    @property
    def state(self) -> str:
        return f"heard {len(self.seen)}"

    def observe(self, seen: Observation) -> None:
        self.seen.append(seen)

    def plan(self, stats: PageStats, budgets: Budgets) -> Plan:
        self.stats.append(stats)
        return place(stats, budgets, stats.mass_mean)


@pytest.mark.parametrize("which", ["smollm2_path", "gemma3_path"])
def test_a_policy_hears_and_sees_what_is_there(which: str, request: pytest.FixtureRequest) -> None:
    policy = Listens()
    text = source_text()
    with Llama(
        str(request.getfixturevalue(which)),
        n_ctx=1024,
        n_batch=256,
        n_ubatch=256,
        swa_full=False,
        verbose=False,
        policy=policy,
    ) as llm:
        tokens = llm.tokenize(text.encode())[:592]
        llm.eval(tokens[:512])
        for token in tokens[512:]:
            llm.eval([token])
        placement = llm.placement
        assert placement is not None
        assert placement.settle()
        n_layers, page_tokens = llm.kv.n_layers, llm.kv.layer(0).figures.page_tokens
        host = llm.kv.figures.tiers["host"]
    assert policy.seen[-1].decode_per_s > 0
    words = policy.seen[-1].text.strip().split()
    assert " ".join(words[-20:]) in " ".join(text.split())
    assert placement.figures.state == f"heard {len(policy.seen)}"
    stats = policy.stats[-1]
    check_stats(stats)
    assert len(np.unique(stats.array)) == n_layers
    assert stats.n_tokens == 592
    full = stats.layer == stats.layer[np.argmax(stats.position)]
    assert sorted(stats.position[full].tolist()) == list(range(-(-592 // page_tokens)))
    assert stats.age[full & (stats.position == 0)].tolist() == [592 - page_tokens]
    assert int(stats.bytes.sum()) == pytest.approx(host.used_bytes, rel=0.01)
    for layer in np.unique(stats.layer):
        of_layer = stats.layer == layer
        assert stats.mass_mean[of_layer].sum() == pytest.approx(1, abs=1e-3)
        assert stats.mass_max[of_layer].max() <= 1.05
        for figure in (stats.key_norm, stats.value_norm, stats.key_novelty):
            assert figure[of_layer].std() > 0
    windows = [layer for layer in np.unique(stats.layer) if stats.protected[stats.layer == layer].all()]
    assert len(windows) == (0 if which == "smollm2_path" else 15)


def test_measuring_with_a_policy_is_the_same_each_time(smollm2_path: Path, tmp_path: Path) -> None:
    """In a measurement plans are made between steps: which pages are in RAM after each token does not depend on
    time."""

    def run(policy: str) -> tuple[list[bytes], int]:
        config = parse_spec(f"kvtier:f16,host=10MiB,disk=1GiB,dir={tmp_path}{policy}")
        engine = Engine(Opening(str(smollm2_path), config, 512, 1, n_batch=128))
        try:
            tokens = engine.tokenize(source_text()[:6000].encode())[:420]
            engine.prefill(tokens[:384])
            placed = []
            for token in tokens[384:]:
                engine.decode([token])
                pages = engine.pages()
                assert pages is not None
                placed.append(pages.tier.tobytes())
            return placed, engine.n_plans()
        finally:
            engine.close()

    first, n_plans = run(",policy=h2o")
    again, _ = run(",policy=h2o")
    plain, none = run("")
    assert first == again
    assert first != plain
    assert n_plans >= 5
    assert none == 0


@pytest.mark.parametrize("policy", ["delta", "sink_window"])
def test_lossy_memory_is_bounded_and_the_policy_says_what_leaves(policy: str, smollm2_path: Path) -> None:
    config = parse_spec(f"kvtier:f16,host=8MiB,fidelity=lossy,policy={policy}")
    engine = Engine(Opening(str(smollm2_path), config, 1024, 1, n_batch=128))
    try:
        tokens = engine.tokenize(source_text()[:9000].encode())[:608]
        engine.prefill(tokens[:512])
        for token in tokens[512:]:
            engine.decode([token])
            figures = engine.counts()
            assert figures["peak_host_bytes"] <= 8 << 20
        pages = engine.pages()
        assert pages is not None
        assert (figures["n_gone"] > 50) == (policy == "sink_window")  # delta takes bits first, which is enough here
        assert engine.n_plans() >= 6
        of_layer = pages.tier[pages.layer == 0]
        held = np.flatnonzero(of_layer == HOST)
        assert {0, 17, 18} <= set(held.tolist())  # protected: the first page and the newest two
        if policy == "sink_window":  # the newest pages of a layer, without a gap
            assert held[1:].tolist() == list(range(int(held[1]), 19)) or held[2:].tolist() == list(
                range(int(held[2]), 19)
            )
    finally:
        engine.close()


class _Counts(TraceEngine):
    """A trace that counts how often it was compacted."""

    n_compacted = 0

    def compact(self) -> None:
        self.n_compacted += 1


def test_memory_is_compacted_every_thousand_tokens(tmp_path: Path) -> None:
    engine = _Counts(synthetic(tmp_path / "t"), Budgets(50_000, UNLIMITED))
    placement = Placement(engine, create("lru"))
    for n_tokens, n_compacted in ((900, 0), (99, 0), (16, 1), (900, 1), (100, 2)):
        placement.advance(n_tokens)
        assert placement.settle()
        assert engine.n_compacted == n_compacted
    placement.stop()


class _Refuses(_Counts):
    """An engine that has every page in use for a while, and then no such page."""

    n_asked = 0

    def move(self, array: int, pages: Sequence[int], to_tier: str) -> int:
        self.n_asked += 1
        raise BusyError("it is in use") if self.n_asked <= 3 else InvalidArgumentError("there is no such page")


def test_only_moves_that_are_wrong_are_told(tmp_path: Path) -> None:
    told: list[str] = []
    engine = _Refuses(synthetic(tmp_path / "t"), Budgets(50_000, UNLIMITED))
    placement = Placement(engine, create("sink_window"), report=told.append)
    while engine.n_asked < 6:
        assert not told or engine.n_asked > 3
        placement.advance(16)
        assert placement.settle()
        assert placement.figures.n_plans < 100
    placement.stop()
    assert placement.figures.n_refused == engine.n_asked
    assert told == ["a move that the policy wanted was refused (said once): there is no such page"]


def test_lossy_has_a_policy_by_default(smollm2_path: Path) -> None:
    with Llama(
        str(smollm2_path), n_ctx=256, verbose=False, kv_settings=KVSettings(host="64MiB", fidelity="lossy")
    ) as llm:
        assert llm.placement is not None
        assert llm.placement.policy.name == "adaptive"
