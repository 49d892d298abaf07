"""`kvtier eval MODEL`: what a KV cache format costs in quality, beside stock's own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError
from ..evaluation import report
from ..evaluation.rows import EXACT, REFERENCE, STOCK_TYPES, RowFile, default_rows, find_rows, stock_row
from ..evaluation.run import EvaluationPlan, Report, evaluate
from ..evaluation.tasks import report as task_report
from ..evaluation.tasks import task_names
from ..evaluation.tasks.run import TaskPlan, evaluate_tasks
from ..folders import cache_dir
from ..measuring.config import Configuration
from ..measuring.errors import MeasuringError
from ..measuring.progress import StatusLine
from ..measuring.stock import Stock, look
from ..outputs import require_writable
from . import ui
from .measured import default_threads, find_model, terminable, write_file
from .options import BATCH, TOKENS, option, text_option
from .texts import read_text


def _chosen(only: tuple[str, ...], reference: str | None, in_tasks: bool) -> tuple[list[Configuration], Configuration]:
    """The rows to measure and the one to compare them with. Raises SpecError."""
    (chosen,) = find_rows((reference or (EXACT if in_tasks else REFERENCE.name),))
    usual = [stock_row(kind) for kind in STOCK_TYPES] if in_tasks else [REFERENCE, *default_rows()]
    rows = find_rows(only) if only else usual
    return [row for row in rows if replace(row, name="") != replace(chosen, name="")], chosen


@click.command("eval", context_settings={"show_default": True})
@click.argument("model", default="smollm2")
@text_option
@option(
    "--prefix", "n_prefix", type=TOKENS, default="6000", metavar="TOKENS", help="Tokens processed in batches first."
)
@option(
    "--tokens",
    "n_tokens",
    type=TOKENS,
    default="500",
    metavar="TOKENS",
    help="Tokens then fed one at a time and compared.",
)
@option(
    "--tasks",
    metavar="LIST",
    help="Instead of a text, tasks: needle, niah_single_1, niah_multikey_2, niah_multikey_3, vt, cwe, fwe; ruler is "
    "the last six, all is all.",
)
@option(
    "--length",
    type=TOKENS,
    default="4k",
    metavar="TOKENS",
    help="Tokens of a task's prompt with its answer.",
)
@option(
    "--samples", type=click.IntRange(1, 1000), default=5, help="Prompts of each task; the needle rounds up to tens."
)
@option("--seed", type=click.IntRange(0), default=0, help="Seed of the tasks' prompts.")
@option(
    "-b",
    "--batch-size",
    "n_batch",
    type=BATCH,
    default=512,
    help="Tokens of the prefix or the prompt that are computed together.",
)
@option("-t", "--threads", type=click.IntRange(1, 512), default=default_threads, help="Threads.")
@option(
    "--weights",
    type=click.Choice(["f32", "model"]),
    default="f32",
    help="f32: widen the weights first, in a temporary file of 4 bytes each, so that only the cache rounds. "
    "model: use them as they are, with llama.cpp's 8-bit rounding beside them.",
)
@option(
    "--row",
    "only",
    multiple=True,
    metavar="ROW",
    help="Only this row, by name ('kvtier q8_0') or as a configuration (kvtier:q8_0,host=64MiB,disk=1GiB); may be "
    "repeated.",
)
@option(
    "--reference",
    metavar="ROW",
    help="The row that the others are compared with; exact is the exact step of kvtier with F16 pages. [default: "
    f"'{REFERENCE.name}', for tasks exact]",
)
@option(
    "--rows",
    "rows_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where finished rows are kept.  [default: kvtier's cache folder]",
)
@option(
    "--keep-logits",
    is_flag=True,
    help="Keep the reference's logits for later runs: 4 bytes per token and vocabulary entry.",
)
@option(
    "--csv",
    "csv_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the rows to this file as CSV, too.",
)
@option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def command(model: str, text_file: Path | None, tasks: str | None, rows_file: Path | None, **options: Any) -> None:
    """Compare next-token distributions with an exact reference, one token at a time.

    MODEL is a GGUF file or a name that `kvtier models` lists; smollm2 without one.

    With --tasks: answers to questions about long texts, instead.

    Rows that are finished already (same model, text, lengths, configuration and build) are not measured again: an
    interrupted run goes on where it stopped.
    """
    if min(options["n_prefix"], options["n_tokens"]) < 1:
        raise UsageError(
            f"--prefix {options['n_prefix']} and --tokens {options['n_tokens']}: one of them is below 1",
            "Take at least 1 of each.",
        )
    if options["csv_file"] is not None:
        require_writable(options["csv_file"], f"the file {options['csv_file']}")
    names = None if tasks is None else task_names(tasks)
    if names is not None and options["keep_logits"]:
        raise UsageError(
            "--keep-logits is given with --tasks, which compare answers and keep no logits", "Leave out one of them."
        )
    rows, reference = _chosen(options["only"], options["reference"], in_tasks=names is not None)
    path, text = find_model(model), read_text(text_file)
    stock = look(path)
    if stock.build.problems():
        ui.warn(stock.warning())
    file = RowFile(rows_file or cache_dir() / "eval" / "rows.jsonl")
    if names is None:
        failures = _divergence(_plan(path, text, reference, rows, options), file, stock, options)
    else:
        failures = _tasks(_task_plan(path, text, names, reference, rows, options), file, stock, options)
    for name, error in failures:
        click.echo(f"{name}: {error}", err=True)
    if failures:
        raise MeasuringError(f"{len(failures)} of {len(rows)} rows could not be measured")


def _plan(
    path: Path, text: str, reference: Configuration, rows: list[Configuration], options: dict[str, Any]
) -> EvaluationPlan:
    lengths = (options["n_prefix"], options["n_tokens"], options["threads"])
    return EvaluationPlan(path, text, *lengths, options["weights"] == "f32", reference, tuple(rows), options["n_batch"])


def _task_plan(
    path: Path,
    text: str,
    names: tuple[str, ...],
    reference: Configuration,
    rows: list[Configuration],
    options: dict[str, Any],
) -> TaskPlan:
    sizes = (options["length"], options["samples"], options["seed"], options["threads"])
    return TaskPlan(path, text, names, *sizes, options["weights"] == "f32", reference, tuple(rows), options["n_batch"])


def _divergence(
    plan: EvaluationPlan, file: RowFile, stock: Stock, options: dict[str, Any]
) -> tuple[tuple[str, str], ...]:
    slow = stock.slow_names((plan.reference, *plan.rows))
    with terminable(_kept(file)), StatusLine() as status:
        result = evaluate(plan, file, _progress(status), options["keep_logits"])
    _show(
        options,
        report.to_csv(result, slow),
        report.to_json(plan, result, stock, slow),
        f"{report.table(result, slow)}\n\n{report.footnote(plan)}; finished rows are kept in {file.path}\n"
        f"{report.stock_lines(stock, slow)}",
    )
    return result.failures


def _tasks(plan: TaskPlan, file: RowFile, stock: Stock, options: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    slow = stock.slow_names((plan.reference, *plan.rows))
    with terminable(_kept(file)), StatusLine() as status:
        result = evaluate_tasks(plan, file, _progress(status))
    _show(
        options,
        task_report.to_csv(result),
        task_report.to_json(plan, result, stock, slow),
        f"{task_report.tables(result, slow)}\n\n{task_report.footnote(plan)}; "
        f"finished rows are kept in {file.path}\n{report.stock_lines(stock, slow)}",
    )
    return result.failures


def _kept(file: RowFile) -> str:
    return f"what is finished is kept in {file.path}, and the same command goes on from there"


def _progress(status: StatusLine) -> Report:
    return lambda row, phase, done, total: status(f"{row}: {phase}, {done:,} of {total:,} tokens")


def _show(options: dict[str, Any], as_csv: str, values: dict[str, Any], text: str) -> None:
    try:
        if options["csv_file"] is not None:
            write_file(options["csv_file"], as_csv)
    finally:
        ui.echo(json.dumps(values, indent=2) if options["as_json"] else text)
