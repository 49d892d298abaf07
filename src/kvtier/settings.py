"""The settings of one KV cache: budgets, formats, directory. Checked here once, written for the native library once."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, get_type_hints

from .errors import SettingsError
from .folders import cache_dir
from .formats import FORMATS
from .machine.hardware import memory
from .sizes import parse_bytes, parse_share

SUB_PAGE_TOKENS: Final = 32  # pages are made of pieces of this many tokens
MAX_PAGE_TOKENS: Final = 4096
MASS_DECAY: Final = 0.98  # the native library's own default
MAX_MASS_DECAY: Final = 0.999999  # what is below 1 in single precision too
LEAST_EPS: Final = 1.2e-38  # what single precision holds in full
MAX_EPS: Final = MAX_MASS_DECAY
LEAST_SHARE: Final = 0.01
MAX_SHARE: Final = 0.95
PROTECT_FIRST: Final = 1  # pages, the native library's own default
PROTECT_LAST: Final = 2  # likewise
DEFAULT_FORMAT: Final = "f16"
DEFAULT_EPS: Final = "0.07"  # about as near to exact as stock's f16 cache (docs/recall.md)
COMPACT: Final = "q8_0"  # of a bounded cache: what it rounds is less than what is left out
FIDELITIES: Final = ("exact", "bounded:EPS", "lossy")


@dataclass(frozen=True, slots=True)
class KVSettings:
    """Where the KV cache lives and in which format. Raises SettingsError for values that cannot be used.

    Attributes:
        host: budget of the host tier in bytes; None: no limit. Text such as "2GiB" is understood.
            With lossy fidelity it may be a share of free memory, "65%", which then is `host_share`: the budget follows
            as free memory changes.
        disk: budget of the disk tier in bytes; None: no disk tier.
        dir: directory of the disk tier; None: the user's cache folder. Needs `disk`.
        host_type_k, host_type_v: storage formats of keys and values in RAM; None: the cache types (type_k, type_v), and
            f16 if those are not given either.
        disk_type_k, disk_type_v: formats on disk; None: as in RAM, so that a page comes back as it left.
        page_tokens: tokens of one page, a multiple of 32; None: the library's own.
        io_threads: workers for reads and writes of the disk tier; None: the library's own.
        protect_first, protect_last: pages at the start and at the end of each sequence that never leave RAM.
        fidelity: "exact"; or "bounded:EPS": a decode step may leave out values that carry at most EPS of the attention.
            Keys then stay in RAM and count against the host budget; both formats are Q8_0 if nothing else is said; or
            "lossy": what has to leave RAM is dropped for good, so that memory is bounded without a disk tier. None:
            exact.
        read_budget: with bounded fidelity, the most values that one step reads per KV head; comes before EPS.
        mass_decay: factor by which older attention mass counts less per step, from 0 to below 1.
    """

    host: int | None = None
    disk: int | None = None
    dir: Path | None = None
    host_type_k: str | None = None
    host_type_v: str | None = None
    disk_type_k: str | None = None
    disk_type_v: str | None = None
    page_tokens: int | None = None
    io_threads: int | None = None
    protect_first: int | None = None
    protect_last: int | None = None
    mass_decay: float | None = None
    fidelity: str | None = None
    read_budget: int | None = None
    host_share: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.host, str) and self.host.strip().endswith("%"):
            share = _share(self.host)
            object.__setattr__(self, "host_share", share)
            object.__setattr__(self, "host", max(1, int(share * memory().available_bytes)))
        self._check_share()
        for name in ("host", "disk"):
            object.__setattr__(self, name, _bytes(name, getattr(self, name)))
        for name in ("host_type_k", "host_type_v", "disk_type_k", "disk_type_v"):
            object.__setattr__(self, name, _format(name, getattr(self, name)))
        object.__setattr__(self, "dir", _directory(self.dir))
        self._check_tiers()
        _check_int("page_tokens", self.page_tokens, SUB_PAGE_TOKENS, MAX_PAGE_TOKENS)
        if self.page_tokens is not None and self.page_tokens % SUB_PAGE_TOKENS:
            near = max(SUB_PAGE_TOKENS, round(self.page_tokens / SUB_PAGE_TOKENS) * SUB_PAGE_TOKENS)
            raise SettingsError(
                f"page_tokens is {self.page_tokens}, which is not a multiple of {SUB_PAGE_TOKENS}", f"Take {near}."
            )
        object.__setattr__(self, "fidelity", _fidelity(self.fidelity))
        _check_int("io_threads", self.io_threads, 1, 64)
        _check_int("protect_first", self.protect_first, 0, 1 << 20)
        _check_int("protect_last", self.protect_last, 1, 1 << 20)
        self._check_read_budget()
        if self.mass_decay is not None and not 0.0 <= self.mass_decay <= MAX_MASS_DECAY:
            raise SettingsError(
                f"mass_decay is {self.mass_decay}, which is not in [0, 1)",
                "Take for example 0.99; 0 keeps only the last step.",
            )

    def _check_share(self) -> None:
        if self.host_share is None:
            return
        if self.fidelity is None or self.fidelity.strip().lower() != "lossy":
            raise SettingsError(
                "the host budget is a share of free memory, which only lossy fidelity can keep to as memory changes",
                "Add --fidelity lossy, or give a number of bytes (--kv-host 2GiB).",
            )

    def _check_tiers(self) -> None:
        if self.host == 0:
            raise SettingsError(
                "the host budget is 0 bytes, but attention reads pages from RAM",
                "Give it at least a few pages per layer (--kv-host 64MiB), or leave it out for no limit.",
            )
        if self.dir is not None and self.disk is None:
            raise SettingsError(
                f"the directory {self.dir} is given, but no budget for the disk tier",
                "Say how much the disk tier may take (--kv-disk 20GiB), or leave --kv-dir out.",
            )
        if self.fidelity == "lossy" and self.disk is not None:
            raise SettingsError(
                "lossy fidelity drops what has to leave RAM, but a disk tier is given too", "Leave --kv-disk out."
            )
        if self.disk == 0:
            raise SettingsError(
                "the disk budget is 0 bytes", "Leave --kv-disk out for no disk tier, or give it for example 20GiB."
            )

    @property
    def eps(self) -> float | None:
        """The most attention mass that a step may leave out; None: exact."""
        kind, _, eps = (self.fidelity or "exact").partition(":")
        return float(eps) if kind == "bounded" else None

    @property
    def protected_pages(self) -> tuple[int, int]:
        """Pages at the start and at the end of each sequence that never leave RAM, the library's own where nothing is
        set."""
        return (
            PROTECT_FIRST if self.protect_first is None else self.protect_first,
            PROTECT_LAST if self.protect_last is None else self.protect_last,
        )

    def _check_read_budget(self) -> None:
        if self.read_budget is None:
            return
        if self.eps is None:
            raise SettingsError(
                f"a read budget of {self.read_budget} tokens is given, but an exact step reads everything",
                "Add --fidelity bounded:0.05, or leave --kv-read-budget out.",
            )
        least = sum(self.protected_pages) * (self.page_tokens or SUB_PAGE_TOKENS)
        _check_int("read_budget", self.read_budget, least, (1 << 31) - 1, "the first and newest pages are always read")

    def with_cache_types(self, type_k: str | None, type_v: str | None) -> KVSettings:
        """The same settings with every format filled in: RAM takes the cache types by default, disk takes RAM's."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for part, nominal in (("k", type_k), ("v", type_v)):
            host = values[f"host_type_{part}"] or _format(f"type_{part}", nominal) or self._default_host_type()
            values[f"host_type_{part}"] = host
            values[f"disk_type_{part}"] = values[f"disk_type_{part}"] or host
        return KVSettings(**values)

    def _default_host_type(self) -> str:
        return DEFAULT_FORMAT if self.eps is None else COMPACT

    def disk_dir(self) -> Path | None:
        """The directory of the disk tier: the given one, or the user's cache folder, or None without a disk tier."""
        if self.disk is None:
            return None
        return self.dir if self.dir is not None else cache_dir() / "pages"

    def to_native(self) -> str:
        """The settings as the native library reads them: key=value lines (see kvtier.h).

        Every line ends with a line break: such a text is split at its lines only, so a directory may hold a comma.
        """
        pairs = (
            ("host", self.host),
            ("disk", self.disk),
            ("dir", self.disk_dir()),
            ("host-k", self.host_type_k),
            ("host-v", self.host_type_v),
            ("disk-k", self.disk_type_k),
            ("disk-v", self.disk_type_v),
            ("page-tokens", self.page_tokens),
            ("io-threads", self.io_threads),
            ("protect-first", self.protect_first),
            ("protect-last", self.protect_last),
            ("mass-decay", self.mass_decay),
            ("fidelity", self.fidelity),
            ("read-budget", self.read_budget),
        )
        return "".join(f"{key}={value}\n" for key, value in pairs if value is not None)

    @classmethod
    def from_native(cls, text: str) -> KVSettings:
        """The settings that `to_native` wrote. Raises SettingsError."""
        values: dict[str, Any] = {}
        names = {field.name for field in fields(cls)}
        for key, equals, value in (line.partition("=") for line in text.splitlines()):
            name = key.replace("-", "_").replace("host_k", "host_type_k").replace("host_v", "host_type_v")
            name = name.replace("disk_k", "disk_type_k").replace("disk_v", "disk_type_v")
            if not equals or name not in names:
                raise SettingsError(f"there is no setting '{key}'", f"Settings: {', '.join(sorted(names))}.")
            hint = str(get_type_hints(cls)[name])
            values[name] = (
                float(value)
                if "float" in hint
                else bool(int(value))
                if "bool" in hint
                else int(value)
                if "int" in hint
                else value
            )
        return cls(**values)


