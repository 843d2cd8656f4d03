"""Whether what a model is evaluated on was held out when it was trained, as far as its `training.json` tells."""

import json
from os.path import expanduser, normpath
from pathlib import Path

from tnt_hf.recipes.arguments import DataArguments
from tnt_hf.recipes.data_files import SPLIT_NAMES, files_of
from tnt_hf.recipes.model_card_tables import portable
from tnt_hf.recipes.sources import LocalFiles, open_source


def training_note(
    folder: Path, data: str, config: str | None, split: str | None, text_column: str, held_out: float
) -> str | None:
    """
    A warning if the model was trained on the very documents it is evaluated on: on the same data, configuration and
    split, or on some of the same files. It is none if only a share of them is read that training held out, by the
    hash of the same text on both sides.
    """
    try:
        training = json.loads((folder / "training.json").read_text(encoding="utf-8"))["data"]
        name, share = training["name"], training.get("eval_share") or 0.0
        used = training.get("config"), training.get("split") or "train"
        same = [[SPLIT_NAMES.get(x, x) for x in choice] for choice in (used, (config, split or "train"))]
        whole = normpath(name) in {normpath(data), normpath(portable(data))}
        if whole:
            trained_on = same[0] == same[1]
        else:
            files = [
                {x.resolve() for x in files_of(Path(expanduser(path)), *choice)}
                for path, choice in ((name, used), (data, (config, split or "train")))
            ]
            trained_on = bool(files[0] & files[1])
        if not trained_on or (0 < held_out <= share and _same_keys(training, whole, data, config, split, text_column)):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not trained by a recipe
    return f"the model was trained on {data} with eval_share={share}, so the text it is evaluated on is not held out"


def _same_keys(
    training: dict, whole: bool, data: str, config: str | None, split: str | None, text_column: str
) -> bool:
    """Whether the hash that holds a document out is of the same text on both sides."""
    reading = DataArguments(streaming=True, text_column=text_column)
    try:
        source = open_source(data, config, split or "train", reading, "pretrain")
    except ValueError:
        return True  # there is nothing to evaluate on, which is said where it is read
    if isinstance(source, LocalFiles) and not whole and not source.holds_tables:
        return False  # a text is told by its name, from the folder that was given
    columns = [source.columns.kind, *source.columns.names]
    return training.get("columns", columns) == columns
