"""A stranger who pulls a model: a process that cannot import `tnt_hf` follows the model card and computes logits.

Usage: push_client.py REPO INPUTS RESULTS SITE_PACKAGES
"""

import contextlib
import io
import re
import sys
from pathlib import Path


def pull(repo: str, inputs: str, results: str, site_packages: str):
    sys.path.append(site_packages)
    sys.path.append(str(Path(__file__).parent))
    from hub_client import hide

    hide("tnt_hf", "triton")
    from importlib.util import find_spec

    assert find_spec("tnt_hf") is None
    from huggingface_hub import hf_hub_download
    from safetensors.torch import load_file, save_file

    card = Path(hf_hub_download(repo, "README.md")).read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", card, flags=re.MULTILINE | re.DOTALL)
    namespace, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "quick start", "exec"), namespace)
    assert namespace["path"] == repo, namespace["path"]
    assert printed.getvalue().startswith("Test-time memory is"), printed.getvalue()

    import torch

    with torch.inference_mode():
        logits = namespace["model"].eval()(load_file(inputs)["ids"]).logits
    assert type(namespace["model"]).__module__.startswith("transformers_modules.")
    save_file({"logits": logits}, results)


if __name__ == "__main__":
    pull(*sys.argv[1:])
