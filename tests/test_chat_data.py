"""Conversations as rows: what the assistant says is scored, exactly, or the template is refused."""

import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data_sources import EOS, jsonl, write
from tokenizers import processors

from tnt_hf.recipes.arguments import DataArguments
from tnt_hf.recipes.chat import PLAIN_TEMPLATE, ChatEncoder
from tnt_hf.recipes.conversations import conversations, write_conversations
from tnt_hf.recipes.data import train_tokenizer
from tnt_hf.recipes.messages import Conversation
from tnt_hf.recipes.packing import IGNORED
from tnt_hf.recipes.sources import Columns
from tnt_hf.recipes.training_data import build_datasets, training_texts


def says(role: str, content: str) -> dict:
    return {"role": role, "content": content}


SHORT = [says("user", "Hi"), says("assistant", "Hello")]
LONG = [says("system", "Be brief."), says("user", "1+1?"), says("assistant", "two"), says("user", "+1?")]
LONG += [says("assistant", "three, übrigens"), says("user", "thanks")]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UNMARKED = PLAIN_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# Like Qwen3's: what was thought in earlier turns is left out of the later ones.
FORGETS = (
    "{% for m in messages %}{{ m['role'] + ': ' }}{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


DATED = "{{ strftime_now('%d %b %Y') }}|" + UNMARKED
DATED_BY_CALLER = "{{ date_string }}|" + PLAIN_TEMPLATE


def bytes_tokenizer(template: str | None):
    tokenizer = train_tokenizer(["bytes"], 257)
    tokenizer.chat_template = template
    return tokenizer


def test_a_word_without_end_is_no_obstacle():
    """Training would take the cube of its length."""
    tokenizer = train_tokenizer(["x" * 1_000_000, "a word " * 3, " " * 1_000_000], 300)
    text = "x" * 50 + " a word"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text and len(tokenizer) > 257


def scored_texts(tokenizer, ids, scored) -> list[str]:
    """What is scored, one text per run of scored tokens."""
    runs, before = [], False
    for token, now in zip(ids, scored):
        if now:
            runs[-1].append(token) if before else runs.append([token])
        before = now
    return [tokenizer.decode(run) for run in runs]


def build(tokenizer, path, **fields):
    data = DataArguments(dataset_name=str(path), **{"sequence_length": 64, **fields})
    return build_datasets(data, tokenizer, seed=0, mode="sft")


# --- what is scored -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template, end", [(PLAIN_TEMPLATE, "<|endoftext|>"), (UNMARKED, "<|endoftext|>"), (CHATML, "<|im_end|>\n")]
)
def test_the_assistant_is_scored_and_nothing_else(template, end):
    """With the template's own marks, or found from prefixes: its words and what ends them."""
    tokenizer = bytes_tokenizer(template)
    for messages, said in ((SHORT, ["Hello"]), (LONG, ["two", "three, übrigens"])):
        (encoded,) = ChatEncoder(tokenizer, True, 500).encode([Conversation(messages)])
        assert scored_texts(tokenizer, encoded.ids, encoded.scored) == [text + end for text in said]
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        assert encoded.ids.tolist() == tokenizer(whole)["input_ids"]


def test_prefixes_and_marks_agree_with_a_vocabulary_of_words():
    """Text full of merges: the borders fall between tokens, and both ways score the same ones."""
    text = "Hello there, three of us. Assistant:\nUser:\n" * 4
    marked, unmarked = (train_tokenizer([text], 320) for _ in range(2))
    marked.chat_template, unmarked.chat_template = PLAIN_TEMPLATE, UNMARKED
    conversation = [says("user", "there?\n"), says("assistant", " three of us"), says("user", "us?")]
    conversation += [says("assistant", "Hello there\n")]
    a, b = (ChatEncoder(tokenizer, True, 500)._encode(Conversation(conversation)) for tokenizer in (marked, unmarked))
    assert a.ids.tolist() == b.ids.tolist() and a.scored.tolist() == b.scored.tolist()
    assert scored_texts(marked, a.ids, a.scored) == ["three of us<|endoftext|>", "Hello there<|endoftext|>"]


