"""Medians and ratios, filling a context, the measuring processes, and a real benchmark."""

from __future__ import annotations

import json
import os
import signal
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kvtier.bench.plan import STOCK_F16, STOCK_Q8_0, BenchPlan, quarter, resident_configurations
from kvtier.bench.report import text, to_json
from kvtier.bench.results import BenchResult, DecodeResult, PrefillResult, Traffic
from kvtier.bench.run import chunk_starts
from kvtier.cli.bench import command
from kvtier.cli.texts import read_text
from kvtier.errors import OutputError, UsageError
from kvtier.measuring import state as states
from kvtier.measuring.bandwidth import disk_bandwidth, read_bandwidth
from kvtier.measuring.child import Child
from kvtier.measuring.config import Configuration, Opening, Rope, rope_for
from kvtier.measuring.errors import MeasuringError, StateLayoutError, WorkerError
from kvtier.measuring.figures import paired_ratio, percentile, rates, spread, total_ratio
from kvtier.measuring.table import markdown
from kvtier.measuring.text import library_text

SECONDS = st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=30)


@given(SECONDS)
def test_spread_is_a_median_within_its_range(values: list[float]) -> None:
    s = spread(values)
    assert s.median == pytest.approx(statistics.median(values))
    assert (s.low, s.high, s.n) == (min(values), max(values), len(values))
    assert s.low <= s.median <= s.high
    assert s.noise >= 0.0


@given(SECONDS, st.floats(0.1, 10))
def test_a_candidate_that_is_always_x_times_faster_has_ratio_x(seconds: list[float], factor: float) -> None:
    faster = [s / factor for s in seconds]
    for ratio in (paired_ratio(seconds, faster), total_ratio(seconds, faster)):
        assert (ratio.median, ratio.low, ratio.high) == pytest.approx((factor, factor, factor))
    assert paired_ratio(faster, seconds).median == pytest.approx(1 / factor)


def test_ratios_pair_rounds_and_totals_weigh_chunks() -> None:
    assert paired_ratio([1.0, 100.0, 1.0], [0.5, 50.0, 1.0]).median == 2.0  # a slow round slows both
    assert total_ratio([1.0, 9.0], [1.0, 3.0]).median == 2.5
    assert rates([0.5, 0.25, 1.0], 16).median == 32.0
    with pytest.raises(MeasuringError, match="as many rounds"):
        paired_ratio([1.0], [1.0, 2.0])
    for bad in ([], [float("inf")]):
        with pytest.raises(MeasuringError):
            spread(bad)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles(values: list[float], q: float) -> None:
    assert min(values) <= percentile(values, q) <= max(values) or percentile(values, q) == pytest.approx(values[0])
    assert percentile(values, 50) == pytest.approx(statistics.median(values))


@given(st.integers(1, 64), st.integers(1, 600))
def test_chunks_cover_a_prompt_in_order(n_chunks: int, chunk: int) -> None:
    starts = chunk_starts(n_chunks * chunk, chunk, sampled=False)
    assert starts == [i * chunk for i in range(n_chunks)]


@given(st.integers(8, 100), st.integers(2, 600), st.floats(0, 10), st.floats(0, 1e-3))
def test_sampled_chunks_cost_what_all_do_on_average(n_chunks: int, chunk: int, fixed: float, per_token: float) -> None:
    def mean_cost(starts: list[int]) -> float:
        return sum(fixed + per_token * start for start in starts) / len(starts)

    n = n_chunks * chunk
    sampled = chunk_starts(n, chunk, sampled=True)
    assert len(sampled) == 4
    assert all(0 <= start <= n - chunk for start in sampled)
    assert mean_cost(sampled) == pytest.approx(mean_cost(chunk_starts(n, chunk, sampled=False)), abs=per_token + 1e-9)


def test_the_roof_is_the_slower_of_memory_and_disk() -> None:
    assert Traffic(60, 40).roof(1000.0) == 10.0
    assert Traffic(60, 40, 50.0).roof(1000.0, 100.0) == 2.0
    assert Traffic(60, 40, 1.0).roof(1000.0, 100.0) == 10.0


@st.composite
def sequence_states(draw: st.DrawFn) -> states.SequenceState:
    n_layers = draw(st.integers(1, 3))
    with_values = draw(st.booleans())
    caches = []
    for _ in range(draw(st.integers(1, 2))):
        n = draw(st.integers(1, 9))
        rng = np.random.default_rng(draw(st.integers(0, 1000)))

        def layers(n_rows: int = n, rng: np.random.Generator = rng) -> tuple[states.Rows, ...]:
            kind, width = draw(st.sampled_from([(1, 64), (8, 34), (2, 18)]))
            return tuple(states.Rows(kind, rng.integers(0, 256, (n_rows, width), np.uint8)) for _ in range(n_layers))

        caches.append(states.Cache(np.arange(n, dtype=np.int32), layers(), layers() if with_values else ()))
    return states.SequenceState(b"\xd8\x3c\x14\xaf\0\0\0\0", tuple(caches))


