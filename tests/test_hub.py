"""A checkpoint on the Hub works for people who have never heard of this package.

One process pushes a tiny model to a loopback Hub; fresh processes that cannot import `tnt_hf`, with and without
triton, pull it by `trust_remote_code=True` and must compute the same bits.
"""

import json
import os
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
from hub_client import HEADS, REPO
from hub_server import HubServer
from safetensors.torch import load_file


ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.long
CLIENT = str(Path(__file__).with_name("hub_client.py"))
STRANGERS = {"with triton": [], "without triton": ["triton"]}


def start(arguments: list[str], home: Path, endpoint: str) -> subprocess.Popen:
    """A Python process whose Hub is the loopback server and whose caches are its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_", "HUGGINGFACE_"))}
    environment |= {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_TOKEN": "hf_loopback",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        cwd=home,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process: subprocess.Popen, server: HubServer):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, f"{output}\nrequests the server does not know: {server.unknown}"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Pushes once, then pulls with every kind of stranger at the same time: (server, folder of results)."""
    folder = tmp_path_factory.mktemp("hub")
    with HubServer() as server:
        homes = {name: folder / name.replace(" ", "_") for name in ("push", *STRANGERS)}
        for home in homes.values():
            home.mkdir()
        finish(start([CLIENT, "push", str(folder / "pushed.safetensors")], homes["push"], server.endpoint), server)
        pulls = []
        for name, hidden in STRANGERS.items():
            # -I and -S: no current folder, no PYTHONPATH and no .pth file can bring the package back.
            results = str(folder / f"{name}.safetensors")
            command = ["-I", "-S", CLIENT, "pull", results, sysconfig.get_paths()["purelib"], *hidden]
            pulls.append(start(command, homes[name], server.endpoint))
        for process in pulls:
            finish(process, server)
        assert not server.unknown
        yield server, folder


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_gets_identical_results(hub, stranger):
    if stranger == "with triton" and find_spec("triton") is None:
        pytest.skip("triton is not installed")
    _, folder = hub
    expected = load_file(folder / "pushed.safetensors")
    found = load_file(folder / f"{stranger}.safetensors")
    assert expected.keys() == found.keys()
    for name in expected:
        assert expected[name].isfinite().all()
        assert found[name].equal(expected[name]), name
    assert not expected["stage2_logits"].equal(expected["logits"]), "the chunk size had no effect: memory is inactive"


def test_the_repository_holds_code_weights_and_auto_map(hub):
    server, _ = hub
    _, files = server.files(REPO)
    travelling = {path.name for path in (ROOT / "tnt_hf").glob("*_tnt.py")}
    assert travelling | {"config.json", "generation_config.json", "model.safetensors", "README.md"} <= files.keys()
    for name in travelling:
        assert files[name] == (ROOT / "tnt_hf" / name).read_bytes()
    for repo, head in {REPO: "CausalLM", **{f"{REPO}-{head}": head for head in HEADS}}.items():
        _, files = server.files(repo)
        assert travelling <= files.keys()
        config = json.loads(files["config.json"])
        assert config["auto_map"] == {
            "AutoConfig": "configuration_tnt.TNTConfig",
            "AutoModel": "modeling_tnt.TNTModel",
            **{f"AutoModelFor{head}": f"modeling_tnt.TNTFor{head}" for head in ("CausalLM", *HEADS)},
        }
        assert config["architectures"] == [f"TNTFor{head}"]
