"""What `bench` and `eval` share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import click

from ..model import gguf
from ..model.names import resolve
from ..outputs import unwritable
from ..sizes import parse_tokens
from . import ui
from .options import ParamType
from .signals import endings


class NumbersParam(ParamType):
    """A list of token counts or other whole numbers: "0,8k,32k"."""

    name = "numbers"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(dict.fromkeys(parse_tokens(part) for part in str(value).split(",")))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if min(numbers) < self.least:
            self.fail(f"'{value}' has a number below {self.least}", param, ctx)
        return numbers


def find_model(model: str) -> Path:
    """The model's file, fetched if need be and checked to be a usable GGUF file. Raises KvtierError."""
    with ui.download_progress() as progress:
        path = resolve(model, progress=progress)
    gguf.read_model(path)
    return path


def default_threads() -> int:
    return max(1, min(2, os.cpu_count() or 1))


def write_file(path: Path, text: str) -> None:
    """Write a result. Raises OutputError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(f"the file {path}", error) from None


@contextmanager
def terminable(kept: str) -> Iterator[None]:
    """SIGTERM and SIGHUP end the block the way SIGINT does, through its cleanup: processes ended, page files removed.

    Then a line says what is `kept`.
    """

    def end(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = {signum: signal.signal(signum, end) for signum in endings()}
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        with suppress(OSError):  # of a terminal that was closed
            ui.say(f"stopped: {kept}")
        raise
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
