"""The portable wheel, as a user meets it: installed beside a llama-cpp-python of its own, without a compiler, it runs.

llama-cpp-python is the wheel that `make setup` built and keeps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .scripts_loader import load

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 3_000_000
RUN = ("-c", "512", "-p", "The sea was", "-n", "24", "--temp", "0", "-t", "2", "--kv-host", "64MiB", "--json")

# Prints the OpenMP runtimes that are in the process after a step with two threads.
_RUNTIMES = """
import re, sys
from kvtier import Llama
with Llama(sys.argv[1], n_ctx=512, n_threads=2, n_threads_batch=2, verbose=False) as llm:
    llm.eval(llm.tokenize(b"The sea was " * 20))
    maps = open("/proc/self/maps").read()
print(*sorted(set(re.findall(r"[^/\\n]*(?:gomp|libomp|iomp)[^/\\n]*\\.so[^/\\n]*", maps))), sep="\\n")
"""

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel of this checkout, built anew."""
    built: Path = load("build-wheel").build()
    return built


@pytest.fixture(scope="module")
def llama_wheel() -> Path:
    """llama-cpp-python as `make setup` installs it."""
    found = sorted(Path(sys.prefix, "wheels").glob("llama_cpp_python-*.whl"))
    assert len(found) == 1, f"{sys.prefix}/wheels: {found or 'no llama-cpp-python'}; `make setup` puts one there"
    return found[0]


@pytest.fixture(scope="module")
def python(wheel: Path, llama_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that holds both wheels and what they depend on."""
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    interpreter = folder / "bin" / "python"
    said(interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(llama_wheel), str(wheel))
    return interpreter


def said(python: Path, *arguments: str, **env: str) -> str:
    """What an interpreter printed, in an environment that has nothing of ours, and no compiler."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVTIER_", "GGML_", "PYTHON"))}
    kept |= {"PATH": str(python.parent), "CC": "/bin/false", "CXX": "/bin/false", "CMAKE_GENERATOR": "none"}
    done = subprocess.run([python, *arguments], env={**kept, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_it_fits_any_python_and_an_old_glibc(wheel: Path) -> None:
    build = load("build-wheel")
    assert wheel.name.endswith(f"-py3-none-{build.PLATFORM}.whl")
    shown = build.run(sys.executable, "-m", "auditwheel", "show", wheel)
    assert f'consistent with the following platform tag: "{build.PLATFORM}"' in " ".join(shown.split())
    assert wheel.stat().st_size < MOST_BYTES


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    (info,) = {name.split("/")[0] for name in names if name.split("/")[0].endswith(".dist-info")}
    inside = {name for name in names if not name.startswith(f"{info}/")}
    python = {f"kvtier/{path.relative_to(ROOT / 'src' / 'kvtier')}" for path in (ROOT / "src" / "kvtier").rglob("*.py")}
    assert python <= inside and "kvtier/py.typed" in inside
    others = {"py.typed", "model/models.txt", "policies/weights.npz", "lib/libkvtier.so"}
    headers = {"include/kvtier.h", "include/kvtier-errors.h"}
    assert inside - python == {f"kvtier/{name}" for name in others | headers}


def test_the_library_needs_nothing_but_glibc(wheel: Path, tmp_path: Path) -> None:
    """So it can meet any libstdc++ and any OpenMP runtime that llama.cpp brings."""
    from elftools.elf.elffile import ELFFile

    with zipfile.ZipFile(wheel) as archive, archive.open("kvtier/lib/libkvtier.so") as file:
        elf = ELFFile(file)
        needed = [tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
        exported = {
            symbol.name
            for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
            if symbol["st_shndx"] != "SHN_UNDEF"
        }
    assert {name.split(".so")[0] for name in needed} <= {"libc", "libm", "libpthread", "libdl", "ld-linux-x86-64"}
    assert "ggml_backend_init" in exported and "kvt_version" in exported
    assert {name for name in exported if not name.startswith("kvt_")} == {"ggml_backend_init"}


def test_it_runs_a_model_as_the_compiled_package_does(python: Path, smollm2_path: Path) -> None:
    theirs = json.loads(said(python, "-m", "kvtier", "run", str(smollm2_path), *RUN))
    ours = json.loads(said(Path(sys.executable), "-m", "kvtier", "run", str(smollm2_path), *RUN, **here()))
    assert theirs["text"] and theirs["text"] == ours["text"]


def here() -> dict[str, str]:
    """The variables by which this Python finds the package and library that are tested."""
    return {name: os.environ[name] for name in ("PYTHONPATH", "KVTIER_LIBRARY") if name in os.environ}


def test_doctor_finds_it_sound(python: Path) -> None:
    found = {
        finding["name"]: finding for finding in json.loads(said(python, "-m", "kvtier", "doctor", "--json"))["findings"]
    }
    assert found["libkvtier"]["status"] == "ok" and str(python.parent.parent) in found["libkvtier"]["text"]
    assert "KVT0" in found["Devices"]["text"]


def test_the_pool_of_threads_is_that_of_llama_cpp(python: Path, smollm2_path: Path) -> None:
    assert said(python, "-c", _RUNTIMES, str(smollm2_path)).split() == ["libgomp.so.1.0.0"]


def test_also_where_llama_cpp_brings_a_runtime_of_its_own(
    python: Path, llama_wheel: Path, smollm2_path: Path, tmp_path: Path
) -> None:
    """As in wheels that auditwheel repaired: a copy of libgomp under another name."""
    load("build-wheel").run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", tmp_path, llama_wheel)
    (repaired,) = tmp_path.glob("*.whl")
    target = tmp_path / "repaired"
    said(python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(repaired))
    (runtime,) = said(python, "-c", _RUNTIMES, str(smollm2_path), PYTHONPATH=str(target)).split()
    assert runtime.startswith("libgomp-")
