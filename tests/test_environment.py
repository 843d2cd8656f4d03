"""What a result says of where it comes from."""

import importlib.util
import shutil
import subprocess

import pytest

from tnt_hf.recipes import environment as original


@pytest.mark.parametrize("tracked", [True, False], ids=["a checkout", "installed below somebody's repository"])
def test_the_commit_is_that_of_this_code(tmp_path, tracked):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", *identity, "-C", tmp_path, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    if shutil.which("git") is None:
        pytest.skip("there is no git")
    copy = shutil.copy(original.__file__, tmp_path / "environment.py")
    git("init", "-q")
    (tmp_path / ".git" / "info" / "exclude").write_text("__pycache__\n")
    git("add", *(["environment.py"] if tracked else []))
    git("commit", "-q", "--allow-empty", "-m", "one")
    spec = importlib.util.spec_from_file_location("environment_copy", copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.environment()
    assert found["commit"] == (git("rev-parse", "HEAD") if tracked else None)
    assert found["uncommitted_changes"] == (False if tracked else None)
