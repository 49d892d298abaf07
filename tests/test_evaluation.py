"""Divergence figures, the file of finished rows, and a real run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvtier.cli.eval import command
from kvtier.evaluation.divergence import kl_divergence, log_softmax, summarise
from kvtier.evaluation.report import table, to_csv, to_json
from kvtier.evaluation.rows import REFERENCE, RowFile, RowResult, default_rows, kvtier_row, row_key, stock_row
from kvtier.evaluation.run import Evaluation, EvaluationPlan, evaluate
from kvtier.measuring.config import Configuration
from kvtier.measuring.errors import MeasuringError
from kvtier.measuring.text import library_text

LOGITS = arrays(np.float32, st.integers(2, 40), elements=st.floats(-80, 80, width=32))
PAIRS = st.integers(2, 40).flatmap(
    lambda n: st.tuples(*[arrays(np.float32, n, elements=st.floats(-80, 80, width=32)) for _ in range(2)])
)


@given(LOGITS, st.floats(-1e4, 1e4))
def test_log_softmax_is_a_distribution_that_ignores_a_common_shift(logits: np.ndarray, shift: float) -> None:
    log_p = log_softmax(logits)
    assert log_p.dtype == np.float64
    assert np.exp(log_p).sum() == pytest.approx(1.0, abs=1e-12)
    assert log_softmax(logits.astype(np.float64) + shift) == pytest.approx(log_p, abs=1e-9)


@given(PAIRS)
def test_kl_is_zero_only_without_a_difference_and_matches_its_definition(pair: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = (x.astype(np.float64) for x in pair)
    p, q = np.exp(a - a.max()), np.exp(b - b.max())
    p, q = p / p.sum(), q / q.sum()
    expected = sum(math.exp(u) * (u - v) for u, v in zip(log_softmax(a), log_softmax(b), strict=True))
    kl = float(kl_divergence(a, b))
    assert kl >= 0.0
    assert kl == pytest.approx(max(expected, 0.0), abs=1e-12)
    assert float(kl_divergence(a, a)) == 0.0
    assert kl + 1e-9 >= 0.5 * float(np.abs(p - q).sum()) ** 2  # Pinsker: a bound that a sign or base error breaks


def test_kl_of_known_distributions() -> None:
    logits = [[math.log(0.5), math.log(0.5)], [math.log(0.9), math.log(0.1)]]
    assert float(kl_divergence(logits[0], logits[1])) == pytest.approx(
        0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    )
    both = kl_divergence(np.array(logits), np.array(logits[::-1]))  # along the last axis
    assert both.shape == (2,)
    assert both[0] != pytest.approx(both[1])


def test_logits_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(MeasuringError, match="finite"):
        log_softmax([0.0, float("nan")])
    with pytest.raises(MeasuringError, match="compared"):
        kl_divergence([0.0, 1.0], [0.0, 1.0, 2.0])


def test_summary() -> None:
    d = summarise([0.0, 0.0, 0.0, 0.4], [True, True, True, False], [math.log(2)] * 4)
    assert (d.n_tokens, d.mean_kl, d.max_kl, d.same_top) == (4, pytest.approx(0.1), 0.4, 0.75)
    assert d.perplexity == pytest.approx(2.0)
    assert d.p99_kl == pytest.approx(0.4 * 0.97)
    for bad in (([], [], []), ([0.1], [True, True], [1.0])):
        with pytest.raises(MeasuringError):
            summarise(*bad)


def row(name: str = "stock f16", kl: float = 0.25) -> RowResult:
    return RowResult(name, (kl, 0.0), (True, False), (1.0, 2.0), 3.0, 4.0)


def test_finished_rows_survive_a_torn_last_line(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "deep" / "rows.jsonl")
    assert file.find("a") is None
    file.add("a", row())
    file.add("b", row("kvtier f16"))
    torn = json.dumps({"key": "c", "row": row().to_dict()})[:40]
    with file.path.open("a") as out:
        out.write(torn)  # the process was killed here
    assert file.find("a") == row()
    assert file.find("c") is None
    file.add("c", row(kl=0.5))
    file.add("a", row(kl=0.75))
    assert file.find("c") == row(kl=0.5)
    assert file.find("a") == row(kl=0.75)  # the newest counts
    assert file.find("b") == row("kvtier f16")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MeasuringError, match="cannot write"):
        RowFile(tmp_path / "file" / "rows.jsonl").add("a", row())


def test_a_row_belongs_to_everything_it_was_measured_with() -> None:
    context = {"model": "m", "tokens": "t", "n_prefix": 1, "n_tokens": 2, "build": "b"}
    keys = {row_key(config, context) for config in [REFERENCE, *default_rows()]}
    assert len(keys) == 1 + len(default_rows())
    keys |= {row_key(REFERENCE, {**context, name: "other"}) for name in context}
    assert len(keys) == 1 + len(default_rows()) + len(context)
    assert row_key(stock_row("q8_0"), context) in keys


def test_rows_say_what_they_store() -> None:
    for fmt in ("f16", "q4_1"):
        config = kvtier_row(fmt)
        assert config.engine == "kvtier"
        assert f"host-k={fmt}" in config.settings
    with pytest.raises(MeasuringError, match="q9_9"):
        Configuration("x", type_k="q9_9")
    with pytest.raises(MeasuringError, match="flash"):
        Configuration("x", "kvtier", flash_attn=False)


def test_reports() -> None:
    plan = EvaluationPlan(Path("m.gguf"), "text")
    result = Evaluation(row(REFERENCE.name, 0.0), (row(), row("kvtier f16", 0.1)), (("stock q4_0", "broke"),))
    lines = table(result).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        f"{REFERENCE.name} (reference)",
        "stock f16",
        "kvtier f16",
    ]
    data = json.loads(json.dumps(to_json(plan, result)))
    assert data["rows"][1]["mean_kl"] == pytest.approx(0.05)
    assert data["failures"] == [{"name": "stock q4_0", "error": "broke"}]
    assert to_csv(result).splitlines()[1].startswith("stock f16,2,0.125,")


def test_an_interrupted_run_goes_on_where_it_stopped(smollm2_path: Path, tmp_path: Path) -> None:
    text = Path(pytest.__file__).read_text() * 3
    plan = EvaluationPlan(smollm2_path, text, n_prefix=96, n_tokens=6, rows=(stock_row("f16"), stock_row("q4_0")))
    file = RowFile(tmp_path / "rows.jsonl")
    measured: list[str] = []

    def stop_at_the_second_row(name: str, phase: str, done: int, total: int) -> None:
        measured.append(name)
        if name == "stock q4_0":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(plan, file, stop_at_the_second_row)
    assert list(dict.fromkeys(measured)) == [smollm2_path.name, REFERENCE.name, "stock f16", "stock q4_0"]

    measured.clear()
    result = evaluate(plan, file, lambda name, *_: measured.append(name))
    assert set(measured) == {smollm2_path.name, "stock q4_0"}  # the weights are widened again, which takes a second
    f16, q4_0 = (r.divergence for r in result.rows)
    assert f16.n_tokens == 6
    assert f16.mean_kl < q4_0.mean_kl  # four bits lose more than sixteen
    assert result.reference.divergence.max_kl == 0.0
    assert list(tmp_path.iterdir()) == [file.path]  # the logits went when every row was done

    measured.clear()
    assert evaluate(plan, file, lambda name, *_: measured.append(name)) == result
    assert not measured
    evaluate(replace(plan, n_tokens=7, rows=(stock_row("f16"),)), file, lambda name, *_: measured.append(name))
    assert set(measured) == {smollm2_path.name, REFERENCE.name, "stock f16"}


def test_a_text_that_is_too_short(smollm2_path: Path, tmp_path: Path) -> None:
    plan = EvaluationPlan(smollm2_path, "two words", n_prefix=50, n_tokens=5)
    with pytest.raises(MeasuringError, match="56 are needed"):
        evaluate(plan, RowFile(tmp_path / "rows.jsonl"), lambda *_: None)


def test_formats_lose_what_their_bits_say(smollm2_path: Path, tmp_path: Path) -> None:
    """With F32 weights only the cache rounds: F32 pages are llama.cpp's own F32 attention, and every format has its place."""
    lengths = ["--prefix", "300", "--tokens", "12"]
    wanted = ["kvtier f32", "kvtier f16", "kvtier bf16", "kvtier q8_0", "kvtier q4_1", "kvtier q4_0", "stock f16"]
    files = ["--rows", str(tmp_path / "rows.jsonl"), "--csv", str(tmp_path / "rows.csv")]
    rows_wanted = [word for name in wanted for word in ("--row", name)]
    arguments = [str(smollm2_path), *lengths, *rows_wanted, *files, "--json"]
    out = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert out.exit_code == 0, out.output
    data = json.loads(out.stdout)
    kl = {r["name"]: r["mean_kl"] for r in data["rows"]}
    assert list(kl) == wanted
    assert kl["kvtier f32"] < 1e-9
    assert kl["kvtier f32"] < kl["kvtier f16"] < kl["stock f16"]  # stock accumulates in F16
    assert kl["kvtier f16"] < kl["kvtier bf16"] < kl["kvtier q4_0"]
    assert kl["kvtier f16"] < kl["kvtier q8_0"] < kl["kvtier q4_1"]
    perplexity = data["reference"]["perplexity"]
    assert all(row["perplexity"] == pytest.approx(perplexity, rel=0.2) for row in data["rows"])
    assert (tmp_path / "rows.csv").read_text().count("\n") == 1 + len(wanted)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "rows.csv",
        "rows.jsonl",
    ]  # neither logits nor widened weights


def test_weights_as_they_are(smollm2_path: Path, tmp_path: Path) -> None:
    plan = EvaluationPlan(smollm2_path, library_text(), 64, 4, 2, False, REFERENCE, (stock_row("f16"),))
    file = RowFile(tmp_path / "rows.jsonl")
    as_is = evaluate(plan, file, lambda *_: None)
    widened = evaluate(replace(plan, f32_weights=True), file, lambda *_: None)
    assert as_is.reference.nll != widened.reference.nll
    assert as_is.reference.divergence.perplexity == pytest.approx(widened.reference.divergence.perplexity, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--row", "stock q3"], "no row"),
        (["--tokens", "0"], "at least 1"),
        (["-f", "/nonexistent/text"], "cannot read"),
    ],
)
def test_bad_arguments(smollm2_path: Path, arguments: list[str], words: str) -> None:
    out = CliRunner().invoke(command, [str(smollm2_path), *arguments])
    assert out.exit_code != 0
    assert words in str(out.exception)
