"""`tnt bench`: every suite runs, stops at a wrong contestant, goes on where it was stopped, and draws its JSON."""

import json
import os
import shutil
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import at_once
from torch._dynamo import convert_frame

from tnt_hf.cli import main
from tnt_hf.recipes import blocked_attention
from tnt_hf.recipes.benchmarks import decode_suite, kernels_gpu, liza_suite, memory_suite, train_models, train_suite
from tnt_hf.recipes.benchmarks.gate import require_agreement
from tnt_hf.recipes.benchmarks.measure import take_turns
from tnt_hf.recipes.benchmarks.plot import draw_file
from tnt_hf.recipes.benchmarks.profile_step import OTHER, PARTS, shares, training_step
from tnt_hf.recipes.benchmarks.settings import SUITES, DecodeSettings
from tnt_hf.recipes.benchmarks.suite_run import resolve


RESULTS = Path(train_suite.__file__).parent / "results"
# Seconds instead of minutes; everything else is as in the real suite.
TINY = {
    "memory": "--chunk-sizes 8 --tokens 24 --heads 1 --width 8 --rounds 1 --titans-rounds 1 --titans-expansions 1",
    "train": "--shape tiny --contexts 128 256 --tokens 256 --rounds 2",
    "decode": "--shape tiny --contexts 64 128 --batch-sizes 1 2 --steps 2 --rounds 1",
    "liza": "--lengths 64 --heads 1 --width 8 --chunk-size 16 --rounds 1",
    "conversion": "--shape tiny --stages cp --rounds 1",
}
FEW = ("TNT {8}", "Titans C=8", "Transformer (SDPA)")


