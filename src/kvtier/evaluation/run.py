"""One quality run: the reference first, then every row against it, each in its own process."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ..errors import UsageError
from ..measuring.child import Child
from ..measuring.config import Configuration, Opening, rope_for
from ..measuring.errors import MeasuringError
from ..model.fetching import sha256_of
from ..native.binding import library_path
from ..policies.parameters import files_of
from .exactmass import EVERY_STEP
from .rows import REFERENCE, RowFile, RowResult, row_key
from .widened import ModelFile

WORKER: Final = "kvtier.evaluation.worker"  # the module that runs in a measuring process
POLICY_ROOMS: Final = ("placement", "policies", "lossy")  # what a built-in policy's decisions come from

Report = Callable[[str, str, int, int], None]  # row, phase, done, total


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """What to evaluate: `n_prefix` tokens in batches, then `n_tokens` one at a time.

    With `f32_weights` the model is used with its weights widened to F32 (in a temporary file): only then is the cache
    the only thing that rounds, and rows differ by what the cache does rather than by chance.
    """

    model: Path
    text: str
    n_prefix: int = 6000
    n_tokens: int = 500
    n_threads: int = 2
    f32_weights: bool = True
    reference: Configuration = REFERENCE
    rows: tuple[Configuration, ...] = ()
    n_batch: int = 512

    @property
    def n_ctx(self) -> int:
        return self.n_prefix + self.n_tokens + 64

    def for_text(self, config: Configuration) -> Configuration:
        """The configuration for this model and as many tokens as are fed. Raises KvtierError."""
        return config.for_model(self.model, self.n_prefix + self.n_tokens, self.n_batch)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The reference row first (its divergence is 0 by definition), then the others in the order asked for."""

    reference: RowResult
    rows: tuple[RowResult, ...]
    failures: tuple[tuple[str, str], ...]  # (row, what went wrong)


class _Run:
    def __init__(self, plan: EvaluationPlan, file: RowFile, report: Report) -> None:
        self.plan, self.file, self.report = plan, file, report
        file.make_folder()
        self.tokens, n_ctx_train = tokenise(plan)
        self.rope = rope_for(plan.n_ctx, n_ctx_train)
        self.context = self._context()
        self.reference_key = row_key(plan.for_text(plan.reference), {**self.context, "build": build_of(plan.reference)})
        self.logits = file.path.with_name(f"{self.reference_key[:16]}.logits")
        self.mass = self.logits.with_suffix(".mass")
        stem = file.path.with_name(self.reference_key[:16])
        self.model = ModelFile(plan.model, plan.f32_weights, stem, self._report_widening)

    def _context(self) -> dict[str, Any]:
        plan = self.plan
        used = self.tokens[: plan.n_prefix + plan.n_tokens + 1]
        return {
            "model": sha256_of(plan.model),
            "f32_weights": plan.f32_weights,
            "n_threads": plan.n_threads,
            "tokens": hashlib.sha256(json.dumps(used).encode()).hexdigest(),
            "n_prefix": plan.n_prefix,
            "n_tokens": plan.n_tokens,
            "n_batch": plan.n_batch,
            "rope": [self.rope.freq_base, self.rope.freq_scale],
        }

    def measure(self, config: Configuration, write: bool) -> RowResult:
        plan = self.plan
        opening = Opening(
            str(self.model.path()), plan.for_text(config), plan.n_ctx, plan.n_threads, plan.n_batch, self.rope
        )
        with Child(opening, self.tokens[: plan.n_prefix + plan.n_tokens + 1], WORKER) as child:
            answer = child.ask(
                "score",
                lambda phase, done, total: self.report(config.name, phase, done, total),
                n_prefix=plan.n_prefix,
                n_tokens=plan.n_tokens,
                logits=str(self.logits),
                mass=str(self.mass),
                write=write,
            )
        return RowResult.from_answer(config.name, answer)

    def _report_widening(self) -> None:
        self.report(self.plan.model.name, "widening weights", 0, 0)

    def reference(self, needed: bool) -> RowResult:
        """The reference row; its logits are on disk afterwards if `needed`."""
        found = self.file.find(self.reference_key)
        if found is not None and (self.logits.exists() or not needed):
            return found
        try:
            row = self.measure(_for_reference(self.plan.reference), write=True)
        except BaseException:
            self.forget()  # an unfinished table must not be compared with
            raise
        self.file.add(self.reference_key, row)
        return row

    def forget(self) -> None:
        """Remove what the reference left for the rows."""
        self.logits.unlink(missing_ok=True)
        self.mass.unlink(missing_ok=True)

    def key(self, config: Configuration) -> str:
        build = build_of(config)
        return row_key(self.plan.for_text(config), {**self.context, "build": build, "reference": self.reference_key})


