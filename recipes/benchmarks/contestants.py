"""Other people's memories, loaded at run time from where the user has them. None of their code is kept here."""

import ast
import contextlib
import types
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._pytree import tree_map


TTT_FUNCTIONS = ("scan", "ln_fwd", "ln_fused_l2_bwd", "gelu_bwd")


class _FreezeBiases(ast.NodeTransformer):
    """ttt-lm's inner biases stay at their initial value (zero), as in a memory without biases."""

    frozen = {"b1_bar": "b1_init", "b2_bar": "b2_init", "b1_last": "b1_init", "b2_last": "b2_init"}

    def __init__(self):
        self.count = 0

    def visit_Assign(self, node: ast.Assign):
        name = node.targets[0].id if isinstance(node.targets[0], ast.Name) else None
        if name in self.frozen:
            self.count += 1
            node.value = ast.copy_location(ast.Name(self.frozen[name], ast.Load()), node.value)
        return node


def _silu_slope(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s + z * s * (1 - s)


def _gelu_slope(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(z * 0.5**0.5)) + z * torch.exp(-0.5 * z * z) * (2 * torch.pi) ** -0.5


def ttt_mlp(path: Path, matched: str | None) -> Callable:
    """The `ttt` method of ttt-lm-pytorch's TTTMLP, out of its `ttt.py` (commit cd831db), without importing the file
    (it needs an older transformers).

    Args:
        path: the file. matched: `None` runs it as published (tanh-GELU and inner biases, which a tnt-hf memory does
            not have); "silu" or "gelu" freezes the biases and swaps the activation, which makes it the very
            computation of `memory_chunkwise` and a little cheaper than published.

    Returns:
        f(q, k, v, lr, w1, w2, gain, bias, chunk_size) -> o, with q, k, v, o `[B, T, H, D]` and lr `[B, T, H]`.

    Raises:
        ValueError: the file does not hold what is expected.
    """
    tree = ast.parse(Path(path).read_text())
    functions = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name in TTT_FUNCTIONS]
    classes = [x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == "TTTMLP"]
    methods = [x for c in classes for x in c.body if isinstance(x, ast.FunctionDef) and x.name == "ttt"]
    if len(functions) != len(TTT_FUNCTIONS) or len(methods) != 1:
        raise ValueError(f"--ttt-lm must be the ttt.py of ttt-lm-pytorch, got {path}")
    for argument in methods[0].args.args:
        argument.annotation = None
    body = ast.Module([*functions, *methods], [])
    functional = F
    if matched is not None:
        freeze = _FreezeBiases()
        body = freeze.visit(body)
        if freeze.count < 4:
            raise ValueError(f"{path}: expected the four inner bias updates, found {freeze.count}")
        functional = types.SimpleNamespace(
            gelu=lambda z, approximate=None: (F.silu if matched == "silu" else F.gelu)(z)
        )
    scope = {"torch": torch, "F": functional, "tree_map": tree_map}
    exec(compile(ast.fix_missing_locations(body), str(path), "exec"), scope)
    if matched is not None:
        scope["gelu_bwd"] = _silu_slope if matched == "silu" else _gelu_slope

    def run(q, k, v, lr, w1, w2, gain, bias, chunk_size):
        B, T, H, D = q.shape
        layer = types.SimpleNamespace(W1=w1, W2=w2, b1=w1.new_zeros(H, 1, w1.shape[2]), b2=w2.new_zeros(H, 1, D))
        layer.ttt_norm_weight, layer.ttt_norm_bias, layer.num_heads, layer.head_dim = gain, bias, H, D
        layer.width, layer.mini_batch_size, layer.training, layer.layer_idx = H * D, chunk_size, True, 0
        layer.config = types.SimpleNamespace(scan_checkpoint_group_size=0)

        def chunks(x):  # [B, T, H, D] -> [B, H, chunks, C, D]
            return x.transpose(1, 2).reshape(B, H, -1, chunk_size, x.shape[-1])

        lr = chunks(lr[..., None]).transpose(-1, -2)
        ones = lr.new_ones(1, 1, 1, chunk_size, 1)  # its per-position factor token_eta; theta_i alone is the other one
        ones = ones.expand(B, H, lr.shape[2], chunk_size, 1)
        inputs = {
            "XQ": chunks(q),
            "XK": chunks(k),
            "XV": chunks(v),
            "eta": ones * lr,
            "token_eta": ones,
            "ttt_lr_eta": lr,
        }
        o, _ = scope["ttt"](layer, inputs, chunk_size, None, None)
        return o.view(B, T, H, D)

    return run


def titans_memory(
    dim: int, heads: int, chunk_size: int, expansion: float, max_lr: float, plain: bool = False
) -> torch.nn.Module | None:
    """titans-pytorch's NeuralMemory as it defaults (momentum, decay, LayerNorm + residual, 2-layer GELU MLP), with
    `batch_size=chunk_size` so that it takes gradients at the chunk's weights. `None` where it is not installed.

    `max_lr`: its default of 1 goes non-finite. `plain` makes it a function that a tnt-hf memory computes as well, by
    its own arguments: no momentum (it adds S once per chunk, not per token) and no LayerNorm with its residual (the
    gain is a fast weight there). Forgetting it always computes; `plain` starts it at 1% per chunk, for at its default
    of 50% nothing but zeros is left to compute with."""
    with contextlib.suppress(ImportError):
        from titans_pytorch import NeuralMemory

        return NeuralMemory(
            dim=dim,
            dim_head=dim // heads,
            heads=heads,
            chunk_size=chunk_size,
            batch_size=chunk_size,
            momentum=not plain,
            mem_model_norm_add_residual=not plain,
            init_decay_bias=-4.6 if plain else None,
            default_step_transform_max_lr=max_lr,
            default_model_kwargs={"depth": 2, "expansion_factor": expansion},
        )
    return None


def titans_parameters(theirs: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Its parameters in the order of `memory_op.SameNeuralMemory`. `memory_model` is only the mould of the heads'."""
    names = (
        ["retrieve_norm.weight", "store_norm.weight", "to_queries.weight", "to_keys.weight", "to_values.weight"]
        + ["combine_heads.weight", "retrieve_gate.0.weight", "to_adaptive_step.0.weight", "to_adaptive_step.0.bias"]
        + ["to_decay_factor.0.weight", "to_decay_factor.0.bias"]
        + ["memory_model_parameters.0", "memory_model_parameters.1"]
    )
    return [theirs.get_parameter(name) for name in names]
