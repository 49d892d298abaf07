"""`kvtier trace`: attention mass of every page at every step, recorded for policies, the simulator and the scorer."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from ..errors import UsageError
from ..measuring.progress import StatusLine
from ..outputs import aside, require_writable
from ..sizes import format_bytes
from . import ui
from .measured import default_threads, find_model
from .options import TOKENS, option, text_option
from .signals import StopFlag, unless_hung_up
from .texts import read_text


@click.group("trace")
def command() -> None:
    """Record and show traces of attention mass."""


@command.command("record", context_settings={"show_default": True})
@click.argument("model", default="smollm2")
@text_option
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="The trace to write."
)
@option(
    "--prefix", "n_prefix", type=TOKENS, default="4096", metavar="TOKENS", help="Tokens processed in batches first."
)
@option(
    "--tokens",
    "n_tokens",
    type=TOKENS,
    default="512",
    metavar="TOKENS",
    help="Tokens then fed one at a time, and recorded.",
)
@option("--first", type=TOKENS, default="0", metavar="TOKENS", help="Tokens of the text to leave out.")
@option("--kv-page-tokens", "page_tokens", type=int, metavar="N", help="Tokens per page, a multiple of 32.")
@option("-t", "--threads", type=click.IntRange(1, 512), default=default_threads, help="Threads.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def record_command(
    model: str,
    text_file: Path | None,
    output: Path,
    n_prefix: int,
    n_tokens: int,
    first: int,
    page_tokens: int | None,
    threads: int,
    as_json: bool,
) -> None:
    """Record the attention mass of a text, one token at a time.

    MODEL is a GGUF file or a name that `kvtier models` lists; smollm2 without one. Layers that see only a sliding
    window are left out. Ctrl-C ends the recording early; what was recorded until then can be used. The trace appears
    when it is
    whole: until then it is in OUTPUT.part, and one that is there already stays.
    """
    if min(n_prefix, n_tokens) < 1:
        raise UsageError(
            f"--prefix {n_prefix} and --tokens {n_tokens}: one of them is below 1", "Take at least 1 of each."
        )
    require_writable(aside(output), f"the trace {output}")
    path = find_model(model)
    text = read_text(text_file)
    from ..engine.recording import Recording, record
    from ..native import runtime

    runtime.log.muted = True
    source = text_file.name if text_file is not None else "Python's standard library"
    job = Recording(path, text, source, n_prefix, n_tokens, first, threads, page_tokens)
    with StopFlag() as stop, StatusLine() as status:
        done = record(job, output, lambda phase, n, total: status(f"{phase}: {n:,} of {total:,} tokens"), stop)
        exit_code = stop.exit_code
    with unless_hung_up(stop):
        if done.n_steps == 0:
            ui.say("stopped before the first step: nothing was recorded")
        elif as_json:
            ui.echo(json.dumps({"trace": str(output), "model": str(path), **asdict(done)}))
        else:
            ui.table(
                [
                    ("trace", str(output)),
                    ("steps", f"{done.n_steps:,}" + (" (stopped)" if done.is_stopped else "")),
                    ("layers", f"{done.n_layers:,}"),
                    ("pages", f"{done.n_pages:,} per layer"),
                    ("size", format_bytes(done.n_bytes)),
                ]
            )
    click.get_current_context().exit(exit_code)


@command.command("show")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--partial", is_flag=True, help="Show what is there of a trace that was cut short.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def show_command(trace: Path, partial: bool, as_json: bool) -> None:
    """Show what TRACE is of."""
    from ..trace import read_trace

    got = read_trace(trace, partial)
    summary = {
        **asdict(got.header),
        "n_steps": got.n_steps,
        "n_pages": int(got.n_pages[-1]),
        "features": sorted(got.features),
        "is_whole": got.is_whole,
    }
    if as_json:
        ui.echo(json.dumps(summary))
    else:
        ui.table(
            [(name, ", ".join(map(str, v)) if isinstance(v, (list, tuple)) else str(v)) for name, v in summary.items()],
            stderr=False,
        )
