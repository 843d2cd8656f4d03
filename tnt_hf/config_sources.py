"""Where `tnt info` finds the fields of a configuration, and what it says of models that it does not describe."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from tnt_hf.conversion.families import FAMILIES
from tnt_hf.conversion.source import check_reachable
from tnt_hf.presets import PRESETS
from tnt_hf.recipes.recipe_file import find_recipe, flatten, packaged_recipes
from tnt_hf.settings import read_yaml


def read_fields(source: str) -> dict[str, Any]:
    """
    The fields of a `TNTConfig` from a preset, a folder or file of fields, a recipe or a Hub id.

    Raises:
        ValueError: a file that is not a mapping, a model of another type, or a recipe that makes no new TNT model.
        OSError: there is no preset, file, folder or Hub repository of that name.
    """
    recipes = packaged_recipes()
    if source in recipes and not Path(source).exists():
        source = str(find_recipe(source))
    path = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
    if source in PRESETS:
        fields = dict(PRESETS[source])
    elif path.is_file():
        fields = read_yaml(path, "MODEL")  # every JSON file is YAML
    elif Path(source).is_dir():
        if (path.parent / "adapter_config.json").is_file():
            raise FileNotFoundError(f"{source!r} holds an adapter: tnt info reads its base model, or a whole model")
        raise FileNotFoundError(f"{source!r} is a folder without config.json")
    elif similar := [name for name in recipes if Path(name).parts[:1] == path.parts[:1]]:
        raise FileNotFoundError(f"{source!r} is not a recipe; there are {', '.join(similar)}")
    elif path.suffix in (".json", ".yaml", ".yml") or len(path.parts) != 2:
        raise FileNotFoundError(f"{source!r} is not a file, folder, recipe, Hub id or preset ({', '.join(PRESETS)})")
    else:
        try:
            check_reachable(source)
            fields, _ = PreTrainedConfig.get_config_dict(source)
        except OSError as error:
            raise OSError(f"MODEL {source}: {' '.join(str(error).split())}") from error
    check_fields(source, fields)
    return fields_of_recipe(source, fields) if "mode" in fields else fields


def check_fields(source: str, fields: Any) -> None:
    """Raises ValueError: `fields`, of the model `source`, are not a mapping, or of a model other than TNT."""
    if not isinstance(fields, dict):
        raise ValueError(f"{source!r} must hold a mapping of TNTConfig fields, not {type(fields).__name__}")
    if strange := [name for name in fields if not isinstance(name, str)]:
        raise ValueError(f"{source!r}: {strange[0]!r} is not the name of a field")
    kind = fields.get("model_type", "tnt")
    if isinstance(fields.get("tnt_injection"), dict):
        raise ValueError(
            f"{source!r} is a model with an injected memory (model_type={kind!r}), which tnt info does not describe:"
            " see tnt_injection in its config.json, or load it with tnt_hf.conversion.load_injected"
        )
    if kind != "tnt":
        can = "; tnt convert turns it into one" if isinstance(kind, str) and kind in FAMILIES else ""
        raise ValueError(f"{source!r} has model_type={kind!r}, and tnt info describes TNT models{can}")


def fields_of_recipe(source: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """The `TNTConfig` fields of the new model that a recipe creates.

    Raises:
        ValueError: the recipe continues from an existing model, or creates one that is not a TNT model.
    """
    recipe = flatten(recipe)
    made, changed = recipe.get("model"), recipe.get("model_config") or {}
    if not isinstance(changed, dict):
        raise ValueError(f"{source!r}: model_config={changed!r} must be a mapping")
    if not isinstance(made, str) or made not in PRESETS:
        raise ValueError(
            f"{source!r} is a recipe that does not create a new TNT model (mode={recipe['mode']!r}, model={made!r});"
            " name the folder of a model"
        )
    vocabulary = {"vocab_size": size} if (size := recipe.get("tokenizer_vocab_size")) else {}
    return PRESETS[made] | vocabulary | changed
