"""Which layers need more than a window? Measured on the source model, before a token of training.

Axis legend
    T tokens of a segment   L decoder layers   W tokens of the window, the query's own included

Each layer's attention runs twice on the inputs it has in the full model: as it is, and narrowed to W tokens. What the
rest of the network then sees of the difference is

    error_l = mean over tokens t >= W of |o_proj(attn_W) - o_proj(attn)|^2 / |o_proj(attn)|^2

one forward pass for all layers. `window_losses` asks the dearer and more direct question, one pass per layer: what the
next token costs when one layer's attention is narrowed, or when one layer alone keeps its own.

They need not agree: a layer may change much that nobody uses, the more so the less the source was trained. So `auto:N`
chooses by losses, and the errors are what one pass can tell.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


NAME = "tnt_window_probe"
SHORTEST_SEGMENT = 512  # tokens: below this a pass is all overhead
BAR = 40  # characters
Attention = Callable[..., tuple[Tensor, Tensor | None]]


@contextmanager
def attention_function(model: PreTrainedModel, function: Attention) -> Iterator[None]:
    """`model` computes its attention by `function(module, query, key, value, attention_mask, **kwargs)` meanwhile.

    Raises:
        ValueError: the model's attention does not go through the library's attention interface.
    """
    before, training = model.config._attn_implementation, model.training
    ALL_ATTENTION_FUNCTIONS.register(NAME, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    try:
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise ValueError(f"model={type(model).__name__}: its attention cannot be replaced by name.")
        model.eval()
        yield
    finally:
        model.set_attn_implementation(before)
        model.train(training)
        del ALL_ATTENTION_FUNCTIONS._global_mapping[NAME], ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[NAME]


def narrowed(mask: Tensor | None, length: int, window: int, device: torch.device) -> Tensor:
    """`[1 or B, 1, T, T]` bool: what `mask` (`None`: causal) lets a query see, within the last `window` tokens."""
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    seen = ((distance >= 0) & (distance < window))[None, None]
    return seen if mask is None else seen & mask


def window_errors(
    model: PreTrainedModel, input_ids: Tensor, window: int, progress: Callable[[int, int], None] | None = None
) -> list[float]:
    """
    Relative squared error of each layer's attention output (after o_proj) when only this layer sees `window` tokens.

    The inputs of a layer are those it has in the full model. 0 for a layer whose own window is no wider.

    Args:
        model: a causal language model of the library with `o_proj` in its attention (Llama, Mistral, Qwen, ...).
        input_ids: `[B, T]` int64 without padding, more than `window` tokens. Rows go one by one, long ones in
            segments of at least four windows, so memory is bounded.
        window: tokens a query sees, its own included.
        progress: called with (segments done, segments) after each segment.

    Returns:
        One number per layer, the mean over the tokens at positions of at least `window` of their segment.

    Raises:
        ValueError: a window or text with which nothing can be measured, or a model whose attention has no `o_proj`.
    """
    parts = segments(model, input_ids, window)
    modules = _attention_modules(model)
    if missing := [name for name, module in modules if not hasattr(module, "o_proj")]:
        raise ValueError(
            f"model={type(model).__name__}: {missing[0]} has no o_proj to measure the window's effect at."
        )
    sums, tokens = [0.0] * len(modules), 0

    def compare(module, query, key, value, attention_mask, **kwargs):
        full, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        mask = narrowed(attention_mask, query.shape[2], window, query.device)
        near, _ = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        # Only the tokens that the window can change; the projection keeps the model's dtype, the sums do not.
        wide = torch.float64 if query.device.type in ("cpu", "cuda") else torch.float32  # others may not have it
        full_out, near_out = (module.o_proj(x[:, window:].flatten(2)).to(wide) for x in (full, near))
        ratio = (near_out - full_out).square().sum(-1) / full_out.square().sum(-1).clamp_min(torch.finfo(wide).tiny)
        sums[module.layer_idx] += float(ratio.sum())
        return full, None

    with torch.no_grad(), attention_function(model, compare):
        for done, segment in enumerate(parts, 1):
            model(input_ids=segment, use_cache=False, logits_to_keep=1)
            tokens += segment.shape[1] - window
            if progress is not None:
                progress(done, len(parts))
    return [x / tokens for x in sums]


def window_losses(
    model: PreTrainedModel, input_ids: Tensor, window: int, layers: list[list[int]] | None = None
) -> list[float]:
    """
    Next-token loss (nats, mean over predictions at positions of at least `window`) with some layers narrowed.

    Args:
        model, input_ids, window: as in [`window_errors`].
        layers: for each loss, the layers narrowed; by default none at all, then each layer alone.

    Returns:
        One loss per entry of `layers`: by default L + 1, `losses[1 + l] - losses[0]` is what narrowing layer l costs.
    """
    parts = segments(model, input_ids, window)
    count = len(_attention_modules(model))
    narrow: set[int] = set()

    def attend(module, query, key, value, attention_mask, **kwargs):
        if module.layer_idx in narrow:
            attention_mask = narrowed(attention_mask, query.shape[2], window, query.device)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    losses = []
    with torch.no_grad(), attention_function(model, attend):
        for chosen in [[], *([l] for l in range(count))] if layers is None else layers:
            narrow.clear()
            narrow.update(chosen)
            total, tokens = 0.0, 0
            for segment in parts:
                logits = model(input_ids=segment, use_cache=False).logits[0, window:-1].float()
                total += float(F.cross_entropy(logits, segment[0, window + 1 :], reduction="sum"))
                tokens += len(logits)
            losses.append(total / tokens)
    return losses


def loss_increases(model: PreTrainedModel, input_ids: Tensor, window: int) -> list[float]:
    """What narrowing each layer alone costs, nats per token, from L + 1 passes of [`window_losses`]."""
    whole, *narrow = window_losses(model, input_ids, window)
    return [loss - whole for loss in narrow]


def choose_full_attention(costs: list[float], count: int) -> list[int]:
    """
    The `count` layers with the largest costs, ascending; the earlier one of two equal ones.

    Raises:
        ValueError: `count` is negative or there are fewer layers, or a cost is NaN.
    """
    if unknown := [layer for layer, cost in enumerate(costs) if cost != cost]:
        raise ValueError(f"costs[{unknown[0]}]=nan: the probe overflowed; measure it in another dtype.")
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= len(costs):
        raise ValueError(f"count={count!r}: must be a number of layers from 0 to {len(costs)}.")
    return sorted(sorted(range(len(costs)), key=lambda l: -costs[l])[:count])


def table(errors: list[float], chosen: list[int] | None = None, losses: list[float] | None = None) -> str:
    """The errors as lines of text, and the losses beside them; the `chosen` layers are marked.

    Bars show the losses if there are any, as these are what layers are chosen by; one that a window lowers has none.
    """
    drawn = losses or errors
    top = max(drawn, default=0.0)
    lines = ["layer  window error" + "  loss added (nats)  # = loss added" * bool(losses)]
    for layer, error in enumerate(errors):
        bar = "#" * (round(BAR * max(drawn[layer], 0.0) / top) if top > 0 else 0)
        added = f"  {losses[layer]:17.4g}" if losses else ""
        mark = "full attention" if layer in (chosen or []) else ""
        lines.append(f"{layer:5}  {error:12.4g}{added}  {bar:{BAR}}  {mark}".rstrip())
    return "\n".join(lines)


def plot(
    errors: list[float], path: str | PathLike, chosen: list[int] | None = None, losses: list[float] | None = None
) -> None:
    """
    Write the losses, or if there are none the errors, as a bar chart in which the `chosen` layers are orange. The
    file's suffix decides the format, such as `.png`.

    Raises:
        ValueError: matplotlib, which is in the extra `train`, is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"path={str(path)!r}: a plot needs matplotlib: pip install 'tnt-hf[train]'.") from error
    figure = Figure(figsize=(max(4.0, 0.25 * len(errors) + 1.5), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    kept = set(chosen or [])
    for color, name, layers in (
        ("tab:blue", "window", [l for l in range(len(errors)) if l not in kept]),
        ("tab:orange", "keeps full attention", sorted(kept)),
    ):
        if layers:  # of no bars there is no legend
            axes.bar(layers, [(losses or errors)[l] for l in layers], color=color, label=name)
    # Short, for a picture of few layers is narrow.
    if losses:
        axes.set(title="Loss added by a window, per layer", ylabel="loss added (nats per token)")
    else:
        axes.set(title="Window error of each layer", ylabel="relative squared error")
    axes.set_xlabel("layer")
    if kept:
        figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=120)


def print_progress(done: int, total: int) -> None:
    """One line on standard error that counts segments."""
    print(f"\rwindow errors: {done}/{total} segments", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _attention_modules(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """The attention of every decoder layer, in order."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "layer_idx", None), int) and name.rpartition(".")[2] in ("self_attn", "attn"):
            found[module.layer_idx] = (name, module)
    count = model.config.num_hidden_layers
    if sorted(found) != list(range(count)):
        raise ValueError(f"model={type(model).__name__}: found attention in layers {sorted(found)} of {count}.")
    return [found[l] for l in range(count)]


def segments(model: PreTrainedModel, input_ids: Tensor, window: int) -> list[Tensor]:
    """What is measured of rows `[B, T]`: parts `[1, n]` of more than `window + 1` tokens each."""
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f"window={window!r}: must be a positive integer (tokens).")
    if input_ids.ndim != 2 or input_ids.dtype != torch.long:
        raise ValueError(f"input_ids of shape {tuple(input_ids.shape)}, {input_ids.dtype}: must be [B, T] int64.")
    most = getattr(model.config, "max_position_embeddings", None) or input_ids.shape[1]
    length = min(max(4 * window, SHORTEST_SEGMENT), most)
    parts = [part for row in input_ids.split(1) for part in row.split(length, 1) if part.shape[1] > window + 1]
    if not parts:
        raise ValueError(
            f"input_ids has {input_ids.shape[1]} tokens (segments of at most {length}), which a window={window} does"
            " not narrow: give a longer text or a smaller window."
        )
    return parts
