"""Divergence figures, the file of finished rows, and a real run."""

from __future__ import annotations

import csv
import importlib
import io
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

from kvtier.cli import main
from kvtier.cli.eval import command
from kvtier.errors import OutputError, UsageError
from kvtier.evaluation.divergence import kl_divergence, log_softmax, mean_interval, summarise
from kvtier.evaluation.exactmass import layer_share
from kvtier.evaluation.readings import counts_between, readings
from kvtier.evaluation.report import table, to_csv, to_json
from kvtier.evaluation.rows import (
    REFERENCE,
    RowFile,
    RowResult,
    default_rows,
    find_rows,
    kvtier_row,
    row_key,
    stock_row,
)
from kvtier.evaluation.run import Evaluation, EvaluationPlan, build_of, evaluate, tokenise
from kvtier.lossy.settings import MemorySettings
from kvtier.measuring.child import Child
from kvtier.measuring.config import Configuration, Opening
from kvtier.measuring.engine import Engine
from kvtier.measuring.errors import MeasuringError
from kvtier.measuring.spec import SpecError, parse_spec, setting_keys
from kvtier.measuring.text import library_text
from kvtier.policies.scorer import shipped

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


def test_the_interval_of_a_mean_covers_it_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for i in range(200):
        noise = rng.normal(size=401)
        low, high = mean_interval(10 + noise[1:] + noise[:-1], 400, seed=i)  # neighbours are alike
        hits += low <= 10 <= high
    assert 0.88 * 200 < hits < 200
    assert mean_interval([0.25]) == (0.25, 0.25)
    assert mean_interval([0.5] * 30) == pytest.approx((0.5, 0.5))
    assert mean_interval([0.1, 0.2, 0.4]) == mean_interval([0.1, 0.2, 0.4])


def test_readings_are_differences_per_token() -> None:
    before = {
        "k_bytes_read": 100,
        "v_bytes_read": 50,
        "disk_read_bytes": 7,
        "peak_host_bytes": 9,
        "name": "x",
        "on": True,
    }
    after = {
        "k_bytes_read": 300,
        "v_bytes_read": 150,
        "disk_read_bytes": 27,
        "peak_host_bytes": 11,
        "name": "y",
        "on": True,
    }
    counts = counts_between(before, after)
    assert counts == {"k_bytes_read": 200, "v_bytes_read": 100, "disk_read_bytes": 20, "peak_host_bytes": 11}
    r = readings({**counts, "cell_bytes": 4}, 10, 5.0)
    assert (r.ram_bytes, r.disk_bytes, r.per_s) == (30, 2, 2)
    stock = readings({"cell_bytes": 40}, 10, 0.0)
    assert (stock.ram_bytes, stock.disk_bytes, stock.per_s) == (4, None, None)


def row(name: str = "stock f16", kl: float = 0.25) -> RowResult:
    return RowResult(name, (kl, 0.0), (True, False), (1.0, 2.0), 3.0, 4.0, {"cell_bytes": 4096.0})


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


@pytest.mark.parametrize("damage", [{"kl": None}, {"nll": ["x"]}, {"reading": None}, None])
def test_a_damaged_row_is_measured_again(tmp_path: Path, damage: dict[str, object] | None) -> None:
    file = RowFile(tmp_path / "rows.jsonl")
    file.add("a", row())
    entry = json.loads(file.path.read_text())
    entry["row"] = {**entry["row"], **damage} if damage else [1, 2]
    file.path.write_bytes(b"\xff\xfe\n" + json.dumps(entry).encode() + b"\n")
    assert file.find("a") is None
    file.add("a", row(kl=0.5))
    assert file.find("a") == row(kl=0.5)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot be written.*\n.*--rows FILE"):
        RowFile(tmp_path / "file" / "rows.jsonl").add("a", row())


def test_a_row_belongs_to_everything_it_was_measured_with() -> None:
    context = {"model": "m", "tokens": "t", "n_prefix": 1, "n_tokens": 2, "build": "b"}
    keys = {row_key(config, context) for config in [REFERENCE, *default_rows()]}
    assert len(keys) == 1 + len(default_rows())
    keys |= {row_key(REFERENCE, {**context, name: "other"}) for name in context}
    assert len(keys) == 1 + len(default_rows()) + len(context)
    assert row_key(stock_row("q8_0"), context) in keys
    assert row_key(parse_spec("stock:q8_0"), context) in keys  # whatever it is called
    varied = [
        f"kvtier:f16,{pair}"
        for pair in (
            "host=1MiB",
            "host=2MiB",
            "disk=1GiB",
            "mass-decay=0.5",
            "cache-v=q8_0",
            "host-v=q8_0,disk=1G",
            "policy=lru",
            "policy=h2o",
        )
    ]
    assert len({row_key(parse_spec(spec), context) for spec in varied} | keys) == len(varied) + len(keys)