def same(a: states.SequenceState, b: states.SequenceState) -> bool:
    return np.array_equal(states.serialise(a), states.serialise(b))


@given(sequence_states(), st.integers(1, 40), st.integers(0, 12))
def test_a_lengthened_state_repeats_its_cells(state: states.SequenceState, n: int, window: int) -> None:
    assert same(states.parse(states.serialise(state)), state)
    long = states.parse(states.serialise(states.lengthen(state, n, window)))
    for i, (short, cache) in enumerate(zip(state.caches, long.caches, strict=True)):
        n_cells = min(n, window) if i > 0 and window > 0 else n
        assert cache.positions.tolist() == list(range(n - n_cells, n))
        for before, after in zip((*short.keys, *short.values), (*cache.keys, *cache.values), strict=True):
            assert after.kind == before.kind
            assert all(np.array_equal(after.rows[j], before.rows[j % len(before.rows)]) for j in range(n_cells))


@given(sequence_states(), st.data())
def test_a_cut_state_is_refused_or_a_whole_one(state: states.SequenceState, data: st.DataObject) -> None:
    whole = states.serialise(state)
    cut = data.draw(st.integers(0, whole.size - 1))
    try:
        parsed = states.parse(whole[:cut])
    except StateLayoutError:
        return
    assert np.array_equal(states.serialise(parsed), whole[:cut])  # the cut fell between two caches, or after the keys


def test_positions_are_squeezed_only_beyond_training() -> None:
    assert rope_for(8192, 8192) == Rope()
    assert rope_for(32768, 8192) == Rope(freq_scale=0.25)


def test_an_opening_survives_the_pipe() -> None:
    opening = Opening(
        "m.gguf", Configuration("x", "kvtier", "q8_0", "q8_0", settings="host=1"), 10, 2, rope=Rope(0.0, 0.5)
    )
    assert Opening.from_dict(json.loads(json.dumps(opening.to_dict()))) == opening


def test_plans_put_the_baselines_first(tmp_path: Path) -> None:
    plan = BenchPlan(Path("m.gguf"))
    assert [c.name for c in resident_configurations(plan)][:2] == [STOCK_F16.name, STOCK_Q8_0.name]
    assert {c.engine for c in resident_configurations(BenchPlan(Path("m.gguf"), stock_only=True))} == {"stock"}
    assert f"host={1 << 20}\n" in quarter(4 << 20, tmp_path).settings


def test_tables_are_aligned_markdown() -> None:
    lines = markdown(("a", "long heading"), [["name", "1"], ["x", "22"]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].endswith("-: |")


def result() -> BenchResult:
    times = {"stock f16": [4.0, 4.0, 8.0], "stock q8_0": [2.0, 2.0, 4.0], "kvtier f16": [1.0, 1.0, 2.0]}
    traffic = dict.fromkeys(times, Traffic(10**8, 10**8))
    decode = DecodeResult(8192, 1, 16, times, times, traffic, dict.fromkeys(times, "repeated"))
    return BenchResult(
        "m",
        {1: 4e9},
        0.0,
        0.5,
        (decode,),
        PrefillResult(8192, 2, 512, False, times, times),
        (("x at 0 tokens", "broke"),),
    )


def test_reports_hold_the_ratios() -> None:
    rows = {row["name"]: row for row in json.loads(json.dumps(to_json(result())))["decode"][0]["rows"]}
    assert rows["kvtier f16"]["ratios"]["stock f16"] == {"median": 4.0, "low": 4.0, "high": 4.0, "n": 3}
    assert rows["kvtier f16"]["ratios"]["stock q8_0"]["median"] == 2.0
    assert rows["stock f16"]["tokens_per_s"]["median"] == 4.0
    assert rows["stock f16"]["roof_tokens_per_s"] == 20.0
    report = text(result())
    assert "### decode, 8k context, 1 thread" in report
    assert "4.00 (4.00..4.00)" in report
    assert "### prefill of 8k" in report
    assert "other programs used 50 %" in report
    assert report.count("CPU x f16") == 1  # of one thread on a busy machine, and of nothing else
    quiet = text(replace(result(), busy=0.0))
    assert "other programs" not in quiet
    assert "CPU x f16" not in quiet


def test_bandwidths_are_positive(tmp_path: Path) -> None:
    assert read_bandwidth(2, 8 << 20, 2) > 0
    assert disk_bandwidth(tmp_path, 8 << 20) > 0
    assert not list(tmp_path.iterdir())


def test_texts(tmp_path: Path) -> None:
    assert len(library_text()) > 100_000
    assert read_text(None) == library_text()
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "latin").write_bytes(b"caf\xe9 ")
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbftext")
    refused = {
        "empty": "empty.*\n.*some text",
        "none": "cannot be read: No such file.*\n.*path",
        ".": "Is a directory",
        "latin": "0xe9 at offset 3.*\n.*iconv",
    }
    for name, words in refused.items():
        with pytest.raises(UsageError, match=words):
            read_text(tmp_path / name)
    assert read_text(tmp_path / "marked") == "text"


