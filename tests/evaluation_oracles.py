"""Small causal language models with known answers: what an evaluation must find is computed by hand.

Axis legend: B batch   T tokens   V vocabulary
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast


V = 257


def llama(**changes) -> LlamaForCausalLM:
    """A tiny Llama with random weights, the same one for the same arguments."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields = {"vocab_size": V, "max_position_embeddings": 512, "initializer_range": 0.1, "pad_token_id": None, **sizes}
    cls = changes.pop("cls", LlamaForCausalLM)
    return cls(LlamaConfig(**{**fields, **changes})).eval()


def uniform() -> LlamaForCausalLM:
    """Every token is as likely as any other: perplexity V at every position, accuracy of a lucky guess."""
    model = llama()
    torch.nn.init.zeros_(model.lm_head.weight)
    return model


class Oracle(LlamaForCausalLM):
    """Logits from `answers(ids)` in place of the network. Its cache holds nothing, so it is given all ids."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=self.answers(input_ids))

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs) -> dict[str, Tensor]:
        return {"input_ids": input_ids}


class Successor(Oracle):
    """Says that i + 1 follows token i: with probability 1/2 after 1 to 16 tokens, 1/4 after more."""

    def answers(self, ids: Tensor) -> Tensor:
        likely = torch.where(torch.arange(1, ids.shape[1] + 1) <= 16, 0.5, 0.25)[:, None].double()
        successor = F.one_hot((ids + 1) % V, V).double()
        return (successor * likely + (1 - successor) * (1 - likely) / (V - 1)).log()


class Lookup(Oracle):
    """Writes what followed the latest occurrence of the longest recent context, if that was at most `reach` tokens
    ago; otherwise `otherwise`. The distance from a token to the one that is read last is their difference in place."""

    reach, otherwise, context = 10**9, 0, 8

    def answers(self, ids: Tensor) -> Tensor:
        answers = torch.full_like(ids, self.otherwise)
        for row, tokens in enumerate(ids.tolist()):
            for t in range(len(tokens)):
                for size in range(min(self.context, t), 0, -1):
                    recent = tokens[t - size + 1 : t + 1]
                    # The token found, `place`, is t - place tokens before the last one.
                    first = max(size, t - self.reach)
                    found = [p for p in range(t, first - 1, -1) if tokens[p - size : p] == recent]
                    if found:
                        answers[row, t] = tokens[found[0]]
                        break
        return F.one_hot(answers, V).float() * 10
