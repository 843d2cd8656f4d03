"""Settings shared by all tests: one torch thread per worker, no network, reproducible property tests."""

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


@pytest.fixture(autouse=True)
def fresh_start():
    """Every test starts from the same random state and the library's usual messages, whatever ran before it."""
    torch.manual_seed(0)
    logging.set_verbosity_warning()
