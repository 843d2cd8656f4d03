"""Which row comes when: the same for a seed, whatever the number of workers or ranks, and the same again on resume.

Run as a script, it trains on every rank of a process group and writes down what each was given.
"""

import json
import os
import subprocess
import sys
import weakref
from itertools import islice
from operator import itemgetter
from pathlib import Path

import datasets
import pytest
import torch
from tiny import later, tiny_model
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from tnt_hf.recipes.arguments import DataArguments
from tnt_hf.recipes.data import train_tokenizer
from tnt_hf.recipes.encoding import TextEncoder
from tnt_hf.recipes.packing import RowFormat
from tnt_hf.recipes.row_datasets import RowStream
from tnt_hf.recipes.sources import HubDataset
from tnt_hf.recipes.token_store import BATCH_DOCUMENTS
from tnt_hf.recipes.training_data import Datasets, build_datasets


LENGTH, SEED = 13, 3  # 16 rows: whole steps, so that an epoch of two ranks repeats none to fill up the last one
DOCUMENTS = [
    f"{name} {'la ' * n}" for n, name in enumerate("one two three four five six seven eight nine ten".split())
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def folder(tmp_path):
    return write_data(tmp_path / "data")


def write_data(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(5):
        rows = [{"text": text} for text in DOCUMENTS[2 * number : 2 * number + 2]]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def build(folder: Path, seed: int = SEED, **fields) -> Datasets:
    data = DataArguments(dataset_name=str(folder), **{"sequence_length": LENGTH, **fields})
    return build_datasets(data, train_tokenizer(["bytes"], 257), seed=seed, mode="pretrain")


def stream(folder: Path, seed: int | None = SEED, shuffled_rows: int = 8, passes: int | None = None) -> RowStream:
    stream = build(folder, seed=seed, streaming=True).train
    return RowStream(
        stream.source, stream.encoder, stream.format, seed=seed, shuffled_rows=shuffled_rows, passes=passes
    )


def ids(rows) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in rows]


# --- the order of a stream ------------------------------------------------------------------------------------------


def test_a_pass_has_the_rows_of_its_documents_once_in_an_order_of_its_own(folder):
    plain = ids(stream(folder, seed=None, passes=1))
    count = len(plain)
    first, second = (ids(islice(stream(folder), start, start + count)) for start in (0, count))
    tokens = lambda rows: sorted(token for row in rows for token in row)  # noqa: E731
    assert tokens(first) == tokens(second) == tokens(plain)
    assert first != plain and first != second  # files and rows are shuffled, in every pass anew
    files = [ids(islice(stream(folder, shuffled_rows=1), start, start + count)) for start in (0, count)]
    assert files[0] != files[1], "the files are, even if no row waits for another"
    assert ids(islice(stream(folder), 3 * count)) == ids(islice(stream(folder), 3 * count))
    assert ids(islice(stream(folder, seed=4), count)) != first


@pytest.mark.parametrize("shuffled_rows", [1, 5, 1000])
def test_shuffling_loses_and_repeats_no_row(shuffled_rows):
    rows = RowStream(None, None, RowFormat(LENGTH, True, False, 0), seed=0, shuffled_rows=shuffled_rows)
    numbers = list(range(100))
    found = list(rows._shuffled(iter(numbers), [0, 0]))
    assert sorted(found) == numbers and (found != numbers) == (shuffled_rows > 1)


def given_out(rows: RowStream, workers: int) -> list[list[int]]:
    return ids(DataLoader(rows, batch_size=1, num_workers=workers, collate_fn=itemgetter(0)))


def test_workers_divide_the_documents(folder):
    """A pass of two workers has every document once, in an order of its own that is always the same."""
    tokens = lambda rows: sorted(token for row in rows for token in row if token)  # noqa: E731
    expected = tokens(ids(stream(folder, seed=None, passes=1)))
    assert tokens(given_out(stream(folder, passes=1), 2)) == expected
    first = given_out(stream(folder, passes=1), 2)
    assert first == given_out(stream(folder, passes=1), 2) != given_out(stream(folder, passes=1), 0)

    for name in range(1, 5):
        (folder / f"{name}.jsonl").unlink()
    (folder / "0.jsonl").write_text('{"text": "the only document"}')  # one worker has nothing to do
    assert given_out(stream(folder, passes=2), 2) == given_out(stream(folder, passes=2), 0)


def test_workers_do_not_divide_a_dataset_of_the_hub(tmp_path):
    """`datasets` gives its shards to workers by itself where single rows are read: rows would be lost."""
    folder = write_data(tmp_path / "repo")  # `datasets` reads a folder as it does a repository of the Hub
    source = HubDataset(str(folder), None, "train", DataArguments(streaming=True), "pretrain")
    assert source.rows.num_shards == 5
    rows = RowStream(source, TextEncoder(train_tokenizer(["bytes"], 257)), stream(folder).format, seed=SEED, passes=1)
    tokens = [sorted(token for row in given_out(rows, workers) for token in row if token) for workers in (0, 2)]
    assert tokens[0] == tokens[1]
    plain = {document.content for document in source.documents()}
    assert plain == {document.content for document in source.documents(seed=1)} == set(DOCUMENTS)
    orders = {tuple(document.content for document in source.documents(seed)) for seed in (None, 1, 2)}
    assert len(orders) == 3  # the shards come in another order


def test_rows_of_a_dataset_of_the_hub_by_number(folder):
    source = HubDataset(str(folder), None, "train", DataArguments(), "pretrain")
    assert [document.content for document in source.documents()] == DOCUMENTS
    with pytest.raises(ValueError, match="row 0: column 'text' must hold"):
        (folder / "0.jsonl").write_text('{"text": ["no text"]}')
        for number in range(1, 5):
            (folder / f"{number}.jsonl").unlink()
        next(HubDataset(str(folder), None, "train", DataArguments(), "pretrain").documents())
    with pytest.raises(ValueError, match=r"dataset_split='nothing': Unknown split"):
        HubDataset(str(folder), None, "nothing", DataArguments(), "pretrain")


def test_a_stream_without_shuffling_gives_the_rows_by_number(folder):
    by_number = build(folder).train
    assert ids(stream(folder, seed=None, passes=1)) == ids(by_number[n] for n in range(len(by_number)))


class WatchedEncoder(TextEncoder):
    """An encoder that knows which of its documents are still held by anybody."""

    def encode(self, texts):
        encoded = super().encode(texts)
        self.known = [*getattr(self, "known", []), *(weakref.ref(x.ids) for x in encoded)]
        return encoded

    @property
    def held(self) -> int:
        return sum(reference() is not None for reference in self.known)


@pytest.mark.parametrize("packing", [True, False])
def test_a_stream_lets_go_of_documents_whose_last_token_is_in_no_row(packing, tmp_path):
    """Of 9 tokens (7, begin and end) in rows of 4, the last one has nothing to predict alone."""
    count = 4 * BATCH_DOCUMENTS
    (tmp_path / "many.jsonl").write_text('{"text": "7 bytes"}\n' * count)
    documents = build(tmp_path, streaming=True, sequence_length=4).train
    encoder = WatchedEncoder(documents.encoder.tokenizer)
    rows = iter(RowStream(documents.source, encoder, RowFormat(4, packing, False, 0), passes=1))
    read = count * 9 // 4 if packing else 2 * count  # all rows, and the stream is still open
    assert sum(1 for _ in islice(rows, read)) == read
    assert len(encoder.known) == count and encoder.held <= BATCH_DOCUMENTS


def test_the_state_tells_what_decides_the_order(folder):
    state = build(folder, streaming=True).state
    for change in ({"seed": 4}, {"sequence_length": 8}, {"packing": False}, {"eval_share": 0.5}, {"streaming": False}):
        assert build(folder, **{"streaming": True} | change).state != state
    assert build(folder, streaming=True).state == state
    (folder / "5.jsonl").write_text('{"text": "more"}\n')
    assert build(folder, streaming=True).state != state


# --- Trainer --------------------------------------------------------------------------------------------------------


class Recorder(Trainer):
    """Notes the rows of every micro-batch."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.seen = [*getattr(self, "seen", []), inputs["input_ids"].tolist()]
        return super().training_step(model, inputs, num_items_in_batch)


def train(built: Datasets, output: Path, steps: int = 6, resume: Path | None = None, **changes) -> Recorder:
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_steps": 3, "seed": 1}
    settings |= {"max_steps": steps, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 100}
    settings |= {"remove_unused_columns": False, "learning_rate": 1e-2}
    model = tiny_model(torch.float32, vocab_size=257, num_hidden_layers=1).train()
    trainer = Recorder(
        model, TrainingArguments(str(output), **settings | changes), built.collator, train_dataset=built.train
    )
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


@pytest.mark.parametrize("workers", [0, *later(2)])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_resumed_run_sees_the_same_batches_and_ends_with_the_same_weights(streaming, workers, folder, tmp_path):
    settings = {"dataloader_num_workers": workers, "steps": 8}
    whole = train(build(folder, streaming=streaming), tmp_path, **settings)
    resumed = train(build(folder, streaming=streaming), tmp_path, resume=tmp_path / "checkpoint-6", **settings)
    assert len(resumed.seen) == 4 and resumed.seen == whole.seen[-4:]
    assert sum(len(batch) for batch in whole.seen[:-4]) > len(build(folder).train)  # it was in the second epoch
    weights = resumed.model.state_dict()
    assert all(torch.equal(x, weights[name]) for name, x in whole.model.state_dict().items())


def test_rows_by_number_come_in_the_same_order_with_and_without_workers(folder, tmp_path):
    runs = [train(build(folder), tmp_path / f"{n}", steps=3, dataloader_num_workers=n) for n in (0, 2)]
    assert runs[0].seen == runs[1].seen


# What ranks are tested with: the data, and settings of `Trainer`.
RANKS = {
    "by number": ({}, {}),
    "stream": ({"streaming": True}, {}),
    "stream of single documents": ({"streaming": True, "packing": False}, {}),
    "a stream that every rank reads": ({"streaming": True}, {"accelerator_config": {"dispatch_batches": False}}),
}


def on_ranks(folder: Path, output: Path) -> None:
    """What a rank sees of each of `RANKS`, and what it sees when the run is resumed."""
    datasets.config.HF_DATASETS_CACHE = output / "cache"
    seen = {}
    for name, (data, settings) in RANKS.items():
        settings = {"gradient_accumulation_steps": 1, **settings}
        seen[name] = train(build(folder, **data), output / name, **settings).seen
        resume = output / name / "checkpoint-3"
        seen[f"{name}, resumed"] = train(build(folder, **data), output / name, resume=resume, **settings).seen
    (output / f"rank{os.environ['RANK']}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()  # left open, its threads can abort the process as it exits


@pytest.mark.slow
def test_two_ranks_divide_what_one_process_sees(folder, tmp_path):
    """Two ranks see the micro-batches of one process that accumulates over two, each one of the two."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*command, __file__, folder, tmp_path], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{n}.json").read_text()) for n in range(2)]
    for name, (data, _) in RANKS.items():
        alone = train(build(folder, **data), tmp_path / f"alone {name}").seen
        together = [batch for step in zip(ranks[0][name], ranks[1][name], strict=True) for batch in step]
        assert together == alone, name
        for rank in ranks:
            assert rank[f"{name}, resumed"] == rank[name][3:]


if __name__ == "__main__":
    on_ranks(*map(Path, sys.argv[1:3]))
