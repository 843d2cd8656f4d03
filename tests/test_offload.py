"""Weights that do not fit are fetched when they are needed, from the CPU's memory or from disk: no number changes."""

import copy

import pytest
import torch
from tiny import few_modes, tiny_model, tokens
from tiny_hosts import OPEN_LIZA, OPEN_TNT, tiny_host

from tnt_hf import TNTForCausalLM
from tnt_hf.conversion import inject


accelerate = pytest.importorskip("accelerate", reason="pip install 'tnt-hf[train]'")

PLACES = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
PLACES |= {"model.layers.0": "cpu", "model.layers.1": "disk"}


def same(offloaded, model):
    ids = tokens(2, 21)
    with torch.no_grad():
        assert torch.equal(offloaded(ids).logits, model(ids).logits)
    settings = {"max_new_tokens": 16, "do_sample": False}  # beyond a reset, which takes W_init anew
    assert torch.equal(offloaded.generate(ids, **settings), model.generate(ids, **settings))


@pytest.mark.filterwarnings("ignore::UserWarning")
@few_modes
def test_a_layer_on_disk(changes, tmp_path):
    model = tiny_model(torch.float32, **changes)
    model.save_pretrained(tmp_path / "model")
    offloaded = TNTForCausalLM.from_pretrained(
        tmp_path / "model", device_map=PLACES, offload_folder=tmp_path / "weights", attn_implementation="sdpa"
    )
    assert any(p.is_meta for p in offloaded.model.layers[1].parameters())
    same(offloaded.eval(), TNTForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="sdpa").eval())


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_model(torch.float32),
        lambda: inject(tiny_host("llama", torch.float32), OPEN_TNT),
        lambda: inject(tiny_host("llama", torch.float32), OPEN_LIZA),
    ],
    ids=["TNT", "injected TNT", "injected LiZA"],
)
def test_every_weight_is_fetched(make):
    model = make().eval()
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in offloaded.parameters())
    same(offloaded, model)
