"""Loads injected models from what `save_pretrained` wrote: a whole model, or an adapter beside its base.

Both kinds of folder hold the injection settings, as `tnt_injection` in `config.json` and in `adapter_config.json`, so
the memory is put back before its tensors are read. Every tensor of the memory must be there, with the right shape:
nothing is silently left at its initial value.
"""

import os
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .inject import inject, take_out_memory
from .injected_attention import PREFIX, is_injected
from .injection_config import LiZAConfig, TNTInjectionConfig, injection_from_dict
from .language_model import language_model
from .schedules import set_aside_alike
from .source import HUB_ID, check_reachable, locate, read_header, read_json, read_source


AUTO_CLASSES = (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForQuestionAnswering,
    AutoModel,
)
HEADS = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}
# What the libraries raise for a value of another type in config.json and adapter_config.json.
DAMAGE = (
    AttributeError, IndexError, KeyError, NotImplementedError, OverflowError, StrictDataclassError, TypeError,
)  # fmt: skip
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def load_injected(
    base: nn.Module | str | os.PathLike | None,
    adapter: str | os.PathLike | None = None,
    *,
    injection: LiZAConfig | TNTInjectionConfig | None = None,
    adapter_name: str = "default",
    is_trainable: bool = False,
    revision: str | None = None,
    **kwargs: Any,
) -> nn.Module:
    """
    The model that `save_pretrained` saved: its logits are equal, bit for bit.

    `load_injected(folder)` takes either kind of folder: an adapter (its base is the one named in it), or a whole
    injected model. `load_injected(base, adapter)` puts an adapter on a base of your own.

    A whole model has the class that was saved, which may be a classifier or the base model without a head.

    `AutoModelForCausalLM` and `PeftModel.from_pretrained` alone do not know about the memory: use this function.

    Args:
        base: a model (changed in place), a folder or a Hub id; `None`: the adapter's `base_model_name_or_path`. A
            `PeftModel` gets one more adapter, inactive, as with peft's `load_adapter`.
        adapter: folder or Hub id of an adapter; a Trainer checkpoint is one.
        injection: settings for an adapter that holds none because it was saved without [`lora_config`].
        adapter_name: its name in the `PeftModel`.
        is_trainable: for further training; otherwise everything is frozen and in eval mode, as in peft.
        revision: revision of the Hub repository with the adapter or the whole model.
        kwargs: passed to `from_pretrained`, such as `dtype` and `attn_implementation`.

    Returns:
        A `PeftModel` for an adapter, a model of its own class otherwise.

    Raises:
        ValueError: a missing, foreign or damaged folder; a base of other shapes or with another injection. A model
            that was passed in is then unchanged.
        OSError: a file cannot be read.
    """
    if injection is not None and not isinstance(injection, (LiZAConfig, TNTInjectionConfig)):
        kind = type(injection).__name__
        raise ValueError(
            f"injection: must be a LiZAConfig or a TNTInjectionConfig, not {kind}; see injection_from_dict."
        )
    for field, value, kinds in (
        ("base", base, (nn.Module, str, os.PathLike)),
        ("adapter", adapter, (str, os.PathLike)),
    ):
        if value is not None and not isinstance(value, kinds):
            raise ValueError(f"{field}={value!r}: must be a folder or Hub id{', or a model' * (field == 'base')}.")
    if not isinstance(adapter_name, str) or not adapter_name or "." in adapter_name:
        raise ValueError(f"adapter_name={adapter_name!r}: must be a name without a dot, such as 'default'.")
    if adapter is None:
        if not isinstance(base, (str, os.PathLike)):
            raise ValueError(f"adapter=None: needs a folder or Hub id as base, not {type(base).__name__}.")
        folder = _locate(base, revision, kwargs)
        if not (folder / ADAPTER_CONFIG).is_file():
            return _load_whole(folder, str(base), injection, kwargs)
        base, adapter = None, base
    config, settings, folder = _read_adapter(adapter, revision, kwargs)
    if injection is not None:
        _compare(settings or injection.to_dict(), injection.to_dict(), str(adapter), "injection")
        settings = injection.to_dict()
    if base is None or isinstance(base, (str, os.PathLike)):
        model = _load_base(base, config, str(adapter), kwargs)
    elif kwargs:
        raise ValueError(f"{', '.join(kwargs)}: only for a base that is loaded here, not a {type(base).__name__}.")
    else:
        model = base
    return _attach(model, config, settings, folder, adapter_name, is_trainable)


