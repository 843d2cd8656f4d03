"""The models of suite `train`: TNT, Titans and Transformers of one shape, equal in parameters, and their check.

The shape is that of the recipes `tnt_150m`, `titans_150m` and `transformer_150m`. For a CPU it is shrunk to one layer
of a third of the width, with heads of 64 channels, chunks, window and reset interval as they are, and a vocabulary
that leaves the head its share of the work. The narrower a model, the larger the memory's part of a step: its work
grows with the width, that of the layers around it with the square. `narrow` has a sixth of the width and two layers.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tnt_hf import TNTConfig, TNTForCausalLM
from tnt_hf.presets import PRESETS
from tnt_hf.recipes import blocked_attention
from tnt_hf.recipes.benchmarks.gate import largest_distance, require_agreement


GEOMETRY = {"sliding_window": 512, "global_chunk_size": 2048, "local_reset_interval": 4096}
SHAPES: dict[str, dict[str, Any]] = {
    "150m": GEOMETRY
    | {"vocab_size": 32128, "hidden_size": 768, "intermediate_size": 1792, "num_hidden_layers": 12}
    | {"num_attention_heads": 12},
    "shrunk": GEOMETRY
    | {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 600, "num_hidden_layers": 1}
    | {"num_attention_heads": 4},
    "narrow": GEOMETRY
    | {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 300, "num_hidden_layers": 2}
    | {"num_attention_heads": 2},
    "tiny": {"sliding_window": 16, "global_chunk_size": 128, "local_reset_interval": 128}
    | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    | {"num_attention_heads": 2},
}
TRANSFORMER, WINDOW = "Transformer (SDPA)", "sliding window only"
BLOCKED = "Transformer (blocks)"  # the others' attention on a CPU, without a window
PLAIN_TITANS = "Titans C=8, no momentum or forgetting"
CONTESTANTS: dict[str, dict[str, Any]] = {
    **{f"TNT {{{size}}}": {"local_chunk_sizes": [size]} for size in (8, 16, 64, 128)},
    "TNT {4,8,16,32}": {"local_chunk_sizes": [4, 8, 16, 32]},
    **{f"Titans C={size}": PRESETS["titans"] | {"global_chunk_size": size} for size in (8, 16, 32, 64, 128)},
    PLAIN_TITANS: PRESETS["titans"] | {"global_chunk_size": 8, "memory_momentum": False, "memory_decay": False},
    TRANSFORMER: PRESETS["transformer"],
    BLOCKED: PRESETS["transformer"],
    WINDOW: PRESETS["sliding-window-only"],
}
# What the check replaces: a few tokens then pass resets, a window and chunks that stay unfinished. On a GPU heads are
# as wide as the ones that are timed.
CHECKED = {"cpu": SHAPES["tiny"] | {"global_chunk_size": 64}}
CHECKED["cuda"] = CHECKED["cpu"] | {"hidden_size": 128}
CHECKED_TOKENS = 150
ALIGNED = 8  # a GPU's matrix products of widths that are not multiples of 16 bytes take a slower kernel
# On a CPU in float64: sums in another order, and no more. On a GPU in float32, whose matrix products may round.
TOLERANCES = {"cpu": 1e-8, "cuda": 1e-3}
# By autocast, of the norm of every gradient, or of so much of the largest one's: rounding to 8 bits adds up to some
# percent, what is wrong to many.
ROUNDED, SMALLEST = 0.1, 1e-3
COMPILED = 1e-6  # the least of a compiled model's: its float32 loss is another sum, too
EXECUTIONS: dict[str, Callable] = {"eager": lambda model: model, "compiled": torch.compile}


@contextlib.contextmanager
def compiling(execution: str):
    """Around all that runs compiled contestants: they share their code, and after 8 compilations of a function torch
    would run the next model eager. After other lengths a length would be compiled otherwise, too."""
    if execution == "eager":
        yield
        return
    torch.compiler.reset()
    limits = {"recompile_limit": 512, "accumulated_recompile_limit": 4096, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits):
        yield


def config_of(name: str, shape: dict[str, Any], **more) -> TNTConfig:
    """The configuration of a contestant. The gradient bound is the recipes'."""
    fields = {"memory_grad_bound": 1.0, "max_position_embeddings": 32768} | shape | CONTESTANTS[name]
    return TNTConfig(**fields | more)


