"""What people see: tables, progress and errors. The only module that uses rich; on stderr unless told otherwise."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TextIO

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from ..errors import KvtierError, OutputError
from ..models import FetchProgress
from ..sizes import format_rate

_STAGES = {"wait": "waiting for another process to fetch", "fetch": "fetching", "check": "checking"}


class _Console(Console):
    """A console whose reader may go: that is for `app` to answer, not for rich, which would exit with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def console(stderr: bool = True) -> Console:
    """A console on the stream as it is now; plain text when the stream is no terminal."""
    stream = sys.stderr if stderr else sys.stdout
    # Without a terminal the width is nobody's: lines are not wrapped.
    return _Console(file=stream, highlight=False, soft_wrap=not stream.isatty(), width=None if stream.isatty() else 200)


def echo(text: str = "", nl: bool = True) -> None:
    """Text on stdout, flushed. Raises OutputError."""
    with _writing():
        click.echo(text, nl=nl)


@contextmanager
def _writing() -> Iterator[None]:
    """A write to stdout that fails in this block is an OutputError, and nothing is written there any more."""
    try:
        yield
    except OSError as err:
        abandon(sys.stdout)
        raise OutputError(
            f"standard output cannot be written: {err.strerror}",
            "Free space where it goes, or send it elsewhere.",
            is_quiet=isinstance(err, BrokenPipeError),
        ) from None


def abandon(stream: TextIO) -> None:
    """Let what is still buffered go nowhere, so that the interpreter's last flush does not fail as well."""
    with open(os.devnull, "w") as nowhere, suppress(OSError, ValueError):
        os.dup2(nowhere.fileno(), stream.fileno())


def table(rows: Iterable[Sequence[str]], *, header: Sequence[str] = (), title: str = "", stderr: bool = True) -> None:
    """Print a table. With a header the columns after the first are right-aligned, without one all are left-aligned."""
    out = Table(
        title=title or None,
        title_justify="left",
        box=SIMPLE_HEAD if header else None,
        show_header=bool(header),
        pad_edge=False,
    )
    rows = [tuple(row) for row in rows]
    for i in range(max([len(header), *(len(row) for row in rows)])):
        out.add_column(
            header[i] if i < len(header) else "", justify="right" if header and i > 0 else "left", no_wrap=True
        )
    for row in rows:
        out.add_row(*(Text(cell) for cell in row))
    with nullcontext() if stderr else _writing():
        console(stderr).print(out)


def say(text: str) -> None:
    """A line of information on stderr."""
    console().print(Text(text))


def warn(text: str) -> None:
    """A warning on stderr."""
    console().print(Text.assemble(("warning: ", "yellow"), text))


def error(problem: KvtierError) -> None:
    """An error on stderr: what happened, then what to do."""
    out = console()
    first, *rest = str(problem).split("\n")
    out.print(Text.assemble(("error: ", "bold red"), first))
    for line in rest:
        out.print(Text("  " + line.strip()))


class _Rate(ProgressColumn):
    """Tokens per second, over the whole time so far."""

    def render(self, task: Task) -> Text:
        elapsed = task.finished_time or task.elapsed or 0.0
        return Text(format_rate(task.completed / elapsed if task.completed and elapsed else None))


@contextmanager
def prefill_progress() -> Iterator[Callable[[int, int], None]]:
    """Shows tokens done, rate and time left while the block runs; gives the function to call with (done, total).

    Without a terminal nothing is shown.
    """
    out = console()
    if not out.is_terminal:
        yield lambda _done, _total: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("reading the prompt"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
        _Rate(),
        TimeRemainingColumn(compact=True),
    )
    with _shown_when_used(Progress(*columns, console=out, transient=True)) as update:
        yield lambda done, total: update(completed=done, total=max(total, 1))


@contextmanager
def download_progress() -> Iterator[Callable[[FetchProgress], None]]:
    """Shows a model's download while the block runs; gives the function to call. No terminal: a line per stage."""
    out = console()
    if not out.is_terminal:
        said: set[str] = set()

        def plain(at: FetchProgress) -> None:
            if at.stage not in said:
                said.add(at.stage)
                out.print(Text(f"{_STAGES[at.stage]} {at.name}"))

        yield plain
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with _shown_when_used(Progress(*columns, console=out, transient=True)) as update:
        yield lambda at: update(
            description=f"{_STAGES[at.stage]} {at.name}", completed=at.n_bytes_done, total=at.n_bytes_total
        )


@contextmanager
def _shown_when_used(progress: Progress) -> Iterator[Callable[..., None]]:
    """A display of one task that appears with its first update and disappears with the block; gives the update."""
    tasks: list[TaskID] = []

    def update(**fields: Any) -> None:
        if not tasks:
            progress.start()
            tasks.append(progress.add_task("", total=fields.get("total")))
        progress.update(tasks[0], **fields)

    try:
        yield update
    finally:
        if tasks:
            progress.stop()
