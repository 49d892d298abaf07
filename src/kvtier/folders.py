"""Where kvtier keeps its files on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import platformdirs

CACHE_ENV: Final = "KVTIER_CACHE_DIR"


def cache_dir() -> Path:
    """The user's cache folder of kvtier (KVTIER_CACHE_DIR overrides it). Not created here."""
    override = os.environ.get(CACHE_ENV)
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_path("kvtier"))
