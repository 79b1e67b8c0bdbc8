"""Reads a conversation from a line of .jsonl or a row of a table.

conversation = conversation_of({"messages": [{"role": "user", "content": "Hi"}, ...]}, column="messages")
conversation = conversation_of({"prompt": "Hi", "completion": "Hello"}, column="messages")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]  # role, content, and whatever else the chat template reads


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template.

    tools   JSON schemas of functions, or None
    prompt  number of messages at the beginning in which the assistant's tokens have no loss
    """

    messages: list[Message]
    tools: list[Any] | None = None
    prompt: int = 0


def conversation_of(record: Mapping[str, Any], column: str) -> Conversation:
    """The conversation in `column`, or else in prompt and completion, which are texts or lists of messages.

    Raises ValueError if there is no conversation; the message does not name the file and line.
    """
    tools = record.get("tools") or None
    if record.get(column) is not None:
        return Conversation(_messages(record[column], column, "user"), tools)
    if record.get("prompt") is None or record.get("completion") is None:
        raise ValueError(
            f"this record has neither {column!r} nor both 'prompt' and 'completion'; it has {', '.join(record)}. "
            "data.column names the column with the messages"
        )
    prompt = _messages(record["prompt"], "prompt", "user")
    return Conversation(prompt + _messages(record["completion"], "completion", "assistant"), tools, len(prompt))


def _messages(value: Any, column: str, role: str) -> list[Message]:
    """The messages in `value`: a list of messages or, for prompt and completion, a text.

    role: the role of the message if `value` is a text
    """
    if isinstance(value, str) and column in ("prompt", "completion"):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) and "role" in one for one in value):
        raise ValueError(f"{column!r} is not a list of messages, each with a role and its content")
    return value
