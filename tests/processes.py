"""Commands that run beside a test: started as from a terminal or on one, waited for, and looked at while they write."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0

# Under nohup, or in the background of a script, processes begin with signals ignored, and kvtier leaves it at that.
# A process of its own puts that right: after a fork of this one, which has threads, little is safe to call.
_BEGIN = """
import fcntl, os, signal, sys, termios
for signum in (signal.SIGHUP, signal.SIGINT):
    signal.signal(signum, signal.SIG_DFL)
if os.isatty(0):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "kvtier", *sys.argv[1:]])
"""


def start(*args: str | Path) -> subprocess.Popen[str]:
    """`kvtier ARGS`, its output captured, nothing to read."""
    command = [sys.executable, "-c", _BEGIN, *map(str, args)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, encoding="utf-8")


def open_terminal(size: tuple[int, int] = (80, 24)) -> tuple[int, int]:
    """Both ends of a pseudo terminal of so many columns and rows: ours, and the one for the process."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    return ours, theirs


@contextmanager
def on_terminal(*args: str | Path, size: tuple[int, int] = (80, 24)) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`kvtier ARGS` on a pseudo terminal, and our end of that. The process ends with the block at the latest."""
    ours, theirs = open_terminal(size)
    env = {**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1"}
    command = [sys.executable, "-c", _BEGIN, *map(str, args)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def pieces(terminal: int) -> Iterator[bytes]:
    """What comes from our end of a terminal until the other is closed."""
    end = time.monotonic() + PATIENCE_S
    while True:
        left_s = end - time.monotonic()
        assert left_s > 0 and select.select([terminal], [], [], left_s)[0], "the terminal is still in use"
        try:
            data = os.read(terminal, 65536)
        except OSError:  # so Linux says that the other end is closed
            return
        if not data:
            return
        yield data


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    """Wait until `ready`; the process must still run then. A file that is not there, or no longer, is not ready."""
    end = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < end:
        with suppress(FileNotFoundError):
            if ready():
                return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"it did not come to that: {process.communicate(timeout=PATIENCE_S)}")
