"""Pretrained checkpoints into TNT hybrids, and memory into live models.

Two doors, one engine. `convert_checkpoint` writes a standalone TNT checkpoint beside a Llama, Mistral, Qwen or Phi-3
one, and `verify_conversion` proves what it promises. `inject` puts a memory into any live causal LM, before `o_proj`.
Names are imported when they are first used, so importing the package costs nothing.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .adapters import get_tptt_model, lora_config, without_adapters
    from .convert import convert_checkpoint
    from .export import export_injected
    from .inject import inject, unload
    from .injection_config import LiZAConfig, TNTInjectionConfig
    from .language_model import language_model
    from .linear_attention import linear_attention
    from .liza import LiZAttention
    from .reload import load_injected
    from .schedules import LiZACallback
    from .sensitivity import choose_full_attention, window_errors
    from .verify import verify_conversion

_MODULES = {
    "convert_checkpoint": "convert",
    "verify_conversion": "verify",
    "window_errors": "sensitivity",
    "choose_full_attention": "sensitivity",
    "inject": "inject",
    "unload": "inject",
    "LiZAConfig": "injection_config",
    "TNTInjectionConfig": "injection_config",
    "language_model": "language_model",
    "LiZACallback": "schedules",
    "LiZAttention": "liza",
    "linear_attention": "linear_attention",
    "lora_config": "adapters",
    "without_adapters": "adapters",
    "load_injected": "reload",
    "get_tptt_model": "adapters",
    "export_injected": "export",
}
__all__ = [
    "LiZACallback",
    "LiZAConfig",
    "LiZAttention",
    "TNTInjectionConfig",
    "choose_full_attention",
    "convert_checkpoint",
    "export_injected",
    "get_tptt_model",
    "inject",
    "language_model",
    "linear_attention",
    "load_injected",
    "lora_config",
    "unload",
    "verify_conversion",
    "window_errors",
    "without_adapters",
]


class _Package(ModuleType):
    """`inject` and others name a function and the file that holds it: the package's attribute is the function,
    whichever was imported first."""

    def __setattr__(self, name, value):
        same_name = isinstance(value, ModuleType) and _MODULES.get(name) == name
        super().__setattr__(name, getattr(value, name) if same_name else value)

    def __dir__(self):
        return sorted({*super().__dir__(), *_MODULES})

    def __getattr__(self, name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        setattr(self, name, value)
        return value


sys.modules[__name__].__class__ = _Package
