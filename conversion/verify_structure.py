"""What every causal language model with a memory must do, trained or not: checks on one loaded model.

Axis legend
    B batch   T tokens   V vocabulary

Each check gets the model, ids `[1, T]`, their logits `[1, T, V]` in one pass, a seed, and a tolerance; it returns
whether it holds and what it measured. Where two calls compute the same shapes they are compared bit by bit; where
shapes differ, kernels add up in another order and the tolerance says what that explains (`rounding`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from tnt_hf import TNTConfig

from .verify_measures import difference, forward, in_pieces, padded


TRAINING_TOKENS = 256  # a pass that keeps activations costs memory
Result = tuple[bool, dict[str, Any]]


def boundary(config: Any, length: int) -> int:
    """The last place within `length` tokens where what a layer sees changes: window or global chunk, else the half."""
    places = [config.sliding_window, config.global_chunk_size] if config.memory_layer_indices else []
    return max((x for x in places if x is not None and x < length - 4), default=length // 2)


def crossed(config: Any, length: int) -> dict[str, bool]:
    """Which of the model's boundaries `length` tokens reach: what they do not reach is not checked."""
    found = {}
    if any("sliding" in kind for kind in config.layer_types):
        found[f"window of {config.sliding_window}"] = length > config.sliding_window
    for spec in config.memory_specs if config.memory_layer_indices else []:
        found[f"{spec.name} chunk of {spec.chunk_size}"] = length > spec.chunk_size
        if spec.reset_interval is not None:
            found[f"reset after {spec.reset_interval}"] = length > spec.reset_interval
    return found


