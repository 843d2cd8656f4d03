"""The language model of one that also sees or hears, as a causal LM of its own that a memory can be injected into."""

import copy

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel


# What the library notes on a model about how its weights are kept, and looks for when it trains or saves them.
NOTED = (
    "is_quantized", "quantization_method", "hf_quantizer", "is_loaded_in_4bit", "is_loaded_in_8bit", "hf_device_map"
)  # fmt: skip


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """
    A composite model's language model alone, with the same weights: on text it computes what `model` does, bit for
    bit. `AutoModelForCausalLM` makes composite models of Gemma 3 and 4, among others, and their checkpoints name
    tensors in a way that the language model's own class does not find.

    It is made of parts of `model`, which is not to be used any more, and saved as a model of its own.

    Returns:
        The causal LM, of its own class (`Gemma3ForCausalLM`), in the mode `model` is in; `model` itself if it is no
        composite model.

    Raises:
        ValueError: no Transformers model, or a language model that has no class of its own.

    ```python
    model = AutoModelForCausalLM.from_pretrained("google/gemma-3-4b-it")
    model = inject(language_model(model), TNTInjectionConfig())
    ```
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model: must be a transformers PreTrainedModel, not {type(model).__name__}.")
    text = model.config.get_text_config(decoder=True)
    if text is model.config or getattr(model.config, "is_encoder_decoder", False):
        return model
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    config = copy.deepcopy(text)
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is None or head is None or not isinstance(decoder, PreTrainedModel):
        raise ValueError(
            f"model={type(model).__name__}: its language model ({config.model_type!r}) is not one that the library"
            " has alone."
        )
    # Composite models have a field of their own for it, which their text_config may contradict.
    config.tie_word_embeddings = head.weight is decoder.get_input_embeddings().weight
    with torch.device("meta"):
        found = kind(config)
    if type(found.base_model) is not type(decoder):
        raise ValueError(
            f"model={type(model).__name__}: its language model is a {type(decoder).__name__}, and {kind.__name__} has"
            f" a {type(found.base_model).__name__}."
        )
    setattr(found, found.base_model_prefix, decoder)
    found.set_output_embeddings(head)
    before = decoder.config
    for module in found.modules():
        if getattr(module, "config", None) is before:
            module.config = config
    for name in NOTED:
        if name in model.__dict__:
            setattr(found, name, model.__dict__[name])
    if hasattr(model.config, "quantization_config"):
        config.quantization_config = model.config.quantization_config
    found.generation_config = copy.deepcopy(model.generation_config)
    found.name_or_path, found.training = model.name_or_path, model.training
    return found
