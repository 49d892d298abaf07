"""llama.cpp's own backends, where a build keeps them in files of their own, and which of its devices are GPUs."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import LibraryError
from kvtier.machine import ggmlbackends
from kvtier.native import runtime

CPU, GPU, INTEGRATED, ACCELERATOR = 0, 1, 2, 3


class Ggml:
    """A ggml that finds a backend where a folder has its file. Functions are real ones: they are called through their
    addresses."""

    def __init__(self, *devices: tuple[str, int]) -> None:
        self.devices, self.asked = list(devices), list[Path]()
        makers = {
            "ggml_backend_load_all_from_path": self._load,
            "ggml_backend_dev_by_type": lambda kind: next(
                (i + 1 for i, d in enumerate(self.devices) if d[1] == kind), 0
            ),
            "ggml_backend_dev_count": lambda: len(self.devices),
            "ggml_backend_dev_get": lambda i: i + 1,
            "ggml_backend_dev_type": lambda device: self.devices[device - 1][1],
        }
        for name, function in makers.items():
            result, types = ggmlbackends._SIGNATURES[name]
            setattr(self, name, ctypes.CFUNCTYPE(result, *types)(function))
        self._names = [ctypes.create_string_buffer(name.encode()) for name, _ in devices]
        to_name = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        self.ggml_backend_dev_name = to_name(lambda device: ctypes.addressof(self._names[device - 1]))

    def _load(self, folder: bytes) -> None:
        self.asked.append(Path(os.fsdecode(folder)))
        if (self.asked[-1] / "libggml-cpu.so").exists():
            self.devices.append(("CPU", CPU))


def installed(site: Path, *files: str) -> Any:
    """A libllama in a package folder, with other files around it."""
    for name in ("llama_cpp/lib/libllama.so", *files):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).touch()
    return SimpleNamespace(_name=str(site / "llama_cpp" / "lib" / "libllama.so"))


def test_backends_are_loaded_from_beside_libllama(tmp_path: Path) -> None:
    ggml = Ggml()
    assert ggmlbackends.load(ggml, installed(tmp_path, "llama_cpp/lib/libggml-cpu.so", "bin/libggml-cpu.so"))
    assert ggml.asked == [tmp_path / "llama_cpp" / "lib"]


def test_or_from_where_others_of_its_builds_install_them(tmp_path: Path) -> None:
    ggml = Ggml()
    assert ggmlbackends.load(ggml, installed(tmp_path, "bin/libggml-cpu.so"))
    assert ggml.asked == [tmp_path / "llama_cpp" / "lib", tmp_path / "bin"]


def test_a_cpu_backend_that_is_there_is_left_alone(tmp_path: Path) -> None:
    ggml = Ggml(("CPU", CPU))
    assert ggmlbackends.load(ggml, installed(tmp_path, "llama_cpp/lib/libggml-cpu.so"))
    assert ggml.asked == []


def test_where_there_is_none_at_all_the_error_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "libggml", Ggml())
    monkeypatch.setattr(runtime.api, "_lib", installed(tmp_path))
    with pytest.raises(LibraryError, match="no CPU backend") as raised:
        runtime.load_backends()
    assert str(tmp_path / "llama_cpp" / "lib") in raised.value.message and "pip install" in raised.value.hint


def test_gpus_are_those_that_compute() -> None:
    ggml = Ggml(("CPU", CPU), ("CUDA0", GPU), ("Vulkan0", INTEGRATED), ("BLAS", ACCELERATOR), ("KVT0", GPU))
    assert ggmlbackends.gpus(ggml) == ["CUDA0", "Vulkan0"]
    assert ggmlbackends.gpus(Ggml(("CPU", CPU))) == []


def test_the_installed_one() -> None:
    runtime.load()
    assert ggmlbackends.has_cpu(runtime.libggml)
    found = {device["name"]: device["description"] for device in ggmlbackends.devices(runtime.libggml)}
    assert found["CPU"] and found["KVT0"]
    assert "KVT0" not in ggmlbackends.gpus(runtime.libggml)