@pytest.fixture(autouse=True)
def one_thread():
    """A suite sets the threads of its process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def bench(suite: str, folder: Path, *more: str) -> int:
    few = ["--contestants", *FEW] if suite == "train" else []
    return main(["bench", suite, "--out", str(folder), *TINY[suite].split(), *few, *more])


def result(suite: str, folder: Path) -> dict:
    return json.loads((folder / f"{suite}.json").read_text())


@pytest.mark.parametrize("suite", [pytest.param(x, marks=[pytest.mark.long] * (x == "conversion")) for x in SUITES])
def test_a_suite_leaves_a_whole_result_a_table_and_a_picture(suite, tmp_path, capsys):
    assert bench(suite, tmp_path) == 0
    found = result(suite, tmp_path)
    assert found["suite"] == suite and found["complete"] and found["rows"] and found["summary"]
    assert {"cpu", "commit", "versions", "source_sha256", "command", "seed", "threads"} <= found["environment"].keys()
    assert found["settings"]["device"] == ("cuda" if torch.cuda.is_available() and suite != "memory" else "cpu")
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) > 3 and f"{suite}.png" in printed
    assert (tmp_path / f"{suite}.png").read_bytes().startswith(b"\x89PNG")


DRAWN = [path for path in RESULTS.glob("*.json") if "suite" in json.loads(path.read_text())]


EARLY = {"liza", "train"}


@pytest.mark.parametrize("committed", at_once({path.stem: path for path in sorted(DRAWN)}, EARLY))
def test_pictures_of_committed_results_come_from_the_json_alone(committed, tmp_path):
    copy = tmp_path / "copy.json"
    copy.write_text(committed.read_text())
    draw = ["bench", "plot", str(copy), "--picture", str(tmp_path / "picture.png")]
    assert main(draw) == 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


# ----------------------------------------------------------------------------------------------- rounds and their rows


def test_contestants_take_turns_and_the_first_rotates():
    calls = []
    seconds = take_turns({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=3, warmup=1)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert {len(x) for clocks in seconds.values() for x in clocks.values()} == {3}


def test_an_interrupted_suite_keeps_its_rows_and_goes_on(tmp_path, monkeypatch):
    measure = train_suite.measure

    def interrupted(name, settings, tell):
        if name == "256":
            raise KeyboardInterrupt
        return measure(name, settings, tell)

    monkeypatch.setattr(train_suite, "measure", interrupted)
    assert bench("train", tmp_path) == 130
    half = result("train", tmp_path)
    assert list(half["rows"]) == ["check", "128"] and not half["complete"]
    with pytest.raises(ValueError, match="unfinished"):
        draw_file(tmp_path / "train.json")

    monkeypatch.setattr(train_suite, "measure", measure)
    assert bench("train", tmp_path) == 0
    whole = result("train", tmp_path)
    assert whole["complete"] and list(whole["rows"]) == ["check", "128", "256"]
    assert all(whole["rows"][name] == row for name, row in half["rows"].items())


def test_a_result_is_only_replaced_when_asked(tmp_path, capsys):
    assert bench("liza", tmp_path) == 0
    before = (tmp_path / "liza.json").read_bytes()
    assert bench("liza", tmp_path) == 2
    assert "liza.json exists" in capsys.readouterr().err
    assert (tmp_path / "liza.json").read_bytes() == before
    assert bench("liza", tmp_path, "--overwrite", "--seed", "1") == 0
    assert result("liza", tmp_path)["settings"]["seed"] == 1


@pytest.mark.parametrize(
    "free, status", [pytest.param(10 * 2**20, 0, marks=pytest.mark.long), (2**10, 2)], ids=["10 MB", "1 KB"]
)
def test_a_small_checkpoint_asks_for_little_room(free, status, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert bench("conversion", tmp_path) == status
    assert ("are free beside the source" in capsys.readouterr().err) == bool(status)


def test_an_unfinished_result_of_other_settings_is_refused(tmp_path, capsys):
    assert bench("liza", tmp_path) == 0
    found = result("liza", tmp_path)
    (tmp_path / "liza.json").write_text(json.dumps(found | {"complete": False}))
    assert bench("liza", tmp_path, "--seed", "1") == 2
    assert "of another settings" in capsys.readouterr().err
    assert bench("liza", tmp_path, "--overwrite") == 0, "what was begun alike goes on"
    assert result("liza", tmp_path)["rows"] == found["rows"]
    assert bench("liza", tmp_path, "--overwrite") == 0
    assert result("liza", tmp_path)["rows"] != found["rows"]


def test_what_a_gpu_has_measured_is_not_written_over(tmp_path, capsys):
    (path := tmp_path / "found.json").write_text("{}")
    with pytest.raises(SystemExit):
        kernels_gpu.main(["--out", str(path)])
    assert "found.json: is there already" in capsys.readouterr().err and path.read_text() == "{}"


def test_a_suite_for_cpus_takes_one_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, device in (("memory", "cpu"), ("train", "cuda")):
        module, settings = import_module(f"tnt_hf.recipes.benchmarks.{name}_suite"), SUITES[name].settings()
        assert resolve(settings, getattr(module, "CPU_ONLY", False)).device == device


def test_ratios_are_formed_inside_a_round(tmp_path):
    assert bench("train", tmp_path) == 0
    found = result("train", tmp_path)
    seconds = found["rows"]["128"]["seconds"]
    clock = found["clock"]
    rounds = [b / a for a, b in zip(*(seconds[name][clock] for name in ("TNT {8}", "Titans C=8")))]
    ratio = found["summary"]["times_faster"]["TNT {8} against Titans C=8"]["128"]
    assert (ratio["min"], ratio["max"]) == (round(min(rounds), 3), round(max(rounds), 3))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_contestants_can_be_compiled(tmp_path, monkeypatch, capsys):
    compiled = []
    monkeypatch.setitem(train_models.EXECUTIONS, "compiled", lambda model: compiled.append(model) or model)
    assert bench("train", tmp_path, "--execution", "compiled") == 0
    assert len(compiled) == len(FEW) * 3  # checked once and timed at two lengths
    assert bench("train", tmp_path / "other", "--execution", "fast") == 2
    assert "execution='fast': must be one of 'eager', 'compiled'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_more_contestants_are_compiled_than_torch_compiles_of_a_function(tmp_path, monkeypatch):
    """Else it would run the last of them, the Transformers, as they are, with nothing but a warning to show it."""
    monkeypatch.setitem(train_models.EXECUTIONS, "compiled", lambda model: torch.compile(model, backend="eager"))
    asked, limit = [], convert_frame.exceeds_recompile_limit

    def exceeds(*args):
        asked.append(limit(*args))
        return asked[-1]

    monkeypatch.setattr(convert_frame, "exceeds_recompile_limit", exceeds)
    with torch._dynamo.config.patch(recompile_limit=len(FEW) - 1):
        assert bench("train", tmp_path, "--execution", "compiled", "--contexts", "128") == 0
    assert asked and not any(exceeded for exceeded, _ in asked)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("contestant", FEW)
def test_a_compiled_contestant_computes_what_it_should(contestant):
    train_models.check(contestant, blocked_attention.NAME, "cpu", seed=0, execution="compiled")


@torch.inference_mode()
@pytest.mark.parametrize("name", [decode_suite.LLAMA, decode_suite.STATIC])
def test_the_llama_decodes_every_turn_from_its_context(name):
    settings = decode_suite.prepare(DecodeSettings(device="cpu", shape="tiny", steps=5))
    model = decode_suite.placed(decode_suite.llama(settings), settings)
    cache = decode_suite.filled(model, 40, 2, settings.steps, static=name == decode_suite.STATIC)
    turn = decode_suite.decoding(name, model, cache, 2, settings)
    for _ in range(2):
        turn()
        assert int(cache.get_seq_length()) == 40


# ------------------------------------------------------------------------------------------------------ wrong answers


def test_a_step_in_half_precision_is_checked_in_it(tmp_path):
    """In float32 the same kernels may not run at all, as flash attention's."""
    found = []
    for contestant in FEW:
        _, rounded = train_models.check(contestant, "sdpa", "cpu", seed=0, autocast=torch.bfloat16)
        assert 1e-3 < rounded < train_models.ROUNDED  # rounded, and no more
        found.append(rounded)
    assert bench("train", tmp_path, "--dtype", "bfloat16", "--attention", "sdpa", "--contexts", "64") == 0
    assert list(result("train", tmp_path)["rows"]["check"]["largest_relative_distance_in_bfloat16"]) == list(FEW)


