"""The command line: `tnt COMMAND …`.

Slow imports are left to the command that needs them, so `tnt --help` answers at once. A mistake in the input ends as
one line on standard error with exit status 2; any other exception is a bug and keeps its traceback.
"""

import argparse
import json
import math
import os
import sys
from difflib import get_close_matches
from importlib import import_module


# Commands that bring their own options, read only when the command is given.
DELEGATED = {
    "convert": "turn a Llama, Mistral, Qwen2, Qwen3 or Phi-3 checkpoint into a TNT checkpoint",
    "verify": "check a converted checkpoint's promises against its source",
    "train": "run a recipe",
    "eval": "evaluate a checkpoint: perplexity, recall, cost, ablations",
    "push": "upload a checkpoint with its model card",
    "demo": "from a Llama trained on real text to a hybrid: convert, verify, distil, stage 2, evaluate",
    "bench": "named benchmarks: memory, train, decode, liza, conversion; results as JSON and pictures",
}
# Those of them that are a module with a `main` of their own.
MAINS = {"train": "train", "eval": "evaluate", "push": "push", "demo": "demo", "bench": "benchmarks.bench"}
COMMANDS = ("info", "generate", *DELEGATED)
DTYPES = ("float64", "float32", "bfloat16", "float16")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    from tnt_hf import __version__
    from tnt_hf.command_line import add_config
    from tnt_hf.presets import PRESETS
    from tnt_hf.settings import Integers, accept_fields_after_options

    parser = argparse.ArgumentParser(prog="tnt", description="TNT test-time memory for Hugging Face Transformers.")
    parser.add_argument("--version", action="version", version=f"tnt-hf {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    info = commands.add_parser("info", help="parameters, state bytes and FLOPs of a model or configuration")
    info.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"folder, .json or .yaml file, recipe for a new model, Hub id, or {', '.join(PRESETS)}",
    )
    info.add_argument(
        "overrides", metavar="FIELD=VALUE", nargs="*", default=[], help="any field of TNTConfig, its value in YAML"
    )
    info.add_argument("--config", metavar="FILE.yaml", help="in place of MODEL")
    info.add_argument("--context", type=int, metavar="TOKENS", help="default: max_position_embeddings")
    info.add_argument("--dtype", choices=DTYPES, help="model dtype (default: the configuration's, else float32)")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    accept_fields_after_options(info, "overrides")
    info.set_defaults(run=run_info, error=info.error)

    generate = commands.add_parser("generate", help="continue a prompt, printing as it goes")
    generate.add_argument("model", metavar="MODEL", help="folder or Hub id with weights and tokenizer")
    generate.add_argument("--prompt", required=True, metavar="TEXT", help="what to continue; - reads standard input")
    generate.add_argument(
        "--chat", action="store_true", help="take the prompt as a user message and apply the tokenizer's chat template"
    )
    generate.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="at most (default: 128)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy decoding")
    generate.add_argument("--top-p", type=float, default=1.0, help="share of the probability to sample from")
    generate.add_argument("--seed", type=int, default=0, help="seed for sampling")
    generate.add_argument(
        "--local-chunk-sizes", action=Integers, nargs="+", metavar="C", help="of a TNT model: one for all, or one each"
    )
    generate.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: the checkpoint's own")
    generate.add_argument("--device", help="default: cuda if available, otherwise cpu")
    add_config(generate)
    generate.set_defaults(run=run_generate)

    for name, text in DELEGATED.items():
        commands.add_parser(name, add_help=False, help=text).set_defaults(run=run_delegated)
    parser.commands = commands.choices
    return parser


def check_command(parser: argparse.ArgumentParser, word: str = "") -> None:
    """Exits, as `parser` does for any wrong command, if `word` is nearly the name of one: with that name."""
    similar = get_close_matches(word, COMMANDS, n=1)
    if similar and word not in COMMANDS and not word.startswith("-"):
        parser.error(f"there is no command {word!r}; did you mean {similar[0]!r}?")


def spin_briefly() -> None:
    """
    Threads of OpenMP, with which torch computes, soon sleep while they wait for each other: one that spins on a core
    that other jobs use, too, keeps from running what it waits for. Not where the environment says how to wait, and not
    for a torch that has read it already.
    """
    if "torch" not in sys.modules and not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = "10000"  # tens of microseconds; by default it is milliseconds


