"""What the controller goes by: memory, length, speed, what the text looks like, and where attention goes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..figures import UNLIMITED
from .base import HOST, Budgets, Observation, PageStats

_WORD: Final = re.compile(r"\w+|[^\w\s]")
_CODE_SIGNS: Final = frozenset("{}[]()<>=+*/\\|&^%$#@~`")
_CODE_WORDS: Final = frozenset(
    ("def", "elif", "lambda", "None", "True", "False", "int", "char", "void", "const", "struct", "var", "null")
)
_NAME: Final = re.compile(r"\w*[a-z]_[a-z]\w*|[a-z]+[A-Z]\w*|\w*[A-Za-z]\d+\w*|__\w+")
_MARK: Final = re.compile(r"<\|[^|>]{1,40}\|>|</?[a-z_]{1,30}>|\[/?INST\]")  # of chat templates: neither code nor prose
_TURN: Final = re.compile(
    r"<\|im_start\|>|<start_of_turn>|<\|start_header_id\|>|\[INST\]|<\|user\|>|<\|assistant\|>"
    r"|^\s*(?:[Uu]ser|[Aa]ssistant|[Ss]ystem|Human|AI|[A-Z][a-z]{1,15}(?: [A-Z][a-z]{1,15})?):\s+\S",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Signals:
    """What the controller sees.

    Attributes:
        memory_use: bytes on the host over its budget, 0 without a limit.
        n_tokens: of the longest stream.
        decode_per_s: tokens per second, 0 if not known.
        code_share: share of the newest text's words and signs that look like code.
        turns_per_1000: turns of a dialogue per 1,000 words.
        locality: share of the mass on the newest tenth of the pages, mean over layers.
        entropy: of the mass over the pages, 0 (one page has all) to 1 (all have the same), mean over layers.
    """

    memory_use: float
    n_tokens: int
    decode_per_s: float
    code_share: float
    turns_per_1000: float
    locality: float
    entropy: float


def signals(stats: PageStats, budgets: Budgets, seen: Observation) -> Signals:
    """All signals of one moment."""
    used = int(stats.bytes[stats.tier == HOST].sum())
    use = 0.0 if budgets.host_bytes >= UNLIMITED else used / max(1, budgets.host_bytes)
    locality, entropy = attention_signals(stats)
    return Signals(
        use, stats.n_tokens, seen.decode_per_s, code_share(seen.text), turns_per_1000(seen.text), locality, entropy
    )


def attention_signals(stats: PageStats) -> tuple[float, float]:
    """Locality and entropy of the mass, mean over layers, whose masses sum to 1 each; (0, 1) without pages."""
    mass = stats.mass_mean
    n_layers = float(mass.sum())
    n_pages = len(mass) / max(1e-9, n_layers)  # per layer
    if n_layers < 0.5 or n_pages < 2:
        return 0.0, 1.0
    local = float(mass[stats.age < 0.1 * max(1, stats.n_tokens)].sum()) / n_layers
    entropy = -float(np.dot(mass, np.log(np.maximum(mass, np.float32(1e-12))))) / n_layers
    return local, entropy / float(np.log(n_pages))


def code_share(text: str) -> float:
    """Share of words and signs that occur in programs rather than in prose."""
    words = _WORD.findall(_MARK.sub(" ", text))
    if len(words) < 20:
        return 0.0
    n_code = sum(1 for word in words if word in _CODE_SIGNS or word in _CODE_WORDS or _NAME.fullmatch(word))
    return n_code / len(words)


def turns_per_1000(text: str) -> float:
    """Turns of a dialogue per 1,000 words: marks of chat templates, and lines that begin with who speaks."""
    n_words = len(text.split())
    return 1000 * len(_TURN.findall(text)) / n_words if n_words >= 20 else 0.0
