"""scripts/fetch-llama.py: checked, atomic, idempotent."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from .scripts_loader import load

FILES = {
    "ggml/include/ggml.h": b"// header\n",
    "src/llama.cpp": b"// source\n",
    ".git": b"gitdir: ../../.git/modules/llama.cpp\n",
}


def package(path: Path, inside: str, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(inside + name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture
def script(tmp_path: Path) -> ModuleType:
    """The script with its places moved, and the checksum of a small package of ours."""
    module = load("fetch-llama")
    module.THIRD_PARTY = tmp_path / "third_party"
    module.TREE = module.THIRD_PARTY / "llama.cpp"
    module.SDIST = module.THIRD_PARTY / "kept.tar.gz"
    source = package(tmp_path / "good.tar.gz", module.INSIDE, FILES)
    module.SHA256 = hashlib.sha256(source.read_bytes()).hexdigest()
    return module


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_good_package_becomes_a_tree(script: ModuleType, tmp_path: Path) -> None:
    script.fetch(tmp_path / "good.tar.gz")
    assert (script.TREE / "src/llama.cpp").read_bytes() == FILES["src/llama.cpp"]
    assert not (script.TREE / ".git").exists()
    assert script.SDIST.read_bytes() == (tmp_path / "good.tar.gz").read_bytes()
    assert entries(script.THIRD_PARTY) == {"llama.cpp", "kept.tar.gz"}


def test_a_second_time_changes_nothing(script: ModuleType, tmp_path: Path) -> None:
    script.fetch(tmp_path / "good.tar.gz")
    before = (script.TREE / "src/llama.cpp").stat()
    script.fetch(None)
    after = (script.TREE / "src/llama.cpp").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_broken_tree_is_made_again_from_the_kept_package(script: ModuleType, tmp_path: Path) -> None:
    script.fetch(tmp_path / "good.tar.gz")
    (script.TREE / script.STAMP).unlink()
    (script.TREE / "src/llama.cpp").unlink()
    script.fetch(None)
    assert (script.TREE / "src/llama.cpp").is_file()
    assert entries(script.THIRD_PARTY) == {"llama.cpp", "kept.tar.gz"}


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_a_wrong_package_is_refused_and_the_tree_stays(script: ModuleType, tmp_path: Path, damage: str) -> None:
    good = tmp_path / "good.tar.gz"
    script.fetch(good)
    bad = tmp_path / "bad.tar.gz"
    data = good.read_bytes()
    if damage != "missing":
        bad.write_bytes(data[:-9] if damage == "truncated" else data[:20] + bytes([data[20] ^ 1]) + data[21:])
    with pytest.raises(script.FetchError):
        script.fetch(bad)
    assert (script.TREE / "src/llama.cpp").is_file()
    assert entries(script.THIRD_PARTY) == {"llama.cpp", "kept.tar.gz"}


@pytest.mark.parametrize("files", [{"../evil": b"x", **FILES}, {"src/llama.cpp": b"no headers\n"}])
def test_a_package_with_wrong_contents_leaves_nothing(
    script: ModuleType, tmp_path: Path, files: dict[str, bytes]
) -> None:
    odd = package(tmp_path / "odd.tar.gz", script.INSIDE, files)
    script.SHA256 = hashlib.sha256(odd.read_bytes()).hexdigest()
    with pytest.raises(script.FetchError):
        script.fetch(odd)
    assert entries(script.THIRD_PARTY) == {"kept.tar.gz"}
    assert not (tmp_path / "evil").exists()


def test_the_kept_package_is_the_pinned_one() -> None:
    script = load("fetch-llama")
    assert script.sha256_of(script.SDIST) == script.SHA256
