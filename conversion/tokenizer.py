"""The tokenizer of a checkpoint, as the library loads it: it goes by the model's type before the files' own word."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .families import family_of
from .source import HUB_ID, Source, has_tokenizer, read_json


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG = "tokenizer_config.json"
FIELD = "tokenizer_class"
MEND = "fix_mistral_regex"


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """
    Of a folder, without running code of its own.

    Raises:
        ValueError: it cannot be loaded, or not without that code.
    """
    from transformers import AutoTokenizer

    # Where the package mistral-common is, the library would read tekken.json, and only for Mistral's own type.
    options = {"mistral_format": False} if (folder / "tokenizer.json").exists() else {}
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)
    except Exception as error:  # of the library's many readers, each with its own
        raise ValueError(f"{folder}: its tokenizer cannot be loaded ({' '.join(str(error).split())})") from error


def names_code(folder: Path) -> bool:
    """Whether a tokenizer's files refer to code, their own or of the Hub."""
    return (file := folder / CONFIG).is_file() and "auto_map" in read_json(file)


def can_be_loaded(folder: Path) -> bool:
    """Whether a reader finds a tokenizer in a result, by code that the Hub has if its files refer to that."""
    if not has_tokenizer(folder):
        return False
    if names_code(folder):
        return True
    try:
        return load_tokenizer(folder) is not None
    except ValueError:
        return False


class Settings(NamedTuple):
    """What a conversion says of its tokenizer.

    Attributes:
        named: class for `config.json`, where `tokenizer_config.json` names none.
        fields: of `tokenizer_config.json`, where it differs from the source's. content: the same of `tokenizer.json`.
        loads: whether it can be loaded from the result.
    """

    named: str | None = None
    fields: dict[str, Any] | None = None
    content: str | None = None
    loads: bool = False


def settings(checkpoint: Source, name: str, model_type: str, say: Callable[[str], object]) -> Settings:
    """
    What has to name the tokenizer's class where the model's type is TNT's, of which the library knows none.

    The files of a Mistral name `LlamaTokenizer`, for example, and the library reads them with another class, whose ids
    differ in the spaces around special tokens.

    Args:
        name: of the source in public; of a Hub id the tokenizer's own code can be had, a folder's is not copied.
    """
    file = checkpoint.companions.get(CONFIG)
    fields = read_json(file) if file else {}
    named = fields.get(FIELD) or checkpoint.fields.get(FIELD)
    found, content, loads = named or family_of(model_type).tokenizer, None, False
    written = dict(fields)
    if has_tokenizer(checkpoint.folder):
        from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

        try:
            tokenizer = load_tokenizer(checkpoint.folder)
        except ValueError as error:
            say(f"{error}: its files are copied as they are")
        else:
            loads = True
            if not named or tokenizer_class_from_name(named) is not type(tokenizer):
                found = type(tokenizer).__name__
            # Set where the library found a Mistral's wrong pattern, which it mends in a Mistral's folder alone.
            mended = getattr(getattr(tokenizer, "backend_tokenizer", None), MEND, None)
            if mended:
                content = tokenizer.backend_tokenizer.to_str(pretty=True)
                written.pop(MEND, None)
            elif mended is False:
                say(
                    f"{MEND}=True, which transformers asks for, does nothing for the result: to have it, load the"
                    " tokenizer from the source with it and save it into the result"
                )
    if "auto_map" in fields:
        written["auto_map"] = _of_the_hub(name, fields["auto_map"]) if HUB_ID.fullmatch(name) else None
        if written["auto_map"] is None:
            del written["auto_map"]
            say("the tokenizer of the source has code of its own, which is not copied: load it from the source")
        loads = loads or "auto_map" in written
    if fields.get(FIELD):
        written[FIELD] = found
    return Settings(None if fields.get(FIELD) else found, None if written == fields else written, content, loads)


def _of_the_hub(name: str, places: Any) -> Any:
    """References to classes in files of a repository as other repositories make them, `owner/name--file.Class`."""
    if isinstance(places, dict):
        return {key: _of_the_hub(name, value) for key, value in places.items()}
    if isinstance(places, list | tuple):
        return [_of_the_hub(name, value) for value in places]
    return f"{name}--{places}" if isinstance(places, str) and "--" not in places else places
