"""Tokenises a conversation with a Hugging Face chat template, and finds the tokens that the assistant wrote.

    template = ChatTemplate("models/qwen2")
    ids, counted = template.encode(conversation)    # (n,) tokens, (n,) bool
    template.vocabulary                             # the largest id + 1, of tokens that were not added later
    template.end                                    # the special token after an answer

A template with {% generation %} marks the assistant's text itself. With other templates, two texts are rendered for
each answer: one from the earlier messages and the prompt for an answer, and one from the messages up to the answer. The
second text must begin with the first, and the whole conversation with the second. The difference between the two texts
is the answer. A token with at least one character of an answer counts as written by the assistant.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any

import numpy as np

from recycle_pp.storage import local_copy

from .conversation import Conversation

_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
_NOW = re.compile(r"""strftime_now\s*\(\s*(["'])([^"']*)\1\s*\)""")
_ASSISTANT = "assistant"
TODAY = datetime(2024, 7, 26)  # for templates that print the date, so that the same data always give the same tokens


class ChatTemplate:
    """The tokenizer in a folder, with its chat template. Imports transformers, but not its torch models.

    Raises:
        ValueError: the folder has no tokenizer or no chat template, or transformers is missing; the message names the
            configuration key.
    """

    def __init__(self, place: str) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            from transformers import AutoTokenizer
            from transformers.utils import logging
        except ImportError:
            raise ValueError("data.format=chat needs transformers: pip install -e '.[hf]' in the clone of recycle_pp") \
                from None  # fmt: skip
        logging.set_verbosity_error()  # no warning for conversations longer than the tokenizer's model allows
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(local_copy.place(place)), local_files_only=True)
            template = self._tokenizer.get_chat_template()
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"data.tokenizer={place} has no chat template ({_line(error)})") from None
        if not self._tokenizer.is_fast:
            raise ValueError(f"data.tokenizer={place} has no tokenizer.json, which data.format=chat needs")
        self._marks = bool(_GENERATION.search(template))
        base = self._tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
        self.vocabulary: int = max(base.values()) + 1

    def encode(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """(n,) uint32 tokens, and (n,) bool, whether the assistant wrote the token and it has a loss.

        Raises:
            ValueError: the template rejects the messages, or the text of the first messages is not the beginning of
                the whole text; the message does not name the file and line.
        """
        if self._marks:
            found = self._render(
                conversation, None, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
                tokenizer_kwargs={"return_offsets_mapping": True},
            )  # fmt: skip
            begins, ends = np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2).T
            counted = np.asarray(found["assistant_masks"], bool)
            if conversation.prompt:
                counted &= ends > len(self._render(conversation, conversation.prompt))
        else:
            text = self._render(conversation, None)
            found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            begins, ends = np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2).T
            counted = np.zeros(len(begins), bool)
            for begin, end in self._spans(conversation, text):
                counted |= (ends > begin) & (begins < end)
        return np.asarray(found["input_ids"], np.uint32), counted

    @property
    def end(self) -> int | None:
        """The special token that ends every answer; None if the template writes none, or if that is not known."""
        try:
            ids, counted = self.encode(
                Conversation([{"role": "user", "content": "a"}, {"role": _ASSISTANT, "content": "b"}])
            )
        except ValueError:  # the template rejects these two messages
            return None
        known = self._tokenizer.added_tokens_decoder
        return next((int(of) for of in reversed(ids[counted]) if int(of) in known and known[int(of)].special), None)

    def _spans(self, conversation: Conversation, text: str) -> Iterator[tuple[int, int]]:
        """Yields (begin, end), in characters, for each text of the assistant that has a loss."""
        messages = conversation.messages
        for i in range(conversation.prompt, len(messages)):
            if messages[i]["role"] != _ASSISTANT:
                continue
            if i == 0:
                raise ValueError("the conversation begins with the assistant, so nothing predicts its text")
            before = self._render(conversation, i, add_generation_prompt=True)
            until = text if i + 1 == len(messages) else self._render(conversation, i + 1)
            if not (until.startswith(before) and text.startswith(until)):
                raise ValueError(
                    f"with this chat template the text up to message {i + 1} is not the beginning of the whole text, "
                    "so the assistant's tokens are unknown; mark them in the template with {% generation %}"
                )
            yield len(before), len(until)

    def _render(self, conversation: Conversation, count: int | None, **more: Any) -> Any:
        """The text of the first `count` messages; None: of all messages.

        more: further arguments of `apply_chat_template`, which may change the form of the result
        """
        template = _dated(self._tokenizer.get_chat_template(tools=conversation.tools))
        given = {"tokenize": False, "chat_template": template} | more
        try:
            return self._tokenizer.apply_chat_template(conversation.messages[:count], tools=conversation.tools, **given)
        except Exception as error:  # a template may raise anything: jinja2's errors, TypeError
            raise ValueError(f"the chat template rejects the conversation ({_line(error)})") from None


@lru_cache
def _dated(template: str) -> str:
    """The template with a text instead of each call of `strftime_now`. Raises ValueError if a format is computed."""
    found = _NOW.sub(lambda call: f"{call[1]}{TODAY.strftime(call[2])}{call[1]}", template)
    if re.search(r"strftime_now\s*\(", found):
        raise ValueError("the chat template prints the current time, so the same data would always give other tokens")
    return found


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