SHORT_MONTH = DATED.replace("%d %b %Y", "%-d %b %Y|%-m")


@pytest.mark.parametrize("template", [DATED, SHORT_MONTH, DATED.replace(UNMARKED, PLAIN_TEMPLATE), DATED_BY_CALLER])
def test_tokens_do_not_depend_on_the_day(template):
    """A template that writes the date, as Llama 3.2's does, is told the same one always."""
    tokenizer = bytes_tokenizer(template)
    encoder = ChatEncoder(tokenizer, True, 500)
    (encoded,) = encoder.encode([Conversation(SHORT)])
    assert tokenizer.decode(encoded.ids).startswith("26 Jul 2024|7|" if template == SHORT_MONTH else "26 Jul 2024|")
    assert scored_texts(tokenizer, encoded.ids, encoded.scored)[0].startswith("Hello")
    assert encoder.settings()["date"] == "2024-07-26"


@pytest.mark.parametrize(
    "template", [CHATML, UNMARKED, "  " + CHATML, "\n\n" + UNMARKED, "\n  {% if 1 %}\n x\n{% endif %}"]
)
def test_a_stopped_clock_changes_nothing_else(template):
    tokenizer = bytes_tokenizer(template)
    (encoded,) = ChatEncoder(tokenizer, False, 500).encode([Conversation(SHORT)])
    assert encoded.ids.tolist() == tokenizer(tokenizer.apply_chat_template(SHORT, tokenize=False))["input_ids"]


def test_without_assistant_only_everything_is_scored():
    (encoded,) = ChatEncoder(bytes_tokenizer(CHATML), False, 500).encode([Conversation(LONG)])
    assert encoded.scored is None
    (forgetful,) = ChatEncoder(bytes_tokenizer(FORGETS), False, 500).encode(
        [Conversation(LONG)]
    )  # nothing to be found in it
    assert len(forgetful.ids)


def test_the_first_token_of_a_row_is_predicted_by_none():
    """A conversation in which the assistant says nothing else has nothing to learn from.

    The mask of `apply_chat_template` would score all of the first: it takes an end at token 0 for none.
    """
    tokenizer = bytes_tokenizer(
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    first, second = ([says("assistant", text), says("user", "?")] for text in ("x", "xy"))
    nothing, encoded = ChatEncoder(tokenizer, True, 500).encode([Conversation(first), Conversation(second)])
    assert nothing == "no assistant token" and encoded.scored.tolist() == [True, True, False]


def test_a_template_that_rewrites_the_past_is_refused():
    encoder = ChatEncoder(bytes_tokenizer(FORGETS), True, 500)
    thought = [says("user", "a"), says("assistant", "<think>b</think>c"), says("user", "d"), says("assistant", "e")]
    with pytest.raises(
        ValueError, match=r"chat template renders the beginning .* \(message 1\); mark them with {% gen"
    ):
        encoder.encode([Conversation(thought)])


def test_a_conversation_with_a_token_across_the_border_is_dropped():
    """A prompt that ends with a space, which belongs to the next word's token: nobody could say whose it is."""
    tokenizer = train_tokenizer(["bot: yes yes yes yes"] * 9, 300)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    encoder = ChatEncoder(tokenizer, True, 500)
    yes, no = encoder.encode([Conversation([says("user", "?"), says("assistant", x)]) for x in ("yes", "\nno")])
    assert yes == "a token across the border of an assistant message"
    assert isinstance(no, str) or "no" in tokenizer.decode(no.ids[no.scored])


def test_a_token_across_the_end_of_a_message_is_one_across_its_border():
    tokenizer = train_tokenizer(["xab xab xab"] * 9, 300)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
        "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    turns = [says("user", "?"), says("assistant", "a")]
    shared, clear = ChatEncoder(tokenizer, True, 500).encode([Conversation([*turns, says("user", x)]) for x in "b?"])
    assert shared == "a token across the border of an assistant message" and clear.scored.sum() == 1
    cut, whole = (
        ChatEncoder(tokenizer, True, n).encode(
            [Conversation([turns[0], says("assistant", "zzza"), says("user", "b")])]
        )[0]
        for n in (3, 500)
    )
    assert whole == shared and cut.scored.tolist() == [False, True, True]


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, UNMARKED])
def test_what_is_cut_away_is_not_read_message_by_message(template, monkeypatch):
    """Wherever a row ends, it is the beginning of the whole conversation; that takes as long as what is kept of it."""
    tokenizer = bytes_tokenizer(template)
    talk = [x for n in range(50) for x in (says("user", f"{n}"), says("assistant", f"{n}" * 6))]
    (whole,) = ChatEncoder(tokenizer, True, 10_000).encode([Conversation(talk)])
    for length in range(30, 80):
        encoder, seen = ChatEncoder(tokenizer, True, length), []
        tokens = encoder._tokens
        monkeypatch.setattr(
            encoder, "_tokens", lambda text, seen=seen, tokens=tokens: seen.append(text) or tokens(text)
        )
        (found,) = encoder.encode([Conversation(talk)])
        assert found.cut and found.ids.tolist() == whole.ids[:length].tolist()
        assert found.scored.tolist() == whole.scored[:length].tolist()
        assert len(seen) <= 8 and sum(map(len, seen[1:])) < 8 * 100


