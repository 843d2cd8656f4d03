"""What a model finds again over a distance: a pass key in filler text, and values by their keys.

A pass key is asked for through `generate`, so the decoding path is what is measured; recall is one forward pass. Both
are put together from token ids, so distances are exact in tokens whatever the tokenizer.

Axis legend
    N samples   T tokens of a sample   V vocabulary
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tnt_hf.recipes.evaluation_perplexity import buckets
from tnt_hf.recipes.memory_statistics import host_of
from tnt_hf.recipes.packing import IGNORED
from tnt_hf.recipes.recall import Recall


# The pass key of Mohtashami and Jaggi (arXiv 2305.16300), mentioned once.
FILLER = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
BEFORE, AFTER = " The pass key is", ". Remember it."
QUESTION = " What is the pass key? The pass key is"
LOWEST_KEY, KEYS = 10_000, 90_000  # five digits
PASSKEY_CHANCE = 1 / KEYS
MOST_PAIRS, TOKENS_PER_PAIR = 32, 16  # of a recall sample
FIRST_DISTANCES = 8  # tokens; every further bucket reaches twice as far


def begin_token(tokenizer) -> int | None:
    """The token every sample starts with, as every document of a training does: the tokenizer's bos, if it has one."""
    return None if tokenizer is None else tokenizer.bos_token_id


def encode(tokenizer, text: str) -> list[int]:
    """
    Token ids without special tokens.

    Raises:
        ValueError: the tokenizer cannot write the text, as one of a made-up vocabulary.
    """
    ids = tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if back.strip() != text.strip():
        raise ValueError(f"tokenizer: writes {text[:30]!r} as {back[:30]!r}; the task 'passkey' needs one for text")
    return ids


# ------------------------------------------------------------------------------------------------------------ pass key


def passkey_distances(shortest: int, longest: int) -> list[int]:
    """The shortest, 32, 128, 512 and so on, and the longest distance in tokens."""
    steps, step = [shortest], 32
    while step < longest:
        steps += [step] if step > shortest else []
        step *= 4
    return sorted({*steps, longest})


class PasskeySamples:
    """
    Prompts `[begin] filler, "The pass key is 12345", ". Remember it.", filler, question`, all of one length.

    Args:
        tokenizer: of a vocabulary that can write the text. context: tokens of a prompt and its answer together.

    Attributes:
        shortest, longest: possible distances, from the last token of the key to the last token of the prompt.

    Raises:
        ValueError: a tokenizer that cannot write the text, or a context with no room for it.
    """

    def __init__(self, tokenizer, context: int):
        self.begin = [] if begin_token(tokenizer) is None else [begin_token(tokenizer)]
        self.filler, self.before, self.after, self.question = (
            encode(tokenizer, text) for text in (FILLER, BEFORE, AFTER, QUESTION)
        )
        self.tokenizer, self.context = tokenizer, context
        # Room for the longest key on both sides; how many tokens a number takes differs from number to number.
        self.answer = max(len(encode(tokenizer, f" {key}")) for key in (10_000, 31_415, 77_777, 98_765))
        self.shortest = len(self.after) + len(self.question)
        self.longest = context - 2 * self.answer - len(self.begin) - len(self.before)
        if self.longest < self.shortest:
            needed = context + self.shortest - self.longest
            raise ValueError(f"context={context!r}: the task 'passkey' needs at least {needed} tokens")

    def draw(self, count: int, distance: int, generator: torch.Generator) -> tuple[Tensor, list[list[int]]]:
        """`count` prompts `[N, T]` int64 with the key `distance` tokens before the end, and their answers."""
        if not self.shortest <= distance <= self.longest:
            raise ValueError(f"distance={distance!r}: must be in [{self.shortest}, {self.longest}]")
        prompts, answers = [], []
        while len(prompts) < count:
            key = LOWEST_KEY + int(torch.randint(KEYS, (), generator=generator))
            answer = encode(self.tokenizer, f" {key}")
            if len(answer) > self.answer:
                continue  # longer than the room for it
            after = [*self.after, *self._filler(distance - self.shortest, generator), *self.question]
            length = self.context - self.answer
            before = length - len(self.begin) - len(self.before) - len(answer) - len(after)
            prompts.append([*self.begin, *self._filler(before, generator), *self.before, *answer, *after])
            answers.append(answer)
        return torch.tensor(prompts), answers

    def _filler(self, length: int, generator: torch.Generator) -> list[int]:
        start = int(torch.randint(len(self.filler), (), generator=generator))
        return [self.filler[(start + i) % len(self.filler)] for i in range(length)]


@contextmanager
def plain_generation(model: nn.Module) -> Iterator[None]:
    """Without the model's own settings of generation: greedy, no penalties, no early end."""
    from transformers import GenerationConfig

    host = host_of(model)
    own = host.generation_config
    host.generation_config = GenerationConfig()
    try:
        yield
    finally:
        host.generation_config = own


