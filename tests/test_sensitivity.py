"""Window sensitivity: each layer's error against one computed by hand, the choice of layers, table and plot."""

import sys

import pytest
import torch
from matplotlib.figure import Figure
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from tnt_hf.conversion.sensitivity import (
    choose_full_attention,
    loss_increases,
    plot,
    table,
    window_errors,
    window_losses,
)


SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": None,
}
SOURCES = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=9),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=12),
    "phi3": Phi3Config(**SIZES),
}


def source(name: str, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(SOURCES[name]).to(dtype).eval()


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(1))


def by_hand(model, row: torch.Tensor, window: int) -> list[float]:
    """Every attention module called again, alone, on the inputs it had, with a mask written out."""
    seen = {}
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda module, args, kwargs, out: seen.update({module.layer_idx: (module, kwargs, out[0])}),
            with_kwargs=True,
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(row, use_cache=False)
    for hook in hooks:
        hook.remove()
    T, own = row.shape[1], getattr(model.config, "sliding_window", None) or row.shape[1]
    mask = torch.tensor([[0 <= t - i < min(window, own) for i in range(T)] for t in range(T)])[None, None]
    errors = []
    for layer in range(model.config.num_hidden_layers):
        module, kwargs, full = seen[layer]
        with torch.no_grad():
            near = module(**{**kwargs, "attention_mask": mask})[0]
        ratio = (near - full)[0, window:].norm(dim=-1) ** 2 / full[0, window:].norm(dim=-1) ** 2
        errors.append(float(ratio.mean()))
    return errors


@pytest.mark.parametrize("name", SOURCES)
def test_errors_are_those_of_each_layer_narrowed_alone_on_the_inputs_of_the_full_model(name):
    model = source(name)
    errors = window_errors(model, ids(1, 23), 5)
    assert errors == pytest.approx(by_hand(model, ids(1, 23), 5), rel=1e-4)  # float32 sums in another order
    assert min(errors) > 1e-3


def test_the_rows_of_a_batch_count_alike():
    model = source("llama")
    one_by_one = [window_errors(model, row[None], 5) for row in ids(3, 23)]
    assert window_errors(model, ids(3, 23), 5) == pytest.approx([sum(x) / 3 for x in zip(*one_by_one)], rel=1e-6)


@pytest.mark.parametrize("window", [9, 12], ids=["its own", "a wider one"])
def test_a_window_that_changes_nothing_measures_zero(window):
    assert window_errors(source("mistral"), ids(1, 23), window) == [0.0, 0.0, 0.0]


def test_bfloat16_agrees_with_float32():
    """Two digits is what bfloat16 has."""
    errors = window_errors(source("llama", torch.bfloat16), ids(2, 31), 5)
    assert errors == pytest.approx(window_errors(source("llama"), ids(2, 31), 5), rel=0.05)


@pytest.mark.parametrize("positions, expected", [(2048, [512, 512, 76]), (400, [400, 400, 300])])
def test_a_long_text_is_measured_in_segments_of_bounded_length(positions, expected):
    """No longer than the model has positions for."""
    model, lengths = source("llama"), []
    model.config.max_position_embeddings = positions
    model.model.embed_tokens.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    window_errors(model, ids(1, 1100), 5)
    assert lengths == expected


def test_the_model_is_left_as_it_was():
    model = source("llama").train()
    before = model.config._attn_implementation, model(ids(1, 23)).logits
    window_errors(model, ids(1, 23), 5)
    window_losses(model, ids(1, 23), 5)
    assert model.training and model.config._attn_implementation == before[0]
    assert torch.equal(model(ids(1, 23)).logits, before[1])


def test_losses_are_those_of_a_model_whose_layers_are_narrowed():
    """All layers at once is what the library's own Mistral computes with a sliding window."""
    torch.manual_seed(0)
    wide = AutoModelForCausalLM.from_config(MistralConfig(**SIZES, sliding_window=None)).eval()
    near = AutoModelForCausalLM.from_config(MistralConfig(**SIZES, sliding_window=5)).eval()
    near.load_state_dict(wide.state_dict())
    row = ids(1, 23)

    def loss(model):
        with torch.no_grad():
            return float(F.cross_entropy(model(row).logits[0, 5:-1], row[0, 6:]))

    losses = window_losses(wide, row, 5, [[], [0], [0, 1, 2]])
    assert losses[0] == pytest.approx(loss(wide), rel=1e-5)
    assert losses[2] == pytest.approx(loss(near), rel=1e-5)
    assert len({round(x, 4) for x in losses}) == 3
    assert window_losses(wide, row, 5)[:2] == losses[:2]
    assert loss_increases(wide, row, 5)[0] == losses[1] - losses[0]


