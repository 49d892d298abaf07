"""After close(): every way to what was freed is a ClosedError, and closing again is harmless."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from kvtier import Llama, errors

from .children import run_child

# What needs arguments to come as far as the model. The rest of the class is called without any.
CALLS: dict[str, tuple[Any, ...]] = {
    "tokenize": (b"text",),
    "detokenize": ([1, 2],),
    "eval": ([1, 2],),
    "embed": ("text",),
    "create_embedding": ("text",),
    "create_completion": ("text",),
    "create_chat_completion": ([{"role": "user", "content": "text"}],),
    "create_chat_completion_openai_v1": ([{"role": "user", "content": "text"}],),
    "generate": ([1, 2],),
    "load_state": (None,),
    "set_cache": (None,),
    "set_seed": (1,),
}


def members() -> list[str]:
    """Public methods and properties, upstream's and ours; what the class itself answers is none of them."""
    names = [name for name in dir(Llama) if not name.startswith("_") and name not in ("close", "kv", "placement")]
    return [name for name in names if not isinstance(inspect.getattr_static(Llama, name), staticmethod | classmethod)]


@pytest.fixture(scope="module")
def closed(smollm2_path: Path) -> Llama:
    model = Llama(str(smollm2_path), n_ctx=256, verbose=False)
    model.eval([1, 2, 3])
    model.close()
    return model


@pytest.mark.parametrize("name", members())
def test_every_public_method(closed: Llama, name: str) -> None:
    with pytest.raises(errors.ClosedError, match=name) as caught:
        getattr(closed, name)(*CALLS.get(name, ()))
    assert "close()" in caught.value.hint


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model("text"),
        lambda model: model.__enter__(),
        lambda model: copy.copy(model),
        lambda model: copy.deepcopy(model),
        lambda model: pickle.dumps(model),
        lambda model: model._ctx.n_ctx(),
        lambda model: model._model.vocab,
        lambda model: model._batch.reset(),
        lambda model: model._create_completion("text").__next__(),
        lambda model: llama_cpp.Llama.n_vocab(model),
        lambda model: llama_cpp.Llama.tokenize(model, b"text"),
    ],
)
def test_ways_around_the_methods(closed: Llama, use: Callable[[Any], object]) -> None:
    with pytest.raises(errors.ClosedError):
        use(closed)


def test_what_python_holds_can_still_be_read(closed: Llama, smollm2_path: Path) -> None:
    assert isinstance(closed, Llama) and type(closed).__name__ == "Llama"
    assert closed.metadata["general.architecture"] == "llama" and closed.model_path == str(smollm2_path)
    assert closed.longest_token_prefix([1, 2], [1, 3]) == 1
    assert not hasattr(closed, "no_such_name")
    closed.close()
    closed.close()


def test_what_was_taken_from_an_open_model(smollm2_path: Path) -> None:
    with Llama(str(smollm2_path), n_ctx=256, verbose=False) as model:
        model.eval([1, 2, 3])
        tokenizer, kv, evaluate, n_vocab = model.tokenizer(), model.kv, model.eval, model.n_vocab
        layer = kv.layer(0).figures
        running = model.generate([1, 2, 3], temp=0.0)
        next(running)
        streamed: Any = model("The", max_tokens=8, stream=True)
        next(streamed)
    uses: list[Callable[[], object]] = [
        lambda: tokenizer.tokenize(b"text"),
        lambda: tokenizer.decode([1]),
        lambda: evaluate([4]),
        n_vocab,
        lambda: next(running),
        lambda: next(streamed),
        lambda: kv.figures,
        lambda: kv.n_layers,
        lambda: kv.last_error,
        lambda: kv.lost_mass(),
        lambda: kv.layer(0),
        lambda: kv.layers(),
        lambda: kv.pages(0),
        lambda: kv.on_offload(),
        lambda: kv.move(layer.array, [0], "host"),
        lambda: kv.reencode(layer.array, [0], "f16", "f16"),
        lambda: kv.read_page(layer, 0),
        lambda: kv.set_summary(layer, None),
        lambda: kv.summary_mass(layer),
        lambda: kv.reserve(0),
        lambda: kv.set_host_budget(1 << 30),
        lambda: kv.compact(),
        lambda: kv.evict_every_step(),
    ]
    for i, use in enumerate(uses):
        with pytest.raises(errors.ClosedError):
            use()
            raise AssertionError(f"use {i} was answered")


def test_it_is_an_error_of_the_native_tree(closed: Llama) -> None:
    """Who caught NativeError for a closed cache still does."""
    with pytest.raises(errors.NativeError, match="closed"):
        _ = closed.kv.figures
    assert closed.kv.settings.fidelity is None and closed.placement is None


def test_a_subclass_is_closed_too(smollm2_path: Path) -> None:
    class Mine(Llama):
        def words(self) -> int:
            return self.n_vocab()

    model = Mine(str(smollm2_path), n_ctx=256, verbose=False)
    assert model.words() > 0
    model.close()
    with pytest.raises(errors.ClosedError, match="words"):
        model.words()
    assert isinstance(model, Mine)


def test_dropping_a_closed_model(smollm2_path: Path) -> None:
    model = Llama(str(smollm2_path), n_ctx=256, verbose=False)
    model.close()
    del model
    gc.collect()


def test_a_process_lives_on_and_ends_well(smollm2_path: Path) -> None:
    """In a process of its own: what this is about used to end it."""
    code = """
import sys
from kvtier import Llama, errors
model = Llama(sys.argv[1], n_ctx=256, verbose=False)
model("The", max_tokens=2)
model.close()
for name, given in (("__call__", "The"), ("eval", [1]), ("n_embd", None), ("detokenize", [5]), ("save_state", None)):
    try:
        getattr(model, name)(*[given] * (given is not None))
    except errors.ClosedError:
        print("refused")
"""
    result = run_child(code, smollm2_path)
    assert (result.returncode, result.stdout.split()) == (0, ["refused"] * 5), result.stderr
