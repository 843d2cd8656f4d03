"""What `verify_conversion` finds in the files of a folder that was saved, or that somebody changed."""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import save_source
from tiny import later

from tnt_hf import TNTConfig, TNTForCausalLM, modeling_tnt
from tnt_hf.conversion import convert_checkpoint, verify, verify_command, verify_conversion
from tnt_hf.conversion.files import write_text
from tnt_hf.conversion.verify_measures import addresses, move_to
from tnt_hf.conversion.verify_probe import probe_ids


MEMORY = {"global_chunk_size": 8, "local_chunk_sizes": [4], "local_reset_interval": 16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path, Path]:
    """A Llama, its conversion (shards unread) and that saved elsewhere. Nobody changes these."""
    folder = tmp_path_factory.mktemp("folders")
    source = save_source(folder / "source")
    output = convert_checkpoint(source, folder / "output", **MEMORY, check=False, progress=False)
    TNTForCausalLM.from_pretrained(output).save_pretrained(folder / "saved")
    return source, output, folder / "saved"


@pytest.fixture
def converted(folders, tmp_path) -> Path:
    """A copy of the conversion to change."""
    return Path(shutil.copytree(folders[1], tmp_path / "converted"))


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


@pytest.mark.parametrize("name", ["modeling_tnt.py", *later("scan_tnt.py")])
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


@pytest.mark.long
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


@pytest.mark.parametrize("size", ["5GB", *later("20KB")])
def test_a_model_saved_into_the_converted_folder_passes(folders, converted, size, monkeypatch):
    def watched(model, wanted):
        move_to(model, wanted)
        assert wanted and wanted.items() <= addresses(model).items()
        moved.append(model)

    moved = []
    monkeypatch.setattr(verify, "move_to", watched)
    TNTForCausalLM.from_pretrained(converted).save_pretrained(converted, max_shard_size=size)
    rows = check(folders[0], converted)
    assert not failed(rows) and rows["manifest"]["status"] == "not applicable"
    assert rows["manifest"]["reason"].startswith("saved over after the conversion") and len(moved) == 1
    parser = argparse.ArgumentParser()
    verify_command.add_arguments(parser)
    options = [str(folders[0]), str(converted), "--tokens", "16", "--record-digests"]
    assert verify_command.run(parser.parse_args(options)) == 0, "of files that are gone"


def test_weights_are_compared_at_the_same_addresses(folders):
    """Some BLAS round a product by where in memory its matrix lies, which another size of shards changes."""
    source, result = (TNTForCausalLM.from_pretrained(folders[1]) for _ in range(2))
    for model, floats in ((source, 12), (result, 3)):  # 48 and 12 bytes behind where torch puts a tensor
        p = model.lm_head.weight
        p.data = torch.cat([p.new_zeros(floats), p.detach().flatten()])[floats:].view_as(p)
    for p in source.model.layers[0].parameters():
        p.data = p.data.clone()
    before, weights = addresses(result), {name: p.clone() for name, p in result.named_parameters()}
    wanted = addresses(source)
    places = {name: p.data_ptr() for name, p in result.named_parameters()}
    move_to(result, {name: n for name, n in wanted.items() if ".memory." not in name})
    for name, p in result.named_parameters():
        assert torch.equal(p, weights[name]) and p.is_contiguous() and p.requires_grad
        assert addresses(result)[name] == (before if ".memory." in name else wanted)[name], name
        if before[name] == wanted[name]:
            assert p.data_ptr() == places[name], "nothing is copied that lies right"
    assert (before["lm_head.weight"], wanted["lm_head.weight"]) == (12, 48)


def test_a_folder_that_lost_its_shards_was_not_saved_over(folders, converted):
    for path in converted.glob("model-base-*"):
        path.unlink()
    assert failed(check(folders[0], converted)) >= {"manifest", "finite"}
    for path in converted.glob("*.safetensors"):
        path.unlink()
    assert failed(check(folders[0], converted)) >= {"manifest", "finite"}


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "rope, positions, found",
    [
        (DYNAMIC, 20, {"configuration", "parity"}),
        pytest.param(DYNAMIC, 64, {"configuration", "parity"}, marks=pytest.mark.long),
        pytest.param(YARN | {"factor": None}, 64, {"configuration", "parity"}, marks=pytest.mark.long),
        pytest.param(YARN | {"factor": 2.0}, 64, set(), marks=pytest.mark.long),
        pytest.param({"rope_type": "default", "rope_theta": 1e4}, 64, set(), marks=pytest.mark.long),
    ],
)
def test_a_length_that_rope_is_computed_from_is_held_to_the_source(tmp_path, rope, positions, found):
    """With a probe of the default length, which follows the lengths of both."""
    source = save_source(tmp_path / "source", rope_parameters=dict(rope), max_position_embeddings=32)
    output = convert_checkpoint(source, tmp_path / "output", **MEMORY, progress=False)
    assert not failed(check(source, output, None))
    path = output / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": positions}))
    assert failed(check(source, output, None)) == {"manifest"} | found


@pytest.mark.long
def test_a_source_that_rounding_moves_far_is_measured_and_does_not_fail(tmp_path):
    """Attention that picks single keys makes of bfloat16's rounding another token's value. Nothing is wrong."""
    source = save_source(tmp_path / "source", dtype=torch.bfloat16, initializer_range=0.8)
    found = check(source, convert_checkpoint(source, tmp_path / "output", **MEMORY, progress=False), 64)
    assert not failed(found) and found["parity"]["measured"]["bitwise"]
    for name in ("decode", "padding", "prefix"):
        assert found[name]["status"] == "measured" and "padding alone moves the source's own" in found[name]["reason"]


