"""What can go wrong while measuring."""

from __future__ import annotations

from ..errors import KvtierError


class MeasuringError(KvtierError):
    """A measurement could not be made; the message says which one, and what to do."""

    def about(self, name: str) -> str:
        """The message for a list in which the measurement's name stands before it already."""
        return str(self).removeprefix(f"{name}: ")


class WorkerError(MeasuringError):
    """A measuring process failed or died; the message holds its own last words."""


class StateLayoutError(MeasuringError):
    """A saved sequence state has a layout that cannot be repeated to fill a longer context."""