def main(arguments: list[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, 2 for a mistake in the input, 130 if interrupted, 141 if nobody
    reads the output."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = "tnt"
    try:
        spin_briefly()
        parser = build_parser()
        check_command(parser, *arguments[:1])
        if arguments[:1] == ["generate"]:
            from tnt_hf.command_line import check_config, with_config

            name = "tnt generate"
            arguments = ["generate", *with_config(parser.commands["generate"], arguments[1:])]
            check_config(parser.commands["generate"], parser.parse_known_args(arguments)[0], arguments)
        options, rest = parser.parse_known_args(arguments)
        name = f"tnt {options.command}"
        if rest and options.command not in DELEGATED:
            parser.commands[options.command].error(f"unrecognized arguments: {' '.join(rest)}")
        options.rest = arguments[1:]
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # what was done is no mistake where it cannot be shown
        status = options.run(options) or 0
        if sys.stdout is not None:  # as of a daemon
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # of `tnt ... | head`; what is still to be flushed at exit goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as of a process that SIGPIPE ended
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        known = isinstance(error, OSError) and error.strerror and error.filename
        print(f"{name}: {f'{error.filename}: {error.strerror}' if known else error}", file=sys.stderr)
        return 2


# ------------------------------------------------------------------------------------------------------------ tnt info


def load_config(source: str, overrides: list[str]):
    """The `TNTConfig` of a model ([`~config_sources.read_fields`]) with `FIELD=VALUE` applied.

    Raises:
        ValueError: for an unknown field or an invalid value, or as `read_fields`.
        OSError: as `read_fields`.
    """
    from tnt_hf import TNTConfig
    from tnt_hf.config_sources import read_fields
    from tnt_hf.settings import parse_value

    fields = read_fields(source)
    given = {}
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"{override!r} must have the form FIELD=VALUE")
        if name in given:
            raise ValueError(f"{override!r}: {name} is given twice")
        given[name] = parse_value(value)
    if given.get("model_type", "tnt") != "tnt":
        raise ValueError(f"model_type={given['model_type']!r}: only 'tnt' can be described")
    # The others are saved where they were set, and those of a conversion where its source needs them.
    known = {*TNTConfig().to_dict(), "output_surprise", "window_narrowed", "attn_implementation", "tokenizer_class"}
    known |= {"classifier_dropout", "quantization_config"} & fields.keys()
    for name in fields | given:
        if name not in known and not name.startswith("_"):
            similar = get_close_matches(name, known, n=1)
            raise ValueError(
                f"TNTConfig has no field {name!r}" + (f"; did you mean {similar[0]!r}?" if similar else "")
            )
    options = {name: given.pop(name) for name in list(given) if name in TNTConfig.__dataclass_fields__}
    try:
        return TNTConfig.from_dict(fields | given, **options)
    except (AttributeError, TypeError) as error:  # of the library, for a value of another type
        raise ValueError(f"{source!r}: {' '.join(str(error).split())}") from error


def count_parameters(config) -> dict[str, dict[str, int]]:
    """Parameters counted on the real model: `{place: {"base": n, "memory": n}}`, place "shared" or a layer index.

    "shared" is the embedding, the final norm and the head. The model is built on the meta device, so the size of this
    machine does not matter; a tied head counts once.
    """
    import torch

    from tnt_hf import TNTForCausalLM

    with torch.device("meta"):
        model = TNTForCausalLM(config)
    counts = {place: {"base": 0, "memory": 0} for place in ("shared", *map(str, range(config.num_hidden_layers)))}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            counts[parts[2]]["memory" if parts[3] == "memory" else "base"] += parameter.numel()
        else:
            counts["shared"]["base"] += parameter.numel()
    return counts


def describe(config, context: int, dtype: str) -> dict:
    """Everything `tnt info` prints: counts, bytes per sequence and FLOPs per decoded token at `context` tokens."""
    from tnt_hf.costs_tnt import flops_per_token, key_value_bytes, memory_state_bytes

    counts = count_parameters(config)
    with_memory = set(config.memory_layer_indices)
    state_bytes = memory_state_bytes(config, dtype)
    layers = []
    for index, (kind, kv_bytes) in enumerate(zip(config.layer_types, key_value_bytes(config, context, dtype))):
        has_memory = index in with_memory
        has_attention = not (config.variant == "lmm" and has_memory)
        attention = f"window {config.sliding_window}" if "sliding" in kind else "full"
        layers.append(
            {
                "attention": attention if has_attention else "none",
                "memories": [memory_label(spec) for spec in config.memory_specs] if has_memory else [],
                "base_parameters": counts[str(index)]["base"],
                "memory_parameters": counts[str(index)]["memory"],
                "state_bytes": state_bytes // len(with_memory) if has_memory else 0,
                "kv_bytes": kv_bytes,
            }
        )
    base = sum(count["base"] for count in counts.values())
    memory = sum(count["memory"] for count in counts.values())
    return {
        "context": context,
        "dtype": dtype,
        "parameters": {"base": base, "memory": memory, "total": base + memory},
        "memory_state_bytes": state_bytes,
        "kv_bytes": sum(layer["kv_bytes"] for layer in layers),
        "flops_per_token": flops_per_token(config, context),
        "layers": layers,
    }


def memory_label(spec) -> str:
    """A memory in a few characters: `global C=2048` or `local C=8 S=2048`."""
    return f"{spec.name} C={spec.chunk_size}" + (f" S={spec.reset_interval}" if spec.reset_interval else "")


def size_label(count: int) -> str:
    """Bytes as people read them: `96 B`, `8.6 KiB`, `1.5 MiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"


def run_info(options) -> None:
    """`tnt info`."""
    names = [x for x in (options.config, options.model) if x is not None]
    if not names:
        options.error("the following arguments are required: MODEL")
    config = load_config(names[0], [*names[1:], *options.overrides])
    context = config.max_position_embeddings if options.context is None else options.context
    if context < 1:
        raise ValueError(f"--context {context}: must be at least 1 token")
    dtype = options.dtype or str(config.dtype or "float32").removeprefix("torch.")
    found = describe(config, context, dtype)
    if options.json:
        print(json.dumps(found, indent=2))
        return

    parameters, flops = (
        "   ".join(f"{name} {n:,}" for name, n in found[key].items()) for key in ("parameters", "flops_per_token")
    )
    print(f"parameters         {parameters}")
    state, kept = size_label(found["memory_state_bytes"]), size_label(found["kv_bytes"])
    print(f"memory state       {state} per sequence at any context ({dtype} model)")
    print(f"keys and values    {kept} per sequence at {context:,} tokens")
    print(f"FLOPs per token    {flops}   (decoding at {context:,} tokens)")
    print()
    table = [("layer", "attention", "base", "memory", "state", "KV", "memories")]
    for index, layer in enumerate(found["layers"]):
        numbers = [f"{layer[name]:,}" for name in ("base_parameters", "memory_parameters")]
        numbers += [size_label(layer[name]) for name in ("state_bytes", "kv_bytes")]
        table.append((str(index), layer["attention"], *numbers, ", ".join(layer["memories"]) or "none"))
    widths = [max(map(len, column)) for column in zip(*table)]
    for row in table:
        cells = [cell.rjust(n) if 2 <= i <= 5 else cell.ljust(n) for i, (cell, n) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())


# ------------------------------------------------------------------------------ tnt generate; the other commands


def run_generate(options) -> None:
    """`tnt generate`: prints the continuation token by token."""
    from transformers import LogitsProcessorList, TextStreamer, set_seed

    from tnt_hf.recipes.evaluation_model import check_ids, load_model
    from tnt_hf.recipes.loading_errors import reading
    from tnt_hf.recipes.memory_statistics import host_of
    from tnt_hf.settings import check_text

    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {options.max_new_tokens}: must be at least 1")
    if not (options.temperature == 0 or 1e-6 <= options.temperature < math.inf):  # scores over less are infinite
        raise ValueError(f"--temperature {options.temperature}: must be 0 or a number of at least 1e-6")
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed {options.seed}: must be at least 0 and below 2**32")
    if not 0 < options.top_p <= 1:
        raise ValueError(f"--top-p {options.top_p}: must be above 0 and at most 1")
    if options.top_p < 1 and not options.temperature:
        raise ValueError(f"--top-p {options.top_p}: has no effect at --temperature 0, which is greedy decoding")
    if options.prompt == "-" and sys.stdin is None:
        raise ValueError("--prompt -: standard input is closed")
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    check_text("--prompt", prompt)
    model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
    if tokenizer is None:
        raise ValueError(f"MODEL {options.model}: holds no tokenizer")
    if options.local_chunk_sizes:
        host = host_of(model)
        if not hasattr(host, "set_local_chunk_sizes"):
            raise ValueError(f"--local-chunk-sizes: {type(host).__name__} has no local memories that can change")
        host.set_local_chunk_sizes(options.local_chunk_sizes)
    if options.chat and not tokenizer.chat_template:
        raise ValueError(f"--chat: the tokenizer of {options.model} has no chat template")
    if options.chat:  # the template writes begin and end itself
        said = [{"role": "user", "content": prompt}]
        with reading(f"--chat: the template of {options.model}", "fails"):
            prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    as_it_is = {"add_special_tokens": not options.chat, "return_token_type_ids": False}
    inputs = tokenizer(prompt, return_tensors="pt", **as_it_is).to(model.device)
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError(f"--prompt {prompt!r}: holds no token")
    check_ids(inputs["input_ids"][0].tolist(), model.get_input_embeddings().num_embeddings)
    sampling = {"do_sample": False}
    if options.temperature > 0:
        sampling = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
    set_seed(options.seed)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    how = {"max_new_tokens": options.max_new_tokens, "num_beams": 1, "tokenizer": tokenizer, "streamer": streamer}
    with reading(f"MODEL {options.model}", "cannot generate"):
        model.generate(**inputs, **sampling, **how, logits_processor=LogitsProcessorList([_refuse_nan]))


def _refuse_nan(input_ids, scores):
    """A `LogitsProcessor`: of a model with weights that are not numbers every choice is the first token."""
    if scores.isnan().any():
        raise ValueError("its logits are not finite")
    return scores


def run_delegated(options) -> int | None:
    """Everything after the word goes to the command itself."""
    if options.command in MAINS:
        return import_module(f"tnt_hf.recipes.{MAINS[options.command]}").main(options.rest)
    command = import_module(f"tnt_hf.conversion.{options.command}_command")
    parser = argparse.ArgumentParser(prog=f"tnt {options.command}", description=command.__doc__)
    command.add_arguments(parser)
    from tnt_hf.command_line import parse_arguments

    own = options.command == "convert"  # its file also holds fields of the memory
    return command.run(parser.parse_args(options.rest) if own else parse_arguments(parser, options.rest))


if __name__ == "__main__":
    sys.exit(main())
