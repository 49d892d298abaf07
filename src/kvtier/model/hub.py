"""Files of Hugging Face repositories, through the optional package huggingface_hub (its cache, resuming and locks)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..errors import ModelFetchError, ModelNotFoundError
from .fetching import FetchProgress, ProgressFn, sha256_of

_QUANTS = ("Q4_K_M", "Q4_0", "Q8_0")  # tried in this order when a repository holds several
_INSTALL = 'Install it: pip install "kvtier[hf]"   (or: pip install huggingface-hub)'


def fetch(repo: str, file: str | None, progress: ProgressFn | None) -> Path:
    """See kvtier.model.names.fetch_hf."""
    name, _, quant = repo.partition(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ModelNotFoundError(
            f"'{repo}' is not a Hugging Face repository",
            "Write OWNER/NAME or OWNER/NAME:QUANT, for example -hf Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M",
        )
    try:
        import huggingface_hub as hub
    except ImportError as err:
        raise ModelFetchError(
            f"fetching {name} needs the package huggingface-hub, which is not installed", _INSTALL
        ) from err
    report = progress or (lambda _: None)
    try:
        files = choose_files(name, hub.HfApi().list_repo_files(name) if file is None else None, file, quant)
        paths = [_fetch_one(hub, name, part, report) for part in files]
    except ModelFetchError:
        raise
    except Exception as err:  # the hub raises errors of several HTTP libraries
        reason = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        raise ModelFetchError(
            f"{name}: {reason}", "Check the name and the network; gated repositories need `hf auth login`."
        ) from err
    return paths[0]


def cached(repo: str, file: str) -> Path | None:
    """Where a whole file lies in the hub's own cache, or None (also without the package)."""
    try:
        import huggingface_hub as hub
    except ImportError:
        return None
    path = hub.try_to_load_from_cache(repo, file)
    return Path(path) if isinstance(path, str) else None


def choose_files(repo: str, listing: list[str] | None, file: str | None, quant: str) -> list[str]:
    """The file to fetch, with all its parts if it is split.

    Raises ModelFetchError if the repository has none that fits.
    """
    if file is None:
        ggufs = sorted(f for f in listing or [] if f.endswith(".gguf") and "mmproj" not in f.lower())
        wanted = (quant,) if quant else _QUANTS
        fitting = [
            f
            for q in wanted
            for f in ggufs
            if re.search(rf"(?<![a-z0-9]){re.escape(q.lower())}(?![a-z0-9_])", f.lower())
        ]
        if quant and not fitting:
            raise ModelFetchError(
                f"{repo} has no GGUF file of quantization {quant}", f"It has: {', '.join(ggufs[:20]) or 'no GGUF file'}"
            )
        if not ggufs:
            raise ModelFetchError(
                f"{repo} has no GGUF file", "Name a repository with GGUF files (many are called NAME-GGUF)."
            )
        file = (fitting or ggufs)[0]
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", file)
    if match is None:
        return [file]
    return [f"{match[1]}-{i:05d}-of-{match[3]}.gguf" for i in range(1, int(match[3]) + 1)]


def _fetch_one(hub: Any, repo: str, file: str, report: ProgressFn) -> Path:
    there = cached(repo, file)
    if there is not None:
        return there  # was checked when it was fetched
    infos = hub.HfApi().get_paths_info(repo, [file])
    if not infos:
        raise ModelFetchError(
            f"{repo} has no file {file}",
            "Its page lists the files there are; -hf OWNER/NAME:QUANT takes one by its quantization.",
        )
    report(FetchProgress(file, "fetch", 0, infos[0].size))
    path = Path(hub.hf_hub_download(repo, file))
    report(FetchProgress(file, "check", infos[0].size, infos[0].size))
    if infos[0].lfs is not None and sha256_of(path) != infos[0].lfs.sha256:
        path.resolve().unlink()
        raise ModelFetchError(
            f"{repo}: {file} does not have the SHA-256 that the repository publishes", "It was removed; fetch it again."
        )
    return path
