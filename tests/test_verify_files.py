"""What `verify_conversion` finds in the files of a folder that was saved, or that somebody changed."""

import json
import shutil
from pathlib import Path

import pytest
from checkpoints import save_source

from tnt_hf import TNTForCausalLM
from tnt_hf.conversion import convert_checkpoint, verify_conversion


MEMORY = {"global_chunk_size": 8, "local_chunk_sizes": [4], "local_reset_interval": 16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path, Path]:
    """A Llama, its conversion and that saved elsewhere. Nobody changes these."""
    folder = tmp_path_factory.mktemp("folders")
    source = save_source(folder / "source")
    output = convert_checkpoint(source, folder / "output", **MEMORY, progress=False)
    TNTForCausalLM.from_pretrained(output).save_pretrained(folder / "saved")
    return source, output, folder / "saved"


def check(source: Path, output: Path, tokens: int | None = 16) -> dict[str, dict]:
    """The rows of the report by name."""
    return {row["name"]: row for row in verify_conversion(source, output, tokens=tokens, progress=False)["checks"]}


def failed(rows: dict[str, dict]) -> set[str]:
    return {name for name, row in rows.items() if row["status"] == "fail"}


def add_code(path: Path) -> None:
    path.write_text(path.read_text() + "print('more')\n")


CHANGES = {
    "code added": (add_code, "differs"),
    "garbage": (lambda path: path.write_bytes(b"\0garbage"), "differs"),
    "missing": (Path.unlink, "missing"),
}


@pytest.mark.parametrize("name", ["modeling_tnt.py", "scan_tnt.py"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_code_is_found_without_a_manifest(folders, tmp_path, change, name):
    source, _, saved = folders
    damage, said = CHANGES[change]
    broken = Path(shutil.copytree(saved, tmp_path / "broken"))
    damage(broken / name)
    rows = check(source, broken)
    assert failed(rows) == {"code"} and rows["manifest"]["status"] == "not applicable"
    (problem,) = rows["code"]["measured"]["problems"]
    assert problem.startswith(f"{name}: {said}")


def test_code_that_auto_map_names_must_be_ours(folders, tmp_path):
    source, _, saved = folders
    broken = Path(shutil.copytree(saved, tmp_path / "broken"))
    fields = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(fields | {"auto_map": {"AutoModelForCausalLM": "other.Model"}}))
    assert check(source, broken)["code"]["measured"]["problems"] == ["other.py: missing"]
    (broken / "other.py").write_text("class Model: ...")
    assert "tnt_hf" in check(source, broken)["code"]["measured"]["problems"][0]
    del fields["auto_map"]
    (broken / "config.json").write_text(json.dumps(fields))
    assert check(source, broken)["code"]["status"] == "not applicable"


def test_a_folder_saved_elsewhere_passes(folders):
    source, _, saved = folders
    rows = check(source, saved)
    assert not failed(rows) and rows["code"]["status"] == "pass"
