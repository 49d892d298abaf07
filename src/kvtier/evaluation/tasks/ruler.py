"""The purely synthetic tasks of the RULER benchmark, with texts of our own.

Definitions (what is hidden, how many of what, what counts as answered): C.-P. Hsieh et al., "RULER: What's the Real
Context Size of Your Long-Context Language Models?", 2024, and the parameters published with it. All wording is ours.
"""

from __future__ import annotations

import random
import string
from itertools import pairwise
from typing import Final

from . import words
from .prompts import Prompt, Task

NOISE: Final = "The river is cold. The hills are far. The night is long. We walk on. Then we rest."
N_DEPTHS: Final = 40  # a needle lies at one of so many evenly spread depths
N_DIGITS_NEEDLE: Final = 7
N_HOPS, N_DIGITS_VARIABLE, N_LETTERS_VARIABLE = 4, 5, 5
N_COMMON, N_FREQUENT = 10, 3
# how often common and other words occur; the first that fits
OCCURRENCES: Final = ((30, 3), (20, 2), (10, 1))
ZETA_ALPHA, N_LETTERS_CODED = 2.0, 6
_ZETA_SUM: Final = 1.6449340668482264  # of k**-2 over all k


def _rng(seed: str, task: str, index: int) -> random.Random:
    return random.Random(f"{seed}/{task}/{index}")


def _place(sentences: list[str], sentence: str, depth: float) -> None:
    sentences.insert(round(depth * len(sentences)), sentence)


def _needle_prompt(task: str, index: int, depth: float, text: str, kind: str, key: str, value: str) -> Prompt:
    intro = f"Every name in the text below has a secret {kind}. Remember them: there is a question at the end.\n"
    question = f"\nQuestion: What is the secret {kind} of {key}?\nAnswer: The secret {kind} of {key} is"
    return Prompt(task, index, depth, intro + text + "\n", question, f" {value}", (value,), len(value) + 5)


def _needle(kind: str, key: str, value: str) -> str:
    return f"The secret {kind} of {key} is {value}."


def niah_single_1(seed: str, index: int, size: int) -> Prompt:
    """One needle (a name and a number) in `size` repetitions of the noise."""
    rng = _rng(seed, "niah_single_1", index)
    key, value = words.distinct_keys(rng, 1)[0], words.number(rng, N_DIGITS_NEEDLE)
    depth = rng.randrange(N_DEPTHS) / (N_DEPTHS - 1)
    text = [NOISE] * size
    _place(text, _needle("number", key, value), depth)
    return _needle_prompt("niah_single_1", index, depth, "\n".join(text), "number", key, value)


def niah_multikey_2(seed: str, index: int, size: int) -> Prompt:
    """`size` needles with other names around the one that is asked for."""
    rng = _rng(seed, "niah_multikey_2", index)
    depth = rng.randrange(N_DEPTHS) / (N_DEPTHS - 1)
    wanted, value = words.distinct_keys(rng, 1)[0], words.number(rng, N_DIGITS_NEEDLE)
    others = [key for key in words.distinct_keys(rng, size + 1) if key != wanted][:size]
    text = [_needle("number", key, words.number(rng, N_DIGITS_NEEDLE)) for key in others]
    _place(text, _needle("number", wanted, value), depth)
    return _needle_prompt("niah_multikey_2", index, depth, "\n".join(text), "number", wanted, value)


def niah_multikey_3(seed: str, index: int, size: int) -> Prompt:
    """The same with UUIDs for names and values."""
    rng = _rng(seed, "niah_multikey_3", index)
    depth = rng.randrange(N_DEPTHS) / (N_DEPTHS - 1)
    wanted, value = words.identifier(rng), words.identifier(rng)
    text = [_needle("code", words.identifier(rng), words.identifier(rng)) for _ in range(size)]
    _place(text, _needle("code", wanted, value), depth)
    return _needle_prompt("niah_multikey_3", index, depth, "\n".join(text), "code", wanted, value)