def test_a_token_across_a_border_that_is_cut_away_is_no_reason():
    tokenizer = train_tokenizer(["bot: yes yes yes yes"] * 9, 300)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    talk = [says("user", "?"), says("assistant", "\nno"), says("user", "?"), says("assistant", "yes")]
    (first,) = ChatEncoder(tokenizer, True, 500).encode([Conversation(talk[:2])])
    kept, dropped = (ChatEncoder(tokenizer, True, n).encode([Conversation(talk)])[0] for n in (len(first.ids), 500))
    assert kept.ids.tolist() == first.ids.tolist() and kept.scored.tolist() == first.scored.tolist()
    assert dropped == "a token across the border of an assistant message"


def test_marks_that_strip_white_space_are_marks():
    """With marks, a template may rewrite the past."""
    before, after = "{%- generation -%}", "{%- endgeneration -%}"
    template = FORGETS.replace(
        "{{ m['content'].split('</think>')[-1] }}{% else %}",
        f"{before}{{{{ m['content'].split('</think>')[-1] }}}}{after}{{% elif m['role'] == 'assistant' %}}"
        f"{before}{{{{ m['content'] }}}}{after}{{% else %}}",
    )
    turns = [says("user", "a"), says("assistant", "<think>b</think>c"), says("user", "d"), says("assistant", "e")]
    tokenizer = bytes_tokenizer(template)
    (encoded,) = ChatEncoder(tokenizer, True, 500).encode([Conversation(turns)])
    assert tokenizer.decode(encoded.ids[encoded.scored]) == "ce"


def test_the_template_alone_writes_special_tokens():
    """None comes from a tokenizer that puts one before whatever it is given."""
    tokenizer = bytes_tokenizer(PLAIN_TEMPLATE)
    (plain,) = ChatEncoder(tokenizer, True, 500).encode([Conversation(SHORT)])
    eos = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{eos} $A", special_tokens=[(eos, tokenizer.eos_token_id)]
    )
    assert tokenizer("x")["input_ids"][0] == tokenizer.eos_token_id
    (again,) = ChatEncoder(tokenizer, True, 500).encode([Conversation(SHORT)])
    assert again.ids.tolist() == plain.ids.tolist() and again.scored.tolist() == plain.scored.tolist()


def test_of_several_templates_the_default_is_taken():
    tokenizer = bytes_tokenizer({"default": PLAIN_TEMPLATE, "tool_use": CHATML})
    (encoded,) = ChatEncoder(tokenizer, True, 500).encode([Conversation(SHORT)])
    assert tokenizer.decode(encoded.ids).startswith("User:")


