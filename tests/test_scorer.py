"""The scorer: its network learns, its files prove what they are, and its recipe runs from text to weights."""

from __future__ import annotations

import io
import json
import os
import signal
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cli import main
from kvtier.errors import OutputError, ScorerError, UsageError
from kvtier.policies import Budgets, create
from kvtier.policies.features import FEATURES, features
from kvtier.policies.scorer import HIDDEN, Scorer, load, shapes, shipped
from kvtier.scorer.quality import mass_recall, quality, spearman
from kvtier.scorer.recipe import Segments, Text, split, train_on, tune_on
from kvtier.scorer.samples import LEAST_STEPS, pooled, samples
from kvtier.scorer.train import Training, _gradients, train
from kvtier.simulator.run import Setting, simulate
from kvtier.trace import Trace

from .texts import source_text
from .traces import random_stats, synthetic, write_synthetic

SHORT = Training(steps=400, batch=512)


def silent(_text: str, _done: int, _total: int) -> None:
    pass


def a_scorer(seed: int = 0) -> Scorer:
    rng = np.random.default_rng(seed)
    return Scorer(
        **{name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes().items()}, about="a test"
    )


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    folder = tmp_path_factory.mktemp("traces")
    return synthetic(folder / "a", n_steps=400, seed=1), synthetic(folder / "b", n_steps=400, seed=2)


def test_features_are_finite_and_in_order() -> None:
    stats = random_stats(np.random.default_rng(0), 3, 40)
    x = features(stats)
    assert x.shape == (len(FEATURES) + 1, len(stats))
    assert x.dtype == np.float32
    assert np.isfinite(
        features(
            replace(stats, mass_mean=stats.mass_mean * 0, mass_max=stats.mass_max * 0, mass_long=stats.mass_long * 0)
        )
    ).all()
    assert np.allclose(x[FEATURES.index("age")], np.log2(stats.age + 1))
    assert np.allclose(x[FEATURES.index("layer_depth")], stats.layer_depth)
    assert (x[-1] == 1).all()


@given(n=st.integers(0, 5000), seed=st.integers(0, 100))
@settings(max_examples=30)
def test_predictions_in_blocks_are_those_of_the_formula(n: int, seed: int) -> None:
    scorer = a_scorer(seed)
    x = np.random.default_rng(seed).standard_normal((len(FEATURES) + 1, n)).astype(np.float32)
    x[-1] = 1
    one = np.ones((1, n), np.float32)
    hidden = np.concatenate([np.abs(scorer.w1 @ x), one])
    hidden = np.concatenate([np.abs(scorer.w2 @ hidden), one])
    present = x[FEATURES.index("mass_mean")] * np.log(2)
    assert np.allclose(scorer.predict(x), (scorer.w3 @ hidden)[0] + present, rtol=1e-3, atol=1e-3)


def test_gradients_are_those_of_the_loss() -> None:
    rng = np.random.default_rng(0)
    params = {name: (rng.standard_normal(shape) * 0.2).astype(np.float64) for name, shape in shapes().items()}
    x = rng.standard_normal((len(FEATURES) + 1, 50))
    present, future = rng.standard_normal(50), rng.exponential(1, 50)
    _, gradients = _gradients(params, x, present, future, 0.3)
    for name, values in params.items():
        for at in [(0, 0), (0, values.shape[1] - 1), (values.shape[0] - 1, 1)]:
            losses = []
            for delta in (1e-5, -1e-5):
                changed = {key: value.copy() for key, value in params.items()}
                changed[name][at] += delta
                losses.append(_gradients(changed, x, present, future, 0.3)[0])
            assert gradients[name][at] == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=0.02, abs=1e-4)


def test_training_learns_a_rule_that_it_can_express() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((len(FEATURES) + 1, 4000)).astype(np.float32)
    x[-1] = 1
    x[9] = 0  # a figure that the engine does not give
    future = np.exp(0.8 * x[0] - 0.5 * np.abs(x[4]) + 0.3).astype(np.float32)
    scorer = train(x, future, np.ones(4000, np.float32), Training(steps=2500, batch=512, rate=3e-3, decay=0.0))
    assert spearman(scorer.predict(x), future) > 0.98
    assert np.abs(np.exp(scorer.predict(x)).mean() / future.mean() - 1) < 0.05
    given_now = x.copy()
    given_now[9] = 3
    assert np.array_equal(scorer.predict(given_now), scorer.predict(x))


