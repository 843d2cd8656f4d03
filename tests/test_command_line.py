"""Values that people write into files and on command lines, and `--config` of every command."""

import argparse
import errno
import math
import re

import pytest
import yaml
from model_folders import save_letters

from tnt_hf.cli import main
from tnt_hf.command_line import parse_arguments
from tnt_hf.recipes import push, train
from tnt_hf.settings import dump_yaml, parse_yaml


FIELDS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    "sliding_window": 8, "global_chunk_size": 8, "local_chunk_sizes": [2, 4], "local_reset_interval": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_letters(tmp_path_factory.mktemp("model"), **FIELDS)


def test_numbers_with_an_exponent_are_numbers():
    for text in ("1e-6", "-1e-6", "+2e3", ".5e3", "-.5e3", "1.e3"):
        assert parse_yaml(text) == float(text)


def test_numbers_are_those_of_yaml_1_2():
    """PyYAML's own rules make eight of the first and 750 of the time."""
    numbers = {
        "010": 10,
        "1_000": 1000,
        "-07": -7,
        "0x1F": 31,
        "0o17": 15,
        "+3": 3,
        "5.": 5.0,
        "-.5": -0.5,
        "-.inf": -math.inf,
    }
    assert {text: parse_yaml(text) for text in numbers} == numbers
    for text in ("12:30", "0b11", "1.2.3"):
        assert parse_yaml(text) == text
    for text in (*numbers, "12:30", "08", "1e5", "yes", "a: b", "~"):  # texts that a recipe holds
        for read in (parse_yaml, yaml.safe_load):
            assert read(dump_yaml({"name": text, "a": [text, 1, 0.5]})) == {"name": text, "a": [text, 1, 0.5]}


def test_what_is_nested_too_deeply_is_no_yaml():
    with pytest.raises(ValueError, match="is not valid YAML"):
        parse_yaml("[" * 5000)


@pytest.fixture
def settings_file(tmp_path):
    """Writes a file for --config and returns its path."""

    def write(settings) -> str:
        (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        return str(tmp_path / "settings.yaml")

    return write


def test_arguments_from_a_file(model_folder, settings_file, capsys):
    given = {"model": model_folder, "prompt": "-ab", "max_new_tokens": 9, "seed": None, "local_chunk_sizes": [1, 2]}
    command = ["generate", model_folder, "--prompt=-ab", "--local-chunk-sizes", "1", "2", "--max-new-tokens"]
    for more, words, tokens in (
        ({}, [], "9"),
        ({}, ["--max-new-tokens", "3"], "3"),  # the command line wins
        ({"model": "other"}, [model_folder], "9"),
    ):
        printed = []
        for way in (["generate", *words, "--config", settings_file(given | more)], [*command, tokens]):
            assert main(way) == 0
            printed.append(capsys.readouterr().out)
        assert printed[0] == printed[1]


def test_every_command_reads_its_arguments_from_a_file(model_folder, settings_file, tmp_path, capsys):
    fields = settings_file(FIELDS)
    assert main(["info", "--config", fields, "hidden_size=64"]) == main(["info", fields, "hidden_size=64"]) == 0
    first, second = capsys.readouterr().out.split("parameters  ")[1:]
    assert first == second
    for command, settings, said in (
        ("verify", {"source": "nowhere", "output": model_folder, "json": model_folder}, "--json"),
        ("eval", {"model": model_folder, "tasks": "cost", "context": [8], "output": "/proc/none"}, "/proc/none"),
        ("push", {"folder": model_folder, "repo": "not a name"}, "not a name"),
        ("demo", {"budget": 0, "only": ["lora", "hybrid"]}, "--budget 0"),
        ("train", {"model": "nowhere/none", "mode": "nowhere"}, "mode"),
    ):
        assert main([command, "--config", settings_file(settings)]) == 2
        assert said in capsys.readouterr().err
    assert main(["bench", "memory", "--config", settings_file({"rounds": 0, "out": str(tmp_path)})]) == 2
    assert "rounds" in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"modle": "a"}, "modle='a': is not an argument of tnt generate; did you mean 'model'"),
        ({"chat": "yes"}, "chat='yes': must be true or false"),
        ({"prompt": ["a", "b"]}, "prompt=.*: must be a text or a number"),
        ({"prompt": None}, "prompt=None: must be a text or a number"),
        ({"local_chunk_sizes": []}, "local_chunk_sizes=.*: must be a text, a number or a list of them"),
        ({"config": "other.yaml"}, "config='other.yaml': is not an argument"),
        (["model"], "must hold a mapping, not list"),
    ],
    ids=str,
)
def test_what_a_file_of_arguments_cannot_say_is_named(settings_file, settings, message, capsys):
    assert main(["generate", "--config", settings_file(settings)]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert main(["generate", "--config", "nowhere.yaml"]) == 2
    assert capsys.readouterr().err == "tnt generate: --config nowhere.yaml: is not a file\n"
    for command in ("generate", "eval"):
        with pytest.raises(SystemExit, match="2"):
            main([command, "a", "--conf", "nowhere.yaml", *(["--prompt", "b"] if command == "generate" else [])])
        assert "--config: must not be abbreviated" in capsys.readouterr().err


def test_a_text_of_digits_keeps_them(tmp_path):
    parser = argparse.ArgumentParser()
    parser.add_argument("--revision")
    for name, kind in (("--steps", int), ("--rate", float), ("--seed", int)):
        parser.add_argument(name, type=kind)
    (tmp_path / "a.yaml").write_text("revision: 0071e3\nsteps: 1_000\nrate: 1e-4\nseed: -07\n")
    found = parse_arguments(parser, ["--config", str(tmp_path / "a.yaml")])
    assert (found.revision, found.steps, found.rate, found.seed) == ("0071e3", 1000, 1e-4, -7)


@pytest.mark.parametrize("module, function", [(train, "prepare"), (push, "push")], ids=["train", "push"])
def test_who_no_longer_reads_the_output_made_no_mistake(monkeypatch, module, function):
    """The command line as a whole then ends with the status of the signal."""

    def unread(*args, **options):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(module, function, unread)
    with pytest.raises(BrokenPipeError):
        module.main(["folder", "me/model"])


@pytest.mark.parametrize(
    "words, wanted", [([], ["a", "b"]), (["--only", "c"], ["c"]), (["--on=c"], ["c"]), (["--", "x"], ["a", "b"])]
)
def test_a_repeated_option_replaces_that_of_the_file(words, wanted, settings_file):
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append")
    parser.add_argument("rest", nargs="*")
    found = parse_arguments(parser, ["--config", settings_file({"only": ["a", "b"]}), *words])
    assert found.only == wanted