# -------------------------------------------------------------------------------------------------------- whole models


def _load_whole(
    folder: Path, name: str, injection: LiZAConfig | TNTInjectionConfig | None, kwargs: dict[str, Any]
) -> PreTrainedModel:
    """An injected model with its memory. The base is read by the library, the memory's tensors here."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name}: holds neither {ADAPTER_CONFIG} nor config.json.")
    with _named(name):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=kwargs.get("trust_remote_code"))
    settings = getattr(config, "tnt_injection", None)
    if settings is None:
        hint = "; a TNT model is loaded with AutoModelForCausalLM" if config.model_type == "tnt" else ""
        raise ValueError(f"{name}: config.json has no tnt_injection, so there is no memory to load{hint}.")
    if injection is not None:
        _compare(settings, injection.to_dict(), name, "injection")
    try:
        stored = {x.name: x for x in read_source(folder).tensors.values() if ".memory." in x.name}
    except ValueError as error:
        if getattr(config, "quantization_config", None) is None:
            raise
        hint = "save an adapter instead, and load it on the base as it was, with this quantization_config"
        raise ValueError(f"{name}: its weights were saved quantized and cannot be read ({error}); {hint}.") from error
    saved_with = (config._attn_implementation or PREFIX + "sdpa").removeprefix(PREFIX)
    implementation = kwargs.pop("attn_implementation", None) or saved_with
    del config.tnt_injection
    if hasattr(config, "attn_implementation"):
        del config.attn_implementation
    with _quiet():  # the memory is no surprise, and everything else that is wrong is an error below
        model, found = _auto_class(config, name).from_pretrained(
            folder, config=config, attn_implementation=implementation, output_loading_info=True, **kwargs
        )
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"{name}: tensor {missing[0]!r} is missing.")
    inject(model, injection_from_dict(settings))
    memory = tuple(f"{key}.memory." for key, module in model.named_modules() if is_injected(module))
    own = {key: tensor for key, tensor in model.state_dict().items() if key.startswith(memory)}
    # What the library does not know of the memory is compared below, under the names in the file: it renames some.
    strange = sorted(key for key in found["unexpected_keys"] if not key.startswith(memory))
    _check_tensors({key: tuple(x.shape) for key, x in own.items()}, stored, strange, name)
    for path in {x.path for x in stored.values()}:
        with safe_open(path, "pt") as file, torch.no_grad():
            for key in own:
                if stored[key].path == path:
                    own[key].copy_(file.get_tensor(key))
    for module in filter(is_injected, model.modules()):
        module.keeps_memory = True
    model.name_or_path = name
    return model


def _auto_class(config: PreTrainedConfig, name: str) -> type:
    """The Auto class that makes the model which was saved."""
    wanted = (config.architectures or [None])[0]
    for auto in AUTO_CLASSES:
        made = auto._model_mapping.get(type(config), ())
        if wanted in [x.__name__ for x in (made if isinstance(made, tuple) else (made,))]:
            return auto
    if wanted is not None and type(config) in AutoModelForCausalLM._model_mapping:
        kinds = ", ".join(auto.__name__ for auto in AUTO_CLASSES)
        raise ValueError(f"{name}: architectures={config.architectures!r}: is not one that {kinds} make.")
    return AutoModelForCausalLM  # of code that comes with the checkpoint


# ------------------------------------------------------------------------------------------------------------ adapters


def _read_adapter(
    adapter: str | os.PathLike, revision: str | None, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any] | None, Path]:
    """The adapter's config, the settings of its injection (`None`: it names none) and its folder."""
    from peft import LoraConfig

    from .adapters import InjectedLoraConfig

    folder = _locate(adapter, revision, kwargs)
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(f"adapter={str(adapter)!r}: has no {ADAPTER_CONFIG}.")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ValueError(f"adapter={str(adapter)!r}: has no {ADAPTER_WEIGHTS}, the only format that is read.")
    values = read_json(folder / ADAPTER_CONFIG)
    settings = values.pop("tnt_injection", None)
    if (kind := values.get("peft_type")) != "LORA":
        raise ValueError(f"adapter={str(adapter)!r}: peft_type={kind!r} is not 'LORA'.")
    with _named(str(adapter)):
        plain = LoraConfig.from_peft_type(**values)
    if settings is None:
        return plain, None, folder
    settings = injection_from_dict(settings).to_dict()
    values = {x.name: getattr(plain, x.name) for x in fields(plain) if x.init}
    return InjectedLoraConfig(**values, tnt_injection=settings), settings, folder


