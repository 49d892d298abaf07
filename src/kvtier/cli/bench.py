"""`kvtier bench MODEL`: speed against stock llama.cpp from the same build in the same run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from ..bench import report
from ..bench.plan import BenchPlan
from ..bench.run import run
from ..measuring.errors import MeasuringError
from ..measuring.progress import StatusLine
from ..measuring.text import read_text
from ..models import resolve
from ..sizes import parse_tokens


class _Numbers(click.ParamType):
    """A list such as "0,8k,32k" or "1,2"."""

    name = "list"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(parse_tokens(part) for part in str(value).split(","))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return tuple(dict.fromkeys(numbers))


@click.command("bench")
@click.argument("model")
@click.option("--contexts", type=_Numbers(), default="0,8k,32k", show_default=True, help="Tokens in the cache at decode.")
@click.option("-t", "--threads", type=_Numbers(), default="1,2", show_default=True, help="Thread counts.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Rounds per median.")
@click.option("--prefill", default="8k", show_default=True, help="Prompt whose prefill is measured; 0 for none.")
@click.option("--prefill-sampled", is_flag=True, help="Compute four chunks of that prompt instead of all.")
@click.option("--stock-only", is_flag=True, help="Only the baselines.")
@click.option("--no-tiers", is_flag=True, help="Leave out the row with three quarters of the cache on disk.")
@click.option("--kv-dir", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Directory for that row's pages.")
@click.option("-f", "--file", "text_file", type=click.Path(path_type=Path, dir_okay=False), help="Text to process.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the JSON there, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(
    model: str,
    contexts: tuple[int, ...],
    threads: tuple[int, ...],
    rounds: int,
    prefill: str,
    prefill_sampled: bool,
    stock_only: bool,
    no_tiers: bool,
    kv_dir: Path | None,
    text_file: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Compare decode and prefill speed with stock llama.cpp, side by side.

    MODEL is a GGUF file or a name that `kvtier run` knows. Every configuration runs in its own process; they take
    turns block by block, and the ratios are medians over rounds. Leave the machine alone meanwhile.
    """
    if min(threads) < 1:
        raise click.BadParameter("at least 1 thread", param_hint="--threads")
    try:
        n_prefill = parse_tokens(prefill)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--prefill") from None
    plan = BenchPlan(
        model=resolve(model),
        contexts=contexts,
        threads=threads,
        rounds=rounds,
        prefill=n_prefill,
        prefill_sampled=prefill_sampled,
        stock_only=stock_only,
        tiers=not no_tiers,
        kv_dir=kv_dir,
        text=read_text(text_file),
    )
    start = time.monotonic()
    with StatusLine() as status:
        result = run(plan, status)
    data = report.to_json(result)
    if output is not None:
        try:
            output.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise MeasuringError(f"cannot write {output}: {error}") from None
    if as_json:
        click.echo(json.dumps(data, indent=2))
    else:
        click.echo(report.text(result))
        click.echo(f"{time.monotonic() - start:.0f} s in all")
    for name, error in result.failures:
        click.echo(f"{name}: {error}", err=True)
    if result.failures:
        raise MeasuringError(f"{len(result.failures)} measurements failed")
