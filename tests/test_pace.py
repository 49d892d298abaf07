"""Threads between steps: what is set and when, prompts cut into pieces, and the one line about a run that crawls."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvtier import Llama
from kvtier.engine import pace as pacing
from kvtier.engine.pace import LEAST_PIECE, PIECE_S, Pace
from kvtier.machine.processors import Load, Processors

from .test_run_cli import kvtier
from .texts import source_text


class FakeProcessors(Processors):
    """Two processors whose load the test says."""

    def __init__(self, limit: int = 2) -> None:
        super().__init__(Path("/nowhere"), frozenset(range(limit)))
        self.now = Load(float(limit))

    def load(self) -> Load:
        return self.now


@dataclass
class Run:
    """A pace with a clock that the test moves."""

    decode: int | None = None
    prefill: int | None = None
    limit: int = 2
    at: float = 0.0
    own: float = 0.0
    applied: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.processors = FakeProcessors(self.limit)
        self.pace = Pace(
            lambda *n: self.applied.append(n),
            self.processors,
            self.decode,
            self.prefill,
            lambda: self.at,
            lambda: self.own,
        )

    def step(self, n_tokens: int, wall_s: float, cpu_s: float, times: int = 1) -> None:
        for _ in range(times):
            self.pace.before(n_tokens)
            self.at += wall_s
            self.own += cpu_s
            self.pace.after(n_tokens)


def test_set_only_when_the_number_changes() -> None:
    run = Run()
    run.step(64, 0.2, 0.4, times=5)
    run.step(1, 0.02, 0.04, times=50)
    assert run.applied == [(2, 2)]
    run.processors.now = Load(1.0, 1.0)
    run.step(1, 1.0, 1.0, times=2)
    assert run.applied == [(2, 2), (1, 2)]
    assert run.pace.figures.decode == 1 and run.pace.figures.prefill == 2 and run.pace.figures.n_changes == 1


def test_numbers_that_are_given_stay() -> None:
    run = Run(decode=2, prefill=2)
    run.processors.now = Load(0.5, 1.5)
    run.step(64, 5.0, 2.0, times=5)
    run.step(1, 5.0, 2.0, times=5)
    assert run.applied == [(2, 2)] and not run.pace.figures.automatic
    assert run.pace.piece(512, 512) == 512


def test_decode_given_prefill_chosen() -> None:
    run = Run(decode=3, limit=2)
    run.step(1, 0.1, 0.2)
    assert run.applied == [(3, 2)] and run.pace.figures.automatic


def test_a_busy_machine_is_met_with_fewer_threads_from_the_first_token() -> None:
    run = Run()
    run.processors.now = Load(0.2, 1.8)
    run.step(1, 0.02, 0.02)
    assert run.applied == [(1, 2)]


def test_after_a_pause_what_others_did_meanwhile_counts() -> None:
    run = Run()
    run.step(1, 0.02, 0.04, times=20)
    run.at += 30
    run.processors.now = Load(0.0, 2.0)
    run.step(1, 0.02, 0.02)
    assert run.applied == [(2, 2), (1, 2)]


@pytest.mark.parametrize("token_s", [0.0001, 0.005, 0.01, 0.1, 9.0])
def test_pieces_of_a_prompt(token_s: float) -> None:
    run = Run()
    assert run.pace.piece(512, 512) == 512  # nothing is known yet
    run.step(128, 128 * token_s, 256 * token_s)
    n = run.pace.piece(512, 512)
    assert n == 512 or n % LEAST_PIECE == 0
    assert n == LEAST_PIECE or n * token_s <= PIECE_S
    assert run.pace.piece(100, 100) <= 100


@pytest.mark.parametrize(
    ("n_batch", "n_ubatch", "n"),
    [(512, 512, 128), (512, 1024, 128), (512, 32, 128), (512, 100, 512), (512, 192, 512), (300, 300, 300)],
)
def test_pieces_only_where_batches_begin_at_the_same_places(n_batch: int, n_ubatch: int, n: int) -> None:
    """A cut elsewhere would put the tokens behind it into other places of llama.cpp's tiles of 16."""
    run = Run()
    run.step(128, 128.0, 256.0)
    assert run.pace.piece(n_batch, n_ubatch) == n