def test_training_twice_gives_the_same(traces: tuple[Trace, Trace]) -> None:
    examples = pooled(traces)
    first, second = (train(*examples, SHORT) for _ in range(2))
    assert all(np.array_equal(getattr(first, name), getattr(second, name)) for name in ("w1", "w2", "w3"))


def test_samples_know_the_future_only_in_their_target(traces: tuple[Trace, Trace]) -> None:
    trace = traces[0]
    changed = replace(trace, codes=np.concatenate([trace.codes[:64], trace.codes[64:][::-1]]))
    first, other = next(samples(trace)), next(samples(changed))
    assert np.array_equal(first.x, other.x)
    assert not np.array_equal(first.future, other.future)
    assert len(first.future) == int((~first.stats.protected).sum()) == first.x.shape[1]


def test_a_trained_scorer_ranks_better_than_simple_rules(traces: tuple[Trace, Trace], tmp_path: Path) -> None:
    more = [synthetic(tmp_path / str(seed), n_steps=400, seed=seed) for seed in range(3, 9)]
    outcome = train_on([traces[0], *more], traces[1:], Training(steps=3000, batch=512, rate=3e-3), silent)
    by_name = {q.name: q for q in outcome.quality}
    for name in ("lru", "recency"):  # h2o comes near to the best that there is: heavy pages stay heavy in these traces
        assert by_name["scorer"].spearman > by_name[name].spearman
        assert by_name["scorer"].recall > by_name[name].recall
    assert by_name["scorer"].recall[1] > by_name["h2o"].recall[1]
    assert by_name["perfect"].spearman == pytest.approx(1)
    assert all(by_name["scorer"].recall[i] <= by_name["perfect"].recall[i] + 1e-6 for i in range(3))
    assert "synthetic" in outcome.scorer.about
    refined = tune_on(outcome.scorer, traces[1:], traces[1:], Training(steps=100, rate=5e-4), silent)
    assert refined.before is not None
    assert refined.quality[0].spearman > by_name["scorer"].spearman - 0.02
    assert outcome.scorer.about in refined.scorer.about


def test_short_traces_teach_nothing(tmp_path: Path, traces: tuple[Trace, Trace]) -> None:
    with pytest.raises(UsageError, match="no trace has"):
        train_on([synthetic(tmp_path / "t", n_steps=100)], traces, SHORT, silent)


def test_measures_of_rankings() -> None:
    truth = np.array([4, 3, 2, 1, 0, 0, 0, 0, 0, 0], np.float32)
    assert spearman(truth, truth) == pytest.approx(1)
    assert spearman(-truth, truth) == pytest.approx(-1)
    assert spearman(truth * 0, truth) == 0
    assert mass_recall(truth, truth, 0.2) == pytest.approx(0.7)
    assert mass_recall(-truth, truth, 0.5) == 0


def test_a_file_comes_back(tmp_path: Path) -> None:
    scorer = a_scorer()
    scorer.save(tmp_path / "s.npz")
    again = load(tmp_path / "s.npz")
    assert again.about == "a test"
    assert all(np.array_equal(getattr(again, name), getattr(scorer, name)) for name in ("w1", "w2", "w3"))
    assert [path.name for path in tmp_path.iterdir()] == ["s.npz"]


def _changed(data: bytes, change: Callable[[dict[str, np.ndarray]], None]) -> bytes:
    with np.load(io.BytesIO(data)) as file:
        arrays = {name: file[name].copy() for name in file.files}
    change(arrays)
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def _meta(**changes: object) -> Callable[[dict[str, np.ndarray]], None]:
    def change(arrays: dict[str, np.ndarray]) -> None:
        meta = {**json.loads(arrays["meta"].tobytes()), **changes}
        arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)

    return change


