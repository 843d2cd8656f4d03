"""Runs the command of another package in a process that knows TNT models.

    python -m tnt_hf.recipes.with_tnt lm_eval --model hf --model_args pretrained=FOLDER --tasks hellaswag
    python -m tnt_hf.recipes.with_tnt transformers serve FOLDER

`lm_eval` and `transformers` do not import `tnt_hf`, so alone they know a TNT model only by the code that lies in its
folder (`trust_remote_code`), and `transformers serve` not even then: it looks the class up in `transformers`.
"""

import sys
from importlib.metadata import entry_points


def main(arguments: list[str] | None = None) -> int | None:
    """
    Runs `arguments`: the name of a console command that is installed, and its own arguments.

    Raises:
        ValueError: no command, or one that is not installed.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    found = entry_points(group="console_scripts", name=arguments[0])
    if not found:
        raise ValueError(f"command {arguments[0]!r}: is not installed in this environment")
    import tnt_hf

    tnt_hf.register()
    sys.argv = list(arguments)
    return next(iter(found)).load()()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)
