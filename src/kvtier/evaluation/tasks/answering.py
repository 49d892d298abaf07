"""Answers to prompts in the measuring process: context in batches, question and answer one token at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...measuring.engine import Engine
from ...measuring.errors import MeasuringError
from ..divergence import log_softmax
from ..readings import counts_between


def answer(engine: Engine, prompt: dict[str, Any], progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Put a prompt (see `Prompt.to_dict`) to the engine; `progress(done, total)` counts tokens of its context.

    The expected answer is fed first, whatever the model would have said, and its probability noted; then, from where
    the model would have said something else, it is the model's own most probable tokens. Gives `log_p` (nats per
    expected token), `score` (the share of the answers that occur in the model's text, in any case), `is_exact` (the
    text begins with the expected one), `text`, and of the tokens fed on their own `n_steps`, `decode_s` and `reading`.
    """
    run = _Answer(engine, prompt)
    before = run.read_context(progress)
    said = run.answer()
    reading = {**counts_between(before, engine.counts()), "cell_bytes": run.cell_bytes}
    return {**said, "depth": prompt["depth"], "n_steps": run.n_steps, "decode_s": run.seconds, "reading": reading}


def split_tokens(engine: Engine, prompt: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """Tokens of context, question and expected answer, as they are in the whole text. Raises MeasuringError."""
    texts = (prompt["context"], prompt["context"] + prompt["question"])
    whole = engine.tokenize((texts[1] + prompt["expected"]).encode())
    ends = [_common(engine.tokenize(text.encode()), whole) for text in texts]
    parts = whole[: ends[0]], whole[ends[0] : ends[1]], whole[ends[1] :]
    if not all(parts):
        raise MeasuringError(f"{prompt['task']}: context, question and answer cannot be told apart in tokens")
    return parts


def score(text: str, answers: Sequence[str]) -> float:
    """The share of `answers` that occur in `text`, whatever their case."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


class _Answer:
    """One prompt on an engine; counts and times the tokens that are fed on their own."""

    def __init__(self, engine: Engine, prompt: dict[str, Any]) -> None:
        self.engine, self.prompt = engine, prompt
        self.context, self.question, self.expected = split_tokens(engine, prompt)
        self.n_steps, self.seconds, self.cell_bytes = 0, 0.0, 0.0

    def read_context(self, progress: Callable[[int, int], None]) -> dict[str, Any]:
        """Process the context; what the engine had counted after it."""
        self.engine.clear()
        for at in range(0, len(self.context), self.engine.n_batch):
            progress(at, len(self.context))
            self.engine.prefill(self.context[at : at + self.engine.n_batch])
        self._bytes_per_step = self.engine.cell_bytes()
        return self.engine.counts()

    def _step(self, token: int) -> np.ndarray:
        """Logits after one more token."""
        start = time.perf_counter()
        self.engine.decode((token,))
        self.seconds += time.perf_counter() - start
        self.n_steps += 1
        self.cell_bytes += self._bytes_per_step
        return self.engine.logits()

    def answer(self) -> dict[str, Any]:
        logits = self._ask()
        log_p, agrees = 0.0, True
        said: list[int] = []  # by the model: expected tokens, and the first other one
        for i, token in enumerate(self.expected):
            log_p += float(log_softmax(logits)[token])
            if agrees:
                said.append(int(np.argmax(logits)))
                agrees = said[-1] == token
            if i + 1 < len(self.expected):
                logits = self._step(token)
        text = self._generate(said)
        wanted = self.prompt["expected"].strip()
        return {
            "log_p": log_p / len(self.expected),
            "score": score(text, self.prompt["answers"]),
            "is_exact": text.strip().startswith(wanted),
            "text": text,
        }

    def _ask(self) -> np.ndarray:
        for token in self.question[:-1]:
            self._step(token)
        return self._step(self.question[-1])

    def _generate(self, said: list[int]) -> str:
        """The model's own text, which begins with `said`."""
        engine = self.engine
        self._return_to(len(self.context) + len(self.question) + len(said) - 1)
        while len(said) < self.prompt["n_predict"] and not engine.is_end(said[-1]):
            text = engine.text(said)
            if score(text, self.prompt["answers"]) == 1.0:
                return text
            said.append(int(np.argmax(self._step(said[-1]))))
        return engine.text(said)

    def _return_to(self, n_tokens: int) -> None:
        """Forget what was fed after position `n_tokens`; a memory that cannot forget reads all of it again."""
        if self.engine.rewind(n_tokens):
            return
        fed = (self.context + self.question + self.expected)[:n_tokens]
        self.engine.clear()
        self.engine.prefill(fed[: len(self.context)])
        for token in fed[len(self.context) :]:
            self.engine.decode((token,))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n
