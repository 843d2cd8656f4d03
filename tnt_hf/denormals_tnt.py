"""Denormal numbers, the ones nearest 0, taken for 0 while a memory's chunks run on the CPU.

A gate that forgets half at every token sends weights there within 126 tokens, and many processors take far longer for
each product with such a number. What is lost is below 1.2e-38 (float32). Travels with every pushed checkpoint.
"""

import functools
import sys
from collections.abc import Callable

import torch


SMALLEST = sys.float_info.min  # half of it is denormal


def without_denormals(function: Callable) -> Callable:
    """`function` under `torch.set_flush_denormal`, which is this thread's and its workers' and has no getter: where
    the arithmetic of Python itself, which is in the same mode, says that it is on already, it stays on."""

    @functools.wraps(function)
    def run(*args):
        if SMALLEST * 0.5 == 0 or not torch.set_flush_denormal(True):
            return function(*args)
        try:
            return function(*args)
        finally:
            torch.set_flush_denormal(False)

    return run
