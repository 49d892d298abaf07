"""Calls that llama.cpp ends the process over, or leaves half done: a typed error, and the model works on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from kvtier import Llama, errors


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[Llama]:
    with Llama(str(smollm2_path), n_ctx=256, n_threads=1, verbose=False) as model:
        model.eval([1, 2, 3])
        yield model


@pytest.mark.parametrize("text", ["root ::= (", "root ::= missing", 'other ::= "a"'])
def test_grammars_that_do_not_parse(llm: Llama, text: str) -> None:
    """In stock each is a null pointer among the samplers, and a SIGSEGV."""
    with pytest.raises(errors.UsageError, match="grammar cannot be used") as caught:
        llm("One", max_tokens=2, grammar=llama_cpp.LlamaGrammar.from_string(text, verbose=False))
    assert "'root'" in caught.value.hint
    assert llm("One", max_tokens=1, temperature=0.0)


def test_what_is_no_grammar(llm: Llama) -> None:
    with pytest.raises(errors.UsageError, match="grammar is 42"):
        llm("One", max_tokens=2, grammar=42)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, -7, 49152, 10**9])
def test_tokens_that_no_vocabulary_has(llm: Llama, token: int) -> None:
    for ask in (llm.detokenize, llm.tokenizer().detokenize, llm.tokenizer().decode):
        with pytest.raises(errors.UsageError, match=f"token {token} is none"):
            ask([1, token])
    with pytest.raises(errors.LlamaError):
        llm.eval([token])


@pytest.mark.parametrize("idx", [-1, 0, 10**6, 1 << 40, -(1 << 40)])
def test_positions_without_logits(llm: Llama, idx: int) -> None:
    llm.reset()
    llm.eval([1, 2, 3, 4])
    with pytest.raises(errors.UsageError, match="no logits"):
        llm.sample(idx=idx)
    assert llm.sample(idx=3, temp=0.0) == llm.sample(temp=0.0)


def test_nothing_evaluated(llm: Llama) -> None:
    llm.reset()
    with pytest.raises(errors.UsageError, match="no logits"):
        llm.sample()


def test_states_that_cannot_be(llm: Llama) -> None:
    llm.reset()
    llm.eval([1, 2, 3])
    whole = llm.save_state()
    given: dict[str, Any] = vars(whole)

    def state(**other: Any) -> llama_cpp.LlamaState:
        return llama_cpp.LlamaState(**{**given, **other})

    n_bytes = len(whole.llama_state)
    half = whole.llama_state[: n_bytes // 2]
    for wrong, error, reason in (
        (42, errors.UsageError, "is int"),
        (state(n_tokens=1000), errors.UsageError, "of 1,000 tokens"),
        (state(llama_state=half), errors.UsageError, "cut short"),
        (state(scores=np.zeros((3, 7), np.single)), errors.UsageError, "another vocabulary"),
        (state(llama_state=half, llama_state_size=len(half)), errors.LlamaError, "the context is empty now"),
        (state(llama_state=bytes(n_bytes)), errors.LlamaError, "the context is empty now"),
        (state(llama_state=np.random.default_rng(1).bytes(n_bytes)), errors.LlamaError, "the context is empty now"),
    ):
        with pytest.raises(error, match=reason) as caught:
            llm.load_state(wrong)  # type: ignore[arg-type]
        assert caught.value.hint
        assert llm.n_tokens == (0 if error is errors.LlamaError else 3)
        llm.reset()
        llm.eval([1, 2, 3])
    expected = llm.sample(temp=0.0)
    llm.reset()
    llm.load_state(whole)
    assert llm.n_tokens == 3
    llm.n_tokens = 2
    llm.eval([3])
    assert llm.sample(temp=0.0) == expected


def test_a_draft_model_with_a_prompt_longer_than_a_batch(smollm2_path: Path) -> None:
    """llama_cpp.Llama makes room for the logits of one batch only, and fails."""
    prompt = "one two three four " * 12
    texts = []
    for draft in (None, LlamaPromptLookupDecoding()):
        with Llama(str(smollm2_path), n_ctx=256, n_batch=16, n_threads=1, verbose=False, draft_model=draft) as model:
            texts.append(model(prompt, max_tokens=8, temperature=0.0)["choices"][0]["text"])  # type: ignore[index]
    assert texts[0] and texts[1]
