"""Data of a run: sources and formats, splits and held-out parts, the cache of tokens, errors that name the place."""

import errno
import gzip
import json
import multiprocessing
import os
import resource
import time
from datetime import datetime
from itertools import islice

import datasets
import filelock
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forks import in_a_child
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tnt_hf.recipes.arguments import DataArguments, ModelArguments
from tnt_hf.recipes.corpus import read_corpus
from tnt_hf.recipes.data import train_tokenizer
from tnt_hf.recipes.data_files import data_files
from tnt_hf.recipes.encoding import Encoded, TextEncoder, pieces_of, tokenizer_digest, vocabulary_size
from tnt_hf.recipes.file_formats import records
from tnt_hf.recipes.models import new_model
from tnt_hf.recipes.packing import IGNORED
from tnt_hf.recipes.sources import read_texts
from tnt_hf.recipes.token_store import StoreWriter, cached_store
from tnt_hf.recipes.training_data import build_datasets, training_texts


TEXTS = ["Ein Haus.\n", "zwei Bäume, " * 5, "drei\r\nTiere"]
EOS = 0  # of the tokenizer below, which has one token per byte: 1 + its place in the alphabet


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["bytes"], 257)


def build(tokenizer, path, mode="pretrain", rows_per_step=None, **fields):
    data = DataArguments(dataset_name=str(path), **{"sequence_length": 16, **fields})
    return build_datasets(data, tokenizer, seed=0, mode=mode, rows_per_step=rows_per_step)


def texts_in(tokenizer, rows) -> list[str]:
    """The documents of packed rows in their order, from the tokens between begin and end."""
    ids = [token for row in rows for token in row["input_ids"].tolist()]
    return [tokenizer.decode(x) for x in split_at(ids, EOS) if x]


def split_at(ids: list[int], border: int) -> list[list[int]]:
    parts = [[]]
    for token in ids:
        parts.append([]) if token == border else parts[-1].append(token)
    return parts