@pytest.mark.parametrize(
    ("given", "load", "cpu_s", "words"),
    [
        (2, Load(1.0, 1.0), 1.0, ("2 threads get 50%", "other programs use 1.0 processors", "(-t)")),
        (None, Load(0.2, 1.8), 0.2, ("1 thread gets 20%", "other programs use 1.8")),
        (2, Load(2.0, 0.0, 0.8), 0.6, ("2 threads get 30%", "container")),
    ],
)
def test_a_run_that_crawls_says_why_once(
    given: int | None, load: Load, cpu_s: float, words: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(decode=given, prefill=given)
    run.processors.now = load
    with caplog.at_level(logging.WARNING, pacing.__name__):
        run.step(1, 1.0, cpu_s, times=60)
    assert len(caplog.messages) == 1 and caplog.messages[0] == run.pace.figures.crawl
    for word in words:
        assert word in run.pace.figures.crawl
    assert ("(-t)" in run.pace.figures.crawl) == (given is not None)


@pytest.mark.parametrize(
    ("load", "cpu_s"), [(Load(2.0), 0.2), (Load(1.8, 0.2), 0.2), (Load(1.0, 1.0), 1.9), (Load(0.7, 1.3), 1.3)]
)
def test_no_word_where_others_are_not_why(load: Load, cpu_s: float) -> None:
    """Threads that wait for a disk, that get what they ask for, or that get less but most of it."""
    run = Run(decode=2, prefill=2)
    run.processors.now = load
    run.step(1, 1.0, cpu_s, times=60)
    assert run.pace.figures.crawl == ""


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[Llama]:
    with Llama(str(smollm2_path), n_ctx=1024, n_ubatch=512, verbose=False) as model:
        yield model


def _logits(llm: Llama, prompt: list[int]) -> np.ndarray:
    llm.reset()  # type: ignore[no-untyped-call]
    llm.eval(prompt)
    for token in prompt[:4]:
        llm.eval([token])
    return np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),)).copy()


def test_numbers_of_threads_and_pieces_do_not_change_the_numbers(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = llm.tokenize(source_text().encode())[:600]
    sizes, threads = [], []
    decode = llm._ctx.decode
    apply = llm._pace._apply

    def watched(batch: object) -> None:
        sizes.append(int(batch.batch.n_tokens))  # type: ignore[attr-defined]
        decode(batch)

    def applied(*n: int) -> None:
        threads.append(n)
        apply(*n)

    monkeypatch.setattr(llm._ctx, "decode", watched)
    monkeypatch.setattr(llm._pace, "_apply", applied)
    results = {}
    for n in (1, 2):
        for piece in (LEAST_PIECE, 512):
            monkeypatch.setattr(llm._pace, "_number", lambda _kind, n=n: n)
            monkeypatch.setattr(llm._pace, "piece", lambda *_, piece=piece: piece)
            results[n, piece] = _logits(llm, prompt)
    assert {128, 88, 512, 1} == set(sizes) and {(1, 1), (2, 2)} <= set(threads)
    for logits in results.values():
        np.testing.assert_array_equal(logits, results[1, 512])


def test_llama_says_its_threads_and_keeps_them_over_a_copy(llm: Llama, smollm2_path: Path) -> None:
    figures = llm.threads
    assert figures.automatic and 1 <= figures.decode <= figures.limit
    state = llm.__getstate__()
    assert state["n_threads"] is None and state["n_threads_batch"] is None
    with Llama(str(smollm2_path), n_ctx=256, n_threads=1, n_threads_batch=2, verbose=False) as fixed:
        fixed.eval(fixed.tokenize(b"One two three"))
        assert (fixed.threads.decode, fixed.threads.prefill, fixed.threads.automatic) == (1, 2, False)
        assert fixed.__getstate__()["n_threads"] == 1 and fixed.__getstate__()["n_threads_batch"] == 2


@pytest.mark.parametrize(("given", "row"), [((), " of "), (("-t", "2"), "2")])
def test_run_says_its_threads(smollm2_path: Path, given: tuple[str, ...], row: str) -> None:
    command = ("run", smollm2_path, "-p", "One two", "-n", "2", "-c", "256", *given)
    line = next(line for line in kvtier(*command).stderr.splitlines() if line.startswith("threads"))
    assert row in line
    figures = json.loads(kvtier(*command, "--json").stdout)["threads"]
    assert figures["automatic"] == (not given) and figures["n_changes"] >= 0
