#!/usr/bin/env python3
"""Puts the pinned llama.cpp source into third_party/llama.cpp.

The source comes inside the source package of llama-cpp-python at the pin, which pip gets by name and version; its
SHA-256 is checked before anything is unpacked. The package itself is kept beside the tree, so that llama-cpp-python can
be installed from exactly the file that was checked. Doing it again when the tree is complete changes nothing.

    python3 scripts/fetch-llama.py                 get it with pip
    python3 scripts/fetch-llama.py --from FILE     use a package that is already here
    python3 scripts/fetch-llama.py --print-sdist   only print the path of the kept package
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
THIRD_PARTY = Path(__file__).resolve().parent.parent / "third_party"
TREE = THIRD_PARTY / "llama.cpp"
SDIST = THIRD_PARTY / f"llama_cpp_python-{VERSION}.tar.gz"
STAMP = ".kvtier-stamp"  # in the tree, holds the SHA-256 of the package that it came from
INSIDE = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/"


class FetchError(Exception):
    """What went wrong and what to do about it, for a person."""


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def check(path: Path) -> None:
    """Raises FetchError unless `path` is the pinned package."""
    if not path.is_file():
        raise FetchError(f"{path}: no such file")
    found = sha256_of(path)
    if found != SHA256:
        raise FetchError(f"{path}: its SHA-256 is {found}, but llama-cpp-python {VERSION} has {SHA256}")


def download(into: Path) -> Path:
    """Lets pip get the package; returns its path."""
    requirement = f"llama-cpp-python=={VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", "llama-cpp-python", "--dest", str(into), requirement]
    print(f"fetching the source package of {requirement} (73 MiB)", flush=True)
    if subprocess.run(command).returncode != 0:
        raise FetchError(
            f"pip could not download {requirement} (its message is above). "
            "Get the source package another way and pass it with --from FILE."
        )
    packages = sorted(into.glob("*.tar.gz"))
    if len(packages) != 1:
        raise FetchError(f"pip download left {len(packages)} source packages in {into}, expected one")
    return packages[0]


def keep(package: Path) -> None:
    """Copies a checked package beside the tree, in one step."""
    if package.resolve() == SDIST.resolve():
        return
    temporary = SDIST.with_suffix(f".{os.getpid()}.tmp")
    try:
        shutil.copyfile(package, temporary)
        os.replace(temporary, SDIST)
    finally:
        temporary.unlink(missing_ok=True)


def unpack(package: Path) -> None:
    """Unpacks llama.cpp beside its place and renames it there, so that a broken-off run leaves no half tree."""
    work = Path(tempfile.mkdtemp(prefix=".llama.cpp-", dir=THIRD_PARTY))
    try:
        tree = work / "llama.cpp"
        with tarfile.open(package) as archive:
            for member in archive:
                inner = PurePosixPath(member.name[len(INSIDE) :])
                # .git is a pointer to a repository that is not in the package; git commands in the tree would trip over
                # it
                if not member.name.startswith(INSIDE) or not member.isfile() or ".git" in inner.parts:
                    continue
                if ".." in inner.parts or inner.is_absolute():
                    raise FetchError(f"{package}: refusing the path {member.name}")
                source = archive.extractfile(member)
                if source is None:
                    raise FetchError(f"{package}: cannot read {member.name}")
                target = tree / inner
                target.parent.mkdir(parents=True, exist_ok=True)
                with source, target.open("wb") as file:
                    shutil.copyfileobj(source, file)
                target.chmod(member.mode & 0o755 | 0o600)
        if not (tree / "ggml/include/ggml.h").is_file():
            raise FetchError(f"{package}: there is no {INSIDE}ggml/include/ggml.h in it")
        (tree / STAMP).write_text(SHA256 + "\n")
        if TREE.exists():
            TREE.rename(work / "old")
        tree.rename(TREE)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def is_complete() -> bool:
    stamp = TREE / STAMP
    return stamp.is_file() and stamp.read_text().strip() == SHA256 and SDIST.is_file()


def fetch(from_file: Path | None) -> None:
    THIRD_PARTY.mkdir(exist_ok=True)
    if from_file is None and is_complete():
        return
    with tempfile.TemporaryDirectory() as work:
        if from_file is not None:
            package = from_file
        elif SDIST.is_file() and sha256_of(SDIST) == SHA256:
            package = SDIST
        else:
            package = download(Path(work))
        check(package)
        keep(package)
        unpack(SDIST)
    print(f"llama.cpp of llama-cpp-python {VERSION} is in {TREE}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Puts the pinned llama.cpp source into third_party/llama.cpp.")
    parser.add_argument("--from", dest="from_file", metavar="FILE", type=Path, help="use this source package")
    parser.add_argument(
        "--print-sdist", action="store_true", help="print where the checked package is kept, and do nothing"
    )
    options = parser.parse_args()
    if options.print_sdist:
        print(SDIST)
        return 0
    try:
        fetch(options.from_file)
    except (FetchError, OSError, tarfile.TarError) as error:
        print(f"fetch-llama: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