def test_a_spec_says_everything_that_settings_can() -> None:
    config = parse_spec(
        " kvtier:q8_0,host=64MiB,disk=1GiB,dir=/tmp,disk-k=q4_0,page-tokens=64,mass-decay=0.5,protect_last=2 "
    )
    assert (config.engine, config.type_k, config.type_v) == ("kvtier", "q8_0", "q8_0")
    wanted = {
        "host=67108864",
        "disk=1073741824",
        "dir=/tmp",
        "host-k=q8_0",
        "disk-k=q4_0",
        "disk-v=q8_0",
        "page-tokens=64",
        "mass-decay=0.5",
    }
    assert wanted | {"protect-last=2"} == set(config.settings.split()) - {"host-v=q8_0"}
    assert parse_spec("kvtier:f32").type_k == "f16"  # nominal; the pages are F32
    assert "host-k=f32" in parse_spec("kvtier:f32").settings
    assert parse_spec("stock:cache-k=q8_0,cache-v=f16").type_k == "q8_0"
    assert replace(parse_spec("stock:f32,flash-attn=off"), name=REFERENCE.name) == REFERENCE
    assert {"host", "disk", "dir", "mass-decay"} <= set(setting_keys())
    bounded = parse_spec("kvtier:fidelity=bounded:0.05,read-budget=1k,policy=h2o")
    assert {"fidelity=bounded:0.05", "read-budget=1024", "host-k=q8_0", "host-v=q8_0"} == set(
        bounded.settings.split()
    ) - {"disk-k=q8_0", "disk-v=q8_0"}
    assert bounded.policy == "h2o"
    assert [
        parse_spec(f"kvtier:host=1MiB,{rest}").policy
        for rest in ("fidelity=lossy", "fidelity=lossy,policy=lru", "disk=1GiB")
    ] == ["adaptive", "lru", ""]
    (exact, named) = find_rows(["exact", "kvtier f16", "exact"])
    assert replace(exact, name="") == replace(named, name="")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("llama:f16", "stock: or kvtier:"),
        ("kvtier", "no row is called 'kvtier'"),
        ("kvtier:hoost=1GiB", "no setting 'hoost'.*\n.*host, disk, dir"),
        ("stock:f16,host=1GiB", "no setting 'host'.*\n.*cache, cache-k, cache-v, flash-attn"),
        ("kvtier:q3", "'q3' is no cache type.*\n.*q8_0"),
        ("kvtier:host-k=q3", "storage format"),
        ("kvtier:f16,q8_0", "cache is given twice"),
        ("kvtier:host=", "host has no value"),
        ("kvtier:host=1GB", "powers of 1000 or of 1024"),
        ("kvtier:page-tokens=x", "page-tokens: 'x'"),
        ("kvtier:mass-decay=x", "mass-decay"),
        ("kvtier:mass-decay=1.5", "mass_decay is 1.5"),
        ("kvtier:dir=/tmp", "no budget for the disk tier"),
        ("kvtier:fidelity=perfect", "fidelity is 'perfect'.*\\n.*bounded:0.05"),
        ("kvtier:fidelity=bounded:2", "EPS from"),
        ("kvtier:read-budget=64", "an exact step reads everything"),
        ("kvtier:policy=best", "no policy is called 'best'.*\\n.*h2o"),
        ("kvtier:policy=delta:x=1", "no parameter 'x'"),
        ("stock:policy=h2o", "no setting 'policy'"),
        ("kvtier:fidelity=lossy,keep=20%,host=1MiB", "keep and host both"),
        ("kvtier:fidelity=lossy,keep=0", "keep is '0'.*1% to 100%"),
        ("kvtier:fidelity=lossy,keep=1e-9%", "keep is '1e-9%'.*1% to 100%"),
        ("kvtier:keep=20%", "keep is '20%'.*nowhere to go\n.*fidelity=lossy or disk=BYTES"),
        ("kvtier:fidelity=bounded,keep=1%", "nowhere to go"),
        ("kvtier:", "'kvtier:' has nothing after the colon.*\n.*kvtier:f16"),
        ("stock:,", "nothing after the colon"),
        ("kvtier:fidelity=lossy,keep=some", "keep is 'some'"),
        ("kvtier:fidelity=lossy,keep=120%", "keep is '120%'"),
        ("kvtier:host=1MiB,compress=off", "compress is for lossy fidelity"),
        ("kvtier:fidelity=lossy,host=1MiB,compress=no", "neither on nor off"),
        ("kvtier:fidelity=lossy,host=1MiB,online-share=2", "online_share is 2.0"),
        ("stock:f16,flash-attn=maybe", "neither on nor off"),
    ],
)
def test_a_bad_spec_says_which_part_and_what_is_allowed(spec: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        find_rows([spec])


def test_keep_is_a_share_of_the_texts_own_cache(smollm2_path: Path) -> None:
    row = parse_spec("kvtier:fidelity=lossy,keep=50%,policy=h2o,online-share=0.01")
    assert row.memory == MemorySettings(compress=False, online_share=0.01)
    n_bytes = 30 * 3 * 64 * 2 * 2 * 1024  # layers, KV heads, channels, keys and values, F16, tokens
    config = row.for_model(smollm2_path, 1024)
    assert f"host={n_bytes // 2}" in config.settings.split() and config.keep == 0.0
    assert config.for_model(smollm2_path, 2048) == config  # settled
    opening = Opening(str(smollm2_path), config, 1088, 1)
    assert Opening.from_dict(json.loads(json.dumps(opening.to_dict()))) == opening
    plan = EvaluationPlan(smollm2_path, "", 1000, 24, 1, False)
    assert plan.for_text(row) == config


def test_a_scorer_that_changes_is_another_build(tmp_path: Path) -> None:
    weights = tmp_path / "mine.npz"
    shipped().save(weights)
    row = parse_spec(f"kvtier:fidelity=lossy,keep=50%,policy=delta:scorer={weights}")
    before = build_of(row)
    assert build_of(row) == before
    weights.write_bytes(weights.read_bytes() + b"!")
    assert build_of(row) != before


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
    header, *csv_rows = list(csv.reader(io.StringIO(to_csv(result))))
    assert [dict(zip(header, values, strict=True))["mean_kl"] for values in csv_rows] == ["0.0", "0.125", "0.05"]
    assert dict(zip(header, csv_rows[1], strict=True))["disk_bytes"] == ""
    assert float(dict(zip(header, csv_rows[1], strict=True))["ram_bytes"]) == 2048.0
    assert "2.00 KiB" in lines[2]
    assert "disk/token" not in lines[0]  # no row has it


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
    with pytest.raises(UsageError, match="56 are needed"):
        evaluate(plan, RowFile(tmp_path / "rows.jsonl"), lambda *_: None)


def test_formats_lose_what_their_bits_say(smollm2_path: Path, tmp_path: Path) -> None:
    """With F32 weights only the cache rounds: F32 pages are llama.cpp's own F32 attention, and every format has its
    place."""
    lengths = ["--prefix", "128", "--tokens", "8"]
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
    for row in data["rows"]:  # of eight tokens only
        assert row["perplexity"] == pytest.approx(perplexity, rel=0.5 if "q4" in row["name"] else 0.02), row["name"]
    assert (tmp_path / "rows.csv").read_text().count("\n") == 2 + len(wanted)  # header, reference
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "rows.csv",
        "rows.jsonl",
    ]  # neither logits nor widened weights


