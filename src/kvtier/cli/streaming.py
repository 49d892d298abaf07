"""Where the text of a generation goes while it comes: stdout, and with --live a terminal with a panel below the
text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from . import ui
from .signals import StopFlag

if TYPE_CHECKING:
    from ..engine.generation import Generation
    from ..engine.llama import Llama
    from .live import Look


@contextmanager
def streaming(
    llm: Llama, generation: Generation, stop: StopFlag, as_json: bool, live: bool
) -> Iterator[Callable[[str], None]]:
    """Gives the function to write pieces of text with. With `as_json` there is no text, but there may be a panel."""

    def plain(piece: str) -> None:
        if not as_json:
            ui.echo(piece, nl=False)

    out = ui.terminal_for_live(text_on_stdout=not as_json) if live else None
    if out is None:
        if live:
            ui.warn("--live needs a terminal: the figures come at the end")
        yield plain
        return

    def look() -> Look:
        from . import live as live_figures

        return live_figures.look(llm.kv, generation.timing(), _preset(llm))

    with ui.LivePanel(out, look, None if out.file is sys.stdout else plain) as panel:
        stop.on_abandon = panel.show_cursor
        try:
            yield panel.write
        finally:
            stop.on_abandon = None


def _preset(llm: Llama) -> str:
    if llm.placement is None:
        return ""
    figures = llm.placement.figures
    return f"{figures.policy}, {figures.state}" if figures.state else figures.policy
