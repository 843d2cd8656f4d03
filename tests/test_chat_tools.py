"""Conversations with tools, with messages that are not to be learned, and those that a template refuses."""

import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_chat_data import CHATML, LONG, SHORT, UNMARKED, build, bytes_tokenizer, says, scored_texts
from test_data_sources import jsonl, write

from tnt_hf.recipes.arguments import DataArguments
from tnt_hf.recipes.chat import PLAIN_TEMPLATE, ChatEncoder
from tnt_hf.recipes.messages import Conversation, checked_messages
from tnt_hf.recipes.training_data import training_texts


# Like Qwen's: the schemas first, and a call as JSON.
UNMARKED_TOOLS = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %};{% endif %}"
    "{% for m in messages %}{{ m.role + ':' }}{% if m.content is string %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
MARKED_TOOLS = UNMARKED_TOOLS.replace(
    "{% for m in messages %}{{ m.role + ':' }}",
    "{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
    "{{ eos_token }}{% endgeneration %}{% continue %}{% endif %}",
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
ASKED = [
    says("user", "Rain?"),
    {"role": "assistant", "tool_calls": [CALL]},
    says("tool", "yes"),
    says("assistant", "It rains."),
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


# --- tools ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [UNMARKED_TOOLS, MARKED_TOOLS])
def test_tools_are_shown_and_calls_are_scored(template, tmp_path):
    """As `apply_chat_template(messages, tools=...)` shows them when the model answers."""
    tokenizer = bytes_tokenizer(template)
    path = write(tmp_path / "a.jsonl", jsonl([{"messages": ASKED, "tools": [WEATHER]}, {"messages": SHORT}]))
    with_tools, without = build(tokenizer, path, sequence_length=300, packing=False).train
    whole = tokenizer.apply_chat_template(ASKED, tools=[WEATHER], tokenize=False)
    assert whole.startswith(json.dumps(WEATHER))
    assert with_tools["input_ids"].tolist() == tokenizer(whole)["input_ids"]
    said = scored_texts(tokenizer, with_tools["input_ids"], with_tools["labels"] != -100)
    assert said == ['<weather {"city": "Paris"}><|endoftext|>', "It rains.<|endoftext|>"]
    assert tokenizer.decode(without["input_ids"]).startswith("user:Hi")


def test_tools_and_arguments_may_be_json_and_parquet_may_fill_them_up(tmp_path):
    """All ways to write the same conversation down give the same tokens."""
    tokenizer = bytes_tokenizer(UNMARKED_TOOLS)
    as_json = {"type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": "Paris"})}}
    openai = [ASKED[0], {"role": "assistant", "content": None, "tool_calls": [as_json]}, *ASKED[2:]]
    rows = [{"messages": ASKED, "tools": [WEATHER]}, {"messages": openai, "tools": json.dumps([WEATHER])}]
    files = [write(tmp_path / f"{n}.jsonl", jsonl([row])) for n, row in enumerate(rows)]
    other = {"type": "function", "function": {"name": "x", "parameters": {"place": {"type": "string"}}}}
    table = {"messages": [ASKED, SHORT], "tools": [[WEATHER], [other]]}  # fields of one are null in the other
    pq.write_table(pa.table(table), tmp_path / "2.parquet")
    files.append(tmp_path / "2.parquet")
    first, *others = (build(tokenizer, path, sequence_length=300, packing=False).train[0] for path in files)
    assert all(np.array_equal(row[name], first[name]) for row in others for name in ("input_ids", "labels"))
    assert list(training_texts(DataArguments(str(files[1])))) == ["Rain?\nyes\nIt rains."]


THINKING = (
    "{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'assistant' and not enable_thinking %}<-></->{% endif %}"
    "{{ m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if not enable_thinking %}<-></->{% endif %}{% endif %}"
)


