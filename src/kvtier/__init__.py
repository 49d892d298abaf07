"""kvtier: long contexts for llama.cpp, with the KV cache in pages on RAM and disk.

from kvtier import Llama

llm = Llama("model.gguf", n_ctx=32768, kv_host="1GiB", kv_disk="20GiB")
print(llm("Once upon a time")["choices"][0]["text"])
print(llm.kv.figures)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .engine.llama import Llama
    from .errors import KvtierError
    from .figures import Figures
    from .lossy.settings import MemorySettings
    from .native.kv import KVCache
    from .settings import KVSettings

__all__ = ["Figures", "KVCache", "KVSettings", "KvtierError", "Llama", "MemorySettings", "__version__"]

# Loaded on first use: `import kvtier` alone must not load llama.cpp.
_HOMES: Final = {
    "Llama": "engine.llama",
    "KVSettings": "settings",
    "MemorySettings": "lossy.settings",
    "KVCache": "native.kv",
    "Figures": "figures",
    "KvtierError": "errors",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvtier")
    except PackageNotFoundError:
        return "0+source"  # a source tree that was never installed
