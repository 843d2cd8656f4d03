"""The command line: `tnt info` against counts done by hand, `tnt generate`, and honest refusals."""

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml
from model_folders import save_letters
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tnt_hf import TNTCache, TNTConfig, TNTForCausalLM
from tnt_hf.cli import DELEGATED, load_config, main
from tnt_hf.config_sources import fields_of_recipe
from tnt_hf.presets import PRESETS
from tnt_hf.recipes.evaluate import build_parser as evaluate_parser


ROOT = Path(__file__).parents[1]
FIELDS = {
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "sliding_window": 4,
    "memory_layers": [1],
    "global_chunk_size": 8,
    "local_chunk_sizes": [1, 4],
    "local_reset_interval": 16,
    "memory_depth": 2,
    "memory_expansion": 2,
    "memory_conv_kernel": 4,
    "memory_momentum": True,
    "memory_decay": True,
}


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(FIELDS))
    return str(path)


def info(capsys, *arguments) -> dict:
    assert main(["info", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_info_matches_a_hand_count(config_file, capsys):
    found = info(capsys, config_file, "--context", "100")

    # hidden 16; 2 query heads and 1 key/value head of width 8: q and o are 16 x 16, k and v are 16 x 8.
    attention, mlp, norms = 256 + 128 + 128 + 256, 3 * 16 * 24, 2 * 16
    assert attention + mlp + norms == 1952
    base = 2 * 1952 + 100 * 16 + 100 * 16 + 16  # layers, embedding, head, final norm
    # One layer has memory. Its own q (16 x 16), k, v (16 x 8) and 4 taps on each of their 32 channels.
    inputs = 256 + 128 + 128 + 4 * 32
    # Three memories (one global, two local): W_1 8 x 16 and W_2 16 x 8; gates of rate, momentum and forgetting, each
    # 16 -> 1 with bias.
    memories = 3 * (8 * 16 + 16 * 8 + 3 * (16 + 1))
    # The read-out: RMS norm of width 8; gate "add" has a factor per channel and W_g, 16 -> 2 query heads.
    readout = 8 + 16 + 16 * 2
    memory = inputs + memories + readout
    assert (base, memory) == (7120, 1617)
    assert found["parameters"] == {"base": base, "memory": memory, "total": base + memory}
    assert [layer["base_parameters"] for layer in found["layers"]] == [1952, 1952]
    assert [layer["memory_parameters"] for layer in found["layers"]] == [0, memory]

    # State, 4 bytes each: 256 weights; with C > 1 the chunk's first weights again; momentum. One M of 8 x 8 (both
    # local memories reset every 16 tokens); the last 3 inputs of 32 channels; 8 bytes of memory time.
    state = 4 * ((256 + 256 + 256) + (256 + 256) + (256 + 256 + 256) + 8 * 8 + 3 * 32) + 8
    assert found["memory_state_bytes"] == state == 8840
    assert [layer["state_bytes"] for layer in found["layers"]] == [0, state]
    # Keys and values of the 3 tokens before the one being decoded, width 8, in both layers.
    assert found["kv_bytes"] == 2 * (2 * 3 * 8 * 4) == 384

    # FLOPs of one decoded token: 2 per weight of the backbone; scores and values of 4 visible keys, 2 * 2 * 16 each.
    base_flops = 2 * (2 * (attention + mlp) + 16 * 100)
    attention_flops = 2 * (4 * 2 * 2 * 16)
    # Per memory with P = 256 weights: forward 2 P, backward 2 (P - 128), update 2 P, momentum 2 P; two query rows read
    # with 2 P each; three gates. One M: add k^T k (2 * 64), apply to two query rows (2 * 64 each). W_g.
    memory_flops = 3 * (512 + 256 + 512 + 512 + 2 * 512 + 3 * 2 * 16) + 2 * 64 + 2 * 2 * 64
    memory_flops += 2 * (256 + 128 + 128 + 4 * 32) + 2 * 16 * 2
    expected = {"base": base_flops, "attention": attention_flops, "memory": memory_flops}
    assert found["flops_per_token"] == expected | {"total": sum(expected.values())}


@pytest.mark.parametrize("feature_map", ["silu", "quadratic"])
def test_info_agrees_with_a_real_cache_and_a_real_model(feature_map, config_file, capsys):
    model = TNTForCausalLM(TNTConfig(**FIELDS | {"memory_feature_map": feature_map}))
    for tokens in (3, 21):
        found = info(capsys, config_file, f"memory_feature_map={feature_map}", "--context", str(tokens))
        with torch.inference_mode():
            cache = model(torch.randint(0, 100, (1, tokens)), use_cache=True).past_key_values
        assert found["parameters"]["total"] == sum(p.numel() for p in model.parameters())
        assert found["memory_state_bytes"] == cache.state_bytes()
        assert found["memory_state_bytes"] + found["kv_bytes"] == cache.nbytes()


def test_info_reads_every_kind_of_source(config_file, tmp_path, capsys):
    expected = info(capsys, config_file)
    TNTConfig(**FIELDS).save_pretrained(tmp_path / "folder")
    assert info(capsys, str(tmp_path / "folder")) == expected
    assert info(capsys, str(tmp_path / "folder" / "config.json")) == expected
    assert info(capsys, "tnt", *(f"{name}={value}" for name, value in FIELDS.items())) == expected
    assert load_config("tnt", ["memory_max_lr=1e-2"]).memory_max_lr == 0.01
    assert load_config("tnt", ["local_chunk_sizes=4,8"]).local_chunk_sizes == [4, 8]
    TNTConfig(local_chunk_sizes=[4, 8]).save_pretrained(tmp_path / "saved")  # with the sizes it was trained with
    again = load_config(str(tmp_path / "saved"), ["local_chunk_sizes=[16]"])
    assert (again.local_chunk_sizes, again.memory_train_chunk_sizes[1:]) == ([16], [16])


def test_info_reads_fields_that_are_saved_where_they_were_set(config_file, tmp_path, capsys):
    model = TNTForCausalLM(TNTConfig(**FIELDS | {"sliding_window": 16}))
    model.set_sliding_window(8)
    model.config.output_surprise = True
    model.save_pretrained(tmp_path)
    assert {"window_narrowed", "output_surprise"} <= json.loads((tmp_path / "config.json").read_text()).keys()
    assert info(capsys, str(tmp_path)) == info(capsys, config_file, "sliding_window=8")
    model.config.classifier_dropout = 0.2
    model.save_pretrained(tmp_path)
    assert info(capsys, str(tmp_path)) == info(capsys, config_file, "sliding_window=8")


def test_info_reads_recipes_of_new_models(tmp_path, capsys):
    """The paper's 150M models, by name and by path; the recipes promise equal parameters."""
    totals = {info(capsys, f"{name}_150m/stage1")["parameters"]["total"] for name in ("tnt", "titans", "transformer")}
    assert max(totals) / min(totals) < 1.01
    path = Path(__file__).parents[1] / "recipes" / "tnt_debug" / "stage1.yaml"
    assert info(capsys, str(path)) == info(capsys, "tnt_debug/stage1")
    assert load_config("tnt_debug/stage1", []).vocab_size == 1024
    padded = {"mode": "pretrain", "model": "tnt", "tokenizer_vocab_size": 1000, "model_config": {"vocab_size": 1024}}
    assert fields_of_recipe("a recipe", padded)["vocab_size"] == 1024
    flat = tmp_path / "flat.yaml"
    flat.write_text("mode: pretrain\nmodel: tnt\nhidden_size: 32\nmodel_config.num_hidden_layers: 3\n")
    found = load_config(str(flat), [])
    assert (found.hidden_size, found.num_hidden_layers) == (32, 3), "as `tnt train` reads it"
    assert main(["info", "tnt_debug/stage2"]) == 2
    assert "does not create a new TNT model (mode='stage2', model='runs/tnt_debug/stage1')" in capsys.readouterr().err


def test_info_prints_one_row_per_layer(config_file, capsys):
    assert main(["info", config_file, "--context", "100", "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "base 7,120",
        "memory 1,617",
        "total 8,737",
        "192 B per sequence at 100 tokens",
        "state       8.4 KiB per sequence at any",
    ):
        assert expected in printed
    rows = printed.splitlines()[-2:]
    assert rows[0].split() == ["0", "window", "4", "1,952", "0", "0", "B", "96", "B", "none"]
    assert "  8.4 KiB  " in rows[1] and rows[1].endswith("global C=8, local C=1 S=16, local C=4 S=16")


def test_presets_are_the_documented_baselines():
    readme = Path(__file__).parents[1].joinpath("tnt_hf", "README.md").read_text()
    documented = {"TNTConfig": TNTConfig}
    exec(re.search(r"## Baselines.*?```python\n(.*?)```", readme, flags=re.DOTALL)[1], documented)
    for name in PRESETS.keys() - {"tnt"}:
        assert load_config(name, []).to_dict() == documented[name.replace("-", "_")].to_dict(), name
    assert load_config("tnt", []).to_dict() == TNTConfig().to_dict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tnt", "hidden_sise=3"], "no field 'hidden_sise'; did you mean 'hidden_size'?"),
        (["tnt", "sliding_window=0"], "sliding_window"),
        (["tnt", "hidden_size"], "FIELD=VALUE"),
        (["tnt", "--context", "0"], "--context 0"),
        (["nowhere.yaml"], "'nowhere.yaml' is not a file, folder, recipe, Hub id or preset"),
        (["{folder}"], "is a folder without config.json"),
        (["tnt_debug/stage3"], "'tnt_debug/stage3' is not a recipe; there are tnt_debug/align, "),
        (["{folder}/list.yaml"], "must hold a mapping"),
        (["{folder}/llama.json"], "model_type='llama'"),
        (
            ["{folder}/injected"],
            "an injected memory (model_type='qwen3'), which tnt info does not describe: see tnt_inj",
        ),
        (["{folder}/adapter"], "/adapter' holds an adapter: tnt info reads its base model, or a whole model"),
        (["{folder}/session.safetensors"], "is neither JSON nor YAML"),
        (["tnt", "model_type=llama"], "model_type='llama'"),
        (["tnt", "hidden_size=64", "hidden_size=128"], "hidden_size is given twice"),
        (["tnt", "dtype=float17"], "TNTConfig.dtype='float17': must be the name of"),
        (["tnt", "id2label=5"], "'tnt': 'int' object"),
        (["{folder}/bytes.yaml"], "bytes.yaml': is neither JSON nor YAML"),
        (["{folder}/date.yaml"], "date.yaml': 'a: 2024-13-45' is not valid YAML (month"),
        (["{folder}/number.yaml"], "None is not the name of a field"),
        (["{folder}/recipe.yaml"], "model_config=5 must be a mapping"),
        (["{folder}/recipe2.yaml"], "does not create a new TNT model (mode='pretrain', model=['tnt'])"),
        (["{folder}/recipe3.yaml"], "hidden_sise=3: is not a field; did you mean 'hidden_size'?"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_info_names_the_mistake(arguments, message, tmp_path, capsys):
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "llama.json").write_text('{"model_type": "llama"}')
    (tmp_path / "injected").mkdir()
    (tmp_path / "injected" / "config.json").write_text('{"model_type": "qwen3", "tnt_injection": {"kind": "liza"}}')
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    TNTCache(TNTConfig(**FIELDS)).save(tmp_path / "session.safetensors")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff")
    (tmp_path / "date.yaml").write_text("a: 2024-13-45")
    (tmp_path / "number.yaml").write_text("null: 2\n")
    (tmp_path / "recipe.yaml").write_text("{mode: pretrain, model: tnt, model_config: 5}")
    (tmp_path / "recipe2.yaml").write_text("{mode: pretrain, model: [tnt]}")
    (tmp_path / "recipe3.yaml").write_text("{mode: pretrain, model: tnt, hidden_sise: 3}")
    assert main(["info", *(argument.format(folder=tmp_path) for argument in arguments)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and not printed.out


@pytest.mark.parametrize(
    "arguments, usage, message",
    [
        (["info"], "tnt info [-h]", "the following arguments are required: MODEL\n"),
        (["convert"], "tnt convert [-h]", "the following arguments are required: SRC, OUT\n"),
        (["info", "tnt", "--hidden_size", "64"], "tnt info [-h]", "if a field is meant, write hidden_size=64\n"),
        (["info", "tnt", "--hidden-size=64"], "tnt info [-h]", "if a field is meant, write hidden_size=64\n"),
        (["info", "tnt", "--tied", "--json"], "tnt info [-h]", "if a field is meant, write tied=VALUE\n"),
        (["info", "tnt", "-x"], "tnt info [-h]", "unrecognized arguments: -x\n"),
        (["convert", "a", "b", "--memory_depth", "2"], "tnt convert [-h]", "is meant, write memory_depth=2\n"),
        (["generate", "a", "--prompt", "b", "--x"], "tnt generate [-h]", "unrecognized arguments: --x\n"),
        (["trian", "--config", "x"], "tnt [-h]", "there is no command 'trian'; did you mean 'train'?\n"),
        (["nothing"], "tnt [-h]", "invalid choice: 'nothing'"),
        (["--versoin"], "tnt [-h]", "error: "),
    ],
)
def test_a_wrong_command_line_is_told_with_its_own_usage(arguments, usage, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    error = capsys.readouterr().err
    assert error.startswith(f"usage: {usage}") and message in error and "versoin'; did you mean" not in error


def test_info_says_that_it_reads_models(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["info", "--help"])
    usage = " ".join(capsys.readouterr().out.split())
    assert "tnt info [-h]" in usage and " [MODEL] [FIELD=VALUE ...]" in usage and "CONFIG" not in usage


def test_fields_may_stand_after_options(capsys):
    assert main(["info", "titans", "num_hidden_layers=3", "--json"]) == 0
    expected = capsys.readouterr().out
    assert main(["info", "titans", "--json", "num_hidden_layers=3"]) == 0
    assert capsys.readouterr().out == expected
    try:
        status = main(["info", "titans", "--json", "3"])  # argparse takes it for a field from Python 3.13 on
    except SystemExit as error:
        status = error.code
    assert status == 2


def test_an_interruption_at_any_moment_is_one_line(monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    for place in ("build_parser", "run_info"):
        with monkeypatch.context() as patch:
            patch.setattr(f"tnt_hf.cli.{place}", interrupted)
            try:
                status = main(["info", "tnt"])
            except KeyboardInterrupt:  # which would end the tests
                pytest.fail("it is a traceback")
            assert status == 130
        assert capsys.readouterr().err.splitlines()[0].endswith(": interrupted")


@pytest.mark.long
@pytest.mark.parametrize(
    "words, status",
    [
        ("cli train --help", 0),
        ("cli push --help", 0),
        ("recipes.with_tnt", 0),
        ("recipes.conversations", 1),
    ],
)
def test_help_needs_no_docstrings(words, status):
    """`python -OO` leaves none."""
    command = [sys.executable, "-OO", "-m", *f"tnt_hf.{words}".split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status and done.stdout.count("usage") + done.stderr.count("usage:") == 1, done


def test_help_is_immediate_and_loads_no_torch():
    command = [sys.executable, "-m", "tnt_hf.cli", "--help"]
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1", "COLUMNS": "200"}
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        seconds.append(time.perf_counter() - start)
    assert done.returncode == 0
    for name in ("info", "generate", *DELEGATED):
        assert re.search(rf"^ +{name} ", done.stdout, flags=re.MULTILINE), name
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "tnt_hf" in imported
    assert not sorted(imported & {"torch", "transformers", "numpy"})
    assert min(seconds) < 0.3


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_letters(tmp_path_factory.mktemp("model"), **FIELDS)


@pytest.mark.parametrize("variable", [None, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_threads_do_not_spin_for_long_unless_the_environment_says_so(variable):
    said = {} if variable is None else {variable: "active" if variable == "OMP_WAIT_POLICY" else "5"}
    kept = {name: x for name, x in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    code = "import atexit, os, sys; sys.argv = ['tnt', '--version']; from tnt_hf.cli import main"
    code += "; atexit.register(lambda: print(os.getenv('GOMP_SPINCOUNT'))); main()"
    done = subprocess.run([sys.executable, "-c", code], env=kept | said, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == {None: "10000", "OMP_WAIT_POLICY": "None", "GOMP_SPINCOUNT": "5"}[variable]


def test_generate_streams_the_models_own_continuation(model_folder, capsys):
    assert main(["generate", model_folder, "--prompt", "hello there", "--max-new-tokens", "9"]) == 0
    printed = capsys.readouterr().out.rstrip("\n")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    input_ids = tokenizer("hello there", return_tensors="pt")["input_ids"]
    model = TNTForCausalLM.from_pretrained(model_folder).eval()
    expected = model.generate(input_ids, max_new_tokens=9, do_sample=False)[0, input_ids.shape[1] :]
    assert printed.replace(" ", "") == tokenizer.decode(expected).replace(" ", "")


def test_generate_answers_what_a_user_says(model_folder, tmp_path, capsys):
    """Only where asked for: a model that learnt text alone has a template too, and `def ` is no question."""
    command = ["generate", str(tmp_path / "model"), "--prompt", "hi", "--max-new-tokens", "9"]
    shutil.copytree(model_folder, tmp_path / "model")
    assert main([*command, "--chat"]) == 2
    assert f"--chat: the tokenizer of {tmp_path / 'model'} has no chat template" in capsys.readouterr().err
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    turn = "{% for message in messages %}{{ message['role'] }} says {{ message['content'] }} {% endfor %}"
    tokenizer.chat_template = turn + "{% if add_generation_prompt %}model says {% endif %}"
    tokenizer.save_pretrained(tmp_path / "model")
    assert main(command) == main([*command, "--chat"]) == 0
    answers = capsys.readouterr().out
    for prompt in ("hi", "user says hi model says "):
        assert main(["generate", model_folder, "--prompt", prompt, "--max-new-tokens", "9"]) == 0
    assert answers == capsys.readouterr().out


def test_generate_samples_from_the_share_it_is_given(model_folder, capsys):
    prompt, said = ["generate", model_folder, "--prompt", "ab", "--max-new-tokens", "8"], []
    for options in ([], ["--temperature", "1", "--top-p", "1e-6"], ["--temperature", "1"]):
        assert main([*prompt, *options]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]


def test_generate_samples_by_seed_and_sets_chunk_sizes(model_folder, capsys):
    def sample(*arguments):
        command = ["generate", model_folder, "--prompt", "abc", "--max-new-tokens", "20", "--temperature", "1.0"]
        assert main([*command, *arguments]) == 0
        return capsys.readouterr().out

    assert sample("--seed", "1") == sample("--seed", "1") != sample("--seed", "2")
    assert sample("--local-chunk-sizes", "1", "2") == sample("--local-chunk-sizes", "1,2")
    assert main(["generate", model_folder, "--prompt", "abc", "--local-chunk-sizes", "3"]) == 2
    assert "local_chunk_sizes" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "name"), [("--local-chunk-sizes", "local_chunk_sizes"), ("--context", "context")])
def test_lists_of_integers_are_given_with_spaces_or_commas_as_to_train(option, name, capsys):
    for given in (["4", "8"], ["4,8"], ["4,", "8"]):
        assert getattr(evaluate_parser().parse_args(["model", option, *given]), name) == [4, 8]
    for given in (["4", "x"], ["4.5"], [","]):
        with pytest.raises(SystemExit):
            evaluate_parser().parse_args(["model", option, *given])
        expected = f"argument {option}: '{' '.join(given)}' must be integers, as 4 8 or 4,8"
        assert capsys.readouterr().err.endswith(f"{expected}\n")


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_an_empty_name_is_not_the_working_directory(command, model_folder, monkeypatch, capsys):
    monkeypatch.chdir(model_folder)
    assert main([command, "", *(["--prompt", "a"] if command == "generate" else [])]) == 2
    assert "MODEL '': must name a folder" in capsys.readouterr().err
    assert main(["eval", model_folder, "--output", ""]) == 2
    assert "--output '': must name a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "mistake",
    [
        "--max-new-tokens 0", "--temperature -1", "--temperature nan", "--temperature inf", "--prompt ",
        "--top-p 0 --temperature 1", "--top-p 1.5 --temperature 1", "--top-p nan", "--top-p 0.9",
        "--temperature 1e-40", "--seed -1", "--seed 4294967296", "--prompt caf\udce9", "--device meta",
    ],
)  # fmt: skip
def test_generate_names_the_mistake(model_folder, mistake, capsys):
    assert main(["generate", model_folder, "--prompt", "abc", *mistake.split(" ")]) == 2
    assert mistake.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize("template", ["{% for %}", "{{ raise_exception('no') }}", "{{ nothing.x }}"])
def test_a_template_that_fails_is_one_line(model_folder, tmp_path, template, capsys):
    shutil.copytree(model_folder, tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "model")
    assert main(["generate", str(tmp_path / "model"), "--prompt", "hi", "--chat"]) == 2
    assert f"--chat: the template of {tmp_path / 'model'}: fails, " in capsys.readouterr().err


def test_generate_names_weights_that_are_no_numbers_and_tokens_that_are_unknown(model_folder, tmp_path, capsys):
    folder = str(shutil.copytree(model_folder, tmp_path / "model"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)
    assert main(["generate", folder, "--prompt", "abc<new>"]) == 2
    assert f"tokenizer: gives token id {len(tokenizer) - 1}, the model knows " in capsys.readouterr().err
    model = TNTForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data[0] = math.nan
    model.save_pretrained(folder)
    for more in ([], ["--temperature", "1"]):
        assert main(["generate", folder, "--prompt", "abc", *more]) == 2
        assert f"MODEL {folder}: its logits are not finite" in capsys.readouterr().err
    shutil.copytree(model_folder, folder, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    for field, value in (("max_time", "a"), ("num_beams", 4)):
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings | {field: value}))
        status = main(["generate", folder, "--prompt", "abc", "--max-new-tokens", "4"])
        assert status == (2 if field == "max_time" else 0), field


@pytest.mark.long
def test_generate_ends_with_who_reads_it(model_folder):
    """As `tnt generate ... | head` does: by the signal's status, and without a word."""
    command = [sys.executable, "-m", "tnt_hf.cli", "generate", model_folder, "--prompt", "abc", "--max-new-tokens"]
    done = subprocess.Popen([*command, "3000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert done.stdout.read(1)
    done.stdout.close()
    error = done.stderr.read()
    assert done.wait(timeout=120) == 141 and "Broken pipe" not in error and "Traceback" not in error


def test_generate_needs_an_input_and_a_model_that_fits_its_configuration(model_folder, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"memory_conv_kernel": 0}))
    assert main(["generate", str(folder), "--prompt", "abc"]) == 2
    assert re.search(r"tensor '.*_conv.weight' belongs to another configuration", capsys.readouterr().err)
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", model_folder, "--prompt", "-"]) == 2
    assert "--prompt -: standard input is closed" in capsys.readouterr().err


def test_generate_takes_any_causal_language_model_and_refuses_what_it_cannot_use(model_folder, tmp_path, capsys):
    """A Llama speaks as a Llama, not as a TNT model whose memory is random."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=None, **sizes)).eval()
    llama.save_pretrained(tmp_path)
    command = ["generate", str(tmp_path), "--prompt", "abc", "--max-new-tokens", "9"]
    assert main(command) == 2
    assert f"{tmp_path}: holds no tokenizer" in capsys.readouterr().err
    tokenizer.save_pretrained(tmp_path)
    assert main(command) == 0
    input_ids = tokenizer("abc", return_tensors="pt")["input_ids"]
    expected = llama.generate(input_ids, max_new_tokens=9, do_sample=False)[0, input_ids.shape[1] :]
    assert capsys.readouterr().out.replace(" ", "").strip() == tokenizer.decode(expected).replace(" ", "")
    for damaged in ("", "{", "[1]"):
        (tmp_path / "generation_config.json").write_text(damaged)
        assert main(command) == 2 and "generation_config.json: " in capsys.readouterr().err
    (tmp_path / "generation_config.json").unlink()
    for mistake, message in (
        (["--local-chunk-sizes", "1"], "has no local memories"),
        (["--device", "nowhere"], "--device nowhere"),
    ):
        assert main([*command, *mistake]) == 2
        assert message in capsys.readouterr().err


def nobody_answers(*commands: str) -> list[str]:
    """What the commands write to standard error where nothing is cached and no Hub answers."""
    script = f"from tnt_hf.cli import main\nassert {{main(x.split()) for x in {commands}}} == {{2}}"
    with socket.socket() as free, tempfile.TemporaryDirectory() as home:
        free.bind(("127.0.0.1", 0))
        nowhere = {"HF_ENDPOINT": f"http://127.0.0.1:{free.getsockname()[1]}", "HF_HUB_OFFLINE": "0", "HF_HOME": home}
        nowhere |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=os.environ | nowhere, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.long
def test_what_is_no_folder_and_no_repository_is_told_at_once():
    """Where nobody answers, the library asks for every file six times, for half a minute, and tells of each try."""
    lines = nobody_answers(
        "info owner/hybrid-1.5B",
        "generate owner/nothing --prompt abc",
        "eval owner/nothing",
        "train --max_steps 1 --output_dir none --model owner/nothing",
        "convert owner/nothing none",
    )
    assert len(lines) == 5, lines
    for line in lines:
        assert re.search(r"(owner/nothing'?|owner/hybrid-1.5B): no such folder, and the Hub at http://127", line)
        assert "cannot be reached (" in line


@pytest.mark.parametrize("name", ["runs/nowhere", "./nowhere", "../nowhere/model", "/nowhere", "~/nowhere", "a/b/c"])
def test_what_looks_like_a_path_is_not_asked_of_the_hub(name, capsys):
    for command in (f"generate {name} --prompt a", f"eval {name}", f"info {name}", f"convert {name} none"):
        assert main(command.split()) == 2
        error = capsys.readouterr().err
        assert name in error and "the Hub at" not in error and error.count("\n") == 1
        assert re.search("no such folder|neither a folder nor|not a file, folder", error)


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.split() == ["tnt-hf", version("tnt-hf")]


@pytest.mark.long
def test_nobody_has_to_read_the_output():
    """`tnt info ... | head -0`: no traceback."""
    command = [sys.executable, "-m", "tnt_hf.cli", "info", "tnt", "--json"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.long
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_output_may_be_closed(closed, config_file):
    """As of a daemon."""
    done = subprocess.run(["bash", "-c", f"{sys.executable} -m tnt_hf.cli info {config_file} {closed}"], text=True)
    assert done.returncode == 0


def test_a_mistake_about_a_file_names_it_and_no_number(tmp_path, capsys):
    (tmp_path / "source").mkdir()
    (tmp_path / "result").write_text("mine")
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "result")]) == 2
    assert capsys.readouterr().err == f"tnt convert: {tmp_path / 'result'}: exists and is not a folder\n"
