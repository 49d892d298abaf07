"""What people see: tables, progress and errors. The only module that uses rich; on stderr unless told otherwise."""

from __future__ import annotations

import errno
import logging
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO

import click
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, chop_cells
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
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
from ..model.fetching import FetchProgress
from ..sizes import format_bytes, format_rate

if TYPE_CHECKING:
    from .live import Look, TierLook

_STAGES = {"wait": "waiting for another process to fetch", "fetch": "fetching", "check": "checking"}


class _Console(Console):
    """A console whose reader may go: that is for `app` to answer, not for rich, which would exit with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def console(stderr: bool = True) -> Console:
    """A console on the stream as it is now; plain text when the stream is no terminal."""
    stream = sys.stderr if stderr else sys.stdout
    # Without a terminal the width is nobody's: lines are not wrapped.
    is_terminal = stream.isatty()
    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    width = None if is_terminal else 200
    # FORCE_COLOR and its like would make a file a terminal, cursor movements included.
    return _Console(
        file=stream,
        force_terminal=is_terminal,
        highlight=False,
        soft_wrap=not is_terminal,
        width=width,
        color_system=colours,
    )


def echo(text: str = "", nl: bool = True) -> None:
    """Text on stdout, flushed. Raises OutputError."""
    with _writing():
        click.echo(text, nl=nl)


def echo_styled(*parts: str | tuple[str, str]) -> None:
    """A line on stdout, of texts and of (text, style) for terminals that have styles. Raises OutputError."""
    with _writing():
        console(stderr=False).print(Text.assemble(*parts), soft_wrap=True)


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
            header[i] if i < len(header) else "",
            justify="right" if header and i > 0 else "left",
            no_wrap=bool(header) or i == 0 or not console(stderr).is_terminal,
            overflow="fold",
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


class _Shown(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        (warn if record.levelno >= logging.WARNING else say)(record.getMessage())


def show_log_of(logger: str, verbose: bool = False) -> None:
    """What a part of the package logs is shown as warnings of the program; with `verbose` also what is no warning."""
    log = logging.getLogger(logger)
    log.handlers = [handler for handler in log.handlers if not isinstance(handler, _Shown)]
    log.addHandler(_Shown())
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    log.propagate = False


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


_REFRESH_S: Final = 0.15
_STRIPS: Final = (" .:-=+*#@", " ▁▂▃▄▅▆▇█")  # in plain characters, in blocks
_TIER_NAMES: Final = {"device": "device", "host": "RAM", "disk": "disk", "remote": "remote"}
_HEAT_NAMES: Final = {"read": "values read", "mass": "pages with 90 % of attention"}


def terminal_for_live(text_on_stdout: bool) -> Console | None:
    """Where a panel can be shown: stdout if that is a terminal that text goes to, else stderr; None if neither can."""
    streams = (False, True) if text_on_stdout else (True,)
    for out in map(console, streams):
        if out.is_terminal and not out.is_dumb_terminal:
            return out
    return None


class LivePanel:
    """Text that streams above a panel of figures.

    A context manager: leaving it removes the panel and ends the text's line.

    Where text and panel go to the same terminal, full rows of text scroll up, and the row that is being written stands
    above the panel. Else `write` leaves the text to the caller's function.
    """

    def __init__(self, out: Console, look: Callable[[], Look], write_text: Callable[[str], None] | None) -> None:
        """`write_text` is None where text goes to the panel's own terminal."""
        self._look = look
        self._out = out
        self._write_text = write_text
        self._row = ""
        self._looked: Look | None = None
        self._next_s = 0.0
        self._live = Live(console=out, transient=True, auto_refresh=False, redirect_stdout=False)

    def __enter__(self) -> LivePanel:
        with self._printing():
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._printing():
            self._live.stop()
            if self._row:
                self._out.print(Text(self._row), end="")

    def _printing(self) -> AbstractContextManager[None]:
        return _writing() if self._write_text is None else nullcontext()

    def write(self, piece: str) -> None:
        """More text."""
        rows: list[str] = []
        if self._write_text is not None:
            self._write_text(piece)
        else:
            rows = self._rows(piece)
        with self._printing():
            for row in rows:
                self._out.print(Text(row))
            if rows or time.monotonic() >= self._next_s:
                self._refresh()

    def show_cursor(self) -> None:
        """For a process that ends at once."""
        self._out.show_cursor(True)

    def _rows(self, piece: str) -> list[str]:
        """The rows that `piece` fills, at the terminal's width."""
        *lines, last = (self._row + piece).expandtabs(4).split("\n")
        width = max(1, self._out.width)
        rows = [row for line in lines for row in (chop_cells(line, width) or [""])]
        *full, self._row = chop_cells(last, width) or [""]
        return rows + full

    def _refresh(self) -> None:
        if self._looked is None or time.monotonic() >= self._next_s:
            self._looked = self._look()
            self._next_s = time.monotonic() + _REFRESH_S
        panel = Panel(
            Group(*self._lines(self._looked)), title="kvtier", title_align="left", border_style="dim", padding=(0, 1)
        )
        self._live.update(Group(Text(self._row), panel) if self._write_text is None else panel, refresh=True)

    def _lines(self, seen: Look) -> list[Text]:
        """As many lines as the terminal has room for, the most telling first."""
        lines = panel_lines(seen, self._strip(), max(20, self._out.width - 4))  # borders, and a space at each
        room = max(1, self._out.height - 4)  # borders, the row of text, the cursor
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return lines[:room]

    def _strip(self) -> str:
        return _STRIPS["utf" in self._out.encoding.lower()]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g} %"


