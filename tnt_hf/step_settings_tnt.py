"""What a configuration says of the memories' steps: the kind of kernels, inner rates, bound and target of forgetting.

Axis legend
    C tokens per chunk

This file travels with every pushed checkpoint.
"""

from typing import Any, NamedTuple

from .configuration_tnt import TNTConfig
from .inputs_tnt import check_number


CAP_TOKENS = 64  # see `lr_factors`


def lr_factors(config: TNTConfig) -> list[float]:
    """The factor of theta for each memory, by `memory_lr_scaling` and the chunk size it was trained with.

    A chunk is one gradient step with the rate sum_i theta_i, which diverges beyond theta C |a|^2 = 2 where keys
    are alike. "capped" lets no chunk step further than one of 64 tokens, the largest that recall was measured with.
    """
    fields = vars(config)  # its attributes are slow to read, and this is asked for with every token
    kind, sizes = fields["memory_lr_scaling"], fields["memory_train_chunk_sizes"]
    sizes = [spec.chunk_size for spec in config.memory_specs] if sizes is None else sizes  # as saving fills them in
    return [C**-0.5 if kind == "train_chunk" else min(1.0, CAP_TOKENS / C) if kind == "capped" else 1.0 for C in sizes]


class StepSettings(NamedTuple):
    """What a configuration says of the memories' steps. No weight depends on it, so it may change while a model lives:
    the model hands it to all layers in every call. A memory that peft copied has a configuration of its own."""

    implementation: str
    rates: tuple[float, ...]  # the largest theta of each memory
    decay_target: str
    grad_bound: float | None

    @classmethod
    def of(cls, config: TNTConfig) -> "StepSettings":
        """Raises `ValueError` for a rate or bound that is none."""
        fields = vars(config)  # its attributes are slow to read, and this is asked for with every token
        check_number("memory_max_lr", largest := fields["memory_max_lr"])
        if (bound := fields["memory_grad_bound"]) is not None:
            check_number("memory_grad_bound", bound)
        rates = tuple(largest * factor for factor in lr_factors(config))
        return cls(fields["memory_implementation"], rates, fields["memory_decay_target"], bound)

    @property
    def options(self) -> dict[str, Any]:
        """Of [`memory_chunkwise`]."""
        return {"decay_target": self.decay_target, "grad_bound": self.grad_bound}
