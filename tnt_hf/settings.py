"""Values that people write on a command line or into a file of settings."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any


# The numbers of YAML 1.2, and 1_000.
WHOLE_NUMBER = re.compile(r"([-+]?[0-9]+(_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+)$")
NUMBER = re.compile(r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$")
INTEGER, FLOAT, STARTS = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float", list("-+.0123456789")


def parse_yaml(text: str, *, numbers: bool = True) -> Any:
    """
    YAML with the numbers of YAML 1.2. PyYAML's are of YAML 1.1: `1e-6` is a text there, `010` eight, `12:30` 750.
    Without `numbers` they are the texts that they are written as.

    Raises:
        ValueError: the text is not valid YAML, or a mapping has a key twice, of which PyYAML would drop the first.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    if key.value in seen:
                        raise yaml.YAMLError(f"line {key.start_mark.line + 1}: {key.value!r} is given twice")
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {
        start: [(tag, pattern) for tag, pattern in known if tag not in (INTEGER, FLOAT)]
        for start, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    if numbers:
        Loader.add_implicit_resolver(INTEGER, WHOLE_NUMBER, STARTS)
        Loader.add_implicit_resolver(FLOAT, NUMBER, STARTS)
    Loader.add_constructor(INTEGER, lambda _, node: int(node.value, 0 if node.value[1:2] in ("o", "x") else 10))
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # the last of dates that do not exist
        mark = getattr(error, "problem_mark", None)  # where the reader was stopped, which may be the end
        at = text if mark is None else ([*text.splitlines(), ""][mark.line] or text)
        raise ValueError(f"{at[:60]!r} is not valid YAML ({' '.join(str(error).split())})") from error


def dump_yaml(value: Any) -> str:
    """YAML of `value`, keys in their order, which `parse_yaml` and readers of YAML 1.1 read as the same."""
    import yaml

    class Dumper(yaml.SafeDumper):  # which quotes a text that either would take for a number
        pass

    Dumper.add_implicit_resolver(INTEGER, WHOLE_NUMBER, STARTS)
    Dumper.add_implicit_resolver(FLOAT, NUMBER, STARTS)
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path, name: str, *, numbers: bool = True) -> Any:
    """What the YAML file `path` holds, as [`parse_yaml`]. Raises ValueError, naming `name` and it: not YAML, or not
    text."""
    content = path.read_bytes()
    try:
        text = None if b"\0" in content else content.decode()
    except UnicodeDecodeError:
        text = None
    if text is None:
        raise ValueError(f"{name}={str(path)!r}: is neither JSON nor YAML, for it is not text in UTF-8")
    try:
        return parse_yaml(text, numbers=numbers)
    except ValueError as error:
        raise ValueError(f"{name}={str(path)!r}: {error}") from error


def parse_value(text: str) -> Any:
    """A value of the command line: YAML, and `4,8` is the list that it looks like. Raises ValueError: not YAML."""
    return [int(item) for item in text.split(",")] if re.fullmatch(r"\d+(,\d+)+", text) else parse_yaml(text)


def check_text(name: str, text: str) -> None:
    """Raises ValueError: `text`, of the option or argument `name`, came as bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}={ascii(text)}: is not UTF-8 text") from None


class Integers(argparse.Action):
    """An option with `nargs="+"` whose integers are given as `4 8` or `4,8`."""

    def __call__(self, parser, namespace, values, option_string=None):
        try:
            integers = [int(word) for word in " ".join(values).replace(",", " ").split()]
        except ValueError:
            integers = []
        if not integers:
            raise argparse.ArgumentError(self, f"{' '.join(values)!r} must be integers, as 4 8 or 4,8")
        setattr(namespace, self.dest, integers)


def accept_fields_after_options(parser: argparse.ArgumentParser, name: str) -> None:
    """`FIELD=VALUE`s anywhere on the command line. `name` is their argument, of which `nargs="*"` takes what stands
    before the first option only; the rest comes back as unknown. What is not a field either ends in an error of this
    parser, not of the one that it is a command of."""
    parse = parser.parse_known_args

    def parse_known_args(args=None, namespace=None):
        args = sys.argv[1:] if args is None else args
        found, rest = parse(args, namespace)
        fields = [text for text in rest if re.match(r"[A-Za-z_]\w*=", text)]
        setattr(found, name, [*getattr(found, name), *fields])
        if unknown := [text for text in rest if text not in fields]:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{_as_field(unknown[0], args)}")
        return found, []

    parser.parse_known_args = parse_known_args


def _as_field(unknown: str, arguments: list[str]) -> str:
    """How to write the field for which `unknown`, one of the `arguments`, may be meant: `--hidden_size`."""
    option, equals, value = unknown.partition("=")
    name = option.removeprefix("--").replace("-", "_")
    if not option.startswith("--") or not name.isidentifier():
        return ""
    if not equals:
        after = arguments[arguments.index(unknown) + 1 :]
        value = after[0] if after and not after[0].startswith("-") else "VALUE"
    return f"; if a field is meant, write {name}={value}"
