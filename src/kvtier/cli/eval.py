"""`kvtier eval MODEL`: what a KV cache format costs in quality, beside stock's own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from ..evaluation import report
from ..evaluation.rows import REFERENCE, RowFile, default_rows, find_rows
from ..evaluation.run import EvaluationPlan, evaluate
from ..measuring.config import Configuration
from ..measuring.errors import MeasuringError
from ..measuring.progress import StatusLine
from ..measuring.text import read_text
from ..models import cache_dir
from . import ui
from .measured import default_threads, find_model, terminable, write_file
from .options import TOKENS, option


def _chosen(only: tuple[str, ...], reference: str) -> tuple[list[Configuration], Configuration]:
    """The rows to measure and the one to compare them with. Raises SpecError."""
    (chosen,) = find_rows((reference,))
    rows = find_rows(only) if only else [REFERENCE, *default_rows()]
    return [row for row in rows if replace(row, name="") != replace(chosen, name="")], chosen


@click.command("eval", context_settings={"show_default": True})
@click.argument("model", default="smollm2")
@option(
    "-f",
    "--file",
    "text_file",
    type=click.Path(path_type=Path),
    help="UTF-8 text.  [default: sources of Python's standard library]",
)
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
    help="Only this row, by name ('kvtier q8_0') or as a configuration (kvtier:q8_0,host=64MiB,disk=1GiB); may be repeated.",
)
@option(
    "--reference",
    default=REFERENCE.name,
    metavar="ROW",
    help="The row that the others are compared with; exact is the exact step of kvtier with F16 pages.",
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
def command(
    model: str,
    text_file: Path | None,
    n_prefix: int,
    n_tokens: int,
    threads: int,
    weights: str,
    only: tuple[str, ...],
    reference: str,
    rows_file: Path | None,
    keep_logits: bool,
    csv_file: Path | None,
    as_json: bool,
) -> None:
    """Compare next-token distributions with an exact reference, one token at a time.

    MODEL is a GGUF file or a name that `kvtier models` lists; smollm2 without one.

    Rows that are finished already (same model, text, lengths, configuration and build) are not measured again: an
    interrupted run goes on where it stopped.
    """
    if min(n_prefix, n_tokens) < 1:
        raise MeasuringError("--prefix and --tokens must be at least 1")
    rows, chosen = _chosen(only, reference)
    lengths = (n_prefix, n_tokens, threads)
    widened = weights == "f32"
    plan = EvaluationPlan(find_model(model), read_text(text_file), *lengths, widened, chosen, tuple(rows))
    path = rows_file or cache_dir() / "eval" / "rows.jsonl"
    with terminable(), StatusLine() as status:

        def progress(row: str, phase: str, done: int, total: int) -> None:
            status(f"{row}: {phase}, {done:,} of {total:,} tokens")

        result = evaluate(plan, RowFile(path), progress, keep_logits)
    if csv_file is not None:
        write_file(csv_file, report.to_csv(result))
    if as_json:
        ui.echo(json.dumps(report.to_json(plan, result), indent=2))
    else:
        ui.echo(report.table(result))
        ui.echo(f"\n{report.footnote(plan)}; finished rows are kept in {path}")
    for name, error in result.failures:
        click.echo(f"{name}: {error}", err=True)
    if result.failures:
        raise MeasuringError(f"{len(result.failures)} of {len(rows)} rows could not be measured")
