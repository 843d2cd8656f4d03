"""The miniature study: equal models, runs that can be stopped, honest summaries, and results that are complete."""

import json
import math
import re
import sysconfig
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from tnt_hf.recipes.benchmarks import (
    miniature,
    miniature_conversion,
    miniature_models,
    miniature_report,
    miniature_runs,
)
from tnt_hf.recipes.benchmarks.miniature_models import CONTINUED, REFERENCE, VARIANTS, Plan


STDLIB = Path(sysconfig.get_paths()["stdlib"])
SOURCES = ("argparse.py", "ast.py", "copyreg.py", "sched.py", "tarfile.py")  # two of them held out, to measure on
FOLDER = Path(miniature.__file__).parent
README = (FOLDER / "README.md").read_text()
TINY = {
    "vocab_size": 300, "length": 128, "steps": 2, "held_out_rows": 2, "hidden_size": 32, "intermediate_size": 96,
    "layers": 1,
}  # fmt: skip
SMALL = {
    "vocab_size": 300, "length": 128, "window": 16, "held_out_windows": 4, "verify_characters": 200,
    "teacher_steps": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        (folder / name).write_bytes((STDLIB / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def run(sources, tmp_path_factory):
    """Runs the whole program with a tiny plan in one folder of runs; returns the report, `run.runs` is the folder."""
    out = tmp_path_factory.mktemp("study")

    def program(*arguments: str) -> dict:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(miniature, "Plan", partial(Plan, **TINY))
            common = ["--runs", str(out / "runs"), "--out", str(out / "study.json"), "--corpus", str(sources)]
            miniature.main([*common, *arguments])
        return json.loads((out / "study.json").read_text())

    program.runs, program.out = out / "runs", out / "study.json"
    return program


@pytest.fixture(scope="module")
def whole(run):
    return run("--seeds", "0")


# --- the models -----------------------------------------------------------------------------------------------------


def test_all_variants_have_as_many_parameters():
    counts = {n: miniature_models.parameters_of(c) for n, c in miniature_models.equal_configs(Plan()).items()}
    assert list(counts) == list(VARIANTS)
    assert max(counts.values()) / min(counts.values()) < 1.01


def test_variants_differ_in_what_their_names_say():
    configs = miniature_models.equal_configs(Plan())
    reference = configs[REFERENCE].to_dict()

    def changed(name):
        found = configs[name].to_dict()
        return {
            x
            for x in reference
            if found[x] != reference[x] and x not in ("intermediate_size", "memory_train_chunk_sizes")
        }

    assert changed("TNT {8,16}") == {"local_chunk_sizes"}
    assert changed("TNT {8}, no global memory") == {"global_chunk_size"}
    assert changed("TNT {8}, no Q-K projection") == {"qk_projection"}
    assert changed("TNT {8}, linear memory") == {"memory_depth", "memory_max_lr"}
    assert changed("TNT {8}, nothing written") == {"memory_max_lr"}
    assert changed("TNT {8}, momentum and forgetting") == {"memory_momentum", "memory_decay"}
    assert [x.chunk_size for x in configs["Titans C=8"].memory_specs] == [8]
    assert configs["transformer"].memory_layer_indices == [] and configs["transformer"].sliding_window is None
    assert configs["sliding window only"].memory_layer_indices == []


# --- the program ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_whole_study_runs_and_reports_every_row(whole, run):
    assert list(whole["rows"]) == miniature_report.expected_rows()
    assert whole["missing"] == {} and whole["diverged"] == {}
    counts = [row["parameters"] for row in whole["rows"].values()]
    assert max(counts) / min(counts) < 1.01
    plan = whole["plan"]
    once = plan["steps"] * plan["batch_size"] * plan["length"]
    more = once + plan["stage2_steps"] * plan["batch_size"] * plan["length"]
    for name, row in whole["rows"].items():
        assert math.isfinite(row["perplexity"]["mean"])
        assert len(row["curve"]) == TINY["length"] / 32
        continued = name != row["variant"] and "halved" not in name
        assert row["tokens"] == (more if continued else once)
    assert len(whole["claims"]) == len(miniature_report.CLAIMS)
    assert whole["environment"]["commit"] and whole["environment"]["versions"]["torch"]
    assert {path.name for path in run.out.parent.glob("*.png")} == {"study_perplexity.png", "study_position.png"}


def test_continuations_start_from_the_same_weights(sources, monkeypatch):
    """At a rate that moves everything far: what is measured after one of them has not been through it."""
    plan = Plan(**TINY | {"stage2_learning_rate": 1.0})
    rows = miniature_models.Rows.of(plan, miniature.read_corpus(sources))
    found = miniature_models.run(REFERENCE, 0, plan, rows, lambda *progress: None)
    loss = {name.removeprefix(f"{REFERENCE}, "): row["loss"] for name, row in found["rows"].items()}
    assert abs(loss["stage 1 continued"] - loss[REFERENCE]) > 1
    assert abs(loss["chunks halved"] - loss[REFERENCE]) < 0.01  # other chunks, nothing trained
    monkeypatch.setattr(miniature_models, "CONTINUATIONS", ("stage 2, all weights", "stage 2"))
    again = miniature_models.run(REFERENCE, 0, plan, rows, lambda *progress: None)
    assert len(again["rows"]) == 3 and again["rows"].items() <= found["rows"].items()
    assert 0 < found["stage2_parameters"] < 0.2 * found["parameters"]


@pytest.mark.long
def test_every_continuation_trains(whole):
    for name in CONTINUED:
        losses = {other: row["loss"]["mean"] for other, row in whole["rows"].items() if row["variant"] == name}
        del losses[f"{name}, chunks halved"]  # not trained: in five digits it may be what it was
        assert len(set(losses.values())) == 4


@pytest.mark.long
def test_a_stopped_study_goes_on_and_repeats_itself_exactly(whole, run, capsys):
    path = miniature_runs.path_of(run.runs, "TNT {8}, linear memory", 0)
    first = json.loads(path.read_text())
    path.unlink()
    again = run("--seeds", "0")
    assert "1 of 1: TNT {8}, linear memory, seed 0" in capsys.readouterr().err
    second = json.loads(path.read_text())
    assert second["rows"] == first["rows"] and second["losses"] == first["losses"]
    assert again["rows"] == whole["rows"]


@pytest.mark.long
def test_rows_that_a_seed_lacks_are_named_and_not_reported(whole, run):
    found = run("--seeds", "0", "1", "--only", REFERENCE, "sliding window only")
    assert {row["variant"] for row in found["rows"].values()} == {REFERENCE, "sliding window only"}
    assert set(found["missing"]) == set(VARIANTS) - {REFERENCE, "sliding window only"}
    assert set(map(tuple, found["missing"].values())) == {(1,)}
    seeds = found["rows"][REFERENCE]["perplexity"]["seeds"]
    assert len(set(seeds.values())) == 2  # seeds differ in initial weights and order
    apart = found["rows"]["sliding window only"]["difference_to_reference"]["seeds"]
    for seed in ("0", "1"):
        ratio = found["rows"]["sliding window only"]["perplexity"]["seeds"][seed] / seeds[seed]
        assert math.log(ratio) == pytest.approx(apart[seed], abs=2e-5)  # both are rounded


@pytest.mark.long
def test_time_joins_the_report_and_survives_it(whole, run, monkeypatch):
    monkeypatch.setattr(miniature, "TIMED_LENGTHS", (128,))
    monkeypatch.setattr(miniature, "TIMED_TOKENS", 128)
    timed = run("--time", "--rounds", "1")
    times = timed["time"]["milliseconds_per_token"]["128"]
    assert list(times) == list(VARIANTS)
    assert all(entry[clock]["median"] > 0 for entry in times.values() for clock in ("cpu", "wall"))
    assert run("--seeds", "0")["time"] == timed["time"]
    assert run.out.with_name("study_time.png").is_file()


@pytest.mark.long
def test_runs_of_other_settings_are_refused(whole, run):
    with pytest.raises(ValueError, match="another steps.*--runs"):
        miniature_runs.collect(run.runs, [REFERENCE], [0], {"steps": 3})


def test_a_training_that_ends_in_no_number_is_reported_as_such(sources):
    plan = Plan(**TINY | {"learning_rate": 1e30})
    rows = miniature_models.Rows.of(plan, miniature.read_corpus(sources))
    found = miniature_models.run("sliding window only", 0, plan, rows, lambda *progress: None)
    assert "step 2: " in found["diverged"] and "nan" in found["diverged"] and found["rows"] == {}


# --- what is said about numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pairs, expected",
    [
        ([(1.0, 2.0), (1.1, 2.0), (0.9, 2.0)], "agrees"),
        ([(2.0, 1.0), (2.1, 1.0), (1.9, 1.0)], "disagrees"),
        ([(1.0, 2.0), (2.1, 2.0), (1.0, 2.0)], "undecided"),  # the seeds differ in sign
        ([(1.9, 2.0), (1.7, 2.0), (1.8, 2.0)], "undecided"),  # -0.2 +- 0.1: |t| = 3.5 is too little for three,
        ([(1.9, 2.0), (1.7, 2.0), (1.8, 2.0), (1.8, 2.0)], "agrees"),  # but not for four
        ([(1.0, 2.0), (1.4, 2.0)], "undecided"),  # two seeds are hardly enough for anything
        ([(1.0, 2.0)], "undecided"),
        ([(1.9, 2.0), (2.05, 2.0)] * 6, "undecided"),  # twelve, more than the table has
        ([(1.9, 2.0), (1.8, 2.0)] * 6, "agrees"),
    ],
)
def test_verdict_is_a_paired_t_test(pairs, expected):
    better, worse = ({seed: {"loss": pair[i]} for seed, pair in enumerate(pairs)} for i in (0, 1))
    assert miniature_report.verdict(miniature_report.difference(better, worse)) == expected


@pytest.mark.long
def test_a_diverged_seed_is_reported_and_not_averaged(whole, run):
    plan = Plan(**TINY)
    done = miniature_runs.collect(run.runs, list(VARIANTS), [0], asdict(plan))
    for name in ("Titans C=8", REFERENCE):
        done[name][1] = done[name][0]
    done["Titans C=8"][1] = done["Titans C=8"][0] | {"seed": 1, "rows": {}, "diverged": "step 9: loss nan"}
    found = miniature_report.study(done, [0, 1], plan)
    assert found["diverged"] == {"Titans C=8, seed 1": "step 9: loss nan"}
    assert list(found["rows"]["Titans C=8"]["perplexity"]["seeds"]) == ["0"]
    assert list(found["rows"][REFERENCE]["perplexity"]["seeds"]) == ["0", "1"]
    (line,) = (line for line in miniature_report.table(found) if line.startswith("| Titans C=8 |"))
    assert "(1 of 2 seeds)" in line


def test_mean_and_standard_deviation():
    found = miniature_report.mean_and_std({0: 1.0, 1: 2.0, 2: 6.0})
    assert found == {"mean": 3.0, "std": 2.6458, "seeds": {"0": 1.0, "1": 2.0, "2": 6.0}}
    assert miniature_report.plus_minus(found) == "3.00 ± 2.65"


# --- the conversion -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_conversion_runs_and_liza_starts_as_the_window(sources, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(miniature_conversion, "PLAN", SMALL)
    out = tmp_path / "study.json"
    common = ["--runs", str(tmp_path / "runs"), "--corpus", str(sources), "--seeds", "0"]
    miniature_conversion.main([*common, "--out", str(out)])
    result = json.loads(out.read_text())
    assert list(result["rows"]) == list(miniature_conversion.ROWS) and result["missing"] == {}
    assert len(result["checks"]) == 2 and all(result["checks"].values())
    perplexity = {name: row["perplexity"]["mean"] for name, row in result["rows"].items()}
    gap = perplexity["window only"] - perplexity["source"]
    back = (perplexity["window only"] - perplexity["TNT hybrid"]) / gap
    rounded = 1e-4 * (1 + abs(back)) / abs(gap)  # perplexities have four digits
    assert result["rows"]["TNT hybrid"]["recovered"]["mean"] == pytest.approx(back, abs=rounded + 1e-4)
    starts = {
        name: json.loads(miniature_runs.path_of(tmp_path / "runs", name, 0).read_text())["rows"]["window only"]["loss"]
        for name in ("window + LoRA", "TNT hybrid", "LiZA hybrid")
    }
    assert max(starts.values()) - min(starts.values()) < 1e-5  # float32 sums in another order
    assert out.with_suffix(".png").is_file()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(miniature_conversion.ROWS)


# --- what is committed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program, name", [(miniature, "miniature"), (miniature_conversion, "miniature_conversion")])
def test_committed_results_are_complete_and_are_what_the_readme_says(program, name, tmp_path, capsys):
    committed = FOLDER / "results" / f"{name}.json"
    copy = tmp_path / committed.name
    copy.write_bytes(committed.read_bytes())
    program.main(["--report", str(copy)])
    result = json.loads(committed.read_text())
    assert len(result["seeds"]) >= 3
    for model, row in result["rows"].items():
        diverged = [seed for seed in result["seeds"] if f"{model}, seed {seed}" in result.get("diverged", {})]
        once = model in ("source", "window only")  # of the conversion: nothing in them depends on a seed
        seeds = [0] if once and program is miniature_conversion else [x for x in result["seeds"] if x not in diverged]
        assert list(row["perplexity"]["seeds"]) == [str(seed) for seed in seeds]
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert printed and all(line in README for line in printed)
    drawn = {path.name for path in tmp_path.glob("*.png")}
    own = rf"{name}(_(?!conv)\w+)?\.png"
    assert drawn == {path.name for path in committed.parent.glob("*.png") if re.fullmatch(own, path.name)}
    assert all(f"results/{picture}" in README for picture in drawn)
    if name == "miniature":
        counts = [row["parameters"] for row in result["rows"].values()]
        assert max(counts) / min(counts) < 1.01
