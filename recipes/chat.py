"""Conversations as tokens, with a mask of what the assistant says.

Tokens are those of the tokenizer's chat template over the whole conversation. What the assistant says is told by the
template's `{% generation %}` blocks where it has them, and otherwise found from prefixes: the assistant's message
number i is what lies between the conversation before it, rendered with the prompt to answer, and the conversation up
to it; a template for which these are not prefixes of the whole is refused. Its tokens are then those between
the tokens of the text before it and of the text up to its end; a conversation with a token across such a border, of
what is kept of it, is dropped.
"""

import re
from collections.abc import Iterator
from datetime import datetime
from itertools import chain

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from tnt_hf.recipes.encoding import Encoded


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
        self.rendering = {"chat_template": STOPPED_CLOCK + self.template, "date_string": DATE.strftime("%d %b %Y")}
        self.marked = GENERATION.search(self.template) is not None

    def settings(self) -> dict:
        """What decides the tokens, beside the tokenizer."""
        return {
            "content": "conversations",
            "chat_template": self.template,
            "date": DATE.date().isoformat(),
            "assistant_only_loss": self.assistant_only,
            "truncated_to": self.row_length,
            "borders": "of what is not cut away",
            "null fields": "left out",
        }

    def encode(self, conversations: list[list[dict]]) -> list[Encoded | str]:
        """Tokens of every conversation, or the reason why it is dropped."""
        return [self._encode(messages) for messages in conversations]

    def _encode(self, messages: list[dict]) -> Encoded | str:
        if not messages:
            return "no messages"
        whole = self._render(messages)
        ids, scored = self._tokens(whole), None
        if self.assistant_only:
            scored, borders = np.zeros(len(ids), dtype=bool), []
            spans = self._marked(messages, whole) if self.marked else self._between_prefixes(messages, whole)
            for edge in chain.from_iterable(spans):
                prefix = self._tokens(whole[:edge])
                if ids[: self.row_length][: len(prefix)] != prefix[: self.row_length]:
                    return "a token across the border of an assistant message"
                borders.append(len(prefix))
                if len(prefix) >= self.row_length:
                    break  # what follows is cut away, and reading it for every message takes long
            for begin, end in zip(borders[::2], borders[1::2]):
                scored[begin:end] = True
        cut = len(ids) > self.row_length
        ids, scored = ids[: self.row_length], None if scored is None else scored[: self.row_length]
        if len(ids) < 2 or (scored is not None and not scored[1:].any()):
            return "no assistant token within sequence_length" if cut else "no assistant token"
        return Encoded(np.asarray(ids, dtype=np.int32), scored, cut)

    def _marked(self, messages: list[dict], whole: str) -> list[tuple[int, int]]:
        """The characters `(begin, end)` of the template's generation blocks."""
        # Not the mask of apply_chat_template: it marks all that follows a block whose last character belongs to the
        # first token, or to none, as blanks do that a tokenizer's normaliser drops.
        (text,), (spans,) = render_jinja_template(
            [messages], return_assistant_tokens_mask=True, **self.rendering, **self.tokenizer.special_tokens_map
        )
        if text != whole:
            raise ValueError(
                "tokenizer: its chat template renders one conversation in two ways: its marks say nothing"
            )
        return spans

    def _between_prefixes(self, messages: list[dict], whole: str) -> Iterator[tuple[int, int]]:
        """The characters `(begin, end)` that every message of the assistant adds to the conversation before it."""
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                texts = self._render(messages[:place], prompt=True), self._render(messages[: place + 1])
                if not all(whole.startswith(text) for text in texts):
                    raise ValueError(
                        "tokenizer: its chat template renders the beginning of a conversation differently from the"
                        " same messages in the whole conversation, so the assistant's tokens cannot be told exactly"
                        f" (message {place}); mark them with {{% generation %}} in the template, or set"
                        " assistant_only_loss: false"
                    )
                yield len(texts[0]), len(texts[1])

    def _render(self, messages: list[dict], prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, **self.rendering
        )

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
