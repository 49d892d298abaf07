#!/usr/bin/env python3
"""Prints the CMAKE_ARGS with which llama-cpp-python is at its best on this machine; nothing where its default is.

Two kinds of machine need some: those that advertise AMX and fault on its instructions (a native build crashes at the
first prompt), and those with AVX512_FP16 (a native build has slow attention). Use it as

    CMAKE_ARGS="$(python3 scripts/probe-build.py)" pip install llama-cpp-python

Needs nothing but Python's standard library: what it knows is in src/kvtier/machine, loaded by path.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

MACHINE = Path(__file__).resolve().parent.parent / "src" / "kvtier" / "machine"


def load(name: str) -> ModuleType:
    path = MACHINE / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"kvtier_{name}", path)
    if spec is None or spec.loader is None or not path.is_file():
        sys.exit(f"{path} is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    hardware, buildargs = load("hardware"), load("buildargs")
    flags = hardware.cpu_flags()
    args = buildargs.best_args(flags, hardware.amx_state(flags), buildargs.compiler_takes)
    if args:
        print(args)


if __name__ == "__main__":
    main()
