"""`kvtier eval MODEL`: what a KV cache format costs in quality, beside stock's own."""

from __future__ import annotations

import json
from pathlib import Path

import click
import platformdirs

from ..evaluation import report
from ..evaluation.rows import REFERENCE, RowFile, default_rows
from ..evaluation.run import EvaluationPlan, evaluate
from ..measuring.config import Configuration
from ..measuring.errors import MeasuringError
from ..measuring.progress import StatusLine
from ..measuring.text import read_text
from ..models import resolve


def _chosen(only: tuple[str, ...], reference: str) -> tuple[list[Configuration], Configuration]:
    rows = default_rows()
    known = {row.name: row for row in [REFERENCE, *rows]}
    for name in (*only, reference):
        if name not in known:
            raise MeasuringError(f"no row is called {name!r}", "Rows: " + ", ".join(repr(n) for n in known) + ".")
    picked = [known[name] for name in only] if only else [*rows]
    if reference != REFERENCE.name and not only:
        picked.insert(0, REFERENCE)
    return [row for row in picked if row.name != reference], known[reference]


@click.command("eval")
@click.argument("model")
@click.option("-f", "--file", "text_file", type=click.Path(path_type=Path, dir_okay=False), help="UTF-8 text; default: sources of Python's standard library.")
@click.option("--prefix", "n_prefix", type=click.IntRange(1), default=6000, show_default=True, help="Tokens processed in batches first.")
@click.option("--tokens", "n_tokens", type=click.IntRange(1), default=500, show_default=True, help="Tokens then fed one at a time and compared.")
@click.option("-t", "--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--row", "only", multiple=True, metavar="NAME", help="Only this row, e.g. 'kvtier q8_0'; may be repeated.")
@click.option("--reference", default=REFERENCE.name, show_default=True, metavar="NAME", help="The row that the others are compared with.")
@click.option("--rows", "rows_file", type=click.Path(path_type=Path, dir_okay=False), help="Where finished rows are kept; default: the user's cache folder.")
@click.option("--keep-logits", is_flag=True, help="Keep the reference's logits for later runs (4 bytes per token and vocabulary entry).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.option("--csv", "csv_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the rows as CSV, too.")
def command(
    model: str,
    text_file: Path | None,
    n_prefix: int,
    n_tokens: int,
    threads: int,
    only: tuple[str, ...],
    reference: str,
    rows_file: Path | None,
    keep_logits: bool,
    as_json: bool,
    csv_file: Path | None,
) -> None:
    """Compare next-token distributions with an exact reference, one token at a time.

    MODEL is a GGUF file or a name that `kvtier run` knows. Rows that are finished already (same model, text, lengths,
    configuration and build) are not measured again, so an interrupted run goes on where it stopped.
    """
    rows, chosen = _chosen(only, reference)
    plan = EvaluationPlan(
        model=resolve(model),
        text=read_text(text_file),
        n_prefix=n_prefix,
        n_tokens=n_tokens,
        n_threads=threads,
        reference=chosen,
        rows=tuple(rows),
    )
    path = rows_file or Path(platformdirs.user_cache_dir("kvtier")) / "eval" / "rows.jsonl"
    with StatusLine() as status:

        def progress(row: str, phase: str, done: int, total: int) -> None:
            status(f"{row}: {phase} {done:,} of {total:,} tokens")

        result = evaluate(plan, RowFile(path), progress, keep_logits)
    if csv_file is not None:
        try:
            csv_file.write_text(report.to_csv(result), encoding="utf-8")
        except OSError as error:
            raise MeasuringError(f"cannot write {csv_file}: {error}") from None
    if as_json:
        click.echo(json.dumps(report.to_json(plan, result), indent=2))
    else:
        click.echo(report.table(result))
        click.echo(f"\n{n_tokens} tokens one at a time after a prefix of {n_prefix}; rows kept in {path}")
    for name, error in result.failures:
        click.echo(f"{name}: {error}", err=True)
    if result.failures:
        raise MeasuringError(f"{len(result.failures)} of {len(rows)} rows could not be measured")