def test_a_conversation_of_one_token_has_nothing_to_predict():
    tokenizer = bytes_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    talks = [Conversation([says("user", text)]) for text in ("x", "xy")]
    one, two = ChatEncoder(tokenizer, False, 500).encode(talks)
    assert one == "no assistant token" and len(two.ids) == 2


def test_a_conversation_that_just_fits_is_not_cut():
    tokenizer = bytes_tokenizer(PLAIN_TEMPLATE)
    (whole,) = ChatEncoder(tokenizer, True, 500).encode([Conversation(SHORT)])
    length = len(whole.ids)
    rows = [
        ChatEncoder(tokenizer, True, room).encode([Conversation(SHORT)])[0]
        for room in (length - 1, length, length + 1)
    ]
    assert [(row.cut, len(row.ids)) for row in rows] == [(True, length - 1), (False, length), (False, length)]


def test_a_tokenizer_without_template_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl([{"messages": SHORT}]))
    with pytest.raises(ValueError, match="tokenizer: has no chat template.*set tokenizer.chat_template"):
        build(bytes_tokenizer(None), path)


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_rows_hold_whole_conversations(streaming, packing, tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        jsonl({"messages": [says("user", f"{n}"), says("assistant", "x" * n)]} for n in range(1, 9)),
    )
    tokenizer = bytes_tokenizer(PLAIN_TEMPLATE)
    built = build(tokenizer, path, packing=packing, streaming=streaming)
    rows = []
    for row in built.train:
        rows.append(row)
        if sum(int((row["labels"] == EOS).sum()) for row in rows) == 8:
            break
    answers = []
    for row in rows:
        assert len(row["input_ids"]) == 64 if packing else len(row["input_ids"]) < 64
        for start in (row["position_ids"] == 0).nonzero()[:, 0].tolist():
            assert tokenizer.decode(row["input_ids"][start : start + 4]) in ("User", "<|endoftext|>" * 4)
        answers += scored_texts(tokenizer, row["labels"].tolist(), (row["labels"] != IGNORED).tolist())
    assert sorted(answers) == sorted("x" * n + "<|endoftext|>" for n in range(1, 9))
    assert len(rows) == (4 if packing else 8)
    batch = built.collator(rows[:2])
    longest = max(len(row["input_ids"]) for row in rows[:2])
    assert batch["input_ids"].shape == (2, 64 if streaming else longest)  # a stream's batches are divided among ranks
    extra = "filler" if packing else "attention_mask"
    assert set(batch) == {"input_ids", "labels", "position_ids", extra}


def test_tokens_of_other_settings_are_not_taken(tmp_path):
    """What is scored, how long a conversation may be, and its template are no part of the tokenizer's digest."""
    path = write(tmp_path / "a.jsonl", jsonl([{"messages": SHORT}]))
    tokenizer = bytes_tokenizer(PLAIN_TEMPLATE)
    assert sum(build(tokenizer, path).train[0]["labels"] != IGNORED) == len("Hello") + 1
    everything = build(tokenizer, path, assistant_only_loss=False).train[0]
    assert sum(everything["labels"] != IGNORED) == len("User:\nHi\nAssistant:\nHello")
    assert len(build(tokenizer, path, sequence_length=23, packing=False).train[0]["input_ids"]) == 23
    tokenizer.chat_template = CHATML
    ids = build(tokenizer, path).train[0]["input_ids"]
    assert tokenizer.decode(ids).startswith("<|im_start|>user")
    tokenizer.chat_template = "{{ unk_token }}" + CHATML
    for unknown in ("?", "!"):
        tokenizer.unk_token = unknown
        assert tokenizer.decode(build(tokenizer, path).train[0]["input_ids"]).startswith(unknown + "<|im_start|>user")


