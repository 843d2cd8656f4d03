"""README.md and those of the folders are true: blocks run, commands exist, and every name and link leads somewhere."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tnt_hf.cli import main
from tnt_hf.recipes.recipe_file import read_recipe


ROOT = Path(__file__).parents[1]
# Whose blocks run, in this order; of the others (recipes, benchmarks) the links are checked.
RUN = ("README.md", "tnt_hf/README.md", "conversion/README.md")
TEXT = "\n".join((ROOT / name).read_text() for name in RUN)
FOLDERS = ("tnt_hf", "conversion", "recipes", "tests")
ALL = [ROOT / "README.md", *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("README.md")))]
MAKEFILE = (ROOT / "Makefile").read_text()


def blocks(language: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str = TEXT) -> list[str]:
    lines = (line.partition(" #")[0].strip() for block in blocks("bash", text) for line in block.splitlines())
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def after(tmp_path_factory):
    """The folder in which all python blocks have run, and their variables."""
    folder, namespace = tmp_path_factory.mktemp("readme"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for number, block in enumerate(blocks("python"), 1):
            exec(compile(block, f"README.md, python block {number}", "exec"), namespace)
    return folder, namespace


def test_python_blocks_run_in_order(after):
    folder, namespace = after
    assert namespace["second"].shape[1] == namespace["question"].shape[1] + 20
    assert all(layer.isfinite().all() for layer in namespace["surprise"])
    assert (folder / "my-tnt" / "modeling_tnt.py").is_file()


def test_conversion_and_injection_are_exact_as_claimed(after):
    folder, namespace = after
    source = AutoModelForCausalLM.from_pretrained(folder / "my-llama").eval()
    ids = torch.arange(16)[None]
    with torch.inference_mode():
        logits = source(ids).logits
        assert torch.equal(namespace["hybrid"].eval()(ids).logits, logits)
        assert torch.equal(namespace["source"].eval()(ids).logits, logits)
        assert not torch.equal(namespace["again"].eval()(ids).logits, logits)


def test_the_session_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """What the README claims beside its blocks: a continued conversation equals one forward over all of it."""
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for block in blocks("python"):
        exec(block, namespace)
        if "second" in namespace:
            break
    whole = namespace["model"].generate(namespace["question"], max_new_tokens=20)
    assert whole.equal(namespace["second"])


# What makes a command of the README short enough for a test; the rest of it is as printed.
STEPS = "--max_steps 2 --per_device_train_batch_size 1 --eval_rows 2"
SHORTER = {
    "tnt train --config tnt_debug/stage1": f"{STEPS} --hidden_size 32 --intermediate_size 32",
    "tnt train --config tnt_debug/stage2": STEPS,
    "tnt eval": "--tokens 600 --samples 2",
}


@pytest.mark.long
def test_commands_run(after, monkeypatch, capsys):
    monkeypatch.chdir(after[0])
    for command in (c for c in commands() if c.startswith("tnt ")):
        shorter = next((more for start, more in SHORTER.items() if command.startswith(start)), "")
        assert main(shlex.split(f"{command} {shorter}")[1:]) == 0, command
        assert capsys.readouterr().out, command


def test_commands_of_other_launchers_name_recipes_that_can_be_read():
    text = (ROOT / "recipes" / "README.md").read_text()
    launched = [shlex.split(c.partition("tnt_hf.recipes.train ")[2]) for c in commands(text) if "recipes.train " in c]
    assert launched
    for arguments in launched:
        assert read_recipe([*arguments, "--use_cpu"]).name == "tnt_150m/stage1.yaml"


def test_make_targets_exist_and_ci_runs_the_test_command():
    targets = re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE)
    mentioned = set(re.findall(r"(?:^|`)make ([a-z-]+)", TEXT, flags=re.MULTILINE))
    assert {"test", "demo"} <= mentioned <= set(targets)
    run_by_ci = re.findall(r"^(?:exec )?make (\S+)$", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    assert run_by_ci == ["test", "test-long", "test-newest"]


def test_every_reference_exists():
    for file, name in re.findall(r"`([\w/.-]+\.py)::(\w+)`", TEXT):
        nodes = {getattr(x, "name", None): x for x in ast.walk(ast.parse((ROOT / file).read_text()))}
        assert name in nodes, f"{file}::{name}"
        if file.startswith("tests/"):
            marks = {ast.unparse(x) for x in nodes[name].decorator_list}
            assert name.startswith("test_"), f"{file}::{name} is not collected"
            assert not marks & {"pytest.mark.long", "pytest.mark.slow"}, f"{file}::{name} is deselected"


@pytest.mark.parametrize("file", ALL, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(file):
    for link in re.findall(r"\]\(([^)\s]+)\)", file.read_text()):
        if not link.startswith("https://"):
            name, _, heading = link.partition("#")
            target = file.parent / name if name else file
            assert target.exists(), link
            assert not heading or heading in anchors(target.read_text()), link


def anchors(text: str) -> set[str]:
    """What a link can name behind `#`, as GitHub makes it of the headings."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_fields_of_the_symbol_table_exist():
    from tnt_hf import TNTConfig

    (table,) = re.findall(r"^\| symbol \| field \|\n.*?\n\n", TEXT, flags=re.MULTILINE | re.DOTALL)
    fields = re.findall(r"`(\w+)`", table)
    assert len(fields) > 15
    assert not [field for field in fields if not hasattr(TNTConfig(), field)]
