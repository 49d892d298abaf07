"""The conversation of `kvtier run` on a real terminal (a pseudo one), with a real model."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PATIENCE_S = 120.0


class Terminal:
    """A child process on a pseudo terminal."""

    def __init__(self, *args: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-m", "kvtier", "run", *args])
        self._seen = ""

    def expect(self, text: str) -> str:
        """Read until `text` has come; returns what came before it."""
        end = time.monotonic() + PATIENCE_S
        while text not in self._seen:
            assert time.monotonic() < end, f"no {text!r} in {self._seen!r}"
            if select.select([self._fd], [], [], 0.2)[0]:
                self._seen += os.read(self._fd, 65536).decode("utf-8", "replace")
        before, _, self._seen = self._seen.partition(text)
        return before

    def type(self, line: str) -> None:
        os.write(self._fd, line.encode() + b"\n")

    def exit_code(self, signum: signal.Signals | None = None) -> int:
        """Wait for the end, reading what still comes. `signum` is sent until it is heard.

        Python's readline looks for signals only while it waits for a key: one that comes in the moment between the prompt and
        that waiting is answered at the next key or signal.
        """
        end = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < end, f"still running after {self._seen!r}"
            if signum is not None:
                os.kill(self.pid, signum)
            if not select.select([self._fd], [], [], 1.0)[0]:
                continue
            try:
                if not os.read(self._fd, 65536):
                    break
            except OSError:  # the terminal is gone with the process
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal(smollm2_path: Path) -> Iterator[Terminal]:
    child = Terminal(str(smollm2_path), "-c", "512", "--temp", "0", "-n", "24")
    child.expect("> ")
    yield child
    try:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass  # it has ended, as it should


def test_a_conversation_keeps_its_beginning(terminal: Terminal) -> None:
    terminal.type("Write the word banana three times.")
    assert "anana" in terminal.expect("tokens in,")
    terminal.expect("> ")
    terminal.type("Again.")
    terminal.expect("tokens in,")
    terminal.expect("> ")
    terminal.type("/figures")
    assert "kv in RAM" in terminal.expect("> ")
    terminal.type("/new")
    terminal.expect("> ")
    terminal.type("/help")
    terminal.expect("/exit")
    terminal.expect("> ")
    terminal.type("/exit")
    assert terminal.exit_code() == 0


def test_a_message_longer_than_the_context_can_be_taken_back(terminal: Terminal) -> None:
    for _ in range(3):
        terminal.type("word " * 200)
        terminal.expect("> ")
        if "the context holds" in terminal._seen:
            break
    terminal.type("word " * 600)
    terminal.expect("the context holds 512")
    terminal.expect("> ")
    terminal.type("/exit")
    assert terminal.exit_code() == 0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_while_it_waits_end_it(terminal: Terminal, signum: signal.Signals, code: int) -> None:
    assert terminal.exit_code(signum) == code


def test_ctrl_c_stops_an_answer_only(smollm2_path: Path) -> None:
    child = Terminal(str(smollm2_path), "-c", "2k", "--temp", "0", "-n", "-1")
    child.expect("> ")
    child.type("Write a long story about a cat who travels around the world.")
    child.expect(" a ")
    child.expect(" a ")  # the first is the echo of the question
    child.expect(" a ")
    os.kill(child.pid, signal.SIGINT)
    child.expect("tokens in,")
    child.expect("> ")
    child.type("/exit")
    assert child.exit_code() == 0