def _load_base(base: str | os.PathLike | None, config: Any, adapter: str, kwargs: dict[str, Any]) -> PreTrainedModel:
    """The model an adapter belongs to."""
    name = config.base_model_name_or_path if base is None else str(base)
    if not name or not isinstance(name, str):
        raise ValueError(f"base=None: adapter {adapter!r} does not name its base model, but {name!r}; pass it.")
    revision = config.revision if base is None else None
    try:
        check_reachable(name, **_hub_options(kwargs))
        with _named(name):
            found = AutoConfig.from_pretrained(
                name, revision=revision, trust_remote_code=kwargs.get("trust_remote_code"), **_hub_options(kwargs)
            )
    except (OSError, ValueError) as error:
        hint = "" if base else "; pass base, or correct base_model_name_or_path in its adapter_config.json"
        raise ValueError(
            f"base={name!r}: the base model of adapter {adapter!r} cannot be loaded: {error}{hint}"
        ) from error
    if hasattr(found, "tnt_injection"):
        return _load_whole(_locate(name, None if Path(name).is_dir() else revision, kwargs), name, None, kwargs)
    auto = AutoModelForCausalLM if config.task_type in (None, "CAUSAL_LM") else _auto_class(found, name)
    if auto is AutoModelForCausalLM and config.task_type in HEADS:
        raise ValueError(
            f"base={name!r}: has no head for the task_type={config.task_type!r} of adapter {adapter!r}, which does not"
            f" tell its size; load it with {HEADS[config.task_type]} and pass it as base."
        )
    return language_model(auto.from_pretrained(name, revision=revision, **kwargs))


def _attach(
    model: nn.Module, config: Any, settings: dict[str, Any] | None, folder: Path, name: str, is_trainable: bool
) -> nn.Module:
    """Inject where that is still to be done, add the adapter, and read its tensors; or leave everything as it was."""
    from peft import PeftModel, PeftModelForCausalLM
    from peft.tuners.tuners_utils import check_target_module_exists

    from .adapters import HARMLESS_STARTS, check_no_adapters, unchanged_on_failure

    wrapped = isinstance(model, PeftModel)
    host = model.get_base_model() if wrapped else model
    check_no_adapters(model)
    if wrapped and name in model.peft_config:
        raise ValueError(f"adapter_name={name!r}: the PeftModel has an adapter of that name.")
    for other, its in {name: config, **model.peft_config}.items() if wrapped else ():
        if (start := getattr(its, "init_lora_weights", True)) not in HARMLESS_STARTS:
            raise ValueError(
                f"init_lora_weights={start!r} of adapter {other!r}: changes the weights that other adapters are on;"
                " load it alone, or save it again with peft's path_initial_model_for_weight_conversion."
            )
    with _named(str(folder)):
        found = any(check_target_module_exists(config, key) for key, _ in host.named_modules())
    if not found:
        raise ValueError(f"adapter={str(folder)!r}: its target_modules are not in {type(host).__name__}.")
    # A folder's base that was loaded without its memory says what was injected, and has none.
    injected = any(is_injected(module) for module in host.modules())
    live = getattr(host.config, "tnt_injection", None) if injected else None
    if settings is None and getattr(getattr(host, "config", None), "model_type", None) != "tnt":
        raise ValueError(
            f"adapter={str(folder)!r}: names no injection (it was not made by lora_config), so the memory it was"
            " trained with is not known; pass injection=, or use peft for an adapter without memory."
        )
    if live is not None:
        _compare(settings, live, "the base model", "tnt_injection")
    ours = live is None and settings is not None
    if ours:
        inject(host, injection_from_dict(settings))
    config.host = host.config
    config.inference_mode = not is_trainable
    trainable = [(x, x.requires_grad) for x in host.parameters()]
    try:
        with nullcontext() if wrapped else unchanged_on_failure(host):
            with _named(str(folder)):  # peft checks few of the values
                if wrapped:
                    model.add_adapter(name, config)
                else:
                    kind = PeftModelForCausalLM if config.task_type == "CAUSAL_LM" else PeftModel
                    model = kind(host, config, name)
            resized = _check_adapter(model, name, folder)
            found = model.load_adapter(str(folder), name, is_trainable=is_trainable, torch_device="cpu")
            # all were expected above, and the library renames some
            if lost := [key for key in found.unexpected_keys if key not in resized]:
                raise ValueError(f"adapter={str(folder)!r}: peft does not find the place of tensor {lost[0]!r}.")
        set_aside_alike(model)
    except Exception:
        if wrapped:
            if name in model.peft_config:
                model.delete_adapter(name)
            # peft may have frozen the adapters before, and they stay
            for parameter, trained in trainable:
                parameter.requires_grad_(trained)
        if ours:
            take_out_memory(host)
        raise
    return model


