"""Conversations of a dataset, checked, as chat templates take them.

A message is `{"role", "content"}`, with whatever else the template reads. One that calls tools may have no content,
and the calls' arguments are objects, also where the dataset writes them as JSON. `"weight": 0`, of OpenAI's format,
says that a message of the assistant is not to be learned.
"""

import json
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase


# Arguments of a template that say what is rendered, and how it is used.
OF_THE_RENDERER = {
    "messages", "conversation", "conversations", "tools", "chat_template", "add_generation_prompt",
    "continue_final_message", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
    "tokenizer_kwargs", "padding", "truncation", "max_length", *PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES,
}  # fmt: skip


class Conversation(NamedTuple):
    """Messages, the JSON schemas of the tools that the assistant was shown, and what the template is given beside."""

    messages: list[dict]
    tools: list[dict] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def checked_messages(value, where: str) -> list[dict]:
    """
    `value`, without null fields, if it is a list of messages.

    Raises:
        ValueError: it is none, or a message has no role, no text or a weight that is neither 0 nor 1; names `where`.
    """
    if not isinstance(value, list):
        raise ValueError(f"{where} must hold a list of messages, got {type(value).__name__}")
    return [_checked(message, f"{where}, message {number}") for number, message in enumerate(value)]


def _checked(message, where: str) -> dict:
    fields = without_nulls(message) if isinstance(message, dict) else {}
    calls = fields.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where}: 'tool_calls' must be a list of objects, got {calls!r:.200}")
    if calls:
        fields |= {"tool_calls": [_called(call, where) for call in calls]}
    content = fields.get("content", "" if calls else None)
    if not isinstance(fields.get("role"), str) or not isinstance(content, str):
        raise ValueError(f"{where}: must have the texts 'role' and 'content', got {message!r:.200}")
    if fields.get("weight", 1) not in (0, 1):
        raise ValueError(f"{where}: 'weight' must be 0 or 1, got {fields['weight']!r}")
    return fields


def _called(call: dict, where: str) -> dict:
    """`call` with the arguments as an object: as JSON, templates would write them between quotes."""
    if "function" in call:
        return call | {"function": _called(call["function"], where)} if isinstance(call["function"], dict) else call
    if (given := call.get("arguments")) is None:
        return call
    arguments = given
    if isinstance(given, str):
        arguments = _from_json(given, f"{where}: the arguments of a tool call") if given.strip() else {}
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: the arguments of a tool call must be an object, got {given!r:.200}")
    return call | {"arguments": arguments}


def checked_tools(value, where: str) -> list[dict] | None:
    """
    The tools of a conversation: a list of JSON schemas, or the JSON of one; `None` for an empty one.

    Raises:
        ValueError: it is neither; names `where`.
    """
    tools = _said(value, where)
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"{where} must hold a list of objects (JSON schemas), got {value!r:.200}")
    return tools or None


def checked_template_kwargs(value, where: str) -> dict[str, Any] | None:
    """
    What a conversation sets in its template, as `enable_thinking`: an object, or its JSON; `None` for an empty one.

    Raises:
        ValueError: it is neither, or sets what is not the conversation's to set; names `where`.
    """
    settings = _said(value, where)
    if settings and not isinstance(settings, dict):
        raise ValueError(f"{where} must hold an object, got {value!r:.200}")
    if taken := sorted(OF_THE_RENDERER & set(settings or ())):
        raise ValueError(f"{where} must not set {', '.join(map(repr, taken))}")
    return settings or None


def _said(value, where: str) -> Any:
    """What a column holds, itself without nulls or as JSON; `None` for an empty text."""
    if isinstance(value, str):
        return _from_json(value, where) if value.strip() else None
    return without_nulls(value)


def _from_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} must be JSON, got {text!r:.200}: {error}") from error


def without_nulls(value):
    """`value` without the fields, at any depth, that are null.

    Parquet gives every message, and all that is in it, the fields that any has: a template would print them.
    """
    if isinstance(value, list):
        return [without_nulls(x) for x in value]
    return {name: without_nulls(x) for name, x in value.items() if x is not None} if isinstance(value, dict) else value
