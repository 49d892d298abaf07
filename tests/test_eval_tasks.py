"""Tasks over long texts: what the generated prompts hold, how answers are scored, and a real run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cli.eval import command
from kvtier.errors import UsageError
from kvtier.evaluation.rows import EXACT, RowFile, find_rows, stock_row
from kvtier.evaluation.tasks import NAMES, make_prompts, ruler, task_names
from kvtier.evaluation.tasks.answering import answer, score, split_tokens
from kvtier.evaluation.tasks.needle import DEPTHS, needle
from kvtier.evaluation.tasks.prompts import Count, Prompt, n_tokens_of, sized
from kvtier.evaluation.tasks.report import tables, to_csv, to_json
from kvtier.evaluation.tasks.results import PromptAnswer, TaskRow
from kvtier.evaluation.tasks.run import TaskEvaluation, TaskPlan, evaluate_tasks
from kvtier.measuring.child import Child
from kvtier.measuring.config import Configuration, Opening
from kvtier.measuring.engine import Engine
from kvtier.measuring.spec import parse_spec
from kvtier.measuring.text import library_text

SEEDS = st.integers(0, 1000).map(str)
INDICES = st.integers(0, 50)
SIZES = st.integers(8, 120)
TEXT = library_text()
LINES = [line for line in TEXT.splitlines() if line.strip()]
NEEDLE = needle(TEXT)


@pytest.fixture(scope="module")
def count(smollm2_path: Path) -> Iterator[Count]:
    with Child(Opening(str(smollm2_path), Configuration("tokeniser"), 256, 1)) as child:
        yield lambda text: int(child.ask("count_tokens", text=text)["n_tokens"])


def check(prompt: Prompt) -> None:
    """What holds for every prompt."""
    assert prompt.expected.startswith(" ")
    assert not prompt.question.endswith(" ")
    assert prompt.answers
    assert all(answer in prompt.expected and answer in prompt.context for answer in prompt.answers)
    assert score(prompt.expected, prompt.answers) == 1.0
    assert score(prompt.question, prompt.answers) == 0.0


@given(SEEDS, INDICES, st.integers(20, 400))
def test_one_needle_at_its_depth_in_the_text_as_it_is(seed: str, index: int, size: int) -> None:
    prompt = NEEDLE.write(seed, index, size)
    check(prompt)
    (key,) = re.findall(r"The secret number of (\S+) is$", prompt.question)
    sentence = f"The secret number of {key} is {prompt.answers[0]}."
    assert prompt.context.count(prompt.answers[0]) == 1
    assert prompt.context.count("The secret number of") == 1
    before, after = prompt.context.split(sentence + "\n")
    rest = (before + after).splitlines()
    assert len(rest) == size
    starts = [i for i, line in enumerate(LINES) if line == rest[0]]
    assert any(
        [LINES[(i + k) % len(LINES)] for k in range(size)] == rest for i in starts
    )  # one piece of the text, or its end and beginning
    assert prompt.depth == DEPTHS[index % 10]
    longest = max(len(line) for line in rest) + 1
    assert abs(len(before) - prompt.depth * len(before + after)) <= longest / 2 + 1


@given(SEEDS, INDICES, SIZES)
def test_niah_single_1(seed: str, index: int, size: int) -> None:
    prompt = ruler.niah_single_1(seed, index, size)
    check(prompt)
    text = prompt.context.splitlines()[1:]
    assert text.count(ruler.NOISE) == size == len(text) - 1
    (at,) = [i for i, line in enumerate(text) if line != ruler.NOISE]
    assert prompt.depth is not None
    assert at == round(prompt.depth * size)
    assert re.fullmatch(r"\d{7}", prompt.answers[0])


@pytest.mark.parametrize(
    ("write", "value"),
    [(ruler.niah_multikey_2, r"\d{7}"), (ruler.niah_multikey_3, r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")],
)
@given(seed=SEEDS, index=INDICES, size=SIZES)
def test_many_needles_one_of_which_is_asked_for(write: object, value: str, seed: str, index: int, size: int) -> None:
    assert callable(write)
    prompt = write(seed, index, size)
    check(prompt)
    pairs = re.findall(r"^The secret \w+ of (\S+) is (\S+)\.$", prompt.context, re.MULTILINE)
    assert len(pairs) == size + 1
    assert len(dict(pairs)) == size + 1  # every name once
    (key,) = re.findall(r"of (\S+) is$", prompt.question)
    assert dict(pairs)[key] == prompt.answers[0]
    assert all(re.fullmatch(value, v) for v in dict(pairs).values())
    assert [k for k, _ in pairs].index(key) == round((prompt.depth or 0) * size)


@given(SEEDS, INDICES, SIZES)
def test_the_chain_of_variables_in_the_order_of_the_text(seed: str, index: int, size: int) -> None:
    prompt = ruler.vt(seed, index, size)
    check(prompt)
    example, text = (
        prompt.context.split("\n\n", 2)[0],
        prompt.context[prompt.context.rindex("Variables are assigned") :],
    )
    assert text.count(ruler.NOISE) == size > example.count(ruler.NOISE)
    values: dict[str, str] = {}
    for name, source in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", text, re.MULTILINE):
        values[name] = values.get(source, source)  # an unknown source would be a name, no number
    (wanted,) = re.findall(r"value (\d{5})", prompt.question)
    assert values == dict.fromkeys(prompt.answers, wanted)
    assert len(prompt.answers) == 5


@given(SEEDS, INDICES, st.integers(10, 60), st.sampled_from(ruler.OCCURRENCES))
def test_common_words_are_the_ten_most_common(seed: str, index: int, size: int, times: tuple[int, int]) -> None:
    prompt = ruler.cwe(*times).write(seed, index, size)
    check(prompt)
    entries = re.findall(r"(\d+)\. ([a-z]+)", prompt.context[prompt.context.rindex("numbered list") :])
    assert [int(i) for i, _ in entries] == list(range(1, len(entries) + 1))
    counted = Counter(word for _, word in entries)
    assert {word for word, _ in counted.most_common(10)} == set(prompt.answers)
    assert Counter(counted.values()) == {times[0]: 10, times[1]: size}


@given(SEEDS, INDICES, st.integers(next(task.least for task in ruler.SIMPLE if task.name == "fwe"), 3000))
def test_frequent_words_are_the_three_after_the_dots(seed: str, index: int, size: int) -> None:
    prompt = ruler.fwe(seed, index, size)
    check(prompt)
    counted = Counter(prompt.context.splitlines()[1].split()).most_common()
    assert [word for word, _ in counted[:4]] == ["...", *prompt.answers]
    times = [n for _, n in counted]
    assert times[3] > times[4]
    assert times[0] == pytest.approx(4 * times[1], abs=3)  # the second rank occurs a quarter as often
    assert sum(times) == pytest.approx(size, rel=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_fill_the_length_and_depend_on_seed_and_index_only(name: str, count: Count) -> None:
    prompts = make_prompts(name, 2, 1500, 7, library_text(), count)
    assert len(prompts) == (10 if name == "needle" else 2)
    for prompt in prompts[:4]:
        check(prompt)
        assert 0.9 * 1500 < n_tokens_of(prompt, count) <= 1500
        assert prompt.task == name
    assert len({prompt.context for prompt in prompts}) == len(prompts)
    assert make_prompts(name, 2, 1500, 7, library_text(), count) == prompts
    assert make_prompts(name, 1, 1500, 8, library_text(), count)[0] != prompts[0]


def test_lengths_that_cannot_be(count: Count) -> None:
    with pytest.raises(UsageError, match="cwe needs [0-9,]+ tokens at least; 300"):
        make_prompts("cwe", 1, 300, 0, library_text(), count)
    with pytest.raises(UsageError, match=r"comes to [0-9,]+ tokens at most; 4,000 .*\n.*longer text"):
        make_prompts("needle", 1, 4000, 0, "a short line\n" * 100, count)
    (prompt, *_) = make_prompts("needle", 1, 300, 0, "a short line\n" * 200, count)
    assert n_tokens_of(prompt, count) <= 300


@settings(max_examples=50)
@given(st.integers(100, 3000), st.integers(1, 9), SEEDS)
def test_any_length_is_kept(n_tokens: int, chars_per_token: int, seed: str) -> None:
    def n_parts(text: str) -> int:
        return -(-len(text) // chars_per_token)

    task = next(task for task in ruler.SIMPLE if task.name == "niah_single_1")
    try:
        prompt = sized(task, seed, 0, n_tokens, n_parts)
    except UsageError:
        assert n_tokens_of(task.write(seed, 0, task.least), n_parts) > n_tokens
        return
    size = prompt.context.count(ruler.NOISE)
    assert n_tokens_of(prompt, n_parts) <= n_tokens
    assert n_tokens_of(task.write(seed, 0, size + 1), n_parts) > 0.98 * n_tokens - 100 / chars_per_token


def test_names_of_tasks() -> None:
    assert task_names("needle") == ("needle",)
    assert task_names("ruler, NEEDLE,vt") == (*ruler.NAMES, "needle")
    assert task_names("all") == NAMES
    with pytest.raises(UsageError, match=r"no task 'qa'\n.*niah_single_1"):
        task_names("needle,qa")
    with pytest.raises(UsageError, match="no task is named"):
        task_names(" , ")


def test_score_is_the_share_of_answers_in_the_text() -> None:
    assert score("they are ABC and def.", ("abc", "DEF", "ghi", "jkl")) == 0.5
    assert score("", ("abc",)) == 0.0


def prompt_of(expected: str, answers: tuple[str, ...] = ("no such answer",)) -> Prompt:
    return Prompt("x", 0, None, "One, two, three, four, five, six, seven, eight,", " nine,", expected, answers, 12)


def greedy(engine: Engine, n_tokens: int) -> list[int]:
    """The most probable continuation of the prompt, decoded on its own."""
    context, question, _ = split_tokens(engine, prompt_of(" ten").to_dict())
    engine.clear()
    engine.prefill(context)
    engine.decode(question)
    said = [int(np.argmax(engine.logits()))]
    while len(said) < n_tokens:
        engine.decode((said[-1],))
        said.append(int(np.argmax(engine.logits())))
    return said


@pytest.mark.parametrize("row", ["stock f16", EXACT])
def test_the_text_is_the_models_own_whatever_was_expected(smollm2_path: Path, row: str) -> None:
    (config,) = find_rows([row])
    engine = Engine(Opening(str(smollm2_path), config, 256, 1))
    try:
        said = greedy(engine, 12)
        own = engine.text(said)
        right, half = engine.text(said[:6]), engine.text(said[:3]) + " zebra zebra"
        prompts = [prompt_of(expected) for expected in (" zebra", half, right)]
        answers = [answer(engine, prompt.to_dict(), lambda *_: None) for prompt in prompts]
        assert [a["text"] for a in answers] == [own] * 3
        assert [a["is_exact"] for a in answers] == [False, False, True]
        log_p = [a["log_p"] for a in answers]
        assert log_p[2] > max(log_p[0], log_p[1])
        assert all(x < 0 for x in log_p)
        found = prompt_of(right, (right.split()[0],)).to_dict()
        stopped = answer(engine, found, lambda *_: None)
        assert stopped["score"] == 1.0
        assert own.startswith(stopped["text"])
        assert len(stopped["text"]) < len(own)  # what was asked for is there: no more is generated
    finally:
        engine.close()


@pytest.mark.parametrize(
    "spec",
    [
        "kvtier:fidelity=lossy,host=5MiB,policy=h2o",
        "kvtier:fidelity=lossy,host=3MiB,policy=adaptive",
        "kvtier:fidelity=bounded:0.05",
    ],
)
def test_a_prompt_leaves_nothing_to_the_next(smollm2_path: Path, spec: str) -> None:
    """Neither pages that were dropped, nor what a policy has seen."""
    engine = Engine(Opening(str(smollm2_path), parse_spec(spec), 448, 1))
    try:
        prompts = make_prompts("needle", 1, 448, 0, library_text(), lambda text: len(engine.tokenize(text.encode())))
        first, _, again = (answer(engine, prompts[i].to_dict(), lambda *_: None) for i in (0, 4, 0))
        assert (first["log_p"], first["text"]) == (again["log_p"], again["text"])
        assert engine.counts()["recall_rows" if "bounded" in spec else "n_gone"] > 0
    finally:
        engine.close()


def task_row(name: str, task: str, *scores: float) -> TaskRow:
    read = {"cell_bytes": 20480.0}
    depths = zip((0.05, 0.95, 0.95), scores, strict=False)
    return TaskRow(name, task, tuple(PromptAnswer(d, -0.5 - x, x, x == 1.0, "text", 10, 2.0, read) for d, x in depths))


def test_reports() -> None:
    exact = (task_row("exact", "needle", 1.0, 0.0, 1.0), task_row("exact", "vt", 0.5))
    other = (task_row("stock q4_0", "needle", 1.0, 0.0, 0.0), task_row("stock q4_0", "vt", 1.0))
    result = TaskEvaluation(exact, (other,), (("kvtier q4_0", "broke"),))
    text = tables(result)
    assert "33.3 (-33.3)" in text
    assert "100.0 (+50.0)" in text
    assert "-1.500 (-0.500)" in text  # more was found here with less probability: the two figures are independent
    assert "2.00 KiB" in text
    assert [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| stock q4_0")] == [
        "stock q4_0"
    ] * 3
    assert "-1.00, 1/2" in text  # exact at 95 %
    plan = TaskPlan(Path("m.gguf"), "", ("needle", "vt"), 4096, 3, 0, 2, True, stock_row("f16"), ())
    data = json.loads(json.dumps(to_json(plan, result)))
    assert data["rows"][0]["tasks"][0]["points"] == pytest.approx(-100 / 3)
    assert data["rows"][0]["tasks"][1]["answers"][0]["score"] == 1.0
    assert data["failures"] == [{"name": "kvtier q4_0", "error": "broke"}]
    header, *lines = to_csv(result).splitlines()
    assert header.startswith("name,task,n_prompts,score,points,")
    assert [line.split(",")[:3] for line in lines] == [
        ["exact", "needle", "3"],
        ["exact", "vt", "1"],
        ["stock q4_0", "needle", "3"],
        ["stock q4_0", "vt", "1"],
    ]
    assert PromptAnswer.from_dict(json.loads(json.dumps(exact[0].answers[0].to_dict()))) == exact[0].answers[0]


def test_stock_f16_and_the_exact_step_answer_alike(smollm2_path: Path, tmp_path: Path) -> None:
    sizes = ["--tasks", "needle,niah_single_1", "--length", "320", "--samples", "1"]
    rows = ["--row", "stock f16", "--row", "stock q4_0"]
    arguments = [
        str(smollm2_path),
        *sizes,
        *rows,
        "--rows",
        str(tmp_path / "rows.jsonl"),
        "--csv",
        str(tmp_path / "rows.csv"),
        "--json",
    ]
    out = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert out.exit_code == 0, out.output
    data = json.loads(out.stdout)
    exact, (f16, q4_0) = data["reference"], data["rows"]
    assert (exact["name"], f16["name"]) == ("exact", "stock f16")
    for ours, stocks in zip(exact["tasks"], f16["tasks"], strict=True):
        assert [a["text"] for a in ours["answers"]] == [a["text"] for a in stocks["answers"]]
        assert stocks["log_p_difference"] == pytest.approx(0.0, abs=0.02)
        assert stocks["points"] == 0.0
    assert exact["tasks"][0]["score"] > 0.5  # the model can do this
    assert [a["depth"] for a in exact["tasks"][0]["answers"]] == list(DEPTHS)
    worst = {row["name"]: max(abs(a["log_p"] - b["log_p"]) for a, b in _pairs(row, exact)) for row in (f16, q4_0)}
    assert worst["stock f16"] < worst["stock q4_0"]
    assert exact["ram_bytes"] == pytest.approx(f16["ram_bytes"], rel=0.1)
    assert (tmp_path / "rows.csv").read_text().count("\n") == 1 + 3 * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv", "rows.jsonl"]  # no widened weights
    again = json.loads(CliRunner().invoke(command, arguments, catch_exceptions=False).stdout)  # from the file
    assert {**again, "stock": None} == {**data, "stock": None}  # how fast stock's attention is, is measured anew


def _pairs(row: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for a, b in zip(row["tasks"], other["tasks"], strict=True):
        yield from zip(a["answers"], b["answers"], strict=True)


def test_an_interrupted_run_goes_on_prompt_by_prompt(smollm2_path: Path, tmp_path: Path) -> None:
    rows = (stock_row("f16"), Configuration("broken", "kvtier", settings="host=1KiB"))
    plan = TaskPlan(
        smollm2_path, library_text(), ("niah_single_1", "fwe"), 320, 2, 0, 2, False, find_rows([EXACT])[0], rows
    )
    file = RowFile(tmp_path / "rows.jsonl")
    measured: list[tuple[str, str]] = []

    def measure(name: str, task: str, *_: int) -> None:
        if ("exact" in name or "stock f16" in name) and (name, task) not in measured:
            measured.append((name, task))

    def stop_at_the_last(name: str, task: str, *_: int) -> None:
        if name == "stock f16: prompt 4 of 4":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_tasks(plan, file, stop_at_the_last)
    file.path.write_text(file.path.read_text()[:-30])  # and the last answer was not written to its end
    result = evaluate_tasks(plan, file, measure)
    assert measured == [("stock f16: prompt 1 of 2", "fwe"), ("stock f16: prompt 2 of 2", "fwe")]
    assert [(row.task, len(row.answers)) for row in result.rows[0]] == [("niah_single_1", 2), ("fwe", 2)]
    assert [name for name, _ in result.failures] == ["broken"]
    measured.clear()
    again = evaluate_tasks(replace(plan, n_samples=3, rows=rows[:1]), file, measure)
    assert len(measured) == 2 * 2  # the third prompts
    assert [row.answers[:2] for row in again.rows[0]] == [row.answers for row in result.rows[0]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "haystack"], "no task 'haystack'"),
        (["--tasks", "vt", "--length", "64"], "vt needs"),
        (["--tasks", "needle", "--length", "100m"], "tokens at most"),
        (["--tasks", "needle", "--row", "kvtier:policies=lru"], "no setting 'policies'"),
    ],
)
def test_bad_arguments(smollm2_path: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    out = CliRunner().invoke(command, [str(smollm2_path), "--rows", str(tmp_path / "rows.jsonl"), *arguments])
    assert isinstance(out.exception, UsageError)
    assert words in str(out.exception)
    assert not (tmp_path / "rows.jsonl").exists()