def test_what_is_wrong_in_half_precision_alone_is_not_timed(tmp_path, monkeypatch):
    right = train_models.build

    def build(*args):
        model = right(*args)
        model.model.layers[0].mlp.register_forward_hook(
            lambda m, x, y: 1.2 * y if torch.is_autocast_enabled("cpu") else y
        )
        return model

    monkeypatch.setattr(train_models, "build", build)
    train_models.check("TNT {8}", "sdpa", "cpu", seed=0)
    with pytest.raises(SystemExit, match=r"TNT \{8\} is wrong in torch.bfloat16"):
        train_models.check("TNT {8}", "sdpa", "cpu", seed=0, autocast=torch.bfloat16)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
def test_who_does_not_fit_is_left_out_and_the_others_go_on(error, tmp_path, monkeypatch, capsys):
    right, tokens = train_models.build, 64

    def build(name, config, attention, seed):
        model = right(name, config, attention, seed)

        def full(module, args, kwargs):
            if kwargs["input_ids"].shape[1] > tokens and kwargs["input_ids"].shape[1] != train_models.CHECKED_TOKENS:
                raise error

        if name == "Titans C=8":
            model.register_forward_pre_hook(full, with_kwargs=True)
        return model

    for module in (train_models, train_suite):
        monkeypatch.setattr(module, "build", build)
    few = [*FEW, "sliding window only"]
    assert bench("train", tmp_path, "--contexts", "64", "128", "--contestants", *few) == 0
    found = result("train", tmp_path)
    assert [found["rows"][n]["did_not_fit"] for n in ("64", "128")] == [[], ["Titans C=8"]]
    assert set(found["rows"]["128"]["seconds"]) == {*few} - {"Titans C=8"}
    assert list(found["summary"]["times_faster"]["TNT {8} against Titans C=8"]) == ["64"]
    (line, over) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Titans C=8"))
    assert line.endswith("out of memory") and over.endswith("out of memory")

    tokens = 0
    with pytest.raises(SystemExit, match="256 tokens do not fit into the memory for any contestant"):
        bench("train", tmp_path / "none", "--contexts", "64", "--contestants", "Titans C=8")


def test_a_difference_beyond_the_tolerance_or_no_number_stops():
    x = torch.tensor([1.0, 2.0])
    assert require_agreement("x", [x, None], [x + 1e-6, None], 1e-5) < 1e-5
    for wrong in (x + 1e-2, torch.full_like(x, torch.nan)):
        with pytest.raises(SystemExit, match="x is wrong"):
            require_agreement("x", [wrong], [x], 1e-5)
    with pytest.raises(SystemExit):
        require_agreement("x", [None], [x], 1e-5)


def slightly_wrong(function):
    """The same, and a thousandth more."""
    return lambda *args, **kwargs: 1.001 * function(*args, **kwargs)


def test_a_wrong_memory_op_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_suite, "vmap_grad", slightly_wrong(memory_suite.vmap_grad))
    with pytest.raises(SystemExit, match=r"vmap\(grad\) against tnt-hf at C=8 is wrong"):
        bench("memory", tmp_path)
    assert not (tmp_path / "memory.json").exists()


def test_a_wrong_linear_operator_is_not_timed(tmp_path, monkeypatch):
    right = liza_suite.ours

    def wrong(rule, chunk_size, tensors, implementation="chunk"):
        factor = 1.002 if implementation == "chunk" and rule == "delta_product" else 1.0
        return factor * right(rule, chunk_size, tensors, implementation)

    monkeypatch.setattr(liza_suite, "ours", wrong)
    with pytest.raises(SystemExit, match="delta_product T=64 is wrong"):
        bench("liza", tmp_path)
    assert list(result("liza", tmp_path)["rows"]) == ["delta_rule T=64", "gated_delta_rule T=64"]


