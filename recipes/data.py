"""Data of the demo: the source text of Python's standard library, a byte-level BPE, and synthetic recall.

Everything is a function of the files found and of a seed: files are read in the order of their names, and which are
held out follows from a hash of the name, so it does not change when other files come or go.

Axis legend: N samples   T tokens   P key-value pairs of a sample
"""

import hashlib
import os
import sysconfig
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor


# Left out: tests, installed packages, and folders whose files are tables or help texts rather than programs.
SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idle_test",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
END_OF_TEXT = "<|endoftext|>"
IGNORED = -100  # label of a token that is not scored, as in transformers


@dataclass
class Corpus:
    """Texts by relative file name, in the order of the names, and what happened while they were read."""

    train: dict[str, str] = field(default_factory=dict)
    held_out: dict[str, str] = field(default_factory=dict)
    other_encoding: list[str] = field(default_factory=list)  # not UTF-8, decoded as the file declares (PEP 263)
    unreadable: list[str] = field(
        default_factory=list
    )  # neither UTF-8 nor what it declares, or no permission: left out

    def describe(self) -> dict:
        """Counts for a report: files, characters, and how many files needed another encoding or were left out."""
        return {
            "train_files": len(self.train),
            "train_characters": sum(map(len, self.train.values())),
            "held_out_files": len(self.held_out),
            "held_out_characters": sum(map(len, self.held_out.values())),
            "files_in_another_encoding": len(self.other_encoding),
            "files_left_out_as_unreadable": len(self.unreadable),
        }


def source_files(root: Path) -> list[Path]:
    """All `.py` files below `root` without `SKIPPED_FOLDERS`, in the order of their relative names."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def is_held_out(name: str, share: float) -> bool:
    """Whether a file belongs to the held-out part: a hash of its name falls into the first `share` of all hashes."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") < share * 2**64


def read_corpus(root: str | Path | None = None, held_out: float = 0.05, min_characters: int = 1) -> Corpus:
    """Reads Python source text, from the standard library of the running interpreter unless `root` names a folder.

    Raises:
        ValueError: `held_out` is not in (0, 1), or `root` holds less text than `min_characters` or no held-out file.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be in (0, 1), got {held_out!r}")
    root = Path(sysconfig.get_paths()["stdlib"] if root is None else root)
    corpus = Corpus()
    for path in source_files(root):
        name = path.relative_to(root).as_posix()
        try:
            raw = path.read_bytes()
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                with tokenize.open(path) as file:
                    text = file.read()
                corpus.other_encoding.append(name)
        except (UnicodeDecodeError, SyntaxError, OSError):  # SyntaxError: an encoding declaration nobody knows
            corpus.unreadable.append(name)
            continue
        part = corpus.held_out if is_held_out(name, held_out) else corpus.train
        part[name] = text.replace("\r\n", "\n")
    characters = sum(map(len, corpus.train.values()))
    if characters < min_characters or not corpus.held_out:
        raise ValueError(
            f"corpus {str(root)!r} must hold at least {min_characters} characters of Python source to train on and a"
            f" held-out file, found {characters} characters and {len(corpus.held_out)} held-out files"
        )
    return corpus


def train_tokenizer(texts, vocab_size: int):
    """Byte-level BPE trained on `texts`, as a tokenizer of transformers. Every byte has a token, so any text fits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 1:
        raise ValueError(
            f"vocab_size must be at least {len(alphabet) + 1} (256 bytes and {END_OF_TEXT}), got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def windows(texts, tokenizer, length: int) -> tuple[Tensor, int]:
    """Cuts every text into windows of `length` tokens that never cross from one file into another.

    A file's first window starts with `END_OF_TEXT`, its last one ends with it and overlaps the one before, so that no
    token of a file of at least `length` tokens is lost; shorter files are left out.

    Returns:
        (windows `[N, length]` int64 in the order of the texts, tokens of the files left out).
    """
    end, rows, lost = tokenizer.eos_token_id, [], 0
    for ids in tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]:
        ids = torch.tensor([end, *ids, end])
        if len(ids) < length:
            lost += len(ids)
            continue
        starts = [*range(0, len(ids) - length, length), len(ids) - length]
        rows += [ids[start : start + length] for start in starts]
    if not rows:
        raise ValueError(f"length={length!r}: no text has that many tokens")
    return torch.stack(rows), lost


@dataclass(frozen=True)
class Recall:
    """Multi-query associative recall: pairs (key, value) are shown once, and later each key is asked for once.

    A sample is T/2 slots of two tokens. P of them show a pair, P later ones repeat the pair, and only the repeated
    value is scored; the rest is filler. The token ids are keys, then values, then `fillers` symbols.
    """

    keys: int = 64
    values: int = 64
    fillers: int = 16

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.keys + self.values + self.fillers

    @property
    def chance(self) -> float:
        """Accuracy of a model that knows that a value comes next, but not which."""
        return 1 / self.values

    def samples(self, count: int, length: int, pairs: int, seed: int) -> dict[str, Tensor]:
        """`input_ids`, `labels` and `distance`, each `[N, T]` int64 with T = `length`.

        `labels` is the value where it is scored and -100 elsewhere (transformers shifts them). `distance` is, at the
        same places, how many tokens before the question's key the value was shown (the key is the last token the model
        sees before it answers), and 0 elsewhere.
        """
        slots = length // 2
        if length % 2 or not 0 < 2 * pairs <= slots or pairs > self.keys:
            raise ValueError(
                f"pairs={pairs!r} needs an even length >= {4 * pairs} and {pairs} keys, got {length!r}, {self.keys}"
            )
        generator = torch.Generator().manual_seed(seed)
        rand = lambda n: torch.rand(count, n, generator=generator)  # noqa: E731
        shown, asked = rand(slots).argsort(1)[:, : 2 * pairs].view(count, pairs, 2).sort(-1).values.unbind(-1)
        keys = rand(self.keys).argsort(1)[:, :pairs]
        values = self.keys + torch.randint(self.values, (count, pairs), generator=generator)
        ids = torch.randint(self.keys + self.values, self.vocab_size, (count, length), generator=generator)
        for slot in (shown, asked):
            ids.scatter_(1, 2 * slot, keys).scatter_(1, 2 * slot + 1, values)
        labels = torch.full_like(ids, IGNORED).scatter_(1, 2 * asked + 1, values)
        distance = torch.zeros_like(ids).scatter_(1, 2 * asked + 1, 2 * asked - (2 * shown + 1))
        return {"input_ids": ids, "labels": labels, "distance": distance}