@pytest.mark.long
def test_what_rounding_explains_is_four_times_that_of_the_sources_padded_rows(folders, monkeypatch):
    monkeypatch.setattr(verify, "check_padding", lambda *args: (True, {"worst_token": 0.03}))
    measured = check(*folders[:2])["decode"]["measured"]
    assert measured["as it is"]["tolerance"] == pytest.approx(0.12)
    assert measured["gates opened"]["tolerance"] == pytest.approx(0.24)  # twice: one branch more


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.long
def test_steps_are_one_line_on_a_terminal_and_nothing_elsewhere(folders, monkeypatch, capfd):
    verify_conversion(*folders[:2], tokens=16)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", Terminal())
    verify_conversion(*folders[:2], tokens=16)
    shown = sys.stderr.getvalue()
    assert "\n" not in shown and "verify: base weights (step " in shown
    assert not shown.rstrip("\r").rpartition("\r")[2].strip(), "the line is cleared for the report"


def test_a_report_is_written_into_nothing_that_is_verified(folders, converted, tmp_path):
    """It would be a file that the manifest does not know, or take the place of one that is linked to the source."""
    source, before = folders[0], {path.name: path.read_bytes() for path in converted.iterdir() if path.is_file()}

    def run(*words):
        parser = argparse.ArgumentParser()
        verify_command.add_arguments(parser)
        verify_command.run(parser.parse_args([str(source), str(converted), *map(str, words)]))

    for words, message in (
        (["--json", converted / "verify.json"], "--json=.*which is what is verified"),
        (["--markdown", converted / "config.json"], "--markdown=.*which is what is verified"),
        (["--json", source / "report.json"], "--json=.*which is what is verified"),
        (["--json", tmp_path], "is a folder, not a file"),
        (["--json", tmp_path / "a", "--markdown", tmp_path / "a"], "is the file of --json"),
        (["--markdown", tmp_path / "nowhere" / "a"], "no such folder"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            run(*words)
    with pytest.raises(ValueError, match="report=.*which is what is verified"):
        verify_conversion(source, converted, report=converted / "report.json", progress=False)
    assert {path.name: path.read_bytes() for path in converted.iterdir() if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted"]


def test_a_report_that_cannot_be_written_is_shown(folders, capsys):
    parser = argparse.ArgumentParser()
    verify_command.add_arguments(parser)
    with pytest.raises(OSError):
        verify_command.run(
            parser.parse_args([*map(str, folders[:2]), "--tokens", "16", "--json", "/proc/report.json"])
        )
    assert capsys.readouterr().out.startswith("PASSED: all ")


@pytest.mark.long
def test_a_report_that_cannot_be_written_leaves_the_older_one(tmp_path):
    report = tmp_path / "report.json"
    write_text(report, "older\n")
    code = f"""
import resource
from pathlib import Path
from tnt_hf.conversion.files import write_text
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
write_text(Path({str(report)!r}), "newer" * 100)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"File too large: '{report}'" in done.stderr
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(report)
    write_text(link, "older\n")
    assert link.is_symlink()
    link.unlink()
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "through")
    assert os.read(reading, 99) == b"through" and pipe.is_fifo()
    os.close(reading)
    pipe.unlink()
    assert report.read_text() == "older\n" and list(tmp_path.iterdir()) == [report]


@pytest.mark.parametrize("seed", [-1, 2**63, "a", True])
def test_a_seed_is_named(tmp_path, seed):
    with pytest.raises(ValueError, match=f"seed={seed!r}: must be"):
        probe_ids(tmp_path, None, 20, 16, seed)


def test_a_result_that_differs_only_in_a_long_text_has_no_parity(folders, monkeypatch):
    """Without a window everything is promised, not only the first tokens."""
    rotate = modeling_tnt.TNTRotaryEmbedding.forward
    monkeypatch.setattr(
        modeling_tnt.TNTRotaryEmbedding,
        "forward",
        lambda self, x, position_ids: rotate(self, x, position_ids.clamp(max=255)),
    )
    assert failed(check(folders[0], folders[1], tokens=264)) >= {"parity"}


@pytest.mark.parametrize("reset, length", [(512, 608), (520, 112)])
def test_a_default_probe_crosses_a_reset_that_is_near(reset, length):
    config = TNTConfig(sliding_window=16, **MEMORY | {"local_reset_interval": reset})
    assert verify._default_length(config, config) == length


def test_tokens_are_counted(folders):
    with pytest.raises(ValueError, match=r"tokens=29\.0"):
        check(folders[0], folders[1], tokens=29.0)


def test_a_hub_id_is_verified_at_the_commit_that_was_converted(folders, tmp_path, monkeypatch):
    """Also where its main branch has moved on since."""
    commit = tmp_path / "models--owner--name" / "snapshots" / ("a" * 40)
    shutil.copytree(folders[0], commit)
    output, asked = convert_checkpoint(commit, tmp_path / "output", **MEMORY, progress=False), []

    def locate(source, revision=None):
        asked.append((source, revision))
        raise FileNotFoundError(source)

    monkeypatch.setattr(verify, "locate", locate)
    for source, options in (("owner/name", {}), ("owner/name", {"revision": "v2"}), ("owner/other", {})):
        with pytest.raises(FileNotFoundError):
            verify_conversion(source, output, tokens=16, progress=False, **options)
    assert asked == [("owner/name", "a" * 40), ("owner/name", "v2"), ("owner/other", None)]
