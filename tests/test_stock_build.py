"""How the installed llama.cpp was built: tried on the real one, judged, and said wherever it is compared with."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtier.bench.plan import STOCK_F16, STOCK_Q8_0
from kvtier.bench.report import text, to_json
from kvtier.bench.results import BenchResult, DecodeResult, PrefillResult, Traffic
from kvtier.cli import main
from kvtier.evaluation.rows import kvtier_row, stock_row
from kvtier.evaluation.run import build_of
from kvtier.machine import ggmlcpu
from kvtier.machine.stockbuild import StockBuild
from kvtier.measuring import stock as stock_module
from kvtier.measuring.child import Child
from kvtier.measuring.config import Configuration
from kvtier.measuring.stock import MARK, Stock, look
from kvtier.native.runtime import libggml

from . import machines

ALL_SETS = dict.fromkeys(("AVX", "AVX2", "FMA", "F16C", "AVX512", "LLAMAFILE"), "1")
GOOD = StockBuild("0.3.36", "0.25.3", "Xeon", machines.SAPPHIRE_RAPIDS, ALL_SETS, {64: 30.0, 128: 50.0})
SLOW = replace(GOOD, attention_ns={64: 110.0, 128: 25.0})  # as -march=native makes it there
BARE = replace(GOOD, features={"SSE3": "1", "AVX": "1", "F16C": "0"})


def test_the_real_attention_is_timed() -> None:
    times = ggmlcpu.attention_ns(libggml, (64, 128, 256), n_runs=8)
    assert set(times) == {64, 128, 256}
    assert all(ns > 0 for ns in times.values())
    assert ggmlcpu.features(libggml), "the build says what it was compiled for"
    assert ggmlcpu.version(libggml).count(".") == 2


def test_a_library_without_those_functions_tells_nothing() -> None:
    libc = ctypes.CDLL(None)
    assert (ggmlcpu.attention_ns(libc), ggmlcpu.features(libc), ggmlcpu.version(libc)) == ({}, {}, "unknown")


def test_what_makes_a_build_slow() -> None:
    assert GOOD.problems() == [] and not GOOD.has_slow_heads and GOOD.lacking == []
    assert BARE.lacking == ["AVX512", "AVX2", "FMA", "F16C"]
    assert "built without AVX512, AVX2, FMA, F16C" in BARE.problems()[0]
    (problem,) = SLOW.problems()
    assert "4.4 times as long" in problem and "AVX512_FP16" in problem
    (other,) = replace(SLOW, flags=machines.ZEN_1, features=ALL_SETS).problems()
    assert "AVX512_FP16" not in other
    unknown = replace(GOOD, features={}, attention_ns={})
    assert unknown.problems() == [] and unknown.half_ratio is None
    assert "unknown" in unknown.line()


@pytest.mark.parametrize(
    ("build", "type_v", "sizes", "slow"),
    [
        (GOOD, "f16", (64,), False),
        (SLOW, "f16", (64,), True),
        (SLOW, "f16", (80,), True),
        (SLOW, "f16", (128, 256), False),
        (SLOW, "f16", (256, 96), True),
        (SLOW, "q8_0", (64,), False),
        (BARE, "q8_0", (128,), True),
        (SLOW, "f16", (), False),
    ],
)
def test_whom_it_makes_slow(build: StockBuild, type_v: str, sizes: tuple[int, ...], slow: bool) -> None:
    assert build.is_slow_for(type_v, sizes) is slow


def test_only_stock_is_concerned() -> None:
    stock = Stock(SLOW, (64,))
    assert stock.is_slow(STOCK_F16) and not stock.is_slow(STOCK_Q8_0)
    assert not stock.is_slow(kvtier_row("f16"))
    assert not stock.is_slow(replace(STOCK_F16, flash_attn=False))
    assert not stock.is_slow(Configuration("stock f32", type_k="f32", type_v="f32", flash_attn=False))
    rows = [stock_row("f16"), stock_row("q8_0"), kvtier_row("f16")]
    assert stock.slow_names(rows) == {"stock f16"}
    assert Stock(BARE, (64,)).slow_names(rows) == {"stock f16", "stock q8_0"}


def test_words_say_how_it_was_built_and_what_to_do() -> None:
    stock = Stock(SLOW, (64,))
    assert stock.build.line() == (
        "llama-cpp-python 0.3.36, ggml 0.25.3 (AVX, AVX2, FMA, F16C, AVX512, LLAMAFILE) on Xeon"
    )
    warning = stock.warning()
    assert "slow build" in warning and warning.endswith("llama-cpp-python==0.3.36")
    assert "-DGGML_NATIVE=OFF" in warning and "-DGGML_AVX512_VNNI=ON" in warning
    assert stock.footnote().startswith(f"{MARK} ")
    assert Stock(GOOD, (64,)).warning() == ""
    data = json.loads(json.dumps(stock.to_dict()))
    assert data["attention_ns"] == {"64": 110.0, "128": 25.0} and data["problems"] and data["head_sizes"] == [64]


def test_the_installed_one_is_asked_in_a_process_of_its_own(smollm2_path: Path) -> None:
    stock = look(smollm2_path)
    assert stock.head_sizes == (64,)
    assert stock.build.instruction_sets and set(stock.build.attention_ns) == {64, 128}
    with Child() as child:
        answer = child.ask("build")
    assert StockBuild.from_answer(answer, stock.build.processor, stock.build.flags).features == stock.build.features


def test_another_compiled_backend_is_another_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kvtier.evaluation import run as evaluation_run

    row = stock_row("f16")
    keys = set()
    for code in (b"native", b"named"):
        (tmp_path / "libggml-cpu.so").write_bytes(code)
        monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
        evaluation_run._stock_hash.cache_clear()
        keys.add(build_of(row))
    evaluation_run._stock_hash.cache_clear()
    assert len(keys) == 2


def _slow_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measuring process is the real one; what it says of the build is what it says on such a machine."""
    real = Child.ask

    def ask(self: Child, op: str, *args: object, **arguments: object) -> dict[str, object]:
        answer = real(self, op, *args, **arguments)  # type: ignore[arg-type]
        return {**answer, "attention_ns": {"64": 110.0, "128": 25.0}} if op == "build" else answer

    monkeypatch.setattr(Child, "ask", ask)
    monkeypatch.setattr(stock_module, "cpu_flags", lambda: machines.SAPPHIRE_RAPIDS - {"avx512f"})


