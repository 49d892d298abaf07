"""Commands that run beside a test: started as from a terminal, waited for, and looked at while they write."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 120.0


def start(*args: str | Path) -> subprocess.Popen[str]:
    """`kvtier ARGS`, its output captured, nothing to read."""
    command = [sys.executable, "-m", "kvtier", *map(str, args)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, encoding="utf-8", preexec_fn=_hear_signals)


def _hear_signals() -> None:
    """Under nohup, or in the background of a script, processes begin with signals ignored, and kvtier leaves it at that."""
    for signum in (signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until `ready`; the process must still run then. A file that is not there, or no longer, is not ready."""
    end = time.monotonic() + PATIENCE_S
    while True:
        with suppress(FileNotFoundError):
            if ready():
                return
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
