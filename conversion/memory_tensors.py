"""What a converted model starts its memories with: own projections as copies of the layer's, everything else closed.

Axis legend
    H memory heads   D memory head width   Q query channels   E hidden_size
"""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from tnt_hf.branch_tnt import TNTMemory
from tnt_hf.configuration_tnt import TNTConfig
from tnt_hf.conversion.shards import NewTensor
from tnt_hf.conversion.source import StoredTensor
from tnt_hf.convolution_tnt import TNTCausalConv
from tnt_hf.gate_tnt import TNTGateLinear, TNTMemoryGate, TNTRMSNorm
from tnt_hf.unit_tnt import TNTInitialWeights


# Float32 whatever the model's dtype, as `_keep_in_fp32_modules_strict` of the model has it.
WIDE = ("memories.", "gate.scale", "gate.weight")


def initial_memory_tensors(
    config: TNTConfig, layer_tensors: Mapping[str, StoredTensor], dtype: str, seed: int
) -> Iterator[NewTensor]:
    """
    Everything under `model.layers.N.memory.`, layer by layer, each made or read when it is written.

    Args:
        layer_tensors: base tensors by our names; q, k and v projections are copied where the shapes agree.
        dtype: of the model, as safetensors writes it; W_init, the gates and the memory's scale stay float32 at least.
        seed: of what is random: the weights of the inner learning rate, and W_init of a deep memory.
    """
    layers = config.memory_layer_indices
    wide = dtype if dtype == "F64" else "F32"
    with torch.device("meta"):  # of one layer: its names and shapes
        memory = TNTMemory(config, layers[0]) if layers else None
    for layer in layers:
        values = InitialValues(config, memory, layer, seed)
        for name, shape in values.shapes.items():
            origin = layer_tensors.get(f"model.layers.{layer}.self_attn.{name}")
            if name not in ("q_proj.weight", "k_proj.weight", "v_proj.weight") or origin.shape != shape:
                origin = partial(values.make, name)
            stored_as = wide if name.startswith(WIDE) else dtype
            yield NewTensor(f"model.layers.{layer}.memory.{name}", stored_as, shape, origin)


class InitialValues:
    """The start of one layer's memory by the rules of `TNTPreTrainedModel._init_weights`, reproducible by layer.

    Written out here because one tensor has to be made at a time, and because a converter should not import a model.
    """

    def __init__(self, config: TNTConfig, memory: TNTMemory, layer: int, seed: int):
        self.std, self.memory = config.initializer_range, memory
        self.shapes = {name: tuple(tensor.shape) for name, tensor in memory.state_dict().items()}
        self.first_seed = (seed * 100_003 + layer) * 1009

    def make(self, name: str) -> Tensor:
        """The float32 tensor `name` of this layer, the same one every time."""
        shape, std = self.shapes[name], self.std
        owner, _, leaf = name.rpartition(".")
        module = self.memory.get_submodule(owner)
        # Every tensor has a seed of its own: none depends on which others are made, or when.
        generator = torch.Generator().manual_seed(self.first_seed + list(self.shapes).index(name))

        def normal(scale: float) -> Tensor:
            return torch.randn(shape, generator=generator).mul_(scale)

        if isinstance(module, TNTInitialWeights):
            last = int(leaf) == len(module) - 1
            return normal((0.1 if last else 1.0) * shape[1] ** -0.5) if len(module) > 1 else torch.zeros(shape)
        if isinstance(module, TNTGateLinear):
            if leaf == "bias":
                return torch.full(shape, module.bias_start)
            return torch.zeros(shape) if module.zero_weight else normal(std)
        if isinstance(module, TNTCausalConv):
            newest = torch.zeros(shape)
            newest[..., -1] = 1
            return newest.add_(normal(std))
        if isinstance(module, TNTMemoryGate):
            return torch.full(shape, float(module.start))
        if isinstance(module, TNTRMSNorm) or leaf == "norm_weight":
            return torch.ones(shape)
        if leaf == "norm_bias":
            return torch.zeros(shape)
        if type(module) is nn.Linear:
            return normal(std)
        raise NotImplementedError(f"no initial value is known for {name} of {type(module).__name__}")