def panel_lines(seen: Look, strip: str, width: int) -> list[Text]:
    """What the panel says, in rows of at most `width` cells; `strip` are the characters for more and more heat."""
    rate = [format_rate(seen.per_s), f"{seen.n_tokens:,} tokens", *([seen.preset] if seen.preset else [])]
    first, *more = _packed(rate, "  ", width)
    first.stylize("bold", 0, len(rate[0]))
    tiers = [row for tier in seen.tiers for row in _packed(_tier_parts(tier), ", ", width)]
    return [first, *more, *tiers, *_heat_lines(seen, strip, width), *_packed(_recall_parts(seen), ", ", width)]


def _packed(parts: Sequence[str], comma: str, width: int) -> list[Text]:
    """As many parts in a row as it holds; one that no row holds is broken at spaces."""
    rows: list[str] = []
    for part in parts:
        if rows and cell_len(rows[-1] + comma + part) <= width:
            rows[-1] += comma + part
        else:
            rows += [part] if cell_len(part) <= width else textwrap.wrap(part, width)
    return [Text(row) for row in rows]


def _tier_parts(tier: TierLook) -> list[str]:
    budget = f" of {format_bytes(tier.budget_bytes)}" if tier.budget_bytes is not None else ""
    return [f"{_TIER_NAMES[tier.name]:<6} {format_bytes(tier.used_bytes)}{budget}", f"{tier.n_pages:,} pages"]


def _heat_lines(seen: Look, strip: str, width: int) -> list[Text]:
    """One character per layer: how much of the layer was read, or how far its attention spreads; then what that is."""
    bar = Text()
    for x in seen.heat:
        level = min(len(strip) - 1, max(0, round(x * (len(strip) - 1))))
        bar.append(strip[level], style="green" if x < 1 / 3 else "yellow" if x < 2 / 3 else "red")
    mean = sum(seen.heat) / len(seen.heat) if seen.heat else None
    note = f"{_HEAT_NAMES[seen.heat_of]} {_share(mean)}"
    label = "layers "
    room = width - len(label)
    rows = [
        Text.assemble(label if i == 0 else " " * len(label), bar[i : i + room])
        for i in range(0, max(1, len(bar)), room)
    ]
    if rows[-1].cell_len + 1 + len(note) > width:
        return [*rows, *_packed([note], "", width)]
    return [*rows[:-1], Text.assemble(rows[-1], " ", note)]


def _recall_parts(seen: Look) -> list[str]:
    skipped = "-" if seen.omitted is None else f"{_share(seen.omitted)} (at most {_share(seen.omitted_bound)})"
    gone = [f"{seen.n_gone:,} pages gone"] if seen.n_gone else []
    shares = (
        f"recall {_share(seen.recall)}",
        f"hits {_share(seen.page_hits)}",
        f"attention outside RAM {_share(seen.evicted_mass)}",
    )
    return [f"skipped {skipped}", *shares, *gone]
