"""Python code in a process of its own, for what may end it."""

from __future__ import annotations

import subprocess
import sys

PATIENCE_S = 120.0


def run_child(code: str, *arguments: object, patience_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    """Run `code` with `arguments` as sys.argv[1:]. A process that hangs is an error."""
    command = [sys.executable, "-X", "faulthandler", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=patience_s, check=False)
