"""From texts to weights: what `kvtier scorer` does.

Records traces, trains or refines, and measures on text held out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ..errors import CancelledError, TraceError, UsageError
from ..policies.scorer import Scorer
from ..trace import Trace, read_trace
from .quality import Quality, quality
from .samples import LEAST_STEPS, Floats, pooled, require_length
from .train import Training, train

PREFIXES: Final = (1024, 3072, 6144)
N_TOKENS: Final = 768

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Text:
    """A text and what to call it."""

    name: str
    content: str


LEARNT_SHARE: Final = 0.7


def split(text: Text) -> tuple[Text, Text]:
    """The first part of a text, to learn from, and the rest, to judge by."""
    cut = int(len(text.content) * LEARNT_SHARE)
    return Text(text.name, text.content[:cut]), Text(f"{text.name}, the rest", text.content[cut:])


@dataclass(frozen=True, slots=True)
class Segments:
    """What of a text is recorded: one trace per prefix, from places spread evenly over it."""

    prefixes: tuple[int, ...] = PREFIXES
    n_tokens: int = N_TOKENS
    n_threads: int = 2

    def __post_init__(self) -> None:
        require_length(self.n_tokens, f"{self.n_tokens} tokens are too few to learn from")
        if not self.prefixes or min(self.prefixes) < 1:
            raise UsageError("a prefix has no tokens", "Give prefixes of at least 1 token.")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A scorer, how it ranks the held-out traces, and, when it was refined, how the one before did."""

    scorer: Scorer
    n_examples: int
    quality: list[Quality]
    before: list[Quality] | None = None


def record_all(
    models: Sequence[Path],
    texts: Sequence[Text],
    how: Segments,
    folder: Path,
    progress: Progress,
    stop: Callable[[], bool],
) -> list[Trace]:
    """One trace per model, text and prefix, in `folder`; those that are there already and whole are not recorded again.

    Raises UsageError for a text that is too short, before anything of it is recorded; CancelledError when stopped.
    """
    traces = []
    for model in models:
        wanted = [(text, prefix, _file(folder, model, text, how, prefix)) for text in texts for prefix in how.prefixes]
        if any(_read(path) is None for _, _, path in wanted):
            _record_model(model, texts, how, folder, progress, stop)
        for _, _, path in wanted:
            trace = _read(path)
            if trace is None:
                raise CancelledError("stopped while recording")
            traces.append(trace)
    return traces


def _record_model(
    model: Path, texts: Sequence[Text], how: Segments, folder: Path, progress: Progress, stop: Callable[[], bool]
) -> None:
    from ..engine.recording import Recorder

    recorder = Recorder(model, max(how.prefixes) + how.n_tokens + 64, how.n_threads)
    try:
        for text in texts:
            tokens = recorder.tokenize(text.content)
            needed = max(how.prefixes) + how.n_tokens
            if len(tokens) < needed:
                raise UsageError(
                    f"the text {text.name} has {len(tokens):,} tokens; {needed:,} are needed",
                    "Give a longer text, or take shorter prefixes with --prefix.",
                )
            for i, prefix in enumerate(how.prefixes):
                path = _file(folder, model, text, how, prefix)
                if _read(path) is not None:
                    continue
                room = len(tokens) - prefix - how.n_tokens
                first = room * i // len(how.prefixes)
                part = tokens[first : first + prefix + how.n_tokens]
                say = _labelled(progress, f"{model.stem}, {text.name}, {prefix:,} tokens")
                # under another name until it is whole: a trace that was stopped must not be taken for one that is
                # finished
                rough = path.with_suffix(".part")
                recorder.record(rough, part, prefix, text.name, say, stop)
                if stop():
                    rough.unlink(missing_ok=True)
                    raise CancelledError("stopped while recording")
                rough.replace(path)
    finally:
        recorder.close()


def _labelled(progress: Progress, label: str) -> Progress:
    return lambda phase, done, total: progress(f"{label}: {phase}", done, total)


def _file(folder: Path, model: Path, text: Text, how: Segments, prefix: int) -> Path:
    key = repr((model.name, text.content, how.prefixes, how.n_tokens, prefix))
    return folder / f"{model.stem}-{prefix}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.trace"


def _read(path: Path) -> Trace | None:
    try:
        return read_trace(path) if path.exists() else None
    except TraceError:
        return None


def train_on(traces: Sequence[Trace], held_out: Sequence[Trace], how: Training, progress: Progress) -> Outcome:
    """New weights from traces, judged by others. Raises UsageError if the traces are too short to learn from."""
    x, future, weights = _examples(traces)
    scorer = train(
        x, future, weights, how, progress=lambda step, of, loss: progress(f"training, loss {loss:.3f}", step, of)
    )
    about = f"trained on {_names(traces)}: {x.shape[1]:,} examples, {how.steps:,} steps, seed {how.seed}"
    scorer = replace(scorer, about=about)
    return Outcome(scorer, x.shape[1], quality(held_out, scorer))


def tune_on(
    scorer: Scorer, traces: Sequence[Trace], held_out: Sequence[Trace], how: Training, progress: Progress
) -> Outcome:
    """Refine weights on traces, judged by others."""
    x, future, weights = _examples(traces)
    refined = train(
        x, future, weights, how, scorer, lambda step, of, loss: progress(f"refining, loss {loss:.3f}", step, of)
    )
    refined = replace(refined, about=f"{scorer.about}; refined on {_names(traces)}: {how.steps:,} steps")
    return Outcome(refined, x.shape[1], quality(held_out, refined), quality(held_out, scorer))


def _examples(traces: Sequence[Trace]) -> tuple[Floats, Floats, Floats]:
    usable = [trace for trace in traces if trace.n_steps >= LEAST_STEPS]
    if not usable:
        raise UsageError(f"no trace has the {LEAST_STEPS:,} steps that are needed to learn from", "Record longer ones.")
    return pooled(usable)


def _names(traces: Sequence[Trace]) -> str:
    pairs = dict.fromkeys((trace.header.text, trace.header.model) for trace in traces)
    return ", ".join(f"{text} ({model})" for text, model in pairs)
