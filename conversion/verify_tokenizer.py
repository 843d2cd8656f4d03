"""Whether the result reads text as its source does."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from .source import has_tokenizer
from .tokenizer import load_tokenizer
from .verify_files import unlisted
from .verify_probe import default_text
from .verify_report import NOT_APPLICABLE, Report


# What tokenizer classes treat differently: spaces, digits, line ends, accents, other scripts, what has no token.
TEXTS = (
    "a text",
    " a text",
    "a  text ",
    "1984 in 20245",
    "a\n\n b\tc",
    "cafe\u0301 na\u00efve",
    "\u8a18\u61b6 \U0001f9e0",
    "",
)
LENGTH = 4096  # characters of the default probe
SHOWN = 40  # characters of a text


def check_tokenizer(source: Path, output: Path, rows: Report) -> None:
    """A row, if the source has a tokenizer: the result's ids, and the text of them, are the source's."""
    name, promise = "tokenizer", "the tokenizer gives the ids of the source's"
    if not has_tokenizer(source):
        return
    try:
        theirs = load_tokenizer(source)
    except ValueError as error:
        rows.add(name, promise, NOT_APPLICABLE, reason=str(error))
        return
    rows.check(name, promise, _same_ids, theirs, output, unless=unlisted(output))


def _same_ids(theirs: PreTrainedTokenizerBase, output: Path) -> tuple[bool, dict[str, Any]]:
    ours = load_tokenizer(output)
    special = theirs.all_special_tokens
    texts = [*TEXTS, default_text()[:LENGTH], "".join(special), *(f"a {x} b{x}c{x}\n" for x in special)]
    unlike = []
    for text in texts:
        ids, found = (x(text, verbose=False)["input_ids"] for x in (theirs, ours))  # however long they are
        if found != ids or ours.decode(ids) != theirs.decode(ids):
            unlike.append(text)
    names = [type(x).__name__ for x in (theirs, ours)]
    measured = {"texts": len(texts), "unlike": len(unlike), "classes": names}
    if unlike:
        said = f"{len(unlike)} of {len(texts)} texts, such as {unlike[0][:SHOWN]!r}"
        measured["problems"] = [f"{said}, by {names[0]} in the source and {names[1]} here"]
    return not unlike, measured