def _set(name: str, value: np.ndarray) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda arrays: arrays.__setitem__(name, value)


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "is no scorer"),
    "text": (lambda data: b"hello, world", "is no scorer"),
    "cut": (lambda data: data[: len(data) // 2], "is no scorer"),
    "a plain array": (lambda data: _npy(np.zeros(3)), "is no scorer"),
    "another version": (lambda data: _changed(data, _meta(version=9)), r"version 9\.1"),
    "other features": (lambda data: _changed(data, _meta(features=["mass_mean"])), "version"),
    "another kind": (lambda data: _changed(data, _meta(kind="cat")), "is no scorer"),
    "a changed weight": (lambda data: _changed(data, _set("w3", np.zeros((1, HIDDEN[1] + 1), np.float32))), "checksum"),
    "another shape": (lambda data: _changed(data, _set("w2", np.zeros((3, 3), np.float32))), "shape"),
    "double": (lambda data: _changed(data, _set("w1", np.zeros(shapes()["w1"]))), "float64"),
    "not finite": (lambda data: _changed(data, _set("w1", np.full(shapes()["w1"], np.nan, np.float32))), "not finite"),
    "an array too many": (lambda data: _changed(data, _set("w4", np.zeros(1))), "other arrays"),
    "no meta": (lambda data: _changed(data, lambda arrays: arrays.pop("meta")), "is no scorer"),
    "too large": (lambda data: data + bytes(2 << 20), "bytes"),
}


def _npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_used_is_an_error(damage: str, tmp_path: Path) -> None:
    make, words = DAMAGES[damage]
    a_scorer().save(tmp_path / "s.npz")
    (tmp_path / "s.npz").write_bytes(make((tmp_path / "s.npz").read_bytes()))
    with pytest.raises(ScorerError, match=words):
        load(tmp_path / "s.npz")


def test_any_changed_byte_is_noticed_or_harmless(tmp_path: Path) -> None:
    scorer = a_scorer()
    scorer.save(tmp_path / "s.npz")
    data = (tmp_path / "s.npz").read_bytes()
    for at in range(0, len(data), 7):
        (tmp_path / "c.npz").write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        try:
            again = load(tmp_path / "c.npz")
        except ScorerError:
            continue
        assert all(np.array_equal(getattr(again, name), getattr(scorer, name)) for name in ("w1", "w2", "w3"))


def test_missing_and_unwritable(tmp_path: Path) -> None:
    with pytest.raises(ScorerError, match="cannot be read"):
        load(tmp_path / "none.npz")
    with pytest.raises(OutputError, match="cannot be written"):
        a_scorer().save(tmp_path / "no" / "s.npz")


def test_shipped_weights_beat_the_heuristics_on_a_real_trace(smollm2_path: Path, tmp_path: Path) -> None:
    """On text that was not trained on: the tests' own sources."""
    from kvtier.scorer.recipe import record_all

    here = "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("test_*.py")))
    traces = record_all(
        [smollm2_path], [Text("tests", here)], Segments((1024,), 256, 1), tmp_path, silent, lambda: False
    )
    by_name = {q.name: q for q in quality(traces, shipped())}
    for name in ("h2o", "lru", "recency"):
        assert by_name["scorer"].spearman > by_name[name].spearman
        for i in range(3):
            assert by_name["scorer"].recall[i] > by_name[name].recall[i] - 0.02, (name, by_name)


def test_delta_goes_by_present_attention_unless_it_has_a_scorer(
    traces: tuple[Trace, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    for policy in (create("delta"), create("delta:scorer=shipped")):
        result = simulate(traces[0], policy, Setting(0.4))
        assert 0 < result.recall < 1
    monkeypatch.setattr("kvtier.policies.scorer.SHIPPED", "none.npz")
    stats = random_stats(np.random.default_rng(0), 2, 30)
    assert len(create("delta").plan(stats, Budgets(30_000, 0)).indices) > 0
    with pytest.raises(UsageError, match="no scorer weights"):
        create("delta:scorer=shipped")


def test_a_text_is_split_without_overlap() -> None:
    text = Text("t", "abcdefghij" * 10)
    learnt, judged = split(text)
    assert learnt.content + judged.content == text.content


def test_train_and_tune_from_text_to_weights(smollm2_path: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(source_text()[:40_000], encoding="utf-8")
    common = [
        "-t",
        "1",
        "-m",
        str(smollm2_path),
        "--prefix",
        "256",
        "--tokens",
        "200",
        "--json",
        "--traces",
        str(tmp_path / "traces"),
    ]
    first = CliRunner().invoke(
        main, ["scorer", "train", str(text), "-o", str(tmp_path / "s.npz"), "--steps", "300", *common]
    )
    assert first.exit_code == 0, first.stderr
    assert json.loads(first.stdout)["quality"][0]["name"] == "scorer"
    n_traces = len(list((tmp_path / "traces").glob("*.trace")))
    assert n_traces == 2
    tuned = CliRunner().invoke(
        main,
        [
            "scorer",
            "tune",
            str(text),
            "--from",
            str(tmp_path / "s.npz"),
            "-o",
            str(tmp_path / "t.npz"),
            "--steps",
            "20",
            *common,
        ],
    )
    assert tuned.exit_code == 0, tuned.stderr
    assert json.loads(tuned.stdout)["before"] is not None
    assert len(list((tmp_path / "traces").glob("*.trace"))) == n_traces  # recorded once
    report = CliRunner().invoke(
        main,
        [
            "scorer",
            "report",
            "--from",
            str(tmp_path / "t.npz"),
            "--trace",
            str(next((tmp_path / "traces").glob("*.trace"))),
        ],
    )
    assert report.exit_code == 0, report.stderr
    assert "Spearman" in report.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "none.txt", "-o", "s.npz"], "the text none.txt cannot be read"),
        (["train", "python", "-o", "none/s.npz"], "Make its folder"),
        (["train", "short.txt", "-o", "s.npz"], "are needed"),
        (["train", "python", "-o", "s.npz", "--tokens", "50"], "too few to learn from"),
        (["tune", "python", "--from", "short.txt", "-o", "s.npz"], "is no scorer"),
        (["tune", "python", "--from", "missing.npz", "-o", "s.npz"], "cannot be read"),
        (["train", "python", "-o", "s.npz", "--seed", "-1"], "-1 is not in the range"),
        (["report"], "nothing to judge by"),
        (["report", "--trace", "short.txt"], "is no trace"),
        (["report", "."], "Is a directory"),
    ],
)
def test_bad_input_is_an_error_and_leaves_nothing(
    args: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("a few words only", encoding="utf-8")
    run = CliRunner().invoke(main, ["scorer", *args])
    assert run.exit_code == (14 if "none/s.npz" in args else 2)
    assert words in run.stderr
    assert os.listdir(tmp_path) == ["short.txt"]


def test_a_report_on_a_trace_that_is_too_short_or_cut(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "t", n_steps=260)
    path.write_bytes(path.read_bytes()[:-30])
    args = ["scorer", "report", "--trace", str(path)]
    cut = CliRunner().invoke(main, args)
    assert (cut.exit_code, "--partial" in cut.stderr) == (2, True)
    assert "Spearman" in CliRunner().invoke(main, [*args, "--partial"]).stdout
    write_synthetic(path, n_steps=LEAST_STEPS - 1)
    short = CliRunner().invoke(main, args)
    assert (short.exit_code, short.stdout) == (2, "")
    assert f"has {LEAST_STEPS - 1} steps" in short.stderr
    assert f"at least {LEAST_STEPS}" in short.stderr
    with pytest.raises(UsageError, match="judge by"):
        quality([], shipped())


def test_a_stop_while_training_says_that_nothing_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traces: tuple[Trace, Trace]
) -> None:
    def recorded(*_: object) -> tuple[list[Trace], list[Trace]]:
        signal.raise_signal(signal.SIGTERM)
        return [traces[0]], [traces[1]]

    monkeypatch.setattr("kvtier.cli.scorer._recorded", recorded)
    run = CliRunner().invoke(
        main, ["scorer", "train", "python", "-o", str(tmp_path / "s.npz"), "--traces", str(tmp_path / "traces")]
    )
    assert run.exit_code == 143
    assert "nothing was written to" in run.stderr
    assert "kept in" in run.stderr
    assert os.listdir(tmp_path) == ["traces"]


def test_the_package_has_its_weights() -> None:
    assert shipped().about
    assert zipfile.is_zipfile(Path(__file__).parents[1] / "src" / "kvtier" / "policies" / "weights.npz")
