"""Run as `python -m kvtier.doctor.probe`: loads llama.cpp and the plug-in, and prints what it finds as JSON, one line
per step.

It is a process of its own so that a library that crashes takes nobody with it: the last line says how far it came.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def _step(name: str, **found: Any) -> None:
    os.write(1, (json.dumps({"step": name, **found}) + "\n").encode())


def main() -> None:
    import llama_cpp
    import llama_cpp.llama_cpp as api

    from ..machine import ggmlbackends, ggmlcpu

    libggml = api._lib  # ggml as libllama is linked to it, see runtime.libggml
    llama_cpp.llama_backend_init()
    _step(
        "llama_cpp",
        version=llama_cpp.__version__,
        ggml=ggmlcpu.version(libggml),
        path=os.path.dirname(llama_cpp.__file__),
    )
    from ..errors import KvtierError
    from ..native import binding, runtime

    ggmlbackends.load(libggml, libggml)
    _step("gpus", names=ggmlbackends.gpus(libggml))  # before ours, which says that it is one
    _step("cpu", features=ggmlcpu.features(libggml))
    _step("attention", ns_per_cell=ggmlcpu.attention_ns(libggml))
    try:
        loaded = runtime.load()
    except KvtierError as err:
        _step("refused", message=err.message, hint=err.hint)
        return
    _step("plugin", path=str(loaded.library), version=binding.version(), ggml=binding.ggml_version(), isa=binding.isa())
    _step("devices", devices=ggmlbackends.devices(libggml))


if __name__ == "__main__":
    try:
        main()
    except ImportError as err:
        _step("missing", message=str(err))
        sys.exit(1)
