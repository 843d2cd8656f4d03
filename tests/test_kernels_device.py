"""The kernels on a real GPU, where there is one: against the recurrence in float64, at every width of heads.

Each width is a process of its own, which an illegal access ends. The script that it runs,
`python -m tnt_hf.recipes.benchmarks.kernels_gpu`, times them besides.
"""

import json
import subprocess
import sys

import pytest
import torch

from tnt_hf.recipes.benchmarks.kernels_gpu import CASES, MODEL


SIZES = ["--tokens", "2048", "--layer-tokens", "2048", "--heads", "2", "--rounds", "1"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_on_this_gpu(width, tmp_path):
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "tnt_hf.recipes.benchmarks.kernels_gpu", "--width", str(width), "--out", path]
    done = subprocess.run([*command, *SIZES], capture_output=True, text=True)
    found = json.loads(path.read_text())["cases"] if path.exists() else {}
    assert done.returncode == 0, f"after {list(found)}: {done.stderr[-2000:]}"
    assert list(found) == [MODEL, *CASES]
    for case, by_kind in found.items():
        for entry in by_kind.values():
            if "cannot run here" in entry.get("failed", ""):
                continue  # it says what the kernels refuse
            errors = entry["error"].values()
            for pair in errors if "training" in entry["error"] else [errors]:
                assert all(x <= limit for x, limit in zip(pair, entry["limits"], strict=True)), (case, entry)
