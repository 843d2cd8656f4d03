"""Runs a module in a process that cannot import `tnt_hf`: python -I -S stranger.py SITE_PACKAGES MODULE ARGUMENT...

Started so, no current folder, no PYTHONPATH and no .pth file can bring the package back.
"""

import runpy
import sys
from importlib.util import find_spec


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    assert find_spec("tnt_hf") is None, "the package can be imported"
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
