"""Training data from a dataset repository of a Hub on the loopback interface, downloaded and streamed."""

import hashlib
import io
import json
import os
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import NAME, HubRequestHandler, HubServer


TEXTS = {
    "data/train-0.parquet": ["one", "two " * 9],
    "data/train-1.parquet": ["three"],
    "data/test-0.parquet": ["four"],
}
BUILD = """
import json, sys
from tnt_hf.recipes.arguments import DataArguments
from tnt_hf.recipes.data import train_tokenizer
from tnt_hf.recipes.sources import read_texts
from tnt_hf.recipes.training_data import build_datasets
found = []
for streaming in (False, True):
    data = DataArguments("user/data", streaming=streaming, sequence_length=8, eval_split="test")
    built = build_datasets(data, train_tokenizer(["bytes"], 257), seed=0, mode="pretrain")
    texts = list(read_texts("user/data", streaming=streaming))
    found.append({"texts": texts, "eval": len(built.eval), "digest": built.state["data"]})
try:
    list(read_texts("user/nothing"))
except ValueError as error:
    found.append(str(error))
json.dump(found, sys.stdout)
"""


class DatasetRequestHandler(HubRequestHandler):
    """The part of the protocol that `datasets` uses, byte ranges included."""

    ROUTES = (
        ("GET", rf"/api/datasets/{NAME}(/revision/(?P<revision>[^/]+))?", "model_info"),
        ("GET", rf"/api/datasets/{NAME}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", "tree"),
        ("HEAD", rf"/datasets/{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
        ("GET", rf"/datasets/{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    )

    def tree(self, repo: str, revision: str, folder: str | None):
        _, files = self.server.files(repo, revision)
        prefix = f"{folder}/" if folder else ""
        inside = [path for path in files if path.startswith(prefix)]
        found = {path: {"type": "file", "size": len(files[path])} for path in inside}
        found |= {prefix + path[len(prefix) :].split("/")[0]: {} for path in inside if "/" in path[len(prefix) :]}
        if "recursive=true" not in self.path.lower():
            found = {path: entry for path, entry in found.items() if "/" not in path[len(prefix) :]}
        entries = [
            {"type": "directory", "path": path, "oid": hashlib.sha1(files.get(path, b"")).hexdigest(), **entry}
            for path, entry in sorted(found.items())
        ]
        self.reply(200, entries)

    def reply(self, status: int, content: object = b"", headers: dict[str, str] | None = None):
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if wanted and isinstance(content, bytes):
            first, last = int(wanted[1]), min(int(wanted[2]), len(content) - 1)
            headers = (headers or {}) | {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
            status, content = 206, content[first : last + 1]
        super().reply(status, content, headers)


def parquet(texts: list[str]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), buffer)
    return buffer.getvalue()


@pytest.mark.slow
def test_a_dataset_of_the_hub_is_downloaded_or_streamed(tmp_path):
    files = {path: parquet(texts) for path, texts in TEXTS.items()} | {"README.md": b"# Card\n"}
    with HubServer() as server:
        server.RequestHandlerClass = DatasetRequestHandler
        server.commits["user/data"] = [("a" * 40, files)]
        environment = os.environ | {"HF_ENDPOINT": server.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        environment |= {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}

        def build() -> list:
            command = [sys.executable, "-c", BUILD]
            done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stderr[-3000:]
            return json.loads(done.stdout)

        *first, error = build()
        for found in first:
            assert found["texts"] == ["one", "two " * 9, "three"] and found["eval"] == 1
        assert error.startswith("dataset_name='user/nothing', dataset_config=None, dataset_split='train': ")

        changed = files | {"data/train-1.parquet": parquet(["five"])}
        server.commits["user/data"].append(("b" * 40, changed))
        *second, _ = build()
        for before, after in zip(first, second, strict=True):
            assert after["texts"][-1] == "five" and after["digest"] != before["digest"]
        assert {request for request in server.unknown if "/user/data" in request} == set()