def jsonl(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path, content: str | bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def parquet(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def text_files(folder):
    for name, text in zip(("a.txt", "b/c.py", "b/d/e.md"), TEXTS):
        write(folder / name, text)
    return folder


def repository(folder):
    """A dataset repository as on the Hub: its README.md says which files are which split."""
    parquet(folder / "data" / "one.parquet", text=TEXTS[:2], other=[1, 2])
    parquet(folder / "data" / "two.parquet", text=TEXTS[2:], other=[3])
    parquet(folder / "held" / "three.parquet", text=["vier Blumen auf der Wiese"], other=[4])
    files = [{"split": "train", "path": "data/*"}, {"split": "test", "path": "held/*"}]
    config = {"configs": [{"config_name": "default", "data_files": files}]}
    write(folder / "README.md", f"---\nconfigs: {json.dumps(config['configs'])}\n---\n# Card\n")
    return folder


ROWS = [{"text": text, "n": n} for n, text in enumerate(TEXTS)]
SOURCES = {
    "text files, nested": text_files,
    "a text file": lambda f: write(f / "a.txt", TEXTS[0]),
    "a text file, gzipped": lambda f: write(f / "a.txt.gz", gzip.compress(TEXTS[0].encode())),
    "a text file with a byte order mark": lambda f: write(f / "a.md", b"\xef\xbb\xbf" + TEXTS[0].encode()),
    "JSON lines": lambda f: write(f / "a.jsonl", jsonl(ROWS)),
    "JSON lines, gzipped": lambda f: write(f / "a.jsonl.gz", gzip.compress(jsonl(ROWS).encode())),
    "JSON lines called .json": lambda f: write(f / "a.json", jsonl(ROWS)),
    "a JSON array": lambda f: write(f / "a.json", json.dumps(ROWS, indent=1)),
    "Parquet": lambda f: parquet(f / "a.parquet", text=TEXTS, n=[0, 1, 2]),
    "a folder of Parquet": lambda f: (
        parquet(f / "b.parquet", text=TEXTS[2:]) and parquet(f / "a.parquet", text=TEXTS[:2]).parent
    ),
    "a dataset repository": repository,
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("streaming", [False, True])
def test_every_source_gives_every_document_once(make, streaming, tmp_path, tokenizer):
    path = make(tmp_path)
    expected = TEXTS[:1] if path.name.startswith(("a.txt", "a.md")) else TEXTS
    assert list(read_texts(str(path), streaming=streaming)) == expected

    built = build(tokenizer, path, streaming=streaming)
    tokens = sum(len(text.encode()) + 2 for text in expected)  # begin and end of every document
    rows = -(-tokens // 16)
    found = list(islice(built.train, rows)) if streaming else [built.train[n] for n in range(rows)]
    in_order = sorted(token for text in expected for token in tokenizer(text)["input_ids"])
    assert sorted(token for row in found for token in row["input_ids"].tolist() if token != EOS) == in_order
    scored = sum(int((row["labels"] != IGNORED).sum()) for row in found)
    segments = sum(int((row["position_ids"] == 0).sum()) for row in found)
    filled = rows * 16 - tokens
    assert scored == tokens - (segments - (filled > 0))  # all but the first token of every piece of a document
    if not streaming:
        assert texts_in(tokenizer, found) == expected
        facts = {"rows": rows, "tokens": tokens, "documents": len(expected), "documents_dropped": {}}
        assert facts.items() <= built.facts.items() and len(built.train) == rows
    json.dumps([built.facts, built.state])


def test_the_standard_library_and_what_it_holds_out():
    corpus = read_corpus(held_out=0.1)
    data = DataArguments(eval_share=0.1)
    assert list(training_texts(data)) == [corpus.train[name] for name in sorted(corpus.train) if corpus.train[name]]
    assert list(read_texts("python-stdlib", share=0.1)) == [x for x in corpus.held_out.values() if x]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("share", [0.999, 1e-9])
def test_the_only_document_cannot_be_trained_on_and_held_out(share, streaming, tmp_path, tokenizer):
    path = write(tmp_path / "one.txt", "one file" * 20)
    with pytest.raises(ValueError, match="has no row.*documents are held out whole.*--eval_share \\(0 holds out none"):
        build(tokenizer, path, eval_share=share, streaming=streaming)
    assert build(tokenizer, path, eval_share=0, streaming=streaming).eval is None


def test_bos_and_eos(tmp_path):
    """bos begins a document where the tokenizer has one, eos ends it."""
    tokenizer = train_tokenizer(["bytes"], 257)
    path = write(tmp_path / "a.txt", "ab")
    assert build(tokenizer, path, sequence_length=4).train[0]["input_ids"].tolist() == [EOS, 65, 66, EOS]
    tokenizer.bos_token = None
    assert build(tokenizer, path, sequence_length=4).train[0]["input_ids"].tolist() == [65, 66, EOS, EOS]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="tokenizer: has no eos_token"):
        build(tokenizer, path, sequence_length=4)


def test_rows_of_one_document(tmp_path, tokenizer):
    built = build(tokenizer, write(tmp_path / "a.jsonl", jsonl([{"text": "abc"}, {"text": "d" * 20}])), packing=False)
    assert [len(row["input_ids"]) for row in built.train] == [5, 16, 6]
    assert built.collator([built.train[0], built.train[2]])["attention_mask"].sum(1).tolist() == [5, 6]


def test_long_texts_are_tokenised_in_pieces_that_change_nothing():
    """Cuts are at line breaks with no blank on either side, and no token of such a tokenizer goes across them."""
    text = "".join(f"def f{n}(x):\n    return x * {n}\n\n\na = f{n}\nb = f{n}(2)\n\n" for n in range(60))
    pieces = pieces_of(text, 100)
    assert "".join(pieces) == text and len(pieces) > 10 and all(piece[:3] == "b =" for piece in pieces[1:])
    tokenizer = train_tokenizer([text], 400)
    ids = [token for piece in pieces for token in tokenizer(piece)["input_ids"]]
    assert ids == tokenizer(text)["input_ids"]
    assert pieces_of("x" * 250, 100) == ["x" * 100, "x" * 100, "x" * 50]
    assert pieces_of("", 100) == []
    (encoded,) = TextEncoder(tokenizer).encode([text])
    assert encoded.ids.tolist() == [EOS, *ids, EOS]


# --- which files and which documents --------------------------------------------------------------------------------


def test_a_folder_is_read_as_tables_or_as_texts(tmp_path, caplog):
    write(tmp_path / "README.md", "# about the data")
    write(tmp_path / ".hidden" / "x.jsonl", "broken")
    parquet(tmp_path / "deep" / "a.parquet", text=["table"])
    assert list(read_texts(str(tmp_path))) == ["table"]
    assert (
        "only its tables (1) are read; its texts (1) are not, the first is" in caplog.text
        and "README.md" in caplog.text
    )
    write(tmp_path / "code" / "package.json", "{}")
    write(tmp_path / "code" / "main.js", "let x")
    assert list(read_texts(str(tmp_path / "code"))) == ["let x"]


def test_links_are_followed_but_not_in_circles(tmp_path):
    text_files(tmp_path / "elsewhere")
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "z.txt", "z")
    (tmp_path / "data" / "more").symlink_to(tmp_path / "elsewhere")
    expected = [*read_texts(str(tmp_path / "elsewhere")), "z"]
    (tmp_path / "data" / "here").symlink_to(tmp_path / "data")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "data")
    assert list(read_texts(str(tmp_path / "data"))) == expected


def test_a_folder_with_a_second_name_is_read_once(tmp_path):
    """Documents are held out by their names, so the same text would be on both sides."""
    text_files(tmp_path / "data" / "2024")
    expected = list(read_texts(str(tmp_path / "data")))
    (tmp_path / "data" / "latest").symlink_to(tmp_path / "data" / "2024")
    assert list(read_texts(str(tmp_path / "data"))) == expected
    (tmp_path / "data" / "2024").rename(tmp_path / "data" / ".2024")  # is not read under this name
    (tmp_path / "data" / "latest").unlink()
    (tmp_path / "data" / "latest").symlink_to(tmp_path / "data" / ".2024")
    assert list(read_texts(str(tmp_path / "data"))) == expected


def test_a_link_to_nothing_is_told(tmp_path):
    write(tmp_path / "a.txt", "a")
    (tmp_path / "b.txt").symlink_to(tmp_path / "not mounted" / "b.txt")
    with pytest.raises(ValueError, match="b.txt is a link to a file that is not there"):
        list(read_texts(str(tmp_path)))


@pytest.mark.parametrize("kind", ["Dataset", "DatasetDict"])
def test_a_folder_of_save_to_disk_is_named(tmp_path, kind):
    saved = datasets.Dataset.from_list([{"text": "a b"}])
    (saved if kind == "Dataset" else datasets.DatasetDict(train=saved)).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="saved': holds no file .* what save_to_disk of datasets wrote is not"):
        list(read_texts(str(tmp_path / "saved")))
    write(tmp_path / "c.txt", "c")
    assert list(read_texts(str(tmp_path))) == ["c"]