@pytest.mark.parametrize("contestant", ["TNT {8}", "Titans C=8", "sliding window only"])
def test_a_wrong_model_is_not_trained(contestant, tmp_path, monkeypatch):
    """Chunks twice as long, or a window one token too wide, give another function."""
    right = train_models.build

    def wrong(name, config, attention, seed):
        model = right(name, config, attention, seed)
        if name == contestant and name == "TNT {8}":
            model.set_local_chunk_sizes([16])
        elif name == contestant:
            model.set_sliding_window(config.sliding_window + 1)
        return model

    monkeypatch.setattr(train_models, "build", wrong)
    with pytest.raises(SystemExit, match="is wrong"):
        train_models.check(contestant, blocked_attention.NAME, "cpu", seed=0)


def test_wrong_decoding_is_not_timed(tmp_path, monkeypatch):
    forward = decode_suite.TNTForCausalLM.forward

    def wrong(self, ids, *args, **kwargs):
        out = forward(self, ids, *args, **kwargs)
        out.logits = out.logits * (1.001 if ids.shape[1] == 1 else 1)
        return out

    monkeypatch.setattr(decode_suite.TNTForCausalLM, "forward", wrong)
    with pytest.raises(SystemExit, match=r"TNT \{16\} is wrong"):
        bench("decode", tmp_path)


# ------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize("arguments", [["--list"], ["--list", "train"], ["--help"], ["train", "--help"]], ids=" ".join)
def test_help_comes_at_once_and_without_torch(arguments):
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    start = time.perf_counter()
    command = [sys.executable, "-m", "tnt_hf.cli", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert time.perf_counter() - start < 2
    assert done.returncode == 0
    expected = ["--contexts"] if arguments[0] == "train" else SUITES
    assert all(name in done.stdout for name in expected)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "transformers", "numpy", "matplotlib"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["speed"], "suite 'speed': must be one of memory, train, decode, liza, conversion"),
        (["train", "--rounds", "0"], "rounds=0: must be at least 1"),
        (["memory", "--tokens", "100"], "tokens=100: must be a multiple of chunk_sizes=8"),
        (["train", "--device", "tpu"], "device='tpu': must be cpu, cuda or auto"),
        (["train", "--contestants", "TNT {7}"], "contestants='TNT {7}': must be one of"),
        (["train", "--shape", "huge"], "shape='huge': must be one of '150m', 'shrunk', 'narrow', 'tiny'"),
        (["train", "--dtype", "float8"], "dtype='float8'"),
        (["decode", "--shape", "huge"], "shape='huge'"),
        (["liza", "--tptt", "nowhere"], "tptt='nowhere': holds no tptt"),
        (["memory", "--ttt-lm", "nowhere"], "ttt_lm='nowhere': is not a file"),
        (["memory", "--titans", "nowhere"], "titans='nowhere': holds no titans_pytorch"),
        (["conversion"], "folder=None: shape 8b needs room"),
        (["conversion", "--stages", "move"], "stages='move': must be one of cp, copy, link, cast"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_names_field_and_value(arguments, message, tmp_path, capsys):
    out = [] if arguments == ["speed"] else ["--out", str(tmp_path)]
    assert main(["bench", *arguments, *out]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_cuda_that_is_not_there_is_an_error(tmp_path, capsys):
    assert main(["bench", "train", "--device", "cuda", "--out", str(tmp_path)]) == 2
    assert "device='cuda'" in capsys.readouterr().err


def test_a_file_of_no_suite_is_not_drawn(tmp_path, capsys):
    (tmp_path / "x.json").write_text('{"suite": "speed"}')
    assert main(["bench", "plot", str(tmp_path / "x.json")]) == 2
    assert "suite='speed'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["[1]", "null", "{", '{"suite": []}', '{"suite": "liza", "complete": true, "rows": 5}', '{"rows": {}}']
)
def test_a_damaged_result_is_named_and_stays(text, tmp_path, capsys):
    path = tmp_path / "liza.json"
    path.write_text(text)
    assert main(["bench", "plot", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
    assert bench("liza", tmp_path) == 2
    assert f"{path} is not a result of a suite; replace it with --overwrite: " in capsys.readouterr().err
    assert path.read_text() == text


def test_a_profiled_step_is_divided_among_all_parts():
    found = shares(training_step("TNT {16}", 128, 0))
    assert set(found) == {*PARTS.values(), OTHER}
    assert sum(part["share"] for part in found.values()) == pytest.approx(1, abs=1e-2)  # rounded to 1e-4 each
    assert all(part["share"] > 0 for part in found.values())
