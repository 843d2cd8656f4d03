"""Conversations as tokens, with a mask of what the assistant says.

Tokens are those of the tokenizer's chat template over the whole conversation. What the assistant says is told by the
template's `{% generation %}` blocks where it has them, and otherwise found from prefixes: the assistant's message
number i is what lies between the conversation before it, rendered with the prompt to answer, and the conversation up
to it; a template for which these are not prefixes of the whole is refused. Its tokens are then those between
the tokens of the text before it and of the text up to its end; a conversation with a token across such a border, of
what is kept of it, is dropped. So is one that the template refuses, or whose tools or tool calls it does not show.
"""

import re
from collections.abc import Iterator
from datetime import datetime
from itertools import chain

import numpy as np
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from tnt_hf.recipes.encoding import Encoded
from tnt_hf.recipes.messages import Conversation


# For tokenizers that the recipes train: no special token but eos. What the assistant says begins after a line break
# and with no blank, so that no token goes across its border.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize + ':\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)
DATE = datetime(2024, 7, 26)  # what templates that write the date are told, as Llama's do where there is no clock
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Stands before a template, in place of the clock that transformers gives it. Its line break belongs to its last tag.
STOPPED_CLOCK = "".join(
    [
        "{% macro strftime_now(format) %}{{ format",
        *(f"|replace('%{x}','{DATE.strftime('%' + x)}')" for x in ("-d", "-m", *"aAbBdHIjmMpSyY")),
        " }}{% endmacro %}\n",
    ]
)


class ChatEncoder:
    """
    Tokens of conversations and which of them are scored. They do not depend on the day: a template that writes the
    date is given that of `DATE`.

    A conversation is cut after `row_length` tokens, and dropped if no scored token is left.

    Args:
        tokenizer: with a chat template.
        assistant_only: score what the assistant says, or everything.
        row_length: tokens of a row.

    Raises:
        ValueError: the tokenizer has no chat template, or not one whose assistant messages can be found exactly.
    """

    def __init__(self, tokenizer, assistant_only: bool, row_length: int):
        if not tokenizer.chat_template:
            raise ValueError(
                "tokenizer: has no chat template, which conversations need: use the tokenizer of a chat model"
                " (tokenizer: <its name>) or set tokenizer.chat_template and save it"
            )
        self.tokenizer, self.assistant_only, self.row_length = tokenizer, assistant_only, row_length
        self.template = tokenizer.get_chat_template()
        self.template_with_tools = tokenizer.get_chat_template(tools=[{}])  # of several, that named tool_use

    def settings(self) -> dict:
        """What decides the tokens, beside the tokenizer."""
        return {
            "content": "conversations",
            "chat_template": self.template,
            **({"tool_use": self.template_with_tools} if self.template_with_tools != self.template else {}),
            "special_tokens": {
                name: str(token) for name, token in self.tokenizer.special_tokens_map.items() if name != "pad_token"
            },
            "date": DATE.date().isoformat(),
            "assistant_only_loss": self.assistant_only,
            "truncated_to": self.row_length,
            "borders": "of what is not cut away",
            "null fields": "left out",
            "tools": "shown",
            "chat_template_kwargs": "given",
            "weight": "0 is not scored",
        }

    def encode(self, conversations: list[Conversation]) -> list[Encoded | str]:
        """
        Tokens of every conversation, or the reason why it is dropped.

        Raises:
            ValueError: the template cannot tell what the assistant says, or which message has `weight` 0.
        """
        return [self._encode(conversation) for conversation in conversations]

    def _encode(self, conversation: Conversation) -> Encoded | str:
        template = self.template_with_tools if conversation.tools else self.template
        for name, there in (("tools", conversation.tools), ("tool_calls", _calls(conversation))):
            if there and name not in template:
                return f"{name}, which the chat template does not show"
        try:
            return self._scored(_Rendered(template, conversation, self.tokenizer.special_tokens_map))
        except _RefusedByTemplateError as error:
            return f"refused by the chat template: {error}"

    def _scored(self, rendered: "_Rendered") -> Encoded | str:
        whole = rendered.whole
        ids, scored = self._tokens(whole), None
        if self.assistant_only:
            scored, borders = np.zeros(len(ids), dtype=bool), []
            for edge in chain.from_iterable(rendered.said()):
                prefix = self._tokens(whole[:edge])
                if ids[: self.row_length][: len(prefix)] != prefix[: self.row_length]:
                    return "a token across the border of an assistant message"
                borders.append(len(prefix))
                if len(prefix) >= self.row_length:
                    break  # what follows is cut away, and reading it for every message takes long
            for begin, end in zip(borders[::2], borders[1::2]):
                scored[begin:end] = True
        elif any(_without_weight(message) for message in rendered.messages):
            raise ValueError("assistant_only_loss=False: scores all messages, but the data has some of weight 0")
        cut = len(ids) > self.row_length
        ids, scored = ids[: self.row_length], None if scored is None else scored[: self.row_length]
        if len(ids) < 2 or (scored is not None and not scored[1:].any()):
            return "no assistant token within sequence_length" if cut else "no assistant token"
        return Encoded(np.asarray(ids, dtype=np.int32), scored, cut)

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


