"""TNT test-time memory for Hugging Face Transformers.

`import tnt_hf` registers `model_type="tnt"` with the Auto classes. The command line is the one exception: it imports
this package on its way and has to answer `--help` without waiting for torch, so there registration waits for the first
name.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .cache_tnt import TNTCache
    from .configuration_tnt import TNTConfig
    from .costs_tnt import flops_per_token, memory_state_bytes
    from .memory_tnt import MemoryState, memory_chunkwise, memory_naive
    from .modeling_tnt import (
        TNTForCausalLM,
        TNTForQuestionAnswering,
        TNTForSequenceClassification,
        TNTForTokenClassification,
        TNTModel,
        TNTPreTrainedModel,
    )
    from .projection_tnt import project_queries

__version__ = "0.1.0"

_AUTO_CLASSES = {
    "AutoModel": "TNTModel",
    "AutoModelForCausalLM": "TNTForCausalLM",
    "AutoModelForSequenceClassification": "TNTForSequenceClassification",
    "AutoModelForTokenClassification": "TNTForTokenClassification",
    "AutoModelForQuestionAnswering": "TNTForQuestionAnswering",
}
_MODULES = {
    "TNTConfig": "configuration_tnt",
    "TNTCache": "cache_tnt",
    "flops_per_token": "costs_tnt",
    "memory_state_bytes": "costs_tnt",
    **dict.fromkeys(("MemoryState", "memory_chunkwise", "memory_naive"), "memory_tnt"),
    "project_queries": "projection_tnt",
    **dict.fromkeys((*_AUTO_CLASSES.values(), "TNTPreTrainedModel"), "modeling_tnt"),
}
__all__ = [
    "MemoryState",
    "TNTCache",
    "TNTConfig",
    "TNTForCausalLM",
    "TNTForQuestionAnswering",
    "TNTForSequenceClassification",
    "TNTForTokenClassification",
    "TNTModel",
    "TNTPreTrainedModel",
    "flops_per_token",
    "memory_chunkwise",
    "memory_naive",
    "memory_state_bytes",
    "project_queries",
]


def register() -> None:
    """Make the Auto classes know TNT, and saved checkpoints carry its code; safe to call again."""
    import transformers

    for name, module in _MODULES.items():
        globals()[name] = getattr(import_module(f".{module}", __name__), name)
    transformers.AutoConfig.register("tnt", TNTConfig, exist_ok=True)
    for auto, name in _AUTO_CLASSES.items():
        getattr(transformers, auto).register(TNTConfig, globals()[name], exist_ok=True)
        globals()[name].register_for_auto_class(auto)
        # `transformers serve` and TRL look classes up as attributes of `transformers`. Its first import can leave two
        # module objects behind: the one that importers before us hold and the one that later imports find.
        for library in (transformers, sys.modules["transformers"]):
            setattr(library, name, globals()[name])
    TNTConfig.register_for_auto_class()


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register()
    return globals()[name]


def __dir__():
    return sorted({*globals(), *_MODULES})


def _started_by_command_line() -> bool:
    """Whether this process is `tnt ...`, or `python -m tnt_hf....` (with any options of Python before the -m)."""
    if sys.argv[:1] != ["-m"]:  # what Python puts there while it imports the package of the module it will run
        return bool(sys.argv) and Path(sys.argv[0]).stem == "tnt"
    after = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])]  # without the module's own arguments
    return bool(after) and after[-1].removeprefix("-m").startswith("tnt_hf.")


if not _started_by_command_line():
    register()