def test_tiers_and_bytes_against_the_exact_step(smollm2_path: Path, tmp_path: Path) -> None:
    pages = "kvtier:f16,host=6MiB,disk=1GiB"
    plan = EvaluationPlan(
        smollm2_path, library_text(), 512, 8, 1, False, *_rows("exact", pages, "stock f16", "kvtier q4_0")
    )
    result = evaluate(plan, RowFile(tmp_path / "rows.jsonl"), lambda *_: None)
    tiered, stock, q4_0 = result.rows
    assert tiered.divergence.max_kl == 0.0  # pages come back from disk as they left: the very same numbers
    exact_bytes = result.reference.readings.ram_bytes
    assert exact_bytes is not None
    n_cells = 512 + (1 + 8) / 2
    row_bytes = 30 * 2 * 192 * 2  # layers, K and V, channels of all KV heads, F16
    assert exact_bytes == pytest.approx(n_cells * row_bytes, rel=0.08)  # whole pages are read
    assert stock.readings.ram_bytes == pytest.approx(n_cells * row_bytes, rel=0.01)
    assert q4_0.readings.ram_bytes == pytest.approx(exact_bytes * 18 / 64, rel=0.01)
    assert stock.readings.disk_bytes is None
    assert result.reference.readings.disk_bytes == 0
    assert tiered.readings.disk_bytes is not None
    assert tiered.readings.disk_bytes > 0.3 * exact_bytes  # 12 MiB of cache, 6 of them in RAM
    assert "disk/token" in table(result).splitlines()[0]