def test_settings_of_the_template_are_given_to_it(tmp_path):
    """As `apply_chat_template(messages, enable_thinking=...)` writes them, in the prompt to answer, too."""
    tokenizer, talk = bytes_tokenizer(THINKING), [says("user", "Rain?"), says("assistant", "It rains.")]
    given = [{"enable_thinking": True}, '{"enable_thinking": true}', {"enable_thinking": False}, None, "", {}]
    rows = [*({"messages": talk, "chat_template_kwargs": x} for x in given), {"messages": talk}]
    paths = [write(tmp_path / f"{n}.jsonl", jsonl([row])) for n, row in enumerate(rows)]
    found = [build(tokenizer, path, sequence_length=300, packing=False).train[0] for path in paths]
    for row, thinking in zip(found, [True, True, *[False] * 5], strict=True):
        whole = tokenizer.apply_chat_template(talk, enable_thinking=thinking, tokenize=False)
        assert row["input_ids"].tolist() == tokenizer(whole)["input_ids"]
        assert scored_texts(tokenizer, row["input_ids"], row["labels"] != -100) == ["It rains.<|endoftext|>"]


@pytest.mark.parametrize(
    "value, reason",
    [
        ("[1]", "must hold an object"),
        ("{", "must be JSON"),
        ({"tools": []}, "must not set 'tools'"),
        ({"eos_token": ""}, "must not set 'eos_token'"),
    ],
)
def test_settings_that_are_none_are_refused_with_their_place(value, reason, tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl([{"messages": SHORT, "chat_template_kwargs": value}]))
    with pytest.raises(ValueError, match=f"a.jsonl.*: column 'chat_template_kwargs' {reason}"):
        build(bytes_tokenizer(CHATML), path)


@pytest.mark.parametrize("empty", [None, [], ""])
def test_no_tools_are_as_if_the_column_were_not_there(empty, tmp_path):
    tokenizer = bytes_tokenizer(UNMARKED_TOOLS)
    path = write(tmp_path / "a.jsonl", jsonl([{"messages": SHORT, "tools": empty}]))
    row = build(tokenizer, path, packing=False).train[0]
    assert row["input_ids"].tolist() == tokenizer(tokenizer.apply_chat_template(SHORT, tokenize=False))["input_ids"]


def test_a_call_without_arguments_has_an_empty_object():
    call = {"function": {"name": "now", "arguments": ""}}
    tokenizer = bytes_tokenizer(UNMARKED_TOOLS)
    messages = checked_messages([says("user", "?"), {"role": "assistant", "tool_calls": [call]}], "here")
    (encoded,) = ChatEncoder(tokenizer, True, 500).encode([Conversation(messages)])
    assert scored_texts(tokenizer, encoded.ids, encoded.scored) == ["<now {}><|endoftext|>"]


def test_of_several_templates_that_for_tools_is_taken_where_there_are_some():
    tokenizer = bytes_tokenizer(None)
    tokenizer.chat_template = {"default": CHATML, "tool_use": UNMARKED_TOOLS}
    encoder = ChatEncoder(tokenizer, False, 500)
    with_tools, without = encoder.encode([Conversation(SHORT, [WEATHER]), Conversation(SHORT)])
    assert tokenizer.decode(with_tools.ids).startswith('{"type"')
    assert tokenizer.decode(without.ids).startswith("<|im_start|>user")
    assert encoder.settings()["tool_use"] == UNMARKED_TOOLS


def test_what_a_template_does_not_show_is_not_learned_without_it():
    """A model would learn to call tools that it was not shown, or to be silent where it called one."""
    encoder = ChatEncoder(bytes_tokenizer(PLAIN_TEMPLATE), True, 500)
    found = encoder.encode([Conversation(SHORT, [WEATHER]), Conversation(ASKED), Conversation(SHORT)])
    assert found[:2] == [f"{x}, which the chat template does not show" for x in ("tools", "tool_calls")]
    assert len(found[2].ids)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"tools": "weather"}, r"line 1: column 'tools' must be JSON, got 'weather'"),
        ({"tools": "{}x"}, r"column 'tools' must be JSON"),
        ({"tools": ["weather"]}, r"column 'tools' must hold a list of objects \(JSON schemas\), got \['weather'\]"),
        ({"tools": WEATHER}, r"column 'tools' must hold a list of objects"),
        ({"tools": ["\udc80"]}, r"column 'tools' must hold a list of objects"),
        ({"tools": [{"name": "\udc80"}]}, r"column 'tools' holds half of a surrogate pair"),
        ({"messages": [says("assistant", "x") | {"tool_calls": "f()"}]}, r"message 0: 'tool_calls' must be a list"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, r"message 0: must have the texts 'role' and 'conte"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"arguments": "{x"}]}]}, r"a tool call must be JSON, got"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"arguments": "1"}]}]}, r"tool call must be an object"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"arguments": 1}]}]},
            r"tool call must be an object, got 1",
        ),
        ({"messages": [says("assistant", "x") | {"weight": 2}]}, r"message 0: 'weight' must be 0 or 1, got 2"),
        ({"messages": [says("assistant", "x") | {"weight": "0"}]}, r"'weight' must be 0 or 1, got '0'"),
    ],
)
def test_malformed_tools_and_weights_name_the_place(row, message, tmp_path):
    path = write(tmp_path / "a.jsonl", json.dumps({"messages": SHORT} | row))
    with pytest.raises(ValueError, match=message):
        build(bytes_tokenizer(UNMARKED_TOOLS), path)