BENCH = ["--contexts", "0", "--threads", "1", "--rounds", "1", "--prefill", "0", "--stock-only"]
EVAL = ["--prefix", "64", "--tokens", "2", "--row", "stock f16", "--row", "stock q8_0", "--weights", "model"]


def bench_result(build: StockBuild) -> BenchResult:
    names = (STOCK_F16.name, STOCK_Q8_0.name, "kvtier f16")
    times = {name: [4.0 / (i + 1)] * 3 for i, name in enumerate(names)}
    traffic = dict.fromkeys(names, Traffic(10**8, 10**8))
    decode = DecodeResult(8192, 1, 16, times, times, traffic, dict.fromkeys(names, "repeated"))
    prefill = PrefillResult(8192, 2, 512, False, times, times)
    return BenchResult("m", {1: 4e9}, 0.0, 0.5, (decode,), prefill, stock=Stock(build, (64,)))


def test_bench_marks_every_figure_of_and_ratio_against_a_slow_build() -> None:
    """Decode, decode by processor time (the machine was busy) and prefill."""
    report = text(bench_result(SLOW))
    assert f"\n{MARK} of or against a slow build" in report and "\nwarning: stock llama.cpp is a slow build" in report
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.splitlines() if line.startswith("| ")]
    of_kvtier = [row for row in rows if row[0] == "kvtier f16"]
    assert len(of_kvtier) == 2
    for row in of_kvtier:
        ratios = [cell for cell in row if ".." in cell]
        assert [cell.endswith(MARK) for cell in ratios] == [True, False] * (len(ratios) // 2)
        assert not row[1].endswith(MARK)
    assert [row[1].endswith(MARK) for row in rows if row[0] == "stock f16"] == [True, True]
    assert all(MARK in cell for row in rows if row[0] == "stock q8_0" for cell in row if ".." in cell)
    data = json.loads(json.dumps(to_json(bench_result(SLOW))))
    for table in (data["decode"][0], data["prefill"]):
        by_name = {row["name"]: row for row in table["rows"]}
        assert by_name["kvtier f16"]["slow_baselines"] == ["stock f16"]
        assert by_name["stock f16"]["slow_build"] and not by_name["stock q8_0"]["slow_build"]


def test_bench_of_a_good_build_says_how_it_was_built_and_marks_nothing() -> None:
    report = text(bench_result(GOOD))
    assert f"\nstock: {GOOD.line()}\n" in report
    assert MARK not in report and "warning" not in report


def test_bench_warns_before_it_starts(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _slow_answers(monkeypatch)
    out = CliRunner().invoke(main, ["bench", str(smollm2_path), *BENCH, "-o", str(tmp_path / "out.json")])
    assert out.exit_code == 0, out.output
    assert "slow build" in out.stderr and "-DGGML_NATIVE=OFF" in out.stderr
    assert "stock: llama-cpp-python" in out.stdout and f"\n{MARK} of or against a slow build" in out.stdout
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["stock"]["problems"] and data["stock"]["processor"] == data["machine"]["processor"]


def test_eval_marks_rates_of_a_slow_build(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["eval", str(smollm2_path), *EVAL, "--rows", str(tmp_path / "rows.jsonl")]
    good = CliRunner().invoke(main, command)
    assert good.exit_code == 0, good.output
    assert "stock: llama-cpp-python" in good.stdout
    assert "slow build" not in good.output or look(smollm2_path).build.problems()
    _slow_answers(monkeypatch)
    slow = CliRunner().invoke(main, command)
    assert slow.exit_code == 0, slow.output
    assert "slow build" in slow.stderr
    rates = {line.split("|")[1].strip(): line.split("|")[-2] for line in slow.stdout.splitlines() if "|" in line}
    assert rates["stock f16"].rstrip().endswith(MARK) and not rates["stock q8_0"].rstrip().endswith(MARK)
    assert f"\n{MARK} of or against" in slow.stdout
    data = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    assert {row["name"]: row["slow_build"] for row in data["rows"]} == {"stock f16": True, "stock q8_0": False}
    assert data["stock"]["problems"]
