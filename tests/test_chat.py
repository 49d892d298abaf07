"""The conversation of `kvtier run` on a real terminal (a pseudo one), with a real model."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from .processes import PATIENCE_S, on_terminal, pieces, wait_until


class Terminal:
    """A process on a pseudo terminal, as a person has it before them."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self._process = process
        self._fd = fd
        self._seen = ""

    def expect(self, text: str) -> str:
        """Read until `text` has come; returns what came before it."""
        end = time.monotonic() + PATIENCE_S
        while text not in self._seen:
            assert time.monotonic() < end, f"no {text!r} in {self._seen!r}"
            if not select.select([self._fd], [], [], 0.2)[0]:
                continue
            try:
                self._seen += os.read(self._fd, 65536).decode("utf-8", "replace")
            except OSError:  # the terminal is gone with the process
                pytest.fail(f"it ended without {text!r} after {self._seen!r}")
        before, _, self._seen = self._seen.partition(text)
        return before

    def type(self, line: str) -> None:
        os.write(self._fd, line.encode() + b"\n")

    def send(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    def wait_for_its_waiting(self) -> None:
        """Until it sleeps.

        Python's readline looks for signals only while it waits for a key: one that comes in the moment
        between the prompt and that waiting is answered at the next key or signal.
        """
        main_thread = psutil.Process(self._process.pid)

        def is_asleep() -> bool:
            for _ in range(5):
                if main_thread.status() != psutil.STATUS_SLEEPING:
                    return False
                time.sleep(0.02)
            return True

        wait_until(is_asleep, self._process)

    def exit_code(self) -> int:
        """Wait for the end, reading what still comes."""
        for _ in pieces(self._fd):
            pass
        return self._process.wait(PATIENCE_S)


@contextmanager
def conversation(model: Path, *args: str) -> Iterator[Terminal]:
    with on_terminal("run", model, "--temp", "0", *args) as (process, fd):
        child = Terminal(process, fd)
        child.expect("> ")
        yield child


@pytest.fixture
def terminal(smollm2_path: Path) -> Iterator[Terminal]:
    with conversation(smollm2_path, "-c", "512", "-n", "24") as child:
        yield child


def n_prompt_of(shown: str) -> int:
    """The tokens of a turn's prompt, from what was shown before "tokens in,"."""
    return int(re.findall(r"\[([0-9,]+) $", shown)[0].replace(",", ""))


def test_a_conversation_keeps_its_beginning(terminal: Terminal) -> None:
    terminal.type("Write the word banana three times.")
    terminal.expect("three times.")  # the echo of the question
    first = terminal.expect("tokens in,")
    assert "banana" in first.lower()
    terminal.expect("> ")
    terminal.type("Again.")
    second = terminal.expect("tokens in,")
    assert n_prompt_of(second) > n_prompt_of(first)
    terminal.expect("> ")
    terminal.type("/figures")
    assert "kv in RAM" in terminal.expect("> ")
    terminal.type("/new")
    terminal.expect("> ")
    terminal.type("Again.")
    assert n_prompt_of(terminal.expect("tokens in,")) < n_prompt_of(first)
    terminal.expect("> ")
    terminal.type("/help")
    terminal.expect("/exit")
    terminal.expect("> ")
    terminal.type("/exit")
    assert terminal.exit_code() == 0


def test_a_message_longer_than_the_context_can_be_taken_back(terminal: Terminal) -> None:
    terminal.type("word " * 600)
    terminal.expect("the context holds 512")
    terminal.expect("> ")
    shown = []
    for _ in range(3):  # two of these fit with their answers
        terminal.type("word " * 200)
        shown.append(terminal.expect("> "))
    assert ["the context holds 512" in text for text in shown] == [False, False, True]
    assert ["tokens in," in text for text in shown] == [True, True, False]
    terminal.type("/exit")
    assert terminal.exit_code() == 0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_while_it_waits_end_it(terminal: Terminal, signum: signal.Signals, code: int) -> None:
    terminal.wait_for_its_waiting()
    terminal.send(signum)
    assert terminal.exit_code() == code


def test_ctrl_c_stops_an_answer_only(smollm2_path: Path) -> None:
    with conversation(smollm2_path, "-c", "2k", "-n", "-1") as child:
        child.type("Write a long story about a cat who travels around our world.")
        for _ in range(3):
            child.expect(" the ")  # which the question's echo has not
        child.send(signal.SIGINT)
        child.expect("tokens in,")
        child.expect("> ")
        child.type("/exit")
        assert child.exit_code() == 0