def parameters_of(config: TNTConfig) -> int:
    """Parameters of a model, without making it."""
    with torch.device("meta"):
        return TNTForCausalLM(config).num_parameters()


def equal_configs(names: list[str], shape: dict[str, Any], **more) -> dict[str, TNTConfig]:
    """The MLPs widened, by multiples of `ALIGNED` channels, until all have as many parameters as the largest of all
    contestants."""
    counts = {name: parameters_of(config_of(name, shape)) for name in CONTESTANTS}
    largest, per_channel = max(counts.values()), 3 * shape["hidden_size"] * shape["num_hidden_layers"]
    missing = {name: round((largest - counts[name]) / (per_channel * ALIGNED)) for name in names}
    widths = {name: shape["intermediate_size"] + ALIGNED * n for name, n in missing.items()}
    return {name: config_of(name, shape, intermediate_size=width, **more) for name, width in widths.items()}


def attention_of(name: str, attention: str) -> str:
    """The Transformer's is SDPA, which needs no mask there; the others' serves their windows."""
    blocked_attention.register()
    return {TRANSFORMER: "sdpa", BLOCKED: blocked_attention.NAME}.get(name, attention)


def build(name: str, config: TNTConfig, attention: str, seed: int) -> TNTForCausalLM:
    """A model in training mode, as it is timed."""
    torch.manual_seed(seed)
    return TNTForCausalLM._from_config(config, attn_implementation=attention_of(name, attention)).train()


def loss_and_gradients(model: TNTForCausalLM, ids: Tensor) -> list[Tensor | None]:
    """Of one row batch `[B, T]`: the loss and the gradient of every parameter."""
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    return [loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]


def check(
    name: str,
    attention: str,
    device: str,
    seed: int,
    memory_implementation: str = "auto",
    execution: str = "eager",
    autocast: torch.dtype | None = None,
) -> tuple[float, float | None]:
    """
    Loss and all gradients of a small model of that kind against the same weights with the memory computed token by
    token (`memory_implementation="naive"`) and attention as a plain softmax, in float64 on the CPU.

    Returns:
        The largest relative difference, and with `autocast` also the largest distance of a gradient in that precision
        relative to its norm.

    Raises:
        SystemExit: either is too large.
    """
    shape = CHECKED[device]
    model = build(name, config_of(name, shape, memory_implementation=memory_implementation), attention, seed)
    config = config_of(name, shape, memory_implementation="naive")
    naive = TNTForCausalLM._from_config(config, attn_implementation="eager").train()
    naive.load_state_dict(model.state_dict())
    ids = torch.randint(config.vocab_size, (2, CHECKED_TOKENS), generator=torch.Generator().manual_seed(seed))
    wanted, rounded = loss_and_gradients(naive.double(), ids), None
    model = model.to(device)
    if autocast is not None:
        with torch.autocast(device, autocast):
            found = loss_and_gradients(EXECUTIONS[execution](model), ids.to(device))
        rounded = max(largest_distance(found[:1], wanted[:1], 0.0), largest_distance(found[1:], wanted[1:], SMALLEST))
        if not rounded <= ROUNDED:
            raise SystemExit(
                f"{name} is wrong in {autocast}: a gradient is off by {rounded:.1e} of its norm, allowed {ROUNDED:.0e}"
            )
    if device == "cpu":
        model = model.double()
    found = loss_and_gradients(EXECUTIONS[execution](model), ids.to(device))
    tolerance = max(TOLERANCES[device], COMPILED if execution == "compiled" else 0)
    return require_agreement(name, found, wanted, tolerance), rounded
