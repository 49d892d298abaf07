"""What is wrong between llama.cpp and an NVIDIA GPU, and what to install: findings of `kvtier doctor`.

The wheels named here are those that llama-cpp-python's own documentation lists (its README, "CUDA").
"""

from __future__ import annotations

import re
from typing import Final

from ..machine import buildargs
from ..machine.gpu import Nvidia

SUPPORTED: Final = ">=0.3.29,<=0.3.36"  # llama-cpp-python as pyproject.toml has it
WHEELS: Final = "https://abetlen.github.io/llama-cpp-python/whl/"
# CUDA versions that it has wheels for; a driver runs what was built for its own version or an older one
BUILT_FOR: Final = ((11, 8), (12, 1), (12, 2), (12, 3), (12, 4), (12, 5), (13, 0), (13, 2))

_MISSING: Final = re.compile(r"(lib[\w+.-]+?\.so(?:\.(\d+))?[\d.]*): cannot open shared object file")
_CUDA_LIBRARIES: Final = ("libcudart.", "libcublas.", "libcublasLt.")
_NVIDIA_FOLDERS: Final = (
    "export LD_LIBRARY_PATH=\"$(python3 -c 'import glob, sysconfig; "
    'print(":".join(glob.glob(sysconfig.get_path("purelib") + "/nvidia/*/lib")))\'):$LD_LIBRARY_PATH"'
)


def wheel_for(cuda: tuple[int, int] | None) -> str:
    """The index with wheels that run on a driver for `cuda`; a placeholder where that is not known or too old."""
    fitting = [version for version in BUILT_FOR if cuda is not None and version <= cuda]
    return f"{WHEELS}cu{fitting[-1][0]}{fitting[-1][1]}" if fitting else f"{WHEELS}CUDA-VERSION"


def build_for_gpu(gpu: Nvidia, version: str) -> str:
    """How to get a llama.cpp that can use the GPU: a wheel, or compiled. `version` is the installed one."""
    index = wheel_for(gpu.cuda)
    which = "" if gpu.cuda and gpu.cuda >= BUILT_FOR[0] else " (cu118 to cu132, see `nvidia-smi`)"
    wheel = f"pip install --force-reinstall --no-deps --only-binary llama-cpp-python 'llama-cpp-python{SUPPORTED}'"
    return (
        f"Install llama-cpp-python's own wheel for CUDA{which}:\n{wheel} --extra-index-url {index}\n"
        "or, where it has none for this Python, compile it (needs the CUDA toolkit):\n"
        f"{buildargs.install_command('-DGGML_CUDA=on', version)}"
    )


def missing_library(message: str) -> str:
    """What to do about a shared library that `message`, an import error, says is missing; empty if it says no such
    thing."""
    found = _MISSING.search(message)
    if found is None:
        return ""
    library, major = found[1], found[2]
    if library.startswith(_CUDA_LIBRARIES):
        packages = [
            f"nvidia-{name}{f'-cu{major}' if major in ('11', '12') else ''}" for name in ("cuda-runtime", "cublas")
        ]
        if major and major not in ("11", "12"):
            packages = [f"'{name}=={major}.*'" for name in packages]
        return (
            f"This llama-cpp-python was built for CUDA {major}, and its {library} is not found. Install it, and say "
            f"where it is before you start Python:\npip install {' '.join(packages)}\n{_NVIDIA_FOLDERS}\n"
            f"or take a wheel for the CUDA that is installed (--extra-index-url {wheel_for(None)})."
        )
    if library.startswith("libcuda."):
        return (
            "This llama-cpp-python was built for CUDA, and this machine has no NVIDIA driver. Install the driver (on "
            "Colab: choose a runtime with a GPU), or a build for the CPU:\n"
            f"{buildargs.install_command('-DGGML_CUDA=off')}"
        )
    if library.startswith("libgomp."):
        return f"Install GCC's OpenMP runtime, which has {library} (Debian, Ubuntu: apt-get install libgomp1)."
    return f"Install the package of your system that has {library}, or compile llama-cpp-python here:\n" + (
        buildargs.install_command("")
    )
