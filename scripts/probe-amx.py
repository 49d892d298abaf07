#!/usr/bin/env python3
"""Prints the CMAKE_ARGS with which llama-cpp-python is safe to build on this machine; nothing where its default is.

Some virtual machines advertise AMX and fault on its instructions: a native build then crashes at the first prompt. Use
it as

    CMAKE_ARGS="$(python3 scripts/probe-amx.py)" pip install llama-cpp-python

Needs nothing but Python's standard library: the probe itself is src/kvtier/machine/hardware.py, loaded by its path.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def main() -> None:
    path = Path(__file__).resolve().parent.parent / "src" / "kvtier" / "machine" / "hardware.py"
    spec = importlib.util.spec_from_file_location("kvtier_hardware", path)
    if spec is None or spec.loader is None:
        sys.exit(f"{path} is missing")
    hardware = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = hardware
    spec.loader.exec_module(hardware)
    args = hardware.cmake_args()
    if args:
        print(args)


if __name__ == "__main__":
    main()
