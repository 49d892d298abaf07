"""One run of tasks: prompts first, then every configuration, each in its own process."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...measuring.child import Child
from ...measuring.config import Configuration, Opening, rope_for
from ...measuring.errors import MeasuringError, WorkerError
from ...model.fetching import sha256_of
from ..rows import RowFile, row_key
from ..run import WORKER, Report, build_of
from ..widened import ModelFile
from . import Prompt, make_prompts
from .results import PromptAnswer, TaskRow


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """Which tasks, how long (`n_tokens`, prompt and answer together), how many prompts of each, for which
    configurations."""

    model: Path
    text: str
    tasks: tuple[str, ...]
    n_tokens: int
    n_samples: int
    seed: int
    n_threads: int
    f32_weights: bool
    reference: Configuration
    rows: tuple[Configuration, ...]
    n_batch: int = 512


@dataclass(frozen=True, slots=True)
class TaskEvaluation:
    """Rows by configuration and task, the reference's first."""

    reference: tuple[TaskRow, ...]
    rows: tuple[tuple[TaskRow, ...], ...]
    failures: tuple[tuple[str, str], ...]


def evaluate_tasks(plan: TaskPlan, file: RowFile, report: Report) -> TaskEvaluation:
    """Measure what is not in `file` yet. A row that fails is reported and does not stop the others.

    Raises UsageError for a task or text that has no such length, and MeasuringError when the reference cannot be
    measured.
    """
    file.make_folder()
    prompts, n_ctx_train = _prompts(plan, report)
    run = _Run(plan, file, report, prompts, n_ctx_train)
    failures: list[tuple[str, str]] = []
    done: list[tuple[TaskRow, ...]] = []
    with run.model:
        reference = run.rows_of(plan.reference)
        for config in plan.rows:
            try:
                done.append(run.rows_of(config))
            except MeasuringError as error:
                failures.append((config.name, error.about(config.name)))
    return TaskEvaluation(reference, tuple(done), tuple(failures))


def _prompts(plan: TaskPlan, report: Report) -> tuple[dict[str, list[Prompt]], int]:
    """The prompts of every task, and the context that the model was trained for."""
    with Child(Opening(str(plan.model), Configuration("tokeniser"), 256, 1)) as child:

        def count(text: str) -> int:
            return int(child.ask("count_tokens", text=text)["n_tokens"])

        prompts = {}
        for name in plan.tasks:
            report("writing prompts", name, 0, plan.n_tokens)
            prompts[name] = make_prompts(name, plan.n_samples, plan.n_tokens, plan.seed, plan.text, count)
        return prompts, int(child.info["n_ctx_train"])


class _Run:
    def __init__(
        self, plan: TaskPlan, file: RowFile, report: Report, prompts: dict[str, list[Prompt]], n_ctx_train: int
    ) -> None:
        self.plan, self.file, self.report, self.prompts = plan, file, report, prompts
        self.rope = rope_for(plan.n_tokens, n_ctx_train)
        model = sha256_of(plan.model)
        self.context = {
            "model": model,
            "f32_weights": plan.f32_weights,
            "n_threads": plan.n_threads,
            "n_tokens": plan.n_tokens,
            "n_batch": plan.n_batch,
            "rope": [self.rope.freq_base, self.rope.freq_scale],
        }
        stem = file.path.with_name(f"tasks-{model[:16]}")
        self.model = ModelFile(
            plan.model, plan.f32_weights, stem, lambda: report(plan.model.name, "widening weights", 0, 0)
        )

    def key(self, config: Configuration, prompt: Prompt) -> str:
        text = hashlib.sha256(json.dumps(prompt.to_dict()).encode()).hexdigest()
        return row_key(config, {**self.context, "build": build_of(config), "prompt": text})

    def rows_of(self, config: Configuration) -> tuple[TaskRow, ...]:
        """The rows of one configuration, task by task; answers that were missing are in the file afterwards."""
        config = config.for_model(self.plan.model, self.plan.n_tokens, self.plan.n_batch)
        wanted = [(prompt, self.key(config, prompt)) for task in self.plan.tasks for prompt in self.prompts[task]]
        found = self.file.find_all([key for _, key in wanted], PromptAnswer.from_dict)
        missing = [(prompt, key) for prompt, key in wanted if key not in found]
        if missing:
            opening = Opening(
                str(self.model.path()), config, self.plan.n_tokens, self.plan.n_threads, self.plan.n_batch, self.rope
            )
            with Child(opening, worker=WORKER) as child:
                for i, (prompt, key) in enumerate(missing):
                    found[key] = self._measure(child, config.name, prompt, i, len(missing))
                    self.file.add(key, found[key])
        return tuple(
            TaskRow(config.name, task, tuple(found[key] for prompt, key in wanted if prompt.task == task))
            for task in self.plan.tasks
        )

    def _measure(self, child: Child, name: str, prompt: Prompt, i: int, n: int) -> PromptAnswer:
        def progress(_phase: str, done: int, total: int) -> None:
            self.report(f"{name}: prompt {i + 1} of {n}", prompt.task, done, total)

        data = child.ask("answer", progress, prompt=prompt.to_dict())
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            return PromptAnswer.from_dict(data)
        raise WorkerError(f"{name}: {prompt.task}: the measuring process answered nonsense")