def test_a_name_that_is_no_unicode_is_read_as_any_other(tmp_path, tokenizer):
    for name in (b"a\xe9.txt", b"b.txt"):
        (tmp_path / os.fsdecode(name)).write_text("a text")
    assert texts_in(tokenizer, build(tokenizer, tmp_path).train) == ["a text"] * 2
    assert list(read_texts(str(tmp_path), share=0.999)) == ["a text"] * 2


def test_messages_may_hold_what_json_has_no_word_for(tmp_path, tokenizer):
    rows = [{"role": x, "content": "a text", "at": datetime(2026, 1, 2)} for x in ("user", "assistant")]
    parquet(tmp_path / "a.parquet", messages=[rows])
    assert list(read_texts(str(tmp_path))) == ["a text\na text"]


def test_ids_with_holes_fit_into_the_store_and_the_model(tmp_path, tokenizer):
    assert vocabulary_size(tokenizer) == len(tokenizer) == 257
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "far": 70_000}, unk_token="<unk>"))
    sparse = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>")
    write(tmp_path / "a.txt", "far")
    [row] = build(sparse, tmp_path / "a.txt").train
    assert row["input_ids"].tolist()[:2] == [70_000, 1]
    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    assert new_model(ModelArguments("tnt", model_config=tiny), sparse).config.vocab_size == 70_001


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("wiki-test.jsonl", "test"),
        ("evaluation.jsonl", "test"),
        ("a_dev_2.jsonl", "validation"),
        ("contest.jsonl", "train"),
        ("test.txt", "test"),
        ("Valid.txt.gz", "validation"),
        ("my-test.txt", "train"),
        ("test.py", "train"),
    ],
)
def test_a_split_is_a_word_of_a_table_s_name_or_a_text_s_whole_name(tmp_path, name, split):
    write(tmp_path / name, GOOD)
    assert list(data_files(tmp_path)) == [split]


