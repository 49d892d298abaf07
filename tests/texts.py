"""Real text that any machine has: the Python standard library's own sources."""

from __future__ import annotations

import argparse
import inspect
import textwrap
import typing


def source_text() -> str:
    """About 200,000 characters of Python and its documentation."""
    return "\n\n".join(inspect.getsource(module) for module in (textwrap, argparse, typing))
