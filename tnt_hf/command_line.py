"""`--config FILE.yaml` of a command: arguments by name, which the command line overrides."""

import argparse
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tnt_hf.settings import read_yaml


def parse_arguments(parser: argparse.ArgumentParser, words: list[str] | None = None) -> argparse.Namespace:
    """
    `parser.parse_args`, with the option `--config`.

    Raises:
        ValueError, OSError: of the file, as [`with_config`].
    """
    add_config(parser)
    words = with_config(parser, sys.argv[1:] if words is None else words)
    return check_config(parser, parser.parse_args(words), words)


def check_config(parser: argparse.ArgumentParser, options: argparse.Namespace, words: list[str]) -> argparse.Namespace:
    """Exits, as `parser` does for any wrong command line, if `--config` was abbreviated, so that nobody read it."""
    if options.config is not None and not any(word.partition("=")[0] == "--config" for word in words):
        parser.error("--config: must not be abbreviated")
    return options


def add_config(parser: argparse.ArgumentParser) -> None:
    """Gives `parser` the option whose file [`with_config`] reads."""
    parser.add_argument("--config", metavar="FILE.yaml", help="arguments by name; the command line wins")


def with_config(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """
    The `words` of a command line behind those that the file of their `--config` stands for: a mapping such as
    `max_new_tokens: 64`, `overwrite: true`, `context: [128, 512]`. Positional arguments become `parser`'s defaults.

    Raises:
        ValueError: not a mapping in YAML, an unknown name, or a value that the command line could not give.
        FileNotFoundError: there is no such file.
    """
    early = argparse.ArgumentParser(prog=parser.prog, add_help=False, allow_abbrev=False)
    early.add_argument("--config", type=Path)
    path = early.parse_known_args(words)[0].config
    if path is None or {"-h", "--help"} & {*words}:
        return words
    if not path.is_file():
        raise FileNotFoundError(f"--config {path}: is not a file")
    settings = read_yaml(path, "--config", numbers=False)  # of a text such as 007 the zeros stay
    if not isinstance(settings, dict):
        raise ValueError(f"--config {path}: must hold a mapping, not {type(settings).__name__}")
    actions = {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}
    found: list[str] = []
    for name, value in settings.items():
        if name not in actions:
            near = get_close_matches(str(name), actions, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"--config {path}: {name}={value!r}: is not an argument of {parser.prog}{hint}")
        action = actions[name]
        if isinstance(action, argparse._AppendAction):
            given = any(action.option_strings[0].startswith(x.partition("=")[0]) for x in words if x[:2] == "--" != x)
            values = [] if given else value if isinstance(value, list) else [value]
        else:
            values = [value]
        try:
            found += [word for x in values for word in _words(action, x)]
        except TypeError as error:
            raise ValueError(f"--config {path}: {name}={value!r}: must be {error}") from None
    return [*found, f"--config={path}", *words]  # which ends a list, before a positional argument would join it


def _words(action: argparse.Action, value: Any) -> list[str]:
    """What says `value` on a command line. Raises TypeError: nothing does; its text is what it must be."""
    several = action.nargs in ("+", "*")
    items = value if isinstance(value, list) and several else [value]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise TypeError("true or false")
        return [action.option_strings[0]] if value else []
    if value is None and not action.required:
        return []
    if not items or any(isinstance(x, bool | list | dict) or x is None for x in items):
        raise TypeError("a text, a number or a list of them" if several else "a text or a number")
    if not action.option_strings:
        action.default, action.nargs, action.required = str(value), "?", False
        return []
    return [action.option_strings[0], *map(str, items)] if several else [f"{action.option_strings[0]}={value}"]
