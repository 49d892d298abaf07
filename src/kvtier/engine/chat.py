"""A conversation: messages into tokens, with the chat template that the model brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jinja2
import llama_cpp
from llama_cpp import llama_chat_format

from ..errors import ChatTemplateError, KvtierError

TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatTemplate:
    """The model's own template, or ChatML where it has none (`is_own` tells)."""

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self._llm = llm
        template = llm.metadata.get(TEMPLATE_KEY)
        self.is_own = template is not None
        self._format: Any = llama_chat_format.format_chatml
        if template is not None:
            self._format = llama_chat_format.Jinja2ChatFormatter(
                template, eos_token=_token_text(llm, llm.token_eos()), bos_token=_token_text(llm, llm.token_bos())
            )

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of the conversation, up to where the answer starts.

        Raises KvtierError if the template refuses, ChatTemplateError if it is faulty.
        """
        try:
            formatted = self._format(messages=[{"role": m.role, "content": m.content} for m in messages])
        except ValueError as err:  # raise_exception() of the template
            raise KvtierError(
                f"the model's chat template refuses this conversation: {err}",
                "Give the prompt without --chat, as plain text.",
            ) from err
        except (jinja2.TemplateError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as err:
            raise ChatTemplateError(
                f"the model's chat template ({TEMPLATE_KEY}) fails: {type(err).__name__}: {err}",
                "Give the prompt without --chat, as plain text.",
            ) from err
        return self._llm.tokenize(formatted.prompt.encode(), add_bos=not formatted.added_special, special=True)


def _token_text(llm: llama_cpp.Llama, token: int) -> str:
    return llm._model.token_get_text(token) if token != -1 else ""
