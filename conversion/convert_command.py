"""Turn a Llama, Mistral, Qwen2, Qwen3 or Phi-3 checkpoint into a TNT hybrid, exact before it is trained."""

import argparse
import json
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tnt_hf.conversion.head_start import head_start
from tnt_hf.settings import accept_fields_after_options, parse_value, read_yaml
from tnt_hf.termination import orderly_termination


EPILOG = """\
Any field of the memory can follow as FIELD=VALUE, with the value in YAML: memory_depth=2 local_chunk_sizes=[8,16].
The YAML file of --config holds the same fields and the long options by name (window: 512, keep_full_attention:
"auto:2", link: copy), except --quiet; the command line wins. Shards of the same dtype are hard links where the file
system allows: no time, no space. What is newly written is read back for its SHA-256 and searched for nan and infinity;
linked or copied shards are read up to 1 GiB in all, or with --check, or later by `tnt verify`.
"""
# Options a file may set, besides fields of the memory.
OPTIONS = (
    "window", "keep_full_attention", "probe", "memory_layers", "dtype", "link", "overwrite", "seed", "max_shard_size",
    "check", "revision",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tnt convert`; nothing heavy is imported."""
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, EPILOG
    parser.add_argument("source", metavar="SRC", help="Llama, Mistral, Qwen2, Qwen3 or Phi-3: a folder or Hub id")
    parser.add_argument("output", metavar="OUT", help="folder to create; appears complete or not at all")
    parser.add_argument("fields", metavar="FIELD=VALUE", nargs="*", default=[], help="any field of the memory")
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="read options and fields from a file")
    parser.add_argument("--window", type=int, metavar="W", help="keys a query sees (default: the source's attention)")
    parser.add_argument(
        "--keep-full-attention", metavar="LAYERS", help="layers without the window: 0,7,15, or auto:N with --probe"
    )
    parser.add_argument(
        "--probe",
        metavar="TEXT_OR_FILE",
        help="first measure on this text what the window changes in each layer's attention (window error) and, for"
        " auto:N, what it adds to the loss, which decides",
    )
    parser.add_argument("--memory-layers", metavar="LAYERS", help="layers with a memory, such as 0,2 (default: all)")
    parser.add_argument("--dtype", metavar="TYPE", help="bfloat16, float16, float32 (default: the source's)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--link", dest="link", action="store_const", const="link", help="hard links, or an error")
    how.add_argument(
        "--copy", dest="link", action="store_const", const="copy", help="copies (default: links if possible)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", default=None, help="replace OUT if it is an unchanged conversion"
    )
    how_much = "read linked and copied shards, or not (default: up to 1 GiB)"
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, help=how_much)
    parser.add_argument("--seed", type=int, metavar="S", help="seed for what starts at random (default: 0)")
    parser.add_argument("--max-shard-size", metavar="SIZE", help="maximum size of new shards (default: 5GB)")
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit of a Hub id")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    accept_fields_after_options(parser, "fields")


def run(options: argparse.Namespace) -> int:
    """Convert, and report in a few lines what was done. Raises ValueError or OSError for a mistake in the input."""
    settings, say = read_settings(options), lambda line: print(line, flush=True)
    with orderly_termination(), ExitStack() as stack:
        begun = head_start(options.source, options.output, settings, say, stack)
        from tnt_hf.conversion.convert import convert_checkpoint

        target = convert_checkpoint(
            options.source, options.output, **settings, progress=not options.quiet, say=say, begun=begun
        )
    from tnt_hf.configuration_tnt import TNTConfig
    from tnt_hf.conversion.manifest import read_manifest
    from tnt_hf.conversion.model_card import attention_summary

    manifest = read_manifest(target)
    found, config = manifest["conversion"], TNTConfig.from_dict(json.loads((target / "config.json").read_text()))
    how = {entry["how"] for name, entry in manifest["files"].items() if name.startswith("model-base")}
    parameters = found["parameters"]
    kind = f"{found['model_type']}, {found['dtype']}; base shards {', '.join(sorted(how))}"
    print(f"source      {found['source']} ({kind})")
    print(f"parameters  {parameters['base']:,} base, {parameters['memory']:,} memory")
    for line in attention_summary(config):
        print(f"attention   {line}")
    if config.memory_layer_indices and not found["memory_starts_closed"]:
        print("gate        open from the start: the result does not compute what its source does")
    print(f"result      {target}")
    folders = [f"./{x}" if x.startswith("-") else x for x in (options.source, options.output)]
    print(f"next        tnt verify {shlex.join(folders)}")
    return 0


def read_settings(options: argparse.Namespace) -> dict[str, Any]:
    """
    The keyword arguments of `convert_checkpoint` from the file of `--config`, the options and FIELD=VALUE.

    Raises:
        ValueError: a file that holds no mapping, or something that is not of the form FIELD=VALUE or a list of
            layers.
    """
    settings: dict[str, Any] = {}
    if options.config is not None:
        if not options.config.is_file():
            raise FileNotFoundError(f"--config {options.config}: is not a file")
        settings = read_yaml(options.config, "--config")
        if not isinstance(settings, dict):
            raise ValueError(f"--config {options.config}: must hold a mapping, not {type(settings).__name__}")
        for name in settings:
            check_name(name, f"--config {options.config}")
    given = {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}
    settings |= given
    for name in ("keep_full_attention", "memory_layers"):
        if isinstance(value := settings.get(name), str) and not value.startswith("auto"):
            settings[name] = parse_layers(value, name)
    for text in options.fields:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{text!r} must have the form FIELD=VALUE")
        check_name(name, text)
        if name in given:
            raise ValueError(f"{text!r}: {name} is given twice")
        given[name] = settings[name] = parse_value(value)
    return settings


def check_name(name: Any, where: str) -> None:
    """Raises ValueError if `name` is not the name of a setting that can be chosen."""
    if (
        not isinstance(name, str)
        or not name.isidentifier()
        or name in ("source", "output", "progress", "say", "begun")
    ):
        raise ValueError(f"{where}: {name!r} cannot be set here")


def parse_layers(text: str, name: str) -> list[int]:
    """`"0,7,15"` as a list; an empty text means no layers."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--{name.replace('_', '-')} {text}: must be layers such as 0,7,15")
    return [int(part) for part in parts]
