"""SIGINT, SIGTERM and SIGHUP as a flag that long work asks, so that it ends where everything can be cleaned up."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final

from ..errors import OutputError


class Stopped(KeyboardInterrupt):
    """A signal came while nothing but waiting was going on.

    `exit_code` is what a shell expects of a process it ended.
    """

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.exit_code = 128 + signum


def endings() -> tuple[signal.Signals, ...]:
    """The signals that end a process from outside; not SIGHUP where it is ignored, as under nohup."""
    hangup = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, *hangup)


@contextmanager
def unless_hung_up(stop: StopFlag) -> Iterator[None]:
    """What cannot be written in this block because the terminal has gone is not missed."""
    try:
        yield
    except (OutputError, OSError):
        if stop.signum != signal.SIGHUP:
            raise


class StopFlag:
    """While the block runs, the first of these signals sets the flag; the third ends the process without cleaning
    up."""

    PATIENCE: Final = 3

    def __init__(self) -> None:
        self.signum: int | None = None
        self._n_signals = 0
        self._raises = False
        self._before: dict[int, Any] = {}
        self.on_abandon: Callable[[], None] | None = None  # before the process ends without cleaning up

    def __enter__(self) -> StopFlag:
        for signum in (signal.SIGINT, *endings()):
            self._before[signum] = signal.signal(signum, self._set)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def __call__(self) -> bool:
        return self.signum is not None

    @contextmanager
    def raising(self) -> Iterator[None]:
        """While this block runs, a signal raises Stopped as well: for waiting, on the network or on the user."""
        self._raises = True
        try:
            if self.signum is not None:
                raise Stopped(self.signum)
            yield
        finally:
            self._raises = False

    def clear(self) -> None:
        """Forget the signal: what it should stop has stopped."""
        self.signum = None
        self._n_signals = 0

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that a signal ended; 0 if none came."""
        return 0 if self.signum is None else 128 + self.signum

    def _set(self, signum: int, _frame: FrameType | None) -> None:
        self.signum = signum
        if self._raises:
            raise Stopped(signum)
        self._n_signals += 1
        if self._n_signals >= self.PATIENCE:
            if self.on_abandon is not None:
                with suppress(OSError):
                    self.on_abandon()
            os._exit(128 + signum)