def _check_adapter(model: nn.Module, name: str, folder: Path) -> set[str]:
    """Whether the adapter's file holds exactly the tensors of adapter `name` (embeddings saved with it may come).
    Returns what peft adds where embeddings were resized: tensors of adapters under names that it does not read."""
    from peft import get_peft_model_state_dict

    own = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    stored = {x.name: x for x in read_header(folder / ADAPTER_WEIGHTS)}
    everything = model.state_dict()
    resized = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=True)
    resized = {x: y for x, y in resized.items() if x not in own and x not in everything}
    strange = [x for x in stored if x not in own and x not in everything and x not in resized]
    shapes = {key: tuple(x.shape) for key, x in own.items()}
    everything = resized | everything
    shapes |= {key: tuple(everything[key].shape) for key in stored if key not in own and key in everything}
    _check_tensors(shapes, stored, strange, str(folder))
    return set(resized)


# -------------------------------------------------------------------------------------------------------------- checks


def _check_tensors(own: dict[str, tuple[int, ...]], stored: dict[str, Any], strange: list[str], name: str) -> None:
    if strange := strange or sorted(set(stored) - set(own)):
        raise ValueError(f"{name}: tensor {strange[0]!r} belongs to another model or injection.")
    for key, shape in own.items():
        if key not in stored:
            raise ValueError(f"{name}: tensor {key!r} is missing; it was saved from another model or injection.")
        if stored[key].shape != shape:
            raise ValueError(f"{name}: tensor {key!r} has shape {stored[key].shape}, the model needs {shape}.")


def _compare(saved: dict[str, Any], other: dict[str, Any], name: str, field: str) -> None:
    if different := [key for key in {**saved, **other} if saved.get(key) != other.get(key)]:
        key = different[0]
        raise ValueError(
            f"{field}: {key}={other.get(key)!r} of {name} is not the {key}={saved.get(key)!r} that was saved."
        )


def _hub_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in ("token", "cache_dir") if kwargs.get(name) is not None}


def _locate(name: str | os.PathLike, revision: str | None, kwargs: dict[str, Any]) -> Path:
    """The folder of a model or adapter; a Hub id is downloaded, in safetensors."""
    path = Path(name)
    if not path.is_dir() and (path.exists() or not HUB_ID.fullmatch(str(name))):
        raise ValueError(f"{str(name)!r}: is neither a folder nor a Hub id.")
    hub = _hub_options(kwargs)
    folder = locate(name, revision, **hub)
    if not path.is_dir() and (folder / ADAPTER_CONFIG).is_file():
        from huggingface_hub import hf_hub_download

        hf_hub_download(str(name), ADAPTER_WEIGHTS, revision=folder.name, **hub)
    return folder


@contextmanager
def _named(name: str):
    """What a damaged file causes in a library is a `ValueError` that says which folder it is in."""
    try:
        yield
    except DAMAGE as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{name}: cannot be read, {type(error).__name__}: {said}") from error


@contextmanager
def _quiet():
    """Without the library's report on keys of a checkpoint."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