def _bytes(name: str, value: str | int | None) -> int | None:
    if value is None:
        return None
    if not isinstance(value, (int, str)) or isinstance(value, bool):
        raise SettingsError(
            f"the {name} budget is {value!r}, which is no number of bytes", 'Give an int, or text such as "2GiB".'
        )
    try:
        return parse_bytes(value)
    except ValueError as err:
        raise SettingsError(f"the {name} budget: {err}") from None


def _share(text: str) -> float:
    try:
        share = parse_share(text)
    except ValueError:
        share = 0.0
    if not LEAST_SHARE <= share <= MAX_SHARE:
        raise SettingsError(
            f"the host budget '{text}' is not a share of free memory from 1% to 95%",
            "Take 60% to 70%, which leaves a sound buffer.",
        )
    return share


def _fidelity(value: str | None) -> str | None:
    if value is None:
        return None
    kind, colon, eps = value.strip().lower().partition(":")
    if kind in ("exact", "lossy") and not colon:
        return kind
    if kind == "bounded" and not colon:
        eps = DEFAULT_EPS
    try:
        if kind == "bounded" and LEAST_EPS <= float(eps) <= MAX_EPS:
            return f"{kind}:{float(eps)!r}"
    except ValueError:
        pass
    raise SettingsError(
        f"fidelity is '{value}', which is none of {', '.join(FIDELITIES)} with EPS from {LEAST_EPS} to {MAX_EPS}",
        "Take for example bounded:0.05: a step then leaves out at most 5 % of the attention.",
    )


def _format(name: str, value: str | None) -> str | None:
    if value is None:
        return None
    if value.lower() not in FORMATS:
        raise SettingsError(
            f"{name} is '{value}', which is not a storage format of pages", f"Take one of {', '.join(FORMATS)}."
        )
    return value.lower()


def _directory(value: str | os.PathLike[str] | None) -> Path | None:
    if value is None:
        return None
    text = os.fspath(value)
    if not text.strip():
        raise SettingsError(
            "the directory of the disk tier is empty text",
            "Name a directory, or leave it out for the user's cache folder.",
        )
    if any(c in text for c in "\n\r\0"):
        raise SettingsError(
            f"the directory {text!r} has a line break in its name, which settings cannot hold",
            "Take another directory, or a symbolic link to this one.",
        )
    return Path(text).expanduser().absolute()


def _check_int(name: str, value: int | None, least: int, most: int, why: str = "") -> None:
    if value is not None and not least <= value <= most:
        raise SettingsError(f"{name} is {value}", f"Take a value from {least:,} to {most:,}{why and f': {why}'}.")
