"""Models on a device that is not the CPU. No GPU is needed: `accelerator` makes a device whose tensors refuse to be
mixed with others, and counts the values that are read back from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import MODES, tiny_config, tokens
from tiny_hosts import MODES as INJECTED

from tnt_hf import TNTForCausalLM


CASES = Path(__file__).parent / "accelerator_cases.py"
QUICK = ["default", "injected tnt"]


@pytest.mark.parametrize(
    "modes",
    [pytest.param(QUICK, marks=pytest.mark.long, id="quick"), pytest.param([], marks=pytest.mark.slow, id="all")],
)
def test_models_stay_on_their_device_and_wait_for_no_value(modes):
    """As on the CPU: losses, gradients, generated tokens, cached logits. Without padding neither a training step nor a
    decoded token reads a value back, for which a GPU would stop."""
    command = [sys.executable, CASES, *modes]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    answers = dict(map(json.loads, result.stdout.splitlines()))
    assert len(answers) >= 9 * (len(modes) or len(MODES) + len(INJECTED))
    assert not {case: wrong for case, wrong in answers.items() if wrong}


def test_shapes_without_values():
    """On the meta device, where sizes and operations of a step are counted."""
    with torch.device("meta"):
        model = TNTForCausalLM(tiny_config())
    ids = tokens(2, 40).to("meta")
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    assert out.logits.shape == (2, 40, 64)
    assert all(p.grad.shape == p.shape for p in model.parameters())
