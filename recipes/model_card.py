"""Model cards from what lies in a folder: configuration, weights, `training.json`, evaluation, conversion manifest.

`model_cards/template.md` is the card; a section without content is left out with its heading. An untrained conversion
keeps the card that the conversion wrote, with evaluation results where there are some. The last line of every
generated card holds its digest, so a card that somebody edited is told from one that can be made again.
"""

import hashlib
import os
import re
from itertools import count
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, ModelCardData

import tnt_hf.conversion.model_card as conversion_card
from tnt_hf import TNTConfig, __version__
from tnt_hf.conversion.files import sha256
from tnt_hf.conversion.manifest import MANIFEST, file_entry, read_manifest, write_manifest
from tnt_hf.conversion.source import read_source
from tnt_hf.conversion.tokenizer import can_be_loaded
from tnt_hf.recipes.loading_errors import reading
from tnt_hf.recipes.model_card_sections import (
    architecture,
    evaluation_results,
    limits,
    metadata,
    model_index,
    origin,
    quick_start,
    summary,
    training,
    training_data,
)
from tnt_hf.recipes.model_folder import Model, read_model


TEMPLATE = Path(__file__).parent.parent / "model_cards" / "template.md"
MARKER = re.compile(r"\n<!-- model card of tnt-hf [\w.+-]+, sha256:([0-9a-f]{64}); an edited card is kept -->\s*\Z")
VERSIONS = re.compile(r"### Framework versions\s*(- .*\s*)*\Z")


# ------------------------------------------------------------------------------------------------------------ the card


def model_card(folder: str | os.PathLike | Model, name: str, *, license: str | None = None) -> str:
    """
    The complete README.md of a folder.

    Args:
        folder: a saved TNT model, a model with an injected memory, or an adapter; or what [`read_model`] says of it.
        name: of the model in the card: its Hub id, or the folder's name.
        license: as the Hub calls it; by default what the folder's card, or that of what it was made from, says.

    Raises:
        ValueError, OSError: see [`read_model`].
    """
    model = folder if isinstance(folder, Model) else read_model(folder)
    with reading(f"{model.folder}: training.json, {MANIFEST} or its evaluation"):
        return _model_card(model, name, license)


def _model_card(model: Model, name: str, license: str | None) -> str:
    if model.kind == "tnt" and model.is_as_converted and "source" in model.conversion:
        return _signed(_card_of_conversion(model, name, license))
    parts = sections(TEMPLATE.read_text(encoding="utf-8"))
    values = {
        "metadata": metadata(model, name, license).to_yaml(),
        "title": name,
        "summary": summary(model),
        "quick_start": quick_start(model, name),
        "architecture": architecture(model),
        "origin": origin(model, name),
        "data": training_data(model),
        "training": training(model),
        "results": evaluation_results(model),
        "limits": limits(model),
        "citation": conversion_card.CITATION,
    }
    card = ""
    for heading, body in parts.items():
        filled = re.sub(r"\{(\w+)\}", lambda match: values[match[1]], body)
        if filled.strip():
            card += (f"## {heading}\n\n" if heading else "") + filled.strip() + "\n\n"
    return _signed(card)


def sections(card: str) -> dict[str, str]:
    """The text under every heading of the second level; under `""` what stands before the first."""
    pieces = re.split(r"^## (.*)\n", card, flags=re.MULTILINE)
    return dict(zip(["", *pieces[1::2]], pieces[::2]))


def write_card(
    folder: str | os.PathLike,
    name: str,
    *,
    regenerate: bool = False,
    license: str | None = None,
    card: str | None = None,
) -> bool:
    """
    Write or update README.md of a folder; one that somebody wrote or edited stays.

    Args:
        regenerate: replace that one, too; it is kept as `README.previous….md`.
        license: see [`model_card`]. card: what that has made already, which takes a look at all weights.

    Returns:
        Whether the folder now has the generated card.
    """
    folder = Path(folder)
    path = folder / "README.md"
    mine = not path.exists() or is_generated(path.read_text(encoding="utf-8", errors="replace"), folder)
    if not mine and not regenerate:
        return False
    new = folder / f".README.md.{os.getpid()}"
    new.write_text(model_card(folder, name, license=license) if card is None else card, encoding="utf-8")
    if not mine:
        kept = (folder / f"README.previous{n or ''}.md" for n in count())
        os.replace(path, next(name for name in kept if not name.exists()))
    os.replace(new, path)
    if (folder / MANIFEST).is_file():  # `tnt verify` compares every file with it
        manifest = read_manifest(folder)
        if path.name in manifest["files"]:
            manifest["files"][path.name] = file_entry(path, "written", sha256(path))
            write_manifest(folder, manifest["files"], manifest["conversion"])
    return True


def is_generated(card: str, folder: Path | None = None) -> bool:
    """Whether a card is as it was generated: by this module, by the conversion that made `folder`, or by peft."""
    card = card.replace("\r\n", "\n")
    if match := MARKER.search(card):
        return _digest(card[: match.start()]) == match[1]
    if folder is not None and (folder / MANIFEST).is_file():
        entry = read_manifest(folder)["files"].get("README.md") or {}
        if entry.get("sha256") == sha256(folder / "README.md"):
            return True
    # peft saves the Hub's form, not filled in, with a list of versions at its end.
    body = re.sub(r"\A---\n.*?\n---\n", "", card, count=1, flags=re.DOTALL)
    return VERSIONS.sub("", body).strip() == VERSIONS.sub("", ModelCard.from_template(ModelCardData()).text).strip()


def _signed(card: str) -> str:
    card = card.rstrip() + "\n"
    return f"{card}\n<!-- model card of tnt-hf {__version__}, sha256:{_digest(card)}; an edited card is kept -->\n"


def _digest(card: str) -> str:
    return hashlib.sha256(card.strip().encode()).hexdigest()


def _card_of_conversion(model: Model, name: str, license: str | None) -> str:
    """The conversion's own card, under another name and with results where there are some."""
    config = TNTConfig.from_dict(dict(model.config))
    card = conversion_card.model_card(
        config, model.conversion, read_source(model.folder), name, can_be_loaded(model.folder)
    )
    parts = sections(card)
    own = {"": _completed(parts.pop(""), model, name, license)}
    for heading, body in parts.items():
        if heading == "Limits" and (found := evaluation_results(model)):
            own["Results"] = f"\n{found}\n\n"
        own[heading] = body
    return "".join((f"## {heading}\n" if heading else "") + body for heading, body in own.items())


def _completed(head: str, model: Model, name: str, license: str | None) -> str:
    """The card's head, its metadata with the evaluation and a licence in it."""
    if not (found := model_index(model)) and license is None:
        return head
    _, text, rest = head.split("---\n", 2)
    said = yaml.safe_load(text)
    if license is not None:
        said = {key: x for key, x in said.items() if not key.startswith("license")} | {"license": license}
    said |= {"model_name": name, "eval_results": found} if found else {}
    return f"---\n{ModelCardData(**said).to_yaml()}\n---\n{rest}"