def passkey_result(
    model: nn.Module,
    tokenizer,
    context: int,
    samples: int,
    seed: int,
    batch_size: int,
    tell: Callable[[int], Any] = lambda samples_done: None,
) -> list[dict[str, Any]]:
    """The section `passkey` of evaluation.json: exact matches of the greedy continuation, by distance."""
    prompts = PasskeySamples(tokenizer, context)
    device, result = next(model.parameters()).device, []
    for distance in passkey_distances(prompts.shortest, prompts.longest):
        ids, answers = prompts.draw(samples, distance, torch.Generator().manual_seed(seed + distance))
        right = 0
        for part, expected in zip(ids.split(batch_size), _split(answers, batch_size)):
            with plain_generation(model), torch.inference_mode():
                out = model.generate(
                    part.to(device),
                    attention_mask=torch.ones_like(part, device=device),
                    max_new_tokens=prompts.answer,
                    do_sample=False,
                    pad_token_id=0,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
            refuse_strange(torch.stack(out.logits, 1), f"pass key at a distance of {distance}", part.shape[1])
            written = out.sequences[:, part.shape[1] :].tolist()
            right += sum(row[: len(answer)] == answer for row, answer in zip(written, expected))
            tell(len(part))
        result.append({"distance": distance, **accuracy(right, samples), "samples": samples})
    return result


def refuse_strange(logits: Tensor, what: str, read: int) -> None:
    """
    Raises:
        ValueError: logits `[N, T, V]` of which the largest is not finite; names the position, after `read` tokens.
    """
    strange = ~(logits < math.inf).all(-1)  # minus infinity is a token that is never written
    if bool(strange.any()):
        position = read + int(strange.any(0).nonzero()[0])
        raise ValueError(f"logits are not finite: {what}, position {position}; the model cannot be evaluated")


def accuracy(right: int, count: int) -> dict[str, Any]:
    """`accuracy` of `right` out of `count`, and its 95% `interval` (Wilson's, which has a width at 0 and 1 too)."""
    share, z = right / count, 1.959964
    center = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count**2))
    return {"accuracy": share, "interval": [center - half if right else 0.0, center + half if right < count else 1.0]}


def _split(rows: list, size: int) -> list[list]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


# -------------------------------------------------------------------------------------------------------------- recall


def recall_vocabulary(tokenizer, vocab_size: int, seed: int) -> tuple[Recall, Tensor]:
    """
    The task's size, and the token id `[task.vocab_size]` int64 of each of its symbols: without tokenizer the first
    ids as they are (the vocabulary of a model trained on `Recall`), otherwise ordinary tokens drawn by the seed.

    Raises:
        ValueError: fewer than 8 ordinary tokens.
    """
    if tokenizer is None:
        ordinary = torch.arange(vocab_size)
    else:
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        ordinary = torch.tensor([i for i in range(min(vocab_size, len(tokenizer))) if i not in special])
        ordinary = ordinary[torch.randperm(len(ordinary), generator=torch.Generator().manual_seed(seed))]
    full = Recall()
    if len(ordinary) < 8:
        raise ValueError(f"tokenizer: has {len(ordinary)} ordinary tokens, the task 'recall' needs at least 8")
    share = min(1.0, len(ordinary) / full.vocab_size)
    task = Recall(*(max(1, int(share * size)) for size in (full.keys, full.values, full.fillers)))
    return task, ordinary[: task.vocab_size]


def recall_length(tokenizer, context: int) -> int:
    """Tokens of a recall sample behind the begin token. Raises ValueError for a context shorter than a pair and its
    question."""
    length = (context - (begin_token(tokenizer) is not None)) // 2 * 2
    if length < 4:
        raise ValueError(f"context={context!r}: the task 'recall' needs at least 5 tokens")
    return length


@torch.inference_mode()
def recall_result(
    model: nn.Module,
    tokenizer,
    context: int,
    samples: int,
    seed: int,
    batch_size: int,
    tell: Callable[[int], Any] = lambda samples_done: None,
) -> tuple[list[dict[str, Any]], Recall]:
    """
    The section `recall` of evaluation.json: how often the likeliest of all tokens is the value of the key just read,
    by the distance between the key and its value; and the task.

    Raises:
        ValueError: a context shorter than a pair and its question, or a vocabulary that is too small.
    """
    task, vocabulary = recall_vocabulary(tokenizer, host_of(model).config.vocab_size, seed)
    begin, length = begin_token(tokenizer), recall_length(tokenizer, context)
    pairs = min(task.keys, MOST_PAIRS, max(1, length // TOKENS_PER_PAIR))
    drawn = task.samples(samples, length, pairs, seed)
    device, hits = next(model.parameters()).device, []
    for ids in vocabulary[drawn["input_ids"]].split(batch_size):
        prefix = ids.new_full((len(ids), 0 if begin is None else 1), 0 if begin is None else begin)
        logits = model(input_ids=torch.cat([prefix, ids], 1)[:, :-1].to(device), use_cache=False).logits
        refuse_strange(logits, "recall", 1)
        hits.append(logits.argmax(-1)[:, 1 - length :].cpu() == ids[:, 1:])
        tell(len(ids))
    scored = drawn["labels"][:, 1:] != IGNORED
    right, distance = torch.cat(hits)[scored], drawn["distance"][:, 1:][scored]
    result = []
    for first, last in buckets(length, FIRST_DISTANCES):
        inside = (distance >= first) & (distance <= last)
        if count := int(inside.sum()):
            found = accuracy(int(right[inside].sum()), count)
            result.append({"distance_from": first, "distance_to": last, **found, "questions": count})
    return result, task