class _RefusedByTemplateError(Exception):
    """What a template says of a conversation that it does not render."""


class _Rendered:
    """A conversation in the words of a template, `whole`."""

    def __init__(self, template: str, conversation: Conversation, special_tokens: dict):
        self.messages, self.tools, settings = conversation
        self.marked = GENERATION.search(template) is not None
        self.fields = special_tokens | {
            "chat_template": STOPPED_CLOCK + template,
            "date_string": DATE.strftime("%d %b %Y"),
            **(settings or {}),
        }
        self.whole, _ = self._render(self.messages)

    def said(self) -> Iterator[tuple[int, int]]:
        """The characters `(begin, end)` of every message of the assistant that is learned."""
        spans = self._marked() if self.marked else self._between_prefixes()
        return (span for span, message in spans if not (message and _without_weight(message)))

    def _marked(self) -> list[tuple[tuple[int, int], dict | None]]:
        """The template's generation blocks, and whose they are where they are as many as messages of the assistant."""
        # Not the mask of apply_chat_template: it marks all that follows a block whose last character belongs to the
        # first token, or to none, as blanks do that a tokenizer's normaliser drops.
        text, spans = self._render(self.messages, return_assistant_tokens_mask=True)
        if text != self.whole:
            raise ValueError(
                "tokenizer: its chat template renders one conversation in two ways: its marks say nothing"
            )
        messages: list = [message for message in self.messages if message["role"] == "assistant"]
        if len(messages) != len(spans):
            if any(map(_without_weight, messages)):
                raise ValueError(
                    f"tokenizer: its chat template marks {len(spans)} parts of {len(messages)} messages of the"
                    " assistant, so those of weight 0 cannot be told"
                )
            messages = [None] * len(spans)
        return list(zip(spans, messages))

    def _between_prefixes(self) -> Iterator[tuple[tuple[int, int], dict]]:
        """What every message of the assistant adds to the conversation before it, with the message."""
        for place, message in enumerate(self.messages):
            if message["role"] == "assistant":
                before, _ = self._render(self.messages[:place], add_generation_prompt=True)
                until, _ = self._render(self.messages[: place + 1])
                if not all(self.whole.startswith(text) for text in (before, until)):
                    raise ValueError(
                        "tokenizer: its chat template renders the beginning of a conversation differently from the"
                        " same messages in the whole conversation, so the assistant's tokens cannot be told exactly"
                        f" (message {place}); mark them with {{% generation %}} in the template, or set"
                        " assistant_only_loss: false"
                    )
                yield (len(before), len(until)), message

    def _render(self, messages: list[dict], **how) -> tuple[str, list[tuple[int, int]]]:
        # Not apply_chat_template, which has nothing to say about no messages: those before the assistant's first word.
        try:
            (text,), spans = render_jinja_template([messages], tools=self.tools, **self.fields, **how)
        except (TemplateError, TypeError) as error:  # TypeError: of what a template does with a message
            raise _RefusedByTemplateError(str(error)) from error
        return text, spans[0] if spans else []


def _calls(conversation: Conversation) -> bool:
    return any(message.get("tool_calls") for message in conversation.messages)


def _without_weight(message: dict) -> bool:
    return message["role"] == "assistant" and message.get("weight", 1) == 0