# --- messages that are not to be learned -----------------------------------------------------------------------------


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, UNMARKED])
def test_messages_of_weight_0_are_read_and_not_scored(template):
    tokenizer = bytes_tokenizer(template)
    encoder = ChatEncoder(tokenizer, True, 500)
    weighed = [says(**message) for message in LONG]
    weighed[2]["weight"], weighed[4]["weight"] = 0, 1
    (encoded,), (all_of_it,) = encoder.encode([Conversation(weighed)]), encoder.encode([Conversation(LONG)])
    assert encoded.ids.tolist() == all_of_it.ids.tolist()
    assert scored_texts(tokenizer, encoded.ids, encoded.scored) == ["three, übrigens<|endoftext|>"]
    weighed[4]["weight"] = 0.0
    assert encoder.encode([Conversation(weighed)]) == ["no assistant token"]


def test_a_weight_that_would_not_count_is_refused():
    weighed = [Conversation([SHORT[0], SHORT[1] | {"weight": 0}])]
    with pytest.raises(ValueError, match="assistant_only_loss=False: scores all messages"):
        ChatEncoder(bytes_tokenizer(PLAIN_TEMPLATE), False, 500).encode(weighed)
    twice = PLAIN_TEMPLATE.replace("{% generation %}", "{% generation %}.{% endgeneration %}{% generation %}")
    with pytest.raises(ValueError, match="marks 2 parts of 1 messages of the assistant, so those of weight 0"):
        ChatEncoder(bytes_tokenizer(twice), True, 500).encode(weighed)
    (both,) = ChatEncoder(tokenizer := bytes_tokenizer(twice), True, 500).encode([Conversation(SHORT)])
    assert "".join(scored_texts(tokenizer, both.ids, both.scored)) == ".Hello<|endoftext|>"


# --- conversations that a template refuses ---------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, UNMARKED, PLAIN_TEMPLATE])
def test_the_assistant_may_begin(template):
    tokenizer = bytes_tokenizer(template)
    (encoded,) = ChatEncoder(tokenizer, True, 500).encode([Conversation([says("assistant", "Hello"), *SHORT])])
    assert len(scored_texts(tokenizer, encoded.ids, encoded.scored)) == 2


ALTERNATING = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
ALTERNATING += "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "template, reason",
    [
        (ALTERNATING, "roles must alternate"),
        ("{{ messages[2].content }}" + UNMARKED, "list object has no element 2"),
        ("{{ 1 + messages[0].content }}", "unsupported operand"),
        ("{% if not messages %}{{ raise_exception('nobody') }}{% endif %}" + UNMARKED, "nobody"),  # of its beginning
    ],
)
def test_a_conversation_that_a_template_refuses_is_left_out_and_counted(template, reason, tmp_path):
    refused = [says("assistant", "Hello"), says("user", "Hi")]
    kept = [*SHORT, says("user", "x")]
    path = write(tmp_path / "a.jsonl", jsonl({"messages": x} for x in (refused, kept)))
    tokenizer = bytes_tokenizer(template)
    if reason == "unsupported operand":
        with pytest.raises(ValueError, match="has no row .*refused by the chat template: unsupported operand"):
            build(tokenizer, path)
        return
    facts = build(tokenizer, path, assistant_only_loss=reason == "nobody").facts
    ((why, count),) = facts["documents_dropped"].items()
    assert why.startswith("refused by the chat template: ") and reason in why
    assert count == 1 and facts["documents"] == 1