def test_a_failure_names_its_row_once() -> None:
    assert WorkerError("kvtier:f16: score: too much").about("kvtier:f16") == "score: too much"
    assert WorkerError("too much").about("kvtier:f16") == "too much"


def test_an_output_that_cannot_be_written_is_noticed_first(smollm2_path: Path, tmp_path: Path) -> None:
    out = CliRunner().invoke(command, [str(smollm2_path), "-o", str(tmp_path / "none" / "x.json")])
    assert isinstance(out.exception, OutputError)
    assert "Make its folder" in out.exception.hint


def test_a_repeated_context_is_as_long_and_as_large_as_a_computed_one(smollm2_path: Path) -> None:
    opening = Opening(str(smollm2_path), STOCK_Q8_0, 1024, 2)
    with Child(opening, list(range(100, 400))) as child:
        repeated = child.ask("fill", n_tokens=600)
        assert repeated["how"] == "repeated"
        assert child.ask("prefill", n_tokens=3)["n_past"] == 603
        child.ask("rewind", n_tokens=0)
        assert child.ask("prefill", n_tokens=600)["n_past"] == 600
        assert child.ask("size")["kv_bytes"] == repeated["kv_bytes"]
        child.ask("rewind", n_tokens=599)
        steps = child.ask("decode", n_tokens=1)
        assert steps["seconds"] > 0
        assert steps["disk_read_bytes"] == 0
        assert repeated["kv_bytes"] > 600 * 30 * 2 * 192 * 34 // 32  # 30 layers, K and V, 3 heads of 64


def test_a_window_is_filled_as_far_as_it_reaches(gemma3_path: Path) -> None:
    """Of sliding-window layers a saved state has the last 512 cells only; the others have all."""
    with Child(Opening(str(gemma3_path), STOCK_F16, 1536, 2), list(range(100, 400))) as child:
        repeated = child.ask("fill", n_tokens=1024)
        assert repeated["how"] == "repeated"
        child.ask("rewind", n_tokens=0)
        child.ask("prefill", n_tokens=1024)
        assert child.ask("size")["kv_bytes"] == repeated["kv_bytes"]


def test_failures_of_a_measuring_process_are_its_own_words(smollm2_path: Path) -> None:
    with Child() as child, pytest.raises(WorkerError, match="no model is open"):
        child.ask("decode", n_tokens=1)
    with pytest.raises(WorkerError, match="no such model"):
        Child(Opening("/nonexistent.gguf", STOCK_F16, 64, 1))
    with Child(Opening(str(smollm2_path), STOCK_F16, 256, 1), [1, 2, 3]) as child:
        with pytest.raises(WorkerError, match="llama_decode"):
            child.ask("prefill", n_tokens=1000)  # more than the context holds
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="signal 9"):
            child.ask("decode", n_tokens=1)


def test_a_benchmark(smollm2_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    pages = tmp_path / "pages"
    pages.mkdir()
    sizes = ["--contexts", "0,512", "--threads", "1", "--rounds", "1", "--prefill", "512"]
    arguments = [*sizes, "--kv-dir", str(pages), "-o", str(output)]
    out = CliRunner().invoke(command, [str(smollm2_path), *arguments], catch_exceptions=False)
    assert out.exit_code == 0, out.output
    data = json.loads(output.read_text())
    names = ["stock f16", "stock q8_0", "kvtier f16", "kvtier q8_0"]
    assert [row["name"] for row in data["decode"][0]["rows"]] == names
    assert [row["name"] for row in data["decode"][1]["rows"]] == [*names, "kvtier f16, 1/4 in RAM"]
    assert [row["name"] for row in data["prefill"]["rows"]] == names
    on_disk = data["decode"][1]["rows"][-1]
    assert on_disk["disk_bytes"] > 0.5 * on_disk["kv_bytes"]  # an exact step reads all that is not in RAM
    assert all(row["disk_bytes"] == 0 for row in data["decode"][1]["rows"][:-1])
    assert data["failures"] == []
    assert data["stock"]["features"] and set(data["stock"]["attention_ns"]) == {"64", "128"}
    assert not list(pages.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--threads", "0"], "below 1"),
        (["--contexts", "24,3x"], "3x"),
        (["--prefill", "-1"], "negative"),
        (["--prefill", "100"], "shorter than one batch"),
        (["--kv-dir", "/nonexistent"], "no directory"),
        (["--fidelity", "lossy"], "bounded:EPS"),
        (["--fidelity", "bounded:2"], "EPS from"),
    ],
)
def test_bad_arguments(smollm2_path: Path, arguments: list[str], words: str) -> None:
    out = CliRunner().invoke(command, [str(smollm2_path), *arguments])
    assert out.exit_code != 0
    assert words in out.output + str(out.exception)