def test_what_was_cut_for_short_rows_is_not_taken_for_long_ones(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl([{"messages": SHORT}]))
    tokenizer = bytes_tokenizer(PLAIN_TEMPLATE)
    short, long = (build(tokenizer, path, sequence_length=n, packing=False).train[0]["input_ids"] for n in (23, 64))
    assert len(short) == 23 and len(long) == len("User:\nHi\nAssistant:\nHello") + 1


def test_what_is_cut_and_dropped_is_counted(tmp_path):
    late = [says("user", "q" * 80), says("assistant", "never seen")]
    long = [says("user", "q"), says("assistant", "a" * 80)]
    rows = [SHORT, late, long, [says("user", "alone")], [], None]
    path = write(tmp_path / "a.jsonl", jsonl({"messages": messages} for messages in rows))
    built = build(bytes_tokenizer(PLAIN_TEMPLATE), path)
    assert built.facts["documents"] == 2 and built.facts["documents_cut"] == 1
    assert built.facts["documents_dropped"] == {
        "no assistant token within sequence_length": 1,
        "no assistant token": 1,
        "no text": 2,
    }
    assert len(built.train) == 2
    with pytest.raises(ValueError, match="has no row of .*documents dropped: {'no assistant token': 1}"):
        build(bytes_tokenizer(PLAIN_TEMPLATE), write(tmp_path / "b.jsonl", jsonl([{"messages": rows[3]}])))


def test_instructions_become_conversations(tmp_path):
    rows = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Greet.", "input": "", "output": "Hi"},
    ]
    path = write(tmp_path / "alpaca.json", str(rows).replace("'", '"'))
    tokenizer = bytes_tokenizer(PLAIN_TEMPLATE)
    built = build(tokenizer, path, packing=False)
    found = [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in built.train]
    assert found == ["User:\nAdd.\n\n1 2\nAssistant:\n3", "User:\nGreet.\nAssistant:\nHi"]
    assert list(training_texts(DataArguments(str(path)))) == ["Add.\n\n1 2\n3", "Greet.\nHi"]
    path = write(tmp_path / "no column input.jsonl", jsonl([{"instruction": "Greet.", "output": "Hi"}]))
    assert list(training_texts(DataArguments(str(path)))) == ["Greet.\nHi"]


def test_columns_decide_what_a_document_is(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl([{"text": "plain", "messages": SHORT}]))
    tokenizer = bytes_tokenizer(PLAIN_TEMPLATE)
    data = DataArguments(dataset_name=str(path), sequence_length=32)
    plain = build_datasets(data, tokenizer, seed=0, mode="pretrain").train[0]["input_ids"].tolist()
    assert tokenizer.decode([token for token in plain if token != EOS]) == "plain"
    chat = build_datasets(data, tokenizer, seed=0, mode="sft").train[0]["input_ids"]
    assert tokenizer.decode(chat).startswith("User:\nHi\nAssistant:\nHello<|endoftext|>")


@pytest.mark.parametrize(
    "mode, given", [("sft", {"messages_column": "conversation"}), ("pretrain", {"text_column": "boddy"})]
)
def test_a_column_that_was_named_is_no_other(mode, given):
    there = ["instruction", "output", "messages", "text"]
    (field, value), *_ = given.items()
    with pytest.raises(ValueError, match=f"{field}='{value}': it has no such column, it has 'instruction'"):
        Columns.choose(there, DataArguments("x", **given), mode, "it")
    assert Columns.choose(there, DataArguments("x"), mode, "it").kind == ("messages" if mode == "sft" else "text")
    assert Columns.choose(there[:2], DataArguments("x"), mode, "it").kind == "instructions"


