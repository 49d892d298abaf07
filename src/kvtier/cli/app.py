"""The program `kvtier`: subcommands are loaded when they are used, errors become one message and an exit code."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import IO, Any, Final, TextIO, cast

import click

from ..errors import KvtierError, OutOfMemoryError, OutputError
from . import ui
from .signals import Stopped

# Each is a module of this package with an object `command`.
COMMANDS: Final = ("run", "plan", "doctor", "models", "eval", "bench", "trace", "simulate", "scorer", "plugin-path")
EXIT_INTERRUPTED: Final = 130


class CliError(click.ClickException):
    """Shows a KvtierError the way click shows its own."""

    def __init__(self, problem: KvtierError) -> None:
        super().__init__(str(problem))
        self.problem = problem

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return self.problem.exit_code

    def show(self, file: IO[Any] | None = None) -> None:
        if not (isinstance(self.problem, OutputError) and self.problem.is_quiet):
            ui.error(self.problem)


class LazyGroup(click.Group):
    """A group whose commands are imported by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if find_spec(_module(name)) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = import_module(_module(cmd_name)).command
        if not isinstance(command, click.Command):
            raise TypeError(f"{_module(cmd_name)}.command is not a command")
        return command

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except OSError as err:
            # Files are looked after where they are used: this is a write of click's (help, version) or to stderr.
            if err.filename is not None:
                raise
            ui.abandon(sys.stdout)
            with suppress(OSError):
                ui.error(OutputError(f"the output cannot be written: {err.strerror}"))
            ui.abandon(sys.stderr)
            sys.exit(OutputError.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        _require_streams()
        try:
            return super().invoke(ctx)
        except KvtierError as err:
            raise CliError(err) from err
        except MemoryError as err:
            raise CliError(
                OutOfMemoryError("out of memory", "Take a smaller context or model, or close other programs.")
            ) from err
        except (KeyboardInterrupt, click.Abort) as err:
            ctx.exit(err.exit_code if isinstance(err, Stopped) else EXIT_INTERRUPTED)


def _require_streams() -> None:
    """Python has no object for a stream that is closed from the start (`>&-`), and the first file to be opened takes
    its place."""
    if sys.stdin is None:
        sys.stdin = _nowhere("r")
    out_is_closed = sys.stdout is None
    if out_is_closed:
        sys.stdout = _nowhere("w")
    if sys.stderr is None:
        sys.stderr = _nowhere("w")
    if out_is_closed:
        raise CliError(OutputError("standard output is closed", "Send it to a file, or to /dev/null."))


def _nowhere(mode: str) -> TextIO:
    return cast(TextIO, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


def _module(name: str) -> str:
    return f"{__package__}.{name.replace('-', '_')}"


def _show_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from .. import __version__

        ui.echo(f"kvtier {__version__}")
        ctx.exit()


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Long contexts for llama.cpp: the KV cache in pages on RAM and disk."""
