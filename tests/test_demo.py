"""The demo: its data are what they claim, the twins start equal, and a run of a few steps keeps every promise."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from shutil import copytree

import pytest
import torch

from tnt_hf.recipes import demo
from tnt_hf.recipes.corpus import is_held_out, read_corpus
from tnt_hf.recipes.data import train_tokenizer, windows
from tnt_hf.recipes.demo_conversion import STUDENTS
from tnt_hf.recipes.demo_conversion_report import LABELS, draw
from tnt_hf.recipes.demo_jobs import run_jobs, shuffled
from tnt_hf.recipes.packing import IGNORED
from tnt_hf.recipes.recall import Recall


STDLIB = Path(sysconfig.get_paths()["stdlib"])
HELD_OUT, TRAIN = (
    ("sched.py", "traceback.py"),
    ("argparse.py", "ast.py", "dataclasses.py", "tarfile.py"),
)  # by the hash of the name


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in (*HELD_OUT, *TRAIN):
        (folder / name).write_bytes((STDLIB / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([(STDLIB / name).read_text() for name in TRAIN], vocab_size=400)


# --- text -----------------------------------------------------------------------------------------------------------


def test_corpus_is_split_by_name_and_reports_what_it_could_not_read(sources):
    (sources / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'f\xf6\xf6'\n".encode("latin-1"))
    (sources / "broken.py").write_bytes(b"name = '\xff\xfe'\n")
    (sources / "unknown.py").write_bytes(b"# -*- coding: martian -*-\nname = '\xff'\n")
    (sources / "notes.txt").write_text("not Python")
    for folder in ("tests", "site-packages"):
        (sources / folder).mkdir()
        (sources / folder / "module.py").write_text("left = 'out'\n")

    corpus = read_corpus(sources)
    assert sorted(corpus.held_out) == sorted(HELD_OUT)
    assert set(corpus.train) == {*TRAIN, "latin.py"} and list(corpus.train) == sorted(corpus.train)
    assert corpus.train["latin.py"].endswith("name = 'föö'\n")
    assert corpus.other_encoding == ["latin.py"] and corpus.unreadable == ["broken.py", "unknown.py"]
    counts = corpus.describe()
    assert counts["files_in_another_encoding"] == 1 and counts["files_left_out_as_unreadable"] == 2


def test_held_out_is_a_property_of_the_name_alone():
    names = [f"package/module_{i}.py" for i in range(4000)]
    few = {name for name in names if is_held_out(name, 0.05)}
    assert 0.03 < len(few) / len(names) < 0.07
    assert few < {name for name in names if is_held_out(name, 0.5)}


@pytest.mark.parametrize("share", [0, 1, -0.1])
def test_held_out_share_must_be_a_share(share, sources):
    with pytest.raises(ValueError, match=f"held_out must be in .*{share}"):
        read_corpus(sources, held_out=share)


def test_too_little_text_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ValueError, match="found 0 characters"):
        read_corpus(tmp_path)


def test_tokenizer_is_reproducible_and_loses_nothing(tokenizer):
    text = "\tdef f(x):  # naïve 記憶 🧠\r\n    return x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    again = train_tokenizer([(STDLIB / name).read_text() for name in TRAIN], vocab_size=400)
    assert again.get_vocab() == tokenizer.get_vocab() and len(again) == 400
    with pytest.raises(ValueError, match="vocab_size.*100"):
        train_tokenizer(["text"], vocab_size=100)


def test_windows_hold_every_token_of_a_file_and_of_one_file_only(tokenizer):
    texts = ["a = 1\n" * 50, "short", "b = 2\n" * 31]
    rows, lost = windows(texts, tokenizer, 16)
    end = tokenizer.eos_token_id
    assert lost == len(tokenizer("short")["input_ids"]) + 2
    assert rows.shape[1] == 16 and rows.dtype == torch.int64
    starts = [i for i, row in enumerate(rows) if row[0] == end]
    assert len(starts) == 2
    for text, first, last in zip((texts[0], texts[2]), starts, [*starts[1:], len(rows)]):
        ids = [end, *tokenizer(text)["input_ids"], end]
        part = rows[first:last].tolist()
        whole = [token for row in part[:-1] for token in row]
        assert whole == ids[: len(whole)] and part[-1] == ids[-16:] and len(whole) + 16 >= len(ids)
    with pytest.raises(ValueError, match="length=4096"):
        windows(texts, tokenizer, 4096)


def test_training_order_is_fixed_and_uses_every_window_before_any_comes_again():
    rows = torch.arange(10)[:, None]
    picked = shuffled(rows, 25, seed=3)
    assert torch.equal(picked, shuffled(rows, 25, seed=3)) and not torch.equal(picked, shuffled(rows, 25, 4))
    assert sorted(picked[:10, 0].tolist()) == sorted(picked[10:20, 0].tolist()) == list(range(10))


# --- recall ---------------------------------------------------------------------------------------------------------


def test_every_recall_question_has_exactly_one_answer_in_the_past():
    task = Recall(keys=12, values=5, fillers=3)
    samples = task.samples(64, length=32, pairs=6, seed=1)
    ids, labels, distance = (samples[name] for name in ("input_ids", "labels", "distance"))
    assert torch.equal(ids, task.samples(64, 32, 6, seed=1)["input_ids"]) and ids.max() < task.vocab_size
    scored = labels != IGNORED
    assert (scored.sum(1) == 6).all() and (distance[~scored] == 0).all()
    for row, at in scored.nonzero().tolist():
        key, value, back = ids[row, at - 1], ids[row, at], int(distance[row, at])
        assert labels[row, at] == value and task.keys <= value < task.keys + task.values and key < task.keys
        shown = at - 1 - back
        assert ids[row, shown] == value and ids[row, shown - 1] == key
        assert (ids[row] == key).nonzero().flatten().tolist() == [shown - 1, at - 1]


@pytest.mark.parametrize(("length", "pairs"), [(31, 2), (16, 5), (16, 0), (512, 65)])
def test_impossible_recall_samples_are_refused(length, pairs):
    with pytest.raises(ValueError, match=f"pairs={pairs}"):
        Recall().samples(1, length, pairs, 0)


# --- jobs -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_jobs_wait_for_what_they_need_and_failures_surface(tmp_path):
    first, second, third, missing = (tmp_path / name for name in ("first", "second", "third", "missing"))
    first.mkdir()
    # A job is any importable function; the queue of reports, its last argument, is a true `symlinks` here.
    jobs = {"c": (copytree, second, third), "b": (copytree, first, second)}
    assert run_jobs(jobs, 2, {"c": ("b",)}) == {"c": third, "b": second}
    with pytest.raises(FileNotFoundError, match="missing"):
        run_jobs({"a": (copytree, missing, third), "b": (copytree, first, second)}, 1, {"b": ("a",)})


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_whatever_ends_the_demo_ends_its_workers(number, sources, tmp_path):
    output = tmp_path / "out"
    command = [sys.executable, "-m", "tnt_hf.cli", "demo", "--budget", "10000", "--workers", "1"]
    demo = subprocess.Popen(
        [*command, "--corpus", sources, "--output", output],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # as in a terminal: what a shell starts in the background ignores it, and so would the demo
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert any("source, train" in line for line in demo.stderr)  # a worker is at work
        workers = descendants(demo.pid)
        assert workers
        demo.send_signal(number)
        assert demo.wait(30) == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
        end = time.monotonic() + 10  # Python's own resource tracker follows a moment later
        while any(map(is_running, workers)) and time.monotonic() < end:
            time.sleep(0.1)
        assert not [pid for pid in workers if is_running(pid)]
    finally:
        demo.kill()
        demo.stderr.close()
    assert json.loads((output / "results.json").read_text()) == {"format": "tnt-demo-1", "finished": False}


def descendants(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found += [int(stat.parent.name), *descendants(int(stat.parent.name))]
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- the whole thing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["--budget=0", "--workers=0"])
def test_options_are_checked_before_any_work(wrong, tmp_path):
    with pytest.raises(ValueError, match=f"{wrong[:8]}.* 0"):
        demo.main([wrong, "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_files_of_something_else_stay(tmp_path):
    kept = tmp_path / "source" / "model.safetensors"
    kept.parent.mkdir()
    kept.write_text("somebody's")
    with pytest.raises(FileExistsError, match=f"--output {tmp_path}"):
        demo.main(["--output", str(tmp_path)])
    assert kept.read_text() == "somebody's"


def test_an_earlier_demo_is_replaced_and_nothing_else(tmp_path):
    (tmp_path / "results.json").write_text('{"format": "tnt-demo-1", "finished": false}')
    (tmp_path / "notes.txt").write_text("somebody's")
    (tmp_path / "hybrid").mkdir()
    (tmp_path / "hybrid" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="found 0 characters"):
        demo.main(["--output", str(tmp_path), "--corpus", str(tmp_path / "missing")])
    assert (tmp_path / "hybrid" / "config.json").exists()
    demo.claim(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "results.json"]


def check_the_whole_story_is_told_and_every_check_holds(output, results, printed):
    assert {path.name for path in output.iterdir()} == {
        "source", *STUDENTS, "results.json", "held_out.jsonl", "conversion.png", "loss.png",
    }  # fmt: skip
    assert results["finished"] and results["checks"] and all(results["checks"].values())
    assert {name.split(": ")[0] for name in results["checks"]} == {*STUDENTS, "evaluation"}
    assert all(report["passed"] for report in results["verification"].values())
    assert results["text"].keys() == LABELS.keys() == results["recovered"].keys() | {"source", "window"}
    precision = results["plan"]["precision"]
    assert results["command"] == f"tnt demo --budget 5 --seed 0 --precision {precision} --workers 2 --corpus sources"
    assert f"training in {precision}, the faster one here" in printed
    recorded = json.loads((output / "hybrid" / "training.json").read_text())["settings"]["training"]
    assert recorded["bf16"] is (precision == "bfloat16")
    costs = results["window_costs"]
    assert len(costs) == 4 and all(f"layer {layer}  {cost:.4f}" in printed for layer, cost in enumerate(costs))
    for name, layers in results["full_attention_layers"].items():
        assert layers == ([costs.index(max(costs))] if name.endswith("full-layer") else [])
    for expected in ("7 of 7 hold", "held-out perplexity", "tnt generate", "tnt push", "Written by the hybrid"):
        assert expected in printed, expected


def check_the_pictures_can_be_drawn_from_the_results_alone(output, results, printed):
    again = output.parent / "again"
    again.mkdir()
    for name in draw(again, results):
        assert (again / name).read_bytes() == (output / name).read_bytes()


def check_students_differ_in_their_memory_alone(output, results, printed):
    jobs = results["jobs"]
    assert len({jobs[name]["train_tokens"] for name in STUDENTS}) == 1
    assert jobs["lora"]["parameters"] == jobs["lora-full-layer"]["parameters"] == jobs["source"]["parameters"]
    for hybrid, control in (("hybrid", "lora"), ("hybrid-full-layer", "lora-full-layer")):
        more = jobs[hybrid]["parameters"] - jobs[control]["parameters"]
        assert more == jobs[hybrid]["trained_parameters"] - jobs[control]["trained_parameters"] > 0


def check_every_number_in_the_printed_table_is_one_of_the_results(output, results, printed):
    for name, label in LABELS.items():
        line = next(line for line in printed.splitlines() if line.startswith(label.format(**results["plan"]) + "  "))
        row, share, job = results["text"][name], results["recovered"].get(name), results["jobs"].get(name, {})
        expected = [f"{x:.3f}" for x in (row["perplexity"], *row["perplexity_by_position"].values())]
        if share is not None:
            expected += [f"{share['perplexity']:.1%}", "±", f"{share['perplexity_standard_error']:.1%}"]
        expected += ["0%"] if name == "window" else []
        expected += ["all"] if name == "source" else []
        if name == "hybrid, stage 2":
            hybrid = results["jobs"]["hybrid"]
            job = {"trained_parameters": hybrid["stage2_parameters"], "parameters": hybrid["parameters"]}
        expected += [f"{job[key]:,}" for key in ("trained_parameters", "parameters") if key in job]
        assert line.removeprefix(label.format(**results["plan"])).split() == expected


def check_the_hybrid_is_a_folder_to_push_and_to_load(output, results, printed):
    hybrid = output / "hybrid"
    card = (hybrid / "README.md").read_text()
    first, second = (json.loads((x / "training.json").read_text()) for x in (hybrid / "distilled", hybrid))
    assert [first["mode"], second["mode"]] == ["distill", "stage2"]
    assert [first["steps"], second["steps"]] == [results["plan"][key] for key in ("steps", "stage2_steps")]
    assert first["tokens_trained"] == results["jobs"]["hybrid"]["train_tokens"]
    assert second["data"]["tokens_of_distillation_before"] == first["tokens_trained"]
    assert second["trained_parameters"] == results["jobs"]["hybrid"]["stage2_parameters"]
    assert json.loads((hybrid / "config.json").read_text())["local_chunk_sizes"] == [1]
    assert results["evaluation"] == json.loads((hybrid / "evaluation" / "evaluation.json").read_text())
    assert f"{results['evaluation']['perplexity']['overall']:.4g}" in card and str(output.parent) not in card
    code = (
        "import sys; from transformers import AutoModelForCausalLM as A, AutoTokenizer as T; path = sys.argv[1];"
        "model, tokenizer = A.from_pretrained(path, trust_remote_code=True), T.from_pretrained(path);"
        "model.generate(**tokenizer('class', return_tensors='pt', return_token_type_ids=False), max_new_tokens=2);"
        "assert 'tnt_hf' not in sys.modules"
    )
    environment = os.environ | {"HF_MODULES_CACHE": str(output / "modules"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code, hybrid], check=True, env=environment)


@pytest.mark.long
def test_the_whole_demo_at_a_tiny_budget(sources, tmp_path, capsys):
    output = tmp_path / "out"
    arguments = ["--budget", "5", "--workers", "2", "--corpus", str(sources), "--output", str(output)]
    assert demo.main(arguments) == 0
    told = output, json.loads((output / "results.json").read_text()), capsys.readouterr().out
    check_the_whole_story_is_told_and_every_check_holds(*told)
    check_the_pictures_can_be_drawn_from_the_results_alone(*told)
    check_students_differ_in_their_memory_alone(*told)
    check_every_number_in_the_printed_table_is_one_of_the_results(*told)
    check_the_hybrid_is_a_folder_to_push_and_to_load(*told)
