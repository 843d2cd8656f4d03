"""What a cache is called in arguments and outputs: `past_key_values`, and `cache` since transformers 5.24.

The code here says `cache`. Towards the library it goes by the name of the installed release, and callers may use both.

This file travels with every pushed checkpoint.
"""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast


CACHE_NAMES = ("cache", "past_key_values")
CACHE_NAME = next(field.name for field in fields(BaseModelOutputWithPast) if field.name in CACHE_NAMES)


def take_cache(arguments: dict[str, Any]) -> Any:
    """
    The cache among keyword arguments, which is taken out of them by whichever name it has; `None` if there is none.

    Raises:
        ValueError: there are two.
    """
    given = [x for name in CACHE_NAMES if (x := arguments.pop(name, None)) is not None]
    if len(given) > 1:
        raise ValueError("past_key_values and cache are two names of one argument: give one of them.")
    return given[0] if given else None


def with_cache_name(function: Callable) -> Callable:
    """
    A method that has an argument `cache`, which takes it as `past_key_values` as well and shows the library's name.
    Where that is `cache`, the other is warned of, as in the library.

    Raises:
        ValueError: when called with both.
    """

    @wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        if "past_key_values" in kwargs:
            kwargs["cache"] = take_cache(kwargs)
            if CACHE_NAME == "cache" and not torch.compiler.is_compiling():
                where = f"{type(args[0]).__name__}.{function.__name__}"
                message = f"`past_key_values` is deprecated for `{where}`. Use `cache` instead."
                warnings.warn(message, FutureWarning, stacklevel=2)
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    shown = [p.replace(name=CACHE_NAME) if p.name == "cache" else p for p in signature.parameters.values()]
    named.__signature__ = signature.replace(parameters=shown)
    # torch.compile counts how often it has compiled a code object, and gives up after a few: each method has its own.
    named.__code__ = named.__code__.replace(co_name=function.__name__)
    return named
