"""Settings shared by all tests: one torch thread per worker, no network, reproducible property tests."""

import gc
import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the Hub tests start processes of their own with a Hub of their own

import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers.utils import logging


torch.set_num_threads(1)  # the workers share the cores, and results do not depend on the machine
settings.register_profile(
    "tnt", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tnt")


def pytest_collection_finish():
    """What is imported stays; every run of a trainer collects what it can, which took longer than the run."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """At the end everything may go, or Triton reports leaks."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def fresh_start():
    """Every test starts from the same random state and the library's usual messages, whatever ran before it."""
    torch.manual_seed(0)
    logging.set_verbosity_warning()


@pytest.fixture(params=["chunk", "native"])
def form(request, monkeypatch):
    """What the memory operation is where nothing is said: operations of torch, or C where that can run."""
    from tnt_hf import memory_tnt, native_build_tnt

    reason = native_build_tnt.unavailable(torch.float64) if request.param == "native" else None
    if reason:
        pytest.skip(f"native code: {reason}")
    operation = memory_tnt.memory_chunkwise.__wrapped__
    monkeypatch.setitem(operation.__kwdefaults__, "implementation", "auto" if request.param == "native" else "chunk")
    return request.param
