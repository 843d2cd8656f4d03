"""Adapters on tiny injected models, and their training, which is imitated by giving every trainable tensor another
value; test_adapter_training.py trains."""

import torch
from peft import get_peft_model
from tiny import tokens
from tiny_hosts import OPEN_LIZA, OPEN_TNT, tiny_host

from tnt_hf.conversion.adapters import lora_config
from tnt_hf.conversion.inject import inject
from tnt_hf.conversion.injection_config import LiZAConfig, TNTInjectionConfig
from tnt_hf.conversion.schedules import mag_modules


IDS = tokens(2, 19)
MIX = TNTInjectionConfig(memory_gate="mix", memory_gate_init=0.5, global_chunk_size=8)
OPERATORS = {
    "liza": OPEN_LIZA,
    "learned": LiZAConfig(operator="gated_delta_rule", gate="learned", layers=[1], max_self_attn_length=4),
    "tnt": OPEN_TNT,
    "mix": MIX,
}


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def generated(model) -> torch.Tensor:
    return model.generate(input_ids=IDS[:, :9], max_new_tokens=6, do_sample=False, pad_token_id=0)


def train(model, seed: int = 0):
    """Another value for everything that an adapter trains, and for the scheduled weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        for module in mag_modules(model):
            module.weight.fill_(0.37 + 0.1 * seed)
    return model.eval()


def with_lora(kind: str = "llama", operator: str = "tnt", dtype=torch.float32, **overrides):
    model = inject(tiny_host(kind, dtype), OPERATORS[operator])
    return get_peft_model(model, lora_config(model, **overrides))
