"""The command line. `main` is the program `kvtier`."""

from .app import main

__all__ = ["main"]
