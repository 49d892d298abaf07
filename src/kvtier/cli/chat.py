"""The conversation on a terminal that `kvtier run` starts when it gets no prompt."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import click

from ..errors import ContextLengthError, UsageError
from . import ui
from .options import not_utf8, require_utf8
from .signals import StopFlag, Stopped
from .streaming import streaming

if TYPE_CHECKING:
    from ..engine.generation import Sampling
    from ..engine.llama import Llama

_HELP: Final = "/exit ends, /new forgets the conversation, /figures shows the cache. Ctrl-C stops an answer."


def converse(load: Callable[[], Llama], sampling: Sampling, stop: StopFlag, live: bool = False) -> int:
    """Talk until /exit or the end of input. Returns the exit code."""
    from ..engine.chat import ChatTemplate, Message

    with load() as llm:
        template = ChatTemplate(llm)
        if not template.is_own:
            ui.warn(
                "the model brings no chat template, so ChatML is used: a model that was not trained to chat will ramble"
            )
        ui.say(_HELP)
        messages: list[Message] = []
        while not stop():
            line = _ask(stop)
            if line is None or line == "/exit":
                break
            if line == "/new":
                messages.clear()
            elif line == "/figures":
                ui.table(_figures(llm))
            elif line.startswith("/"):
                ui.say(_HELP)
            elif line:
                messages.append(Message("user", line))
                try:
                    messages.append(Message("assistant", _answer(llm, template.tokens(messages), sampling, stop, live)))
                except ContextLengthError as err:
                    messages.pop()
                    ui.error(err)
                    ui.say("/new starts again with an empty context.")
                if stop() and stop.signum == signal.SIGINT:
                    stop.clear()
    return stop.exit_code


def _ask(stop: StopFlag) -> str | None:
    """A line of input; None at its end, or when a signal came while waiting, or the terminal has gone."""
    try:
        with stop.raising():
            line: str = click.prompt("", prompt_suffix="> ", default="", show_default=False, err=True)
        require_utf8(line, "the line")
    except (click.Abort, Stopped, OSError):
        return None
    except UnicodeDecodeError as err:
        ui.error(not_utf8("the line", err.object[err.start], err.start))
        return ""
    except UsageError as err:
        ui.error(err)
        return ""
    return line.strip()


def _answer(llm: Llama, tokens: list[int], sampling: Sampling, stop: StopFlag, live: bool) -> str:
    from ..engine.generation import Generation
    from .report import rate_line

    generation = Generation(llm, tokens, sampling, stop)
    with ui.prefill_progress() as progress:
        finished = generation.prefill(progress)
    answer: list[str] = []
    if finished:
        with streaming(llm, generation, stop, False, live) as write:
            for piece in generation.decode():
                answer.append(piece)
                write(piece)
    ui.echo()
    ui.say(rate_line(generation.timing()))
    return "".join(answer)


def _figures(llm: Llama) -> list[tuple[str, str]]:
    from .report import kv_rows

    return kv_rows(llm.kv.figures, llm.kv.n_layers)