def test_null_fields_of_messages_are_as_if_they_were_not_there(tmp_path):
    """Parquet gives every message all fields that any has; a template asks whether a message has them."""
    messages = [SHORT[0] | {"name": None}, SHORT[1] | {"name": "Bot"}]
    pq.write_table(pa.table({"messages": [messages]}), tmp_path / "a.parquet")
    template = (
        "{% for m in messages %}{% if 'name' in m %}{{ m['name'] ~ ' ' }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    tokenizer = bytes_tokenizer(template)
    built = build(tokenizer, tmp_path / "a.parquet", packing=False, assistant_only_loss=False)
    assert tokenizer.decode(built.train[0]["input_ids"]) == "HiBot Hello"


NULLS = """
{% for m in messages %}{% if 'calls' in m %}<{% for c in m.calls %}{{ c.arguments|tojson }}{% endfor %}>{% endif %}
{% if m.role == 'assistant' %}{% generation %}{{ m.content ~ '!' }}{% endgeneration %}{% else %}{{ m.content }}
{% endif %}{% endfor %}"""


@pytest.mark.parametrize("template", [NULLS, NULLS.replace("{% generation %}", "").replace("{% endgeneration %}", "")])
def test_null_fields_change_neither_tokens_nor_what_is_scored(template, tmp_path):
    """Those of a message move what a template marks; those inside would be printed."""
    calls = [{"arguments": {"city": "Paris"}}, {"arguments": {"query": "x"}}]
    conversations = [
        [
            says("user", "q"),
            says("assistant", "calling") | {"calls": [call]},
            says("user", "42"),
            says("assistant", "So"),
        ]
        for call in calls
    ]
    lines = write(tmp_path / "a.jsonl", jsonl([{"messages": x} for x in conversations]))
    pq.write_table(pa.table({"messages": conversations}), tmp_path / "a.parquet")
    tokenizer = bytes_tokenizer(template)
    rows = [build(tokenizer, path, packing=False).train for path in (lines, tmp_path / "a.parquet")]
    for one, other, call in zip(*rows, calls, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in ("input_ids", "labels"))
        scored = [int(x) for x in other["labels"] if x != -100]
        called = f"<{json.dumps(call['arguments'])}>"
        said = "calling!So!" if template is NULLS else f"{called}calling!So!"
        assert tokenizer.decode(scored).replace("\n", "") == said
        assert called in tokenizer.decode(other["input_ids"])


@pytest.mark.parametrize(
    "messages, message",
    [
        ("Hi", r"line 1: column 'messages' must hold a list of messages, got str"),
        ([{"role": "user"}], r"column 'messages', message 0: must have the texts 'role' and 'content', got {'role'"),
        ([SHORT[0], {"from": "gpt", "value": "x"}], r"message 1: must have the texts 'role' and 'content'"),
        ([SHORT[0], says("assistant", [{"type": "text"}])], r"message 1: must have the texts 'role' and 'content'"),
    ],
)
def test_malformed_conversations_name_the_message(messages, message, tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl([{"messages": messages}]))
    with pytest.raises(ValueError, match=message):
        build(bytes_tokenizer(PLAIN_TEMPLATE), path)


@pytest.mark.slow
def test_the_standard_library_makes_conversations(tmp_path):
    text = "class A:\n    @property\n"
    text += '    def two(self):\n        """Give two.\n\n        Always."""\n        return 2  # a pair\n'
    text += '\n\ndef bare():\n    return 1\n\n\ndef empty():\n    """Does nothing."""\n'
    talks = list(conversations(text))
    asked, answered = talks[0]["messages"]
    assert asked == says("user", "Write two: Give two.") and len(talks) == 1
    assert answered == says("assistant", "def two(self):\n    return 2")
    path = tmp_path / "new" / "talks.jsonl"
    count = write_conversations(path)
    before = path.read_bytes()
    assert count == before.count(b"\n") > 1000
    first = write(tmp_path / "first.jsonl", "".join(path.read_text().splitlines(keepends=True)[:50]))
    built = build(bytes_tokenizer(PLAIN_TEMPLATE), first, sequence_length=2048)
    assert built.facts["documents"] > 40  # all but those whose answer lies behind the end of a row
    with pytest.raises(FileExistsError):
        write_conversations(path)
    assert path.read_bytes() == before
