"""Runs the command of another package in a process that knows TNT models.

    python -m tnt_hf.recipes.with_tnt lm_eval --model hf --model_args pretrained=FOLDER --tasks hellaswag
    python -m tnt_hf.recipes.with_tnt transformers serve FOLDER

`lm_eval` and `transformers` do not import `tnt_hf`, so alone they know a TNT model only by the code that lies in its
folder (`trust_remote_code`), and `transformers serve` not even then: it looks the class up in `transformers`. Of a
folder with an injected memory they know the base model alone, which `transformers serve` loads without a word about
the memory; here it gets the whole model.
"""

import functools
import os
import sys
from importlib.metadata import entry_points
from typing import Any


def main(arguments: list[str] | None = None) -> int | None:
    """
    Runs `arguments`: the name of a console command that is installed, and its own arguments.

    Raises:
        ValueError: no command, or one that is not installed.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__ or "usage: python -m tnt_hf.recipes.with_tnt COMMAND [arguments]")
        return 0
    found = entry_points(group="console_scripts", name=arguments[0])
    if not found:
        raise ValueError(f"command {arguments[0]!r}: is not installed in this environment")
    import tnt_hf

    tnt_hf.register()
    load_memories_too()
    sys.argv = list(arguments)
    return next(iter(found)).load()()


def load_memories_too() -> None:
    """From here on, in this process, `from_pretrained` of a causal language model is `load_injected` where the folder
    or repository holds an injected memory."""
    from transformers import PreTrainedConfig, PreTrainedModel

    from tnt_hf.conversion import load_injected

    alone = PreTrainedModel.from_pretrained.__func__

    def settings(name: str | os.PathLike | None, config: Any, options: dict[str, Any]) -> dict[str, Any]:
        if hasattr(config, "to_dict"):
            return config.to_dict()
        try:
            return PreTrainedConfig.get_config_dict(name, **options)[0]
        except OSError:  # of which the library knows more to say
            return {}

    @functools.wraps(alone)
    def from_pretrained(cls, pretrained_model_name_or_path, *rest, config: Any = None, **options):
        name = pretrained_model_name_or_path
        known = {x: options[x] for x in ("revision", "token", "cache_dir", "subfolder") if x in options}
        if cls.__name__.endswith("ForCausalLM") and "tnt_injection" in settings(name, config, known):
            if os.path.isdir(name):
                options.pop("revision", None)  # of a folder, the library has none, and tools say "main" of all
            return load_injected(name, **options)  # which comes back here, with a config that says nothing of it
        return alone(cls, name, *rest, config=config, **options)

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)