def other_tokens(ids: Tensor, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Random ids that differ from `ids` everywhere."""
    return (ids + torch.randint(1, vocabulary, ids.shape, generator=generator).to(ids.device)) % vocabulary


def check_future(model: nn.Module, ids: Tensor, full: Tensor, seed: int, tolerance: float) -> Result:
    """Tokens after t do not change logits up to t, for several t."""
    T = ids.shape[1]
    generator = torch.Generator().manual_seed(seed)
    edge = boundary(model.config, T)
    places = sorted({t for t in (T // 4, edge - 1, edge, T - 2) if 0 <= t <= T - 2})
    worst, bitwise, noticed = 0.0, True, True
    for t in places:
        changed = ids.clone()
        changed[:, t + 1 :] = other_tokens(ids[:, t + 1 :], model.config.vocab_size, generator)
        got = forward(model, changed)
        bitwise = bitwise and torch.equal(got[:, : t + 1], full[:, : t + 1])
        worst = max(worst, float((got[:, : t + 1].double() - full[:, : t + 1].double()).abs().max()))
        noticed = noticed and not torch.equal(got[:, t + 1 :], full[:, t + 1 :])
    return bitwise and noticed, {"positions": places, "max_abs": worst, "later_logits_change": noticed}


def check_rows(model: nn.Module, ids: Tensor, full: Tensor, seed: int, tolerance: float) -> Result:
    """Another row of the batch does not change a row's logits."""
    other = other_tokens(ids, model.config.vocab_size, torch.Generator().manual_seed(seed))
    a, b = (forward(model, torch.cat([ids, second]))[0] for second in (ids.flip(1), other))
    return torch.equal(a, b), {"max_abs": float((a.double() - b.double()).abs().max())}


def splits(config: Any, length: int, seed: int) -> list[list[int]]:
    """Ways to feed `length` tokens in pieces: single tokens across a boundary, from the start, and random pieces."""
    edge = min(max(boundary(config, length), 8), length - 1)
    first = max(edge - 6, 1)
    single = min(12, length - first)
    across = [first, *[1] * single, length - first - single]
    start = min(17, length)
    early = [*[1] * start, 3, 17]
    early = early if sum(early) < length else [1] * start
    generator, pieces = torch.Generator().manual_seed(seed), []
    while sum(pieces) < length:
        piece = int(torch.randint(1, max(2, length // 4), (), generator=generator))
        pieces.append(min(piece, length - sum(pieces)))
    found = [across, [*early, length - sum(early)], pieces]
    return [[n for n in one if n > 0] for one in found]


def check_decode(model: nn.Module, ids: Tensor, full: Tensor, seed: int, tolerance: float) -> Result:
    """Prefill and token-by-token decoding with the cache give the logits of one forward pass."""
    found = [difference(in_pieces(model, ids, one)[0], full) for one in splits(model.config, ids.shape[1], seed)]
    return all(x.within(tolerance) for x in found), _worst(found, tolerance)


def check_padding(model: nn.Module, ids: Tensor, full: Tensor, seed: int, tolerance: float) -> Result:
    """Rows of a left- or right-padded batch have the logits that each has alone."""
    found, T = [], ids.shape[1]
    rows = [ids[0, : max(1, T - 5)], ids[0, T // 3 : T // 3 + max(1, T // 2)]]
    alone = [forward(model, row[None])[0] for row in rows]
    for side in ("left", "right"):
        padded_ids, mask = padded(rows, len(rows[0]) + 3, side)
        logits = forward(model, padded_ids, mask)
        found += [difference(logits[i][mask[i].bool()], alone[i]) for i in range(len(rows))]
    return all(x.within(tolerance) for x in found), _worst(found, tolerance)


def check_prefix(model: nn.Module, ids: Tensor, full: Tensor, seed: int, tolerance: float) -> Result:
    """The logits of a prefix are the first logits of the whole."""
    T = ids.shape[1]
    edge = boundary(model.config, T)
    lengths = sorted({n for n in (T // 3, edge, edge + 1, T - 1) if 0 < n < T})
    found = [difference(forward(model, ids[:, :n]), full[:, :n]) for n in lengths]
    return all(x.within(tolerance) for x in found), {"lengths": lengths} | _worst(found, tolerance)


def check_modes(model: nn.Module, ids: Tensor, full: Tensor, seed: int, tolerance: float) -> Result:
    """eval(), no_grad(), inference_mode() and train() give the same logits (dropout aside)."""
    ids = ids[:, :TRAINING_TOKENS]
    want = forward(model, ids)
    with torch.inference_mode():
        inference = model(input_ids=ids, use_cache=False).logits.clone()
    dropout = [(m, m.attention_dropout) for m in model.modules() if hasattr(m, "attention_dropout")]
    try:
        for module, _ in dropout:
            module.attention_dropout = 0.0
        model.train()
        with torch.enable_grad():
            trained = model(input_ids=ids, use_cache=False).logits.detach()
    finally:
        model.eval()
        for module, p in dropout:
            module.attention_dropout = p
    found = [difference(inference, want), difference(trained, want)]
    return all(x.within(tolerance) for x in found), {"bitwise": all(x.bitwise for x in found)} | _worst(
        found, tolerance
    )


def check_state(model: nn.Module, ids: Tensor, promised: int) -> Result:
    """The memory's state has the promised size, whatever the length of the text."""
    sizes = {}
    for n in sorted({max(1, ids.shape[1] // 2), ids.shape[1]}):
        cache = in_pieces(model, ids[:, :n], [n])[1]
        sizes[n] = {"state_bytes": cache.state_bytes(), "kv_bytes": cache.nbytes() - cache.state_bytes()}
    return all(x["state_bytes"] == promised for x in sizes.values()), {"promised": promised, "at_tokens": sizes}


def _worst(found: list, tolerance: float) -> dict[str, Any]:
    nan = [x for x in found if not x.finite]
    return {
        "finite": not nan,
        "max_abs": max((x.max_abs for x in found), key=lambda v: (v != v, v)),
        "worst_token": max((x.worst_token for x in found), key=lambda v: (v != v, v)),
        "tolerance": tolerance,
        "top1": min(x.top1 for x in found),
        "tie": max((x.tie for x in found), key=lambda v: (v != v, v)),
    }


# Promises that a RoPE whose frequencies depend on the length breaks by its nature, in the source as well.
OF_ANY_LENGTH = ("decode", "padding", "prefix")


def steady_positions(config: TNTConfig) -> int | None:
    """Tokens up to which the frequencies of RoPE do not depend on the length of the text; `None` if they never do."""
    kind = config.rope_parameters["rope_type"]
    if kind == "longrope":
        return config.rope_parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    return config.max_position_embeddings if kind == "dynamic" else None


CHECKS = (
    ("future", "tokens after t change no logit up to t, bit by bit", check_future),
    ("rows", "rows of a batch do not see each other, bit by bit", check_rows),
    ("decode", "decoding in pieces with the cache equals one forward pass", check_decode),
    ("padding", "left- and right-padded rows equal each row alone", check_padding),
    ("prefix", "the logits of a prefix are those of the whole text", check_prefix),
    ("modes", "eval(), inference_mode() and train() agree", check_modes),
)