def test_tables_belong_to_the_split_they_are_named_after(tmp_path, tokenizer):
    for split in ("train", "validation", "test"):
        parquet(tmp_path / f"{split}-00000-of-00001.parquet", text=[f"of {split}"])
    parquet(tmp_path / "dev" / "more.parquet", text=["of dev"])
    assert list(read_texts(str(tmp_path))) == ["of train"]
    assert list(read_texts(str(tmp_path), split="validation")) == ["of dev", "of validation"]
    built = build(tokenizer, tmp_path, eval_split="test")
    assert texts_in(tokenizer, built.train) == ["of train"] and texts_in(tokenizer, built.eval) == ["of test"]
    assert list(read_texts(str(repository(tmp_path / "repo")), split="test")) == ["vier Blumen auf der Wiese"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_share_is_held_out_by_the_hash_of_the_document(streaming, tmp_path, tokenizer):
    texts = [f"text number {n}" for n in range(200)]
    path = write(tmp_path / "a.jsonl", jsonl({"text": text} for text in texts))
    data = {"eval_share": 0.2, "eval_rows": 1000, "streaming": streaming}
    held_out = texts_in(tokenizer, build(tokenizer, path, **data).eval)
    assert 20 < len(held_out) < 60 and set(held_out) < set(texts)
    assert list(training_texts(DataArguments(str(path), eval_share=0.2))) == [x for x in texts if x not in held_out]
    if not streaming:
        assert texts_in(tokenizer, build(tokenizer, path, **data).train) == [x for x in texts if x not in held_out]
        other = DataArguments(str(path), eval_share=0.5)  # whose tokens are not those made for the first share
        assert texts_in(tokenizer, build(tokenizer, path, eval_share=0.5).train) == list(training_texts(other))

    write(path, jsonl({"text": text} for text in ["new", *texts[::-1]]))  # others come and all move: it stays held out
    assert set(texts_in(tokenizer, build(tokenizer, path, **data).eval)) - {"new"} == set(held_out)
    whole, few = (build(tokenizer, path, **data | {"eval_rows": n}).eval for n in (1000, 3))
    places = (0, 1, 2) if streaming else (0, (len(whole) - 1) // 2, len(whole) - 1)  # a stream's first, or spread
    assert [row["input_ids"].tolist() for row in few] == [whole[i]["input_ids"].tolist() for i in places]


def test_evaluation_data_of_its_own(tmp_path, tokenizer):
    """The configuration is that of the data which is trained on, and the evaluation's only where it is the same."""
    repo = repository(tmp_path / "repo")
    built = build(tokenizer, repo, dataset_config="default", eval_split="test")
    assert texts_in(tokenizer, built.eval) == ["vier Blumen auf der Wiese"]
    built = build(tokenizer, repo, dataset_config="default", eval_dataset_name=str(write(tmp_path / "c.txt", "c")))
    assert texts_in(tokenizer, built.eval) == ["c"]

    train, other = write(tmp_path / "a.txt", "train"), write(tmp_path / "b.txt", "other")
    assert build(tokenizer, train).eval is None
    assert texts_in(tokenizer, build(tokenizer, train, eval_dataset_name=str(other)).eval) == ["other"]


# --- the cache of tokens --------------------------------------------------------------------------------------------


def stores(cache) -> dict[str, int]:
    return {x.parent.name: x.stat().st_mtime_ns for x in cache.glob("tnt-hf/*/train") if (x / "facts.json").is_file()}


def test_tokens_are_made_once_and_never_stale(tmp_path, tokenizer, cache):
    path = write(tmp_path / "a.txt", "abcabcabcabcabcabc")
    first = build(tokenizer, path)
    made = stores(cache)
    again = build(tokenizer, path, sequence_length=8)  # rows are cut from the same tokens
    assert stores(cache) == made and len(made) == 1 and len(again.train) == 3
    assert again.state["data"] == first.state["data"]

    stat = path.stat()
    write(path, "xyzxyzxyzxyzxyzxyz")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time, another content
    changed = build(tokenizer, path)
    assert texts_in(tokenizer, changed.train) == ["xyz" * 6] and changed.state["data"] != first.state["data"]

    columns = write(tmp_path / "b.jsonl", jsonl([{"text": "abcabcabcabc", "title": "xyzxyzxyzxyz"}]))
    for column, text in (("text", "abcabcabcabc"), ("title", "xyzxyzxyzxyz")):
        assert texts_in(tokenizer, build(tokenizer, columns, text_column=column).train) == [text]

    other = train_tokenizer(["abcabc"] * 9, 260)
    assert tokenizer_digest(other) != tokenizer_digest(tokenizer)
    assert build(other, path).state["tokenizer"] != first.state["tokenizer"]
    assert len(stores(cache)) == 5


def test_tokens_of_a_repository_are_never_stale(tmp_path, tokenizer, cache):
    first = build(tokenizer, repository(tmp_path))
    assert build(tokenizer, tmp_path).state == first.state and len(stores(cache)) == 1
    parquet(tmp_path / "data" / "one.parquet", text=["eins", "zwei Bäume, " * 5], other=[1, 2])
    changed = build(tokenizer, tmp_path)
    assert texts_in(tokenizer, changed.train)[0] == "eins" and changed.state["data"] != first.state["data"]


def test_a_call_of_the_tokenizer_does_not_change_its_digest():
    tokenizer = train_tokenizer(["bytes"], 257)
    before = tokenizer_digest(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert tokenizer_digest(tokenizer) == before
    tokenizer.eos_token = "b"  # it ends documents and conversations
    assert tokenizer_digest(tokenizer) != before
    before, tokenizer.split_special_tokens = tokenizer_digest(tokenizer), True
    assert tokenizer_digest(tokenizer) != before


def slow_write(folder):
    folder.mkdir()
    StoreWriter(folder / "train", 300, with_mask=False).close()
    (folder.parent / f"made by {os.getpid()}").touch()
    time.sleep(0.3)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_cache_that_is_another_users_is_read(cache, monkeypatch, code):
    """As one of a group, or on a disk that is mounted to be read."""

    def acquire(*_, **__):
        raise OSError(code, os.strerror(code))

    made = cached_store("one", "train", slow_write).folder
    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    assert cached_store("one", "train", slow_write).folder == made
    with pytest.raises(OSError, match="cannot be written.*HF_DATASETS_CACHE names another cache.*two"):
        cached_store("two", "train", slow_write)


def test_what_a_killed_process_left_is_removed(cache):
    left = cache / "tnt-hf" / "digest.incomplete"
    write(left / "tokens.bin", "half")
    folder = cached_store("digest", "train", slow_write).folder
    assert folder == cache / "tnt-hf" / "digest" / "train" and not left.exists()


@pytest.mark.parametrize("damaged", [False, True])
def test_of_two_processes_one_makes_the_store(cache, damaged):
    if damaged:
        write(cache / "tnt-hf" / "digest" / "train" / "tokens.bin", "damaged")
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=cached_store, args=("digest", "train", slow_write)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(list((cache / "tnt-hf").glob("made by *"))) == 1 and (cache / "tnt-hf" / "digest").is_dir()


@pytest.mark.parametrize("part", ["train", "held_out"])
@pytest.mark.parametrize("name", ["facts.json", "starts.bin", "tokens.bin", "scored.bin", "sha256"])
def test_a_damaged_store_is_made_anew(tmp_path, cache, caplog, part, name):
    tokenizer = train_tokenizer(["bytes"], 257)
    tokenizer.chat_template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    said = [{"messages": [{"role": "assistant", "content": f"Satz {i}, der lang genug ist"}]} for i in range(9)]
    path = write(tmp_path / "a.jsonl", jsonl(said))

    def rows():
        found = build(tokenizer, path, "sft", eval_share=0.5, sequence_length=64)
        return [{x: row[x].tolist() for x in row} for rows in (found.train, found.eval) for row in rows]

    expected = rows()
    [file] = cache.glob(f"tnt-hf/*/{part}/{name}")
    good = file.read_bytes()
    for content in (good[: len(good) // 2], bytes(len(good)), b"\xff" * len(good), b"", None):
        file.unlink() if content is None else file.write_bytes(content)
        caplog.clear()
        assert rows() == expected and file.read_bytes() == good
        assert f"{file.parent} is damaged: it is deleted, and the documents are tokenised again" in caplog.text
    caplog.clear()
    assert rows() == expected and not caplog.text


def test_a_store_that_fails_leaves_nothing_behind(cache, tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", jsonl([{"text": "fine"}, {"text": 5}]))
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: column 'text' must hold text, got int"):
        build(tokenizer, path)
    assert [x.suffix for x in (cache / "tnt-hf").iterdir()] == [".lock"]


@pytest.mark.parametrize("tokens", [10, 100_000])
def test_a_full_disk_is_told_with_the_folder(cache, tokens):
    """While documents are added, or at the end. The limit on a file's size stands in for the disk's."""

    def write(folder):
        folder.mkdir()
        writer = StoreWriter(folder / "train", 300, with_mask=False)
        writer.add(Encoded(np.zeros(tokens)))
        writer.close()

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (5, 5))
        with pytest.raises(OSError, match="File too large: '.*digest.incomplete/train'"):
            cached_store("digest", "train", write)

    assert in_a_child(work) == 0
    assert [x.suffix for x in (cache / "tnt-hf").iterdir()] == [".lock"]


def test_a_file_that_changes_while_it_is_read_is_told(cache, tmp_path):
    """Its tokens would be kept under the digest of what it was before."""
    path = write(tmp_path / "a.txt", "before")
    tokenizer = train_tokenizer(["bytes"], 257)

    class Editor(type(tokenizer)):
        def __call__(self, *arguments, **keywords):
            write(path, "and after")
            return super().__call__(*arguments, **keywords)

    tokenizer.__class__ = Editor
    with pytest.raises(ValueError, match=r"a.txt was changed while it was read"):
        build(tokenizer, path)
    assert [x.suffix for x in (cache / "tnt-hf").iterdir()] == [".lock"]


def test_one_json_object_may_take_several_lines(tmp_path):
    write(tmp_path / "a.json", json.dumps({"text": "one", "id": [1, 2]}, indent=2))
    assert [row for _, row in records(tmp_path / "a.json")] == [{"text": "one", "id": [1, 2]}]
    write(tmp_path / "b.json", '{\n "text": "one",\n "id": [1, 2\n}')
    with pytest.raises(ValueError, match="b.json, line 4: invalid JSON"):
        list(records(tmp_path / "b.json"))


def test_columns_of_one_name_are_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["one"]), pa.array(["two"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet: has several columns named 'text'"):
        list(records(tmp_path / "a.parquet"))


# --- errors ---------------------------------------------------------------------------------------------------------

GOOD = jsonl([{"text": "a"}])
ERRORS = {
    "no such file": (None, {}, "dataset_name='.*missing.jsonl': no such file or folder"),
    "unknown extension": ({"x.docx": "a"}, {}, r"dataset_name=.*: x.docx has an unknown extension, readable"),
    "nothing readable": ({"d/x.bin": "a", "d/y.so": "a"}, {}, r"dataset_name=.*holds no file that can be read"),
    "empty text": ({"x.txt": ""}, {}, r"dataset_name=.*: has no row.*documents dropped: {'no text': 1}"),
    "empty table": ({"x.jsonl": "\n"}, {}, r"dataset_name=.*x.jsonl': has no rows"),
    "nulls only": ({"x.jsonl": '{"text": null}'}, {}, r"has no row.*'no text': 1"),
    "missing column": ({"x.jsonl": '{"a": 1, "b": 2}'}, {}, r"text_column='text': .*x.jsonl has no such.* 'a', 'b'"),
    "column missing in one row": ({"x.jsonl": GOOD + '{"b": 1}'}, {}, r"line 2: has no column 'text', only 'b'"),
    "wrong type": ({"x.json": '[{"text": ["a"]}]'}, {}, r"x.json, element 0: column 'text' must hold text, got list"),
    "not UTF-8": ({"x.txt": b"abc\xff"}, {}, r"x.txt: not UTF-8: byte 0xff at offset 3"),
    "half of a surrogate pair": (
        {"x.jsonl": GOOD + '{"text": "a\\ud800"}\n'},
        {},
        r"x.jsonl, line 2: column 'text' holds half of a surrogate pair, '\\ud800', which is not text",
    ),
    "half of a surrogate pair, held out": (
        {"x.json": '[{"text": "\\udfff!"}]'},
        {"eval_share": 0.5},
        r"x.json, element 0: column 'text' holds half of a surrogate pair, '\\udfff'",
    ),
    "not UTF-8 in a line": ({"x.jsonl": GOOD.encode() + b'"\xe9"'}, {}, rf"byte 0xe9 at offset {len(GOOD) + 1}"),
    "invalid JSON line": ({"x.jsonl": GOOD + "{'a'}"}, {}, r"x.jsonl, line 2: invalid JSON: .* \(column 2\)"),
    "invalid JSON array": ({"x.json": "[{},\n{]"}, {}, r"x.json, line 2: invalid JSON: "),
    "nested too deeply": ({"x.jsonl": GOOD + "[" * 99999}, {}, r"line 2: JSON that cannot be .*(recursion|overflow)"),
    "too many digits": ({"x.json": f"[{'9' * 5000}]"}, {}, r"x.json: JSON that cannot be read: Exceeds the limit"),
    "no object": ({"x.jsonl": "[1]"}, {}, r"x.jsonl, line 1: must be an object with columns, got list"),
    "broken gzip": ({"x.txt.gz": b"no gzip"}, {}, r"x.txt.gz: not a complete gzip file"),
    "cut gzip": ({"x.jsonl.gz": gzip.compress(GOOD.encode() * 99)[:-9]}, {}, r"x.jsonl.gz: not a complete gzip file"),
    "bad Parquet": ({"x.parquet": "PAR1 and no more"}, {}, r"x.parquet: not a readable Parquet file"),
    "no such split": ({"x.jsonl": GOOD}, {"dataset_split": "test"}, r"dataset_split='test': .* has only 'train'"),
    "no configurations": ({"x.txt": "a"}, {"dataset_config": "en"}, r"dataset_config='en': .* is not a dataset"),
    "sequence_length": ({"x.jsonl": GOOD}, {"sequence_length": 1}, r"sequence_length=1: must be at least 2 tokens"),
    "eval_share": ({"x.jsonl": GOOD}, {"eval_share": 1.0}, r"eval_share=1.0: must be in \[0, 1\)"),
    "eval_rows": ({"x.jsonl": GOOD}, {"eval_rows": 0}, r"eval_rows=0: must be at least 1"),
    "two evaluations": ({"x.jsonl": GOOD}, {"eval_share": 0.1, "eval_split": "test"}, r"excludes eval_dataset_name"),
    "nothing held out": ({"x.jsonl": GOOD}, {"eval_share": 1e-9}, r"eval_share=1e-09: has no row.*whole"),
    "no conversations": ({"x.jsonl": GOOD}, {"mode": "sft"}, r"messages_column='messages': .* no such.* 'text'"),
    "no conversations in text": ({"x.txt": "a"}, {"mode": "sft"}, r"messages_column='messages': .* is plain text"),
}  # fmt: skip


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("files, fields, message", ERRORS.values(), ids=ERRORS)
def test_errors_name_the_field_or_the_place(files, fields, message, streaming, tmp_path, tokenizer):
    for name, content in (files or {}).items():
        write(tmp_path / name, content)
    path = tmp_path / (next(iter(files)).split("/")[0] if files else "missing.jsonl")
    with pytest.raises(ValueError, match=f"(?s){message}"):
        built = build(tokenizer, path, **fields, streaming=streaming)
        list(islice(built.train, 3))


def test_half_of_a_surrogate_pair_in_a_conversation_is_named(tmp_path):
    write(tmp_path / "x.jsonl", '{"messages": [{"role": "user", "content": "\\udc80"}]}')
    with pytest.raises(ValueError, match="x.jsonl, line 1: column 'messages' holds half of a surrogate pair"):
        list(training_texts(DataArguments(dataset_name=str(tmp_path / "x.jsonl"))))


def test_a_pipe_is_not_waited_for(tmp_path, tokenizer):
    os.mkfifo(tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match=r"x.jsonl': is neither a file nor a folder"):
        build(tokenizer, tmp_path / "x.jsonl")


def test_fewer_rows_than_a_step_takes_are_an_error(tmp_path, tokenizer):
    path = write(tmp_path / "x.txt", "a" * 30)
    assert len(build(tokenizer, path, rows_per_step=2).train) == 2
    with pytest.raises(ValueError, match="has 2 rows of 16 tokens, fewer than the 3 of one step"):
        build(tokenizer, path, rows_per_step=3)
    assert build(tokenizer, path, rows_per_step=3, streaming=True).facts["rows"] is None  # it repeats


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"dataset_split": "nothing"}, r"dataset_split='nothing'.* has only 'train', 'test'"),
        ({"dataset_config": "nothing"}, r"dataset_config='nothing'.*'default'"),
        ({"text_column": "nothing"}, r"text_column='nothing': .*it has 'text', 'other'"),
        ({"text_column": "other"}, r"one.parquet, row 0: column 'other' must hold text"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_errors_of_a_repository(fields, message, streaming, tmp_path, tokenizer):
    with pytest.raises(ValueError, match=message):
        build(tokenizer, repository(tmp_path), **fields, streaming=streaming)
