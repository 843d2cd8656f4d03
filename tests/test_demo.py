"""The demo: its data are what they claim, the twins start equal, and a run of a few steps keeps every promise."""

import json
import sysconfig
from pathlib import Path
from shutil import copytree

import pytest
import torch

from tnt_hf.recipes import demo
from tnt_hf.recipes.data import IGNORED, Recall, is_held_out, read_corpus, train_tokenizer, windows
from tnt_hf.recipes.demo_jobs import Plan, build, recall_config, text_config


STDLIB = Path(sysconfig.get_paths()["stdlib"])
HELD_OUT, TRAIN = "traceback.py", ("argparse.py", "ast.py", "dataclasses.py", "tarfile.py")  # by the hash of the name


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in (HELD_OUT, *TRAIN):
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
    assert list(corpus.held_out) == [HELD_OUT]
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
    picked = demo.shuffled(rows, 25, seed=3)
    assert torch.equal(picked, demo.shuffled(rows, 25, seed=3)) and not torch.equal(picked, demo.shuffled(rows, 25, 4))
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


# --- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config_of", [text_config, recall_config])
def test_twins_start_from_the_same_backbone(config_of):
    tnt, twin = (build(config_of, Plan(), 300, memory) for memory in (True, False))
    states = tnt.state_dict(), twin.state_dict()
    extra = states[0].keys() - states[1].keys()
    assert extra and all(".memory." in name for name in extra) and states[1].keys() <= states[0].keys()
    assert all(torch.equal(x, states[0][name]) for name, x in states[1].items())
    assert tnt.config.sliding_window == twin.config.sliding_window and not twin.config.memory_layer_indices


def test_a_plan_scales_with_its_budget():
    plan = Plan()
    assert plan.scaled(plan.stage1_steps) == plan
    half = plan.scaled(plan.stage1_steps // 2)
    assert half.text_steps == pytest.approx(plan.text_steps / 2, abs=1) and half.length == plan.length
    assert 0.05 <= plan.stage2_steps / plan.stage1_steps <= 0.1


# --- the whole thing ------------------------------------------------------------------------------------------------


def test_jobs_wait_for_what_they_need_and_failures_surface(tmp_path):
    first, second, third, missing = (tmp_path / name for name in ("first", "second", "third", "missing"))
    first.mkdir()
    # A job is any importable function; the queue of reports, its last argument, is a true `symlinks` here.
    jobs = {"c": (copytree, second, third), "b": (copytree, first, second)}
    assert demo.run_jobs(jobs, 2, {"c": "b"}) == {"c": third, "b": second}
    with pytest.raises(FileNotFoundError, match="missing"):
        demo.run_jobs({"a": (copytree, missing, third), "b": (copytree, first, second)}, 1, {"b": "a"})


@pytest.mark.slow
def test_a_short_run_of_the_conversion_part(sources, tmp_path, capsys):
    output = tmp_path / "out"
    arguments = ["--only", "conversion", "--budget", "4", "--corpus", str(sources), "--output", str(output)]
    assert demo.main(arguments) == 0
    assert {path.name for path in output.iterdir()} == {"results.json", "conversion.png", "conversion"}
    results = json.loads((output / "results.json").read_text())["conversion"]
    assert all(results["checks"].values()) and results["recovered"].keys() >= {"hybrid", "window + LoRA"}
    assert (output / "conversion" / "hybrid" / "config.json").exists()
    assert "recovered" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["--budget=0", "--workers=0"])
def test_options_are_checked_before_any_work(wrong, tmp_path):
    with pytest.raises(ValueError, match=f"{wrong[:8]}.* 0"):
        demo.main([wrong, "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_short_run_trains_saves_reloads_and_reports(sources, tmp_path, capsys):
    output = tmp_path / "out"
    arguments = ["--budget", "2", "--workers", "1", "--corpus", str(sources), "--output", str(output)]
    assert demo.main([*arguments, "--only", "recall", "--only", "text"]) == 0
    names = {path.name for path in output.iterdir()}
    assert names == {"results.json", "loss.png", "perplexity.png", "recall.png", "checkpoint"}

    results = json.loads((output / "results.json").read_text())
    assert all(results["checks"].values()) and len(results["checks"]) == 3
    assert results["environment"]["packages"]["torch"] and results["command"].startswith("tnt demo --budget 2")
    assert results["command"].endswith("--workers 1 --only text --only recall") and "conversion" not in results
    text = results["text"]
    assert text.keys() == {"stage 1", "stage 1 at C_L = 1", "stage 2", "window only"}
    assert text["stage 2"]["train_tokens"] == text["window only"]["train_tokens"] == 3 * 2 * 512
    jobs = results["jobs"]
    saved = json.loads((output / "checkpoint" / "config.json").read_text())
    assert saved["local_chunk_sizes"] == [1] and saved["use_cache"]
    assert 0 < jobs["text, TNT"]["stage2_parameters"] < jobs["text, TNT"]["parameters"]
    assert results["recall"].keys() == {"TNT", "window only"}
    printed = capsys.readouterr().out
    for expected in ("TNT stage 2", "window only", "accuracy by distance", "Written by the stage-2 model", "reloaded"):
        assert expected in printed