def test_what_bounded_fidelity_leaves_out_and_what_lies_on_disk(smollm2_path: Path, tmp_path: Path) -> None:
    bounded, on_disk, lossy = (
        "kvtier:fidelity=bounded:0.1",
        "kvtier:f16,host=6MiB,disk=1GiB",
        "kvtier:fidelity=lossy,host=6MiB,policy=lru",
    )
    n_prefix, n_tokens = 512, 8
    plan = EvaluationPlan(
        smollm2_path,
        library_text(),
        n_prefix,
        n_tokens,
        1,
        False,
        *_rows("exact", bounded, on_disk, lossy, "stock f16"),
    )
    file = RowFile(tmp_path / "rows.jsonl")
    result = evaluate(plan, file, lambda *_: None)
    sparse, tiered, dropped, stock = (row.readings for row in result.rows)
    assert (stock.hit_rate, stock.recall, stock.omitted, stock.values_read) == (None, None, None, None)
    assert sparse.omitted is not None
    assert sparse.omitted_bound is not None
    assert 0 < sparse.omitted < min(0.1, sparse.omitted_bound)
    assert sparse.max_omitted is not None
    assert sparse.max_omitted >= sparse.omitted
    assert sparse.values_read is not None
    assert 0 < sparse.values_read < 1
    assert (sparse.hit_rate, sparse.recall) == (0.0, pytest.approx(1 - sparse.omitted))
    assert (tiered.recall, tiered.omitted) == (1.0, None)
    assert dropped.hit_rate is not None
    assert dropped.hit_rate > 0.01
    assert dropped.recall == pytest.approx(1 - dropped.hit_rate)  # what left is gone
    assert result.rows[2].divergence.mean_kl > result.rows[0].divergence.mean_kl
    tokens, _ = tokenise(plan)
    assert tiered.hit_rate == pytest.approx(
        _mass_on_disk(smollm2_path, tokens, n_prefix, n_tokens, plan.n_ctx), rel=0.01
    )
    assert list(tmp_path.iterdir()) == [file.path]
    assert {"eviction hits", "recall", "mass skipped"} <= {
        cell.strip() for cell in table(result).splitlines()[0].split("|")
    }


def _mass_on_disk(model: Path, tokens: list[int], n_prefix: int, n_tokens: int, n_ctx: int) -> float:
    """The same, from the attention of the very run that has its pages on disk: exact, too."""
    config = parse_spec("kvtier:f16,host=6MiB,disk=1GiB,mass-decay=0")
    engine = Engine(Opening(str(model), config, n_ctx, 1))
    shares = []
    try:
        engine.prefill(tokens[:n_prefix])
        for token in tokens[n_prefix : n_prefix + n_tokens]:
            before = engine.pages()
            engine.decode((token,))
            after = engine.pages()
            assert before is not None
            assert after is not None
            per_layer = [
                after.mass[(after.layer == layer) & (before.tier == 3)].sum() / after.mass[after.layer == layer].sum()
                for layer in range(30)
            ]
            shares.append(np.mean(per_layer))
    finally:
        engine.close()
    assert np.mean(shares) > 0.01
    return float(np.mean(shares))


