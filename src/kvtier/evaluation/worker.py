"""The measuring process of an evaluation: what it can do, and to score a text or answer a prompt.

python -m kvtier.evaluation.worker
"""

from __future__ import annotations

from ..measuring.worker import COMMANDS, Answer, Worker, serve
from .scoring import score
from .tasks.answering import answer


class EvaluationWorker(Worker):
    """A measuring process that also compares with a reference, and answers the prompts of tasks."""

    def score(self, n_prefix: int, n_tokens: int, logits: str, mass: str, write: bool) -> Answer:
        return score(self.engine, self._tokens, n_prefix, n_tokens, logits, mass, write, self.progress)

    def answer(self, prompt: Answer) -> Answer:
        return answer(self.engine, prompt, lambda done, total: self.progress("context", done, total))


if __name__ == "__main__":
    serve(EvaluationWorker, COMMANDS | {"score", "answer"})