def _for_reference(config: Configuration) -> Configuration:
    """The same results, and attention mass that is the last step's."""
    if config.engine != "kvtier" or "mass-decay=" in config.settings:
        return config
    return replace(config, settings=config.settings + EVERY_STEP)


def tokenise(plan: EvaluationPlan) -> tuple[list[int], int]:
    """Token ids of the plan's text and the context that the model was trained for.

    Raises UsageError for a text too short.
    """
    opening = Opening(str(plan.model), Configuration("tokeniser"), 256, 1)
    with Child(opening) as child:
        tokens: list[int] = child.ask("tokenize", text=plan.text)["tokens"]
        needed = plan.n_prefix + plan.n_tokens + 1
        if len(tokens) < needed:
            raise UsageError(
                f"the text has {len(tokens):,} tokens; {needed:,} are needed",
                "Give a longer text (-f FILE), or ask for less with --prefix and --tokens.",
            )
        return tokens, int(child.info["n_ctx_train"])


def build_of(config: Configuration) -> str:
    """What a row was measured with: llama-cpp-python's version and code, the plug-in's hash and a policy's."""
    import llama_cpp

    parts = [str(llama_cpp.__version__), _stock_hash()]
    if config.engine != "stock":
        parts.append(sha256_of(library_path()))
    if config.policy:
        parts.append(_policies_hash(config.policy))
    return " ".join(parts)


@functools.cache
def _stock_hash() -> str:
    """Of ggml's CPU backend as it was compiled: another build gives other times, and other last bits."""
    import llama_cpp

    folder = Path(os.environ.get("LLAMA_CPP_LIB_PATH") or Path(llama_cpp.__file__).parent / "lib")
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*ggml-cpu*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _policies_hash(policy: str) -> str:
    """Of everything that a built-in policy's decisions come from, files that its parameters name included."""
    root = Path(__file__).parents[1]
    own = [path for room in POLICY_ROOMS for path in sorted((root / room).iterdir())]
    digest = hashlib.sha256()
    for path in (*own, *files_of(policy)):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def evaluate(plan: EvaluationPlan, file: RowFile, report: Report, keep_logits: bool = False) -> Evaluation:
    """Measure what is not in `file` yet. A row that fails is reported and does not stop the others.

    Raises MeasuringError when the reference itself cannot be measured.
    """
    run = _Run(plan, file, report)
    with run.model:
        return _evaluate(run, keep_logits)


def _evaluate(run: _Run, keep_logits: bool) -> Evaluation:
    file, plan = run.file, run.plan
    keys = {config.name: run.key(config) for config in plan.rows}
    found = {name: file.find(key) for name, key in keys.items()}
    reference = run.reference(needed=any(row is None for row in found.values()))
    failures: list[tuple[str, str]] = []
    for config in plan.rows:
        if found[config.name] is not None:
            continue
        try:
            row = run.measure(config, write=False)
        except MeasuringError as error:
            failures.append((config.name, error.about(config.name)))
            continue
        file.add(keys[config.name], row)
        found[config.name] = row
    if not failures and not keep_logits:
        run.forget()
    rows = tuple(replace(row, name=name) for name, row in found.items() if row is not None)
    return Evaluation(replace(reference, name=plan.reference.name), rows, tuple(failures))