def test_a_policy_in_a_row_decides_and_can_be_repeated(smollm2_path: Path, tmp_path: Path) -> None:
    pages = "kvtier:host=5MiB,disk=1GiB,policy="
    names = [pages + "sink_window", pages + "h2o"]
    plan = EvaluationPlan(smollm2_path, library_text(), 400, 8, 1, False, *_rows("exact", *names))
    first = evaluate(plan, RowFile(tmp_path / "rows.jsonl"), lambda *_: None)
    again = evaluate(plan, RowFile(tmp_path / "again.jsonl"), lambda *_: None)
    for row, repeated in zip(first.rows, again.rows, strict=True):
        assert row.divergence.max_kl == 0.0  # wherever pages are, every one is read
        assert row.readings.hit_rate is not None
        assert 0 < row.readings.hit_rate < 1
        assert row.readings.hit_rate == pytest.approx(
            repeated.readings.hit_rate, rel=0.02
        )  # writes go on beside the steps
    hits = [row.readings.hit_rate or 0.0 for row in first.rows]
    assert hits[1] < 0.97 * hits[0]  # h2o keeps what attention looks at


def test_shares_of_layers() -> None:
    layer = np.array([0, 0, 1, 1, 4])
    mass = np.array([1.0, 3.0, 2.0, 2.0, 0.0])
    assert layer_share(layer, mass, np.array([True, False, True, True, True])) == pytest.approx((0.25 + 1.0) / 2)
    assert layer_share(layer, np.zeros(5), np.ones(5, bool)) == 0.0


def _rows(reference: str, *names: str) -> tuple[Configuration, tuple[Configuration, ...]]:
    return find_rows([reference])[0], tuple(find_rows(names))


def test_weights_as_they_are(smollm2_path: Path, tmp_path: Path) -> None:
    plan = EvaluationPlan(smollm2_path, library_text(), 64, 4, 2, False, REFERENCE, (stock_row("f16"),))
    file = RowFile(tmp_path / "rows.jsonl")
    as_is = evaluate(plan, file, lambda *_: None)
    widened = evaluate(replace(plan, f32_weights=True), file, lambda *_: None)
    assert as_is.reference.nll != widened.reference.nll
    assert as_is.reference.divergence.perplexity == pytest.approx(widened.reference.divergence.perplexity, rel=0.1)


def test_the_disk_tier_of_a_row_is_in_the_users_cache_folder(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path / "cache"))  # which is not there yet
    with Child(Opening(str(smollm2_path), parse_spec("kvtier:f16,host=64MiB,disk=1GiB"), 256, 1), [1, 2, 3]):
        assert [path.suffix for path in (tmp_path / "cache" / "pages").iterdir()] == [".pages"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--row", "stock q3"], "no row"),
        (["--row", "kvtier:host=none"], "host budget"),
        (["--reference", "best"], "no row"),
        (["--prefix", "100m"], "tokens; "),
        (["--tokens", "0"], "at least 1"),
        (["--tasks", "needle", "--keep-logits"], "keep no logits"),
        (["-f", "/nonexistent/text"], "cannot be read"),
        (["-f", "/"], "Is a directory"),
    ],
)
def test_bad_arguments(smollm2_path: Path, arguments: list[str], words: str) -> None:
    out = CliRunner().invoke(command, [str(smollm2_path), *arguments])
    assert isinstance(out.exception, UsageError)
    assert words in str(out.exception)


def test_a_table_that_cannot_be_written(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noticed before anything is measured; where it fails at the end, the table is still shown."""
    module = importlib.import_module("kvtier.cli.eval")
    monkeypatch.setattr(module, "evaluate", lambda *_: Evaluation(row(), (), ()))
    there = tmp_path / "there.csv"
    there.write_text("as it was")
    early = CliRunner().invoke(main, ["eval", str(smollm2_path), "--csv", str(tmp_path / "none" / "x.csv")])
    assert (early.exit_code, early.stdout) == (14, "")
    assert "Make its folder" in early.stderr
    monkeypatch.setattr(
        module, "write_file", lambda path, _: (_ for _ in ()).throw(OutputError(f"the file {path} cannot be written"))
    )
    late = CliRunner().invoke(main, ["eval", str(smollm2_path), "--csv", str(there)])
    assert late.exit_code == 14
    assert "stock f16" in late.stdout
    assert there.read_text() == "as it was"


@pytest.mark.parametrize(("stop", "exit_code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_a_stop_says_what_is_kept(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException, exit_code: int
) -> None:
    def evaluate(*_: object) -> Evaluation:
        raise stop

    monkeypatch.setattr(importlib.import_module("kvtier.cli.eval"), "evaluate", evaluate)
    out = CliRunner().invoke(main, ["eval", str(smollm2_path), "--rows", str(tmp_path / "rows.jsonl")])
    assert out.exit_code == exit_code
    assert "rows.jsonl, and the same command goes on" in out.stderr
