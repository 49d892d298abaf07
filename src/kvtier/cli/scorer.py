"""`kvtier scorer`: train, refine and judge the network that predicts future attention mass."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from ..errors import CancelledError, UsageError
from ..measuring.progress import StatusLine
from ..outputs import aside, require_writable
from . import ui
from .measured import NumbersParam, default_threads, find_model
from .options import TOKENS
from .signals import StopFlag, unless_hung_up
from .texts import read_text

if TYPE_CHECKING:
    from ..scorer.quality import Quality
    from ..scorer.recipe import Progress, Segments, Text
    from ..trace import Trace

F = TypeVar("F", bound=Callable[..., Any])
LIBRARY = "python"  # the text that every machine has


@click.group("scorer")
def command() -> None:
    """Train, refine and judge the scorer of the policy `delta`.

    A TEXT is a UTF-8 file, or the word python for sources of Python's standard library.
    """


def _recording(prefixes: str, n_tokens: str) -> Callable[[F], F]:
    """Options that say what of the texts is recorded."""

    def decorate(function: F) -> F:
        for add in reversed(
            (
                click.option(
                    "-m",
                    "--model",
                    "models",
                    multiple=True,
                    default=("smollm2",),
                    help="A model to record; may be repeated.",
                ),
                click.option(
                    "--prefix",
                    "prefixes",
                    type=NumbersParam(1),
                    default=prefixes,
                    metavar="TOKENS",
                    help="Tokens before each recording.",
                ),
                click.option(
                    "--tokens",
                    "n_tokens",
                    type=TOKENS,
                    default=n_tokens,
                    metavar="TOKENS",
                    help="Tokens recorded after each prefix.",
                ),
                click.option(
                    "--traces",
                    "folder",
                    type=click.Path(path_type=Path, file_okay=False),
                    help="Keep the recordings here, and use those that are there.",
                ),
                click.option(
                    "-t",
                    "--threads",
                    type=click.IntRange(1, 512),
                    default=default_threads,
                    help="Threads for recording.",
                ),
                click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table."),
            )
        ):
            function = add(function)
        return function

    return decorate


_OUTPUT: Final = click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="The scorer to write."
)
_HELD_OUT: Final = click.option(
    "--held-out",
    multiple=True,
    metavar="TEXT",
    help="Text to judge by; may be repeated.  [default: the last 30 % of each TEXT]",
)


@command.command("train", context_settings={"show_default": True})
@click.argument("texts", nargs=-1, required=True)
@_OUTPUT
@_HELD_OUT
@click.option("--steps", type=click.IntRange(1, 1_000_000), default=6000, help="Training steps.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of the first weights and the order of examples.")
@_recording("1k,3k,6k", "768")
def train_command(
    texts: tuple[str, ...],
    output: Path,
    held_out: tuple[str, ...],
    steps: int,
    seed: int,
    as_json: bool,
    folder: Path | None,
    **recording: Any,
) -> None:
    """Record TEXTS and train a scorer from nothing."""
    from ..scorer.recipe import train_on
    from ..scorer.train import Training

    with _session(folder, output) as (where, stop, progress):
        traces, judges = _recorded(texts, held_out, where, recording, stop, progress)
        outcome = train_on(traces, judges, Training(steps=steps, seed=seed), _stoppable(progress, stop))
    outcome.scorer.save(output)
    _show(outcome.quality, as_json, scorer=str(output), n_examples=outcome.n_examples, about=outcome.scorer.about)


@command.command("tune", context_settings={"show_default": True})
@click.argument("texts", nargs=-1, required=True)
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    help="The scorer to begin with.  [default: the one of the package]",
)
@_OUTPUT
@_HELD_OUT
@click.option("--steps", type=click.IntRange(1, 1_000_000), default=200, help="Training steps.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of the order of examples.")
@_recording("2k,4k", "512")
def tune_command(
    texts: tuple[str, ...],
    source: Path | None,
    output: Path,
    held_out: tuple[str, ...],
    steps: int,
    seed: int,
    as_json: bool,
    folder: Path | None,
    **recording: Any,
) -> None:
    """Refine a scorer in a few steps on TEXTS of your own."""
    from ..policies.scorer import load, shipped
    from ..scorer.recipe import tune_on
    from ..scorer.train import Training

    scorer = load(source) if source is not None else shipped()
    with _session(folder, output) as (where, stop, progress):
        traces, judges = _recorded(texts, held_out, where, recording, stop, progress)
        outcome = tune_on(
            scorer, traces, judges, Training(steps=steps, rate=5e-4, seed=seed), _stoppable(progress, stop)
        )
    outcome.scorer.save(output)
    _show(
        outcome.quality,
        as_json,
        outcome.before,
        scorer=str(output),
        n_examples=outcome.n_examples,
        about=outcome.scorer.about,
    )


@command.command("report", context_settings={"show_default": True})
@click.argument("texts", nargs=-1)
@click.option(
    "--from", "source", type=click.Path(path_type=Path), help="The scorer to judge.  [default: the one of the package]"
)
@click.option(
    "--trace",
    "trace_files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Judge by this recorded trace; may be repeated.",
)
@click.option("--partial", is_flag=True, help="Use what is there of a trace that was cut short.")
@_recording("2k,6k", "768")
def report_command(
    texts: tuple[str, ...],
    source: Path | None,
    trace_files: tuple[Path, ...],
    partial: bool,
    as_json: bool,
    folder: Path | None,
    **recording: Any,
) -> None:
    """Judge a scorer by TEXTS or recorded traces: how well it ranks pages by the mass they then get."""
    from ..policies.scorer import load, shipped
    from ..scorer.quality import quality
    from ..scorer.recipe import record_all
    from ..scorer.samples import require_length
    from ..trace import read_trace

    if not texts and not trace_files:
        raise UsageError("there is nothing to judge by", "Give a TEXT, or a trace with --trace.")
    scorer = load(source) if source is not None else shipped()
    traces = [read_trace(path, partial) for path in trace_files]
    for path, trace in zip(trace_files, traces, strict=True):
        require_length(trace.n_steps, f"the trace {path} has {trace.n_steps:,} steps, which are too few to judge by")
    with _session(folder) as (where, stop, progress):
        if texts:
            models = _models(recording["models"], stop)
            traces += record_all(models, [_text(name) for name in texts], _segments(recording), where, progress, stop)
        table = quality(traces, scorer)
    _show(table, as_json, about=scorer.about)


@contextmanager
def _session(folder: Path | None, output: Path | None = None) -> Iterator[tuple[Path, StopFlag, Progress]]:
    """A folder for traces (a temporary one without a name), the flag that Ctrl-C sets, and a line that says how far it
    is.

    `output` is checked before: what takes long should not fail at its end.
    """
    if output is not None:
        require_writable(aside(output), f"the scorer {output}")
    stop = StopFlag()
    try:
        with tempfile.TemporaryDirectory(prefix="kvtier-") as temporary, stop, StatusLine() as status:
            yield (
                _folder(folder or Path(temporary)),
                stop,
                lambda text, done, total: status(f"{text}: {done:,} of {total:,}"),
            )
    except CancelledError:
        kept = "" if folder is None else f"; finished recordings are kept in {folder}"
        with unless_hung_up(stop):
            ui.say(f"stopped: nothing was written{'' if output is None else f' to {output}'}{kept}")
        click.get_current_context().exit(stop.exit_code)


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise UsageError(
            f"the folder {path} cannot be made: {err.strerror}", "Name another one with --traces."
        ) from err
    return path


def _stoppable(progress: Progress, stop: StopFlag) -> Progress:
    """Raises CancelledError once it is to stop."""

    def report(text: str, done: int, total: int) -> None:
        if stop():
            raise CancelledError("stopped")
        progress(text, done, total)

    return report


def _recorded(
    texts: Sequence[str],
    held_out: Sequence[str],
    folder: Path,
    recording: dict[str, Any],
    stop: StopFlag,
    progress: Progress,
) -> tuple[list[Trace], list[Trace]]:
    """Traces to learn from, and those to judge by: of the held-out texts, or of the last part of each text."""
    from ..scorer.recipe import Segments, record_all, split

    learn, judge = [_text(name) for name in texts], [_text(name) for name in held_out]
    prefixes, n_tokens, threads = sorted(recording["prefixes"]), recording["n_tokens"], recording["threads"]
    judged = prefixes[-1]
    if not judge:
        learn, judge = (list(part) for part in zip(*map(split, learn), strict=True))
        judged = prefixes[0]
    models = _models(recording["models"], stop)
    traces = record_all(models, learn, _segments(recording), folder, progress, stop)
    return traces, record_all(models, judge, Segments((judged,), n_tokens, threads), folder, progress, stop)


def _models(names: Sequence[str], stop: StopFlag) -> list[Path]:
    with stop.raising():  # they may have to be fetched
        return [find_model(name) for name in names]


def _segments(recording: dict[str, Any]) -> Segments:
    from ..scorer.recipe import Segments

    return Segments(recording["prefixes"], recording["n_tokens"], recording["threads"])


def _text(name: str) -> Text:
    from ..native import runtime
    from ..scorer.recipe import Text

    runtime.log.muted = True
    return (
        Text("Python's standard library", read_text(None))
        if name == LIBRARY
        else Text(Path(name).name, read_text(Path(name)))
    )


def _show(table: Sequence[Quality], as_json: bool, before: Sequence[Quality] | None = None, **about: Any) -> None:
    if as_json:
        values = {
            **about,
            "quality": [asdict(q) for q in table],
            "before": None if before is None else [asdict(q) for q in before],
        }
        ui.echo(json.dumps(values))
        return
    rows = [_row(q) for q in table]
    if before is not None:
        rows.insert(1, _row(before[0], "before"))
    ui.table(rows, header=("ranking", "Spearman", "mass at 10 %", "at 20 %", "at 50 %"), stderr=False)
    for name, value in about.items():
        ui.say(f"{name.replace('_', ' ').removeprefix('n ')}: {value}")


def _row(q: Quality, name: str | None = None) -> tuple[str, ...]:
    return (name or q.name, f"{q.spearman:.3f}", *(f"{share:.1%}" for share in q.recall))