def _chain(rng: random.Random, n_noise: int) -> tuple[str, str, list[str]]:
    """Noise with a chain of assignments in it, in order: text, value, names."""
    value = words.number(rng, N_DIGITS_VARIABLE)
    names: list[str] = []
    while len(names) <= N_HOPS:
        name = words.letters(rng, N_LETTERS_VARIABLE, string.ascii_uppercase)
        names += [name] if name not in names else []
    text = [NOISE] * n_noise
    chain = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a}" for a, b in pairwise(names))]
    places = sorted(rng.sample(range(n_noise + 1), len(chain)))
    for place, link in reversed(list(zip(places, chain, strict=True))):
        text.insert(place, link)
    return "\n".join(text), value, names


def vt(seed: str, index: int, size: int) -> Prompt:
    """One chain of five variables, each the one before, hidden in `size` repetitions of noise; a short example
    first."""
    rng = _rng(seed, "vt", index)
    parts: list[str] = []
    for n_noise in (4, size):
        text, value, names = _chain(rng, n_noise)
        intro = f"Variables are assigned in the text below.\n{text}\n"
        question = (
            f"\nQuestion: Which {len(names)} variables have the value {value}, directly or through others?\nAnswer:"
        )
        parts += [intro, question, f" {', '.join(names)}"]
    example, context, question, expected = "".join(parts[:3]) + "\n\n", parts[3], parts[4], parts[5]
    return Prompt("vt", index, None, example + context, question, expected, tuple(expected.strip().split(", ")), 30)


def _listing(rng: random.Random, n_others: int, often: int, seldom: int) -> tuple[str, list[str]]:
    """A numbered list in random order, and the words that occur often in it."""
    drawn = words.compounds(rng, N_COMMON + n_others)
    common = drawn[:N_COMMON]
    entries = common * often + drawn[N_COMMON:] * seldom
    rng.shuffle(entries)
    return " ".join(f"{i + 1}. {word}" for i, word in enumerate(entries)), common


def cwe(often: int, seldom: int) -> Task:
    """Common words: ten words occur `often`, `size` others `seldom`; which are the ten? A short example first."""

    def write(seed: str, index: int, size: int) -> Prompt:
        rng = _rng(seed, "cwe", index)
        parts: list[str] = []
        for n_others, n_often, n_seldom in ((20, 3, 1), (size, often, seldom)):
            text, common = _listing(rng, n_others, n_often, n_seldom)
            intro = f"Below is a numbered list of words. Some occur more often than others.\n{text}\n"
            question = f"\nQuestion: Which {N_COMMON} words occur most often in the list?\nAnswer:"
            answer = " " + " ".join(f"{i + 1}. {word}" for i, word in enumerate(common))
            parts += [intro, question, answer]
        example, context, question, expected = "".join(parts[:3]) + "\n\n", parts[3], parts[4], parts[5]
        return Prompt("cwe", index, None, example + context, question, expected, tuple(common), 120)

    return Task("cwe", write, least=10, most=50_000)


def zipf_counts(n_words: int, n_entries: int) -> list[int]:
    """How often the word of each rank occurs, so that there are about `n_entries`: rank^-alpha over the zeta
    function."""
    return [round(n_entries / _ZETA_SUM / rank**ZETA_ALPHA) for rank in range(1, n_words + 1)]


def fwe(seed: str, index: int, size: int) -> Prompt:
    """Frequent words: made-up words whose frequency falls with their rank; the first rank is dots, the next three are
    asked for."""
    rng = _rng(seed, "fwe", index)
    counts = zipf_counts(max(20, size // 50), size)
    coded: list[str] = []
    while len(coded) < len(counts) - 1:
        word = words.letters(rng, N_LETTERS_CODED)
        coded += [word] if word not in coded else []
    entries = [word for word, n in zip(["...", *coded], counts, strict=True) for _ in range(n)]
    rng.shuffle(entries)
    wanted = coded[:N_FREQUENT]
    intro = "Below is a coded text. Remember which coded words occur most often in it.\n"
    question = f"\nQuestion: Which {N_FREQUENT} coded words, dots aside, occur most often in the text?\nAnswer:"
    return Prompt(
        "fwe", index, None, intro + " ".join(entries) + "\n", question, " " + ", ".join(wanted), tuple(wanted), 50
    )


SIMPLE: Final = (
    Task("niah_single_1", niah_single_1),
    Task("niah_multikey_2", niah_multikey_2),
    Task("niah_multikey_3", niah_multikey_3),
    Task("vt", vt, least=8),
    Task("fwe", fwe, least=66),  # from there on no other word occurs as often as the third
)
NAMES: Final = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