@pytest.mark.parametrize("count, layers", [(0, []), (1, [2]), (2, [0, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, 3])])
def test_the_layers_that_a_window_hurts_most_keep_full_attention(count, layers):
    assert choose_full_attention([0.2, 0.1, 0.3, 0.1], count) == layers


@pytest.mark.parametrize("count", [5, -1, True, 1.0])
def test_a_count_that_is_no_number_of_layers_is_refused(count):
    with pytest.raises(ValueError, match=f"count={count!r}"):
        choose_full_attention([0.2, 0.1, 0.3, 0.1], count)


def test_a_cost_that_is_no_number_chooses_nothing():
    with pytest.raises(ValueError, match=r"costs\[1\]=nan"):
        choose_full_attention([0.2, float("nan"), 0.3], 1)


@pytest.mark.parametrize(
    "text, window, named",
    [
        (ids(1, 6), 5, "input_ids has 6 tokens"),
        (ids(1, 23), 0, "window=0"),
        (ids(1, 23), True, "window=True"),
        (ids(23), 5, r"input_ids of shape \(23,\)"),
        (ids(1, 23).int(), 5, r"input_ids of shape \(1, 23\), torch.int32"),
    ],
)
def test_inputs_that_measure_nothing_are_refused(text, window, named):
    with pytest.raises(ValueError, match=named):
        window_errors(source("llama"), text, window)


def test_an_architecture_without_o_proj_is_refused():
    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=61))
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        window_errors(model, ids(1, 23), 5)


def test_the_table_shows_every_layer_its_bar_and_the_choice():
    lines = table([0.0096, 0.0003, 0.307, 0.284], [2]).splitlines()
    assert len(lines) == 5
    assert lines[3].split() == ["2", "0.307", "#" * 40, "full", "attention"]
    assert lines[2].split() == ["1", "0.0003"]
    assert lines[4].count("#") == round(40 * 0.284 / 0.307)


def test_bars_are_of_the_losses_where_these_choose():
    lines = table([0.5, 0.2, 0.4], [1], [0.001, 0.02, -0.03]).splitlines()
    assert lines[0].split("  ")[-1] == "# = loss added"
    assert lines[1].split() == ["0", "0.5", "0.001", "##"]
    assert lines[2].split() == ["1", "0.2", "0.02", "#" * 40, "full", "attention"]
    assert lines[3].split() == ["2", "0.4", "-0.03"], "one that the window improves has no bar"


@pytest.mark.parametrize("losses", [None, [0.001, 0.02] * 16])
@pytest.mark.parametrize("layers", [2, 32])
def test_the_picture_says_what_it_shows_and_all_of_it_fits(layers, losses, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))
    errors, losses = ([0.3, 0.1] * 16)[:layers], losses and losses[:layers]
    plot(errors, tmp_path / "errors.png", [1], losses)
    (axes,) = drawn[0].axes
    bars = {round(bar.get_x() + bar.get_width() / 2): bar for bar in axes.patches}
    assert [bars[l].get_height() for l in range(layers)] == (losses or errors)
    assert [l for l in bars if bars[l].get_facecolor() != bars[0].get_facecolor()] == [1]
    assert ("loss" in axes.get_title().lower()) == ("loss" in axes.get_ylabel()) == bool(losses)
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["window", "keeps full attention"]
    drawn[0].canvas.draw()
    edge = drawn[0].bbox
    for part in (axes.title, axes.xaxis.label, axes.yaxis.label, drawn[0].legends[0]):
        box = part.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= edge.x1 and box.y1 <= edge.y1, part


@pytest.mark.parametrize("chosen", [None, [1], [0, 1]])
def test_the_plot_is_a_picture(chosen, tmp_path):
    """Also with one kind of bar."""
    plot([0.1, 0.3], tmp_path / "errors.png", chosen)
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ValueError, match=r"errors\.png.*tnt-hf\[train\]"):
        plot([0.1], tmp_path / "errors.png")
    assert not (tmp_path / "errors.png").exists()


def test_errors_in_half_precision_are_summed_in_more():
    """Squares of large outputs are none of float16; a relative error does not know how large the outputs are."""
    model, errors = source("llama", torch.float16), []
    for _ in range(2):
        errors.append(window_errors(model, ids(2, 31), 5)[-1])
        model.model.layers[-1].self_attn.o_proj.weight.data.mul_(2**12)
    assert errors[0] == pytest.approx(errors[1], rel=1e-6)


def test_losses_in_half_precision_are_summed_in_more():
    model, row = source("llama", torch.bfloat16), ids(1, 300)
    with torch.no_grad():
        logits = model(row).logits[0, 5:-1].float()
    wanted = float(F.cross_entropy(logits, row[0, 6:]))
    assert window_losses(model, row, 5, layers=[[]]) == pytest.approx([wanted], rel=1e-6)
