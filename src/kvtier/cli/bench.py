"""`kvtier bench MODEL`: speed against stock llama.cpp from the same build in the same run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from ..bench import report
from ..bench.plan import BenchPlan
from ..bench.run import run
from ..errors import DirectoryError, UsageError
from ..measuring.errors import MeasuringError
from ..measuring.progress import StatusLine
from ..measuring.stock import look
from ..outputs import require_writable
from ..settings import KVSettings
from . import ui
from .measured import NumbersParam, find_model, terminable, write_file
from .options import TOKENS, option
from .texts import read_text


@click.command("bench", context_settings={"show_default": True})
@click.argument("model", default="smollm2")
@option(
    "--contexts", type=NumbersParam(0), default="0,8k,32k", metavar="LIST", help="Tokens in the cache during decode."
)
@option("-t", "--threads", type=NumbersParam(1), default="1,2", metavar="LIST", help="Thread counts.")
@option("--rounds", type=click.IntRange(1), default=7, help="Rounds behind each median.")
@option(
    "--prefill",
    "n_prefill",
    type=TOKENS,
    default="8k",
    metavar="TOKENS",
    help="Prompt whose prefill is measured; 0: none.",
)
@option("--prefill-sampled", is_flag=True, help="Compute four chunks of that prompt instead of all of them.")
@option(
    "--fidelity",
    metavar="bounded[:EPS]",
    help="Add rows that read values by weight (see kvtier run --fidelity). Contexts then hold the text itself.",
)
@option(
    "--computed", is_flag=True, help="Fill contexts with the text itself instead of some of its cells over and over."
)
@option("--stock-only", is_flag=True, help="Only the baselines.")
@option("--no-tiers", is_flag=True, help="Leave out the row with three quarters of the cache on disk.")
@option(
    "--kv-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where that row's pages go.  [default: the system's temporary folder]",
)
@option(
    "-f",
    "--file",
    "text_file",
    type=click.Path(path_type=Path),
    help="Text to process.  [default: sources of Python's standard library]",
)
@option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the JSON to this file, too.")
@option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(
    model: str,
    n_prefill: int,
    no_tiers: bool,
    text_file: Path | None,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare decode and prefill speed with stock llama.cpp, side by side.

    MODEL is a GGUF file or a name that `kvtier models` lists; smollm2 without one.

    Every configuration runs in its own process; they take turns block by block, and the ratios are medians over
    rounds. Leave the machine alone meanwhile.
    """
    if output is not None:
        require_writable(output, f"the file {output}")
    kv_dir: Path | None = options["kv_dir"]
    if kv_dir is not None and not kv_dir.is_dir():
        raise DirectoryError(f"--kv-dir {kv_dir} is no directory", "Name a directory that exists and can be written.")
    settings = KVSettings(fidelity=options.pop("fidelity"))
    if settings.fidelity == "lossy":
        raise UsageError("--fidelity lossy has no row here: what it reads depends on the budget", "Take bounded:EPS.")
    fidelity = settings.fidelity if settings.eps is not None else None
    options["computed"] = options["computed"] or fidelity is not None
    plan = BenchPlan(
        model=find_model(model),
        prefill=n_prefill,
        fidelity=fidelity,
        tiers=not no_tiers,
        text=read_text(text_file),
        **options,
    )
    start = time.monotonic()
    stock = look(plan.model)
    if stock.build.problems():
        ui.warn(stock.warning())
    with terminable("nothing was written"), StatusLine() as status:
        result = run(plan, status, stock)
    data = json.dumps(report.to_json(result), indent=2)
    try:
        if output is not None:
            write_file(output, data + "\n")
    finally:
        ui.echo(data if as_json else f"{report.text(result)}\n{time.monotonic() - start:.0f} s in all")
    for name, error in result.failures:
        click.echo(f"{name}: {error}", err=True)
    if result.failures:
        raise MeasuringError(f"{len(result.failures)} of the measurements failed")
