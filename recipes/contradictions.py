"""Settings of a recipe that contradict each other."""

from typing import Any

from tnt_hf.recipes.arguments import MODES, NEW_MODELS, TRAINABLE


# Options of torch.utils.checkpoint that can stand in a recipe, and one of the library's own.
RECOMPUTING = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop", "every_n_layers")


def shown(value: Any) -> str:
    """A value in an error, in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_settings(given: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raises `ValueError` for a setting that is impossible together with another one, before anything is loaded."""

    value = (defaults | given).get

    def refuse(name: str, reason: str):
        raise ValueError(f"{name}={shown(value(name))}: {reason}")

    for name, choices in (("mode", MODES), ("trainable", TRAINABLE)):
        if value(name) not in choices:
            refuse(name, f"must be one of {', '.join(choices)}")
    for name, top in (("eval_share", 1), ("window_dropout", None)):
        if not 0 <= value(name) <= 1 or value(name) == top:
            refuse(name, f"must be in [0, 1{')' if top else ']'}")
    if value("train_tokens") is not None and (value("max_steps") or -1) > 0:
        refuse(
            "train_tokens",
            f"sets the length of the run, and so does max_steps={value('max_steps')!r}: leave one out"
            " (train_tokens: null, or max_steps: -1)",
        )
    for name in ("max_steps", "train_tokens"):
        if "num_train_epochs" in given and (value(name) or -1) > 0:
            refuse("num_train_epochs", f"has no effect beside {name}={value(name)!r}: give one of them")
    if "num_train_epochs" in given and not value("num_train_epochs"):
        refuse("num_train_epochs", "must be above 0")
    for name, what in (("output_dir", "a folder"), ("dataset_name", "a file, a folder or a dataset")):
        if name in given and not (given[name] or "").strip():  # "" would be the working directory
            refuse(name, f"must name {what}")
    if value("push_to_hub"):
        refuse("push_to_hub", "would upload checkpoints that nobody checked; use tnt push when the run has ended")
    if value("hub_token") is not None:
        raise ValueError("hub_token: settings are saved with the run, so a secret is refused; set HF_TOKEN, or log in")
    for name in given:
        if name.startswith("hub_") and value(name):
            refuse(name, "has no effect, as a run uploads nothing; use tnt push when it has ended")
    for name, off in (("label_names", None), ("include_for_metrics", []), ("batch_eval_metrics", False)):
        if value(name) not in (None, off):
            refuse(name, "is not used: an evaluation gives eval_loss only, of labels that the data makes")
    for name in ("bf16_full_eval", "fp16_full_eval"):  # which casts a model outside of training, for good
        if value(name):
            refuse(name, f"has no effect on the evaluations of a run; with {name[:4]} they are computed in it")
    if value("optim_target_modules"):
        refuse("optim_target_modules", "has no effect: which weights have which optimizer is the recipe's")
    if value("eval_steps") and value("eval_strategy") != "steps":
        refuse("eval_steps", "has no effect without eval_strategy=steps")
    recomputing = ("activation_checkpointing", "gradient_checkpointing")
    for name in recomputing:
        if value(f"{name}_kwargs") and not any(map(value, recomputing)):
            refuse(f"{name}_kwargs", f"has no effect without {name}")
        options = value(f"{name}_kwargs") or {}
        if unknown := [option for option in options if option not in RECOMPUTING]:
            refuse(f"{name}_kwargs", f"{unknown[0]!r} must be among {', '.join(RECOMPUTING)}")
        if isinstance(every := options.get("every_n_layers", 1), bool) or not isinstance(every, int) or every < 1:
            refuse(f"{name}_kwargs", "every_n_layers must be an integer of at least 1")
    if value("auto_find_batch_size"):
        refuse("auto_find_batch_size", "would change the batch in the run, away from the one written down")
    accelerator = value("accelerator_config")
    if isinstance(accelerator, str):
        refuse("accelerator_config", "settings are written down with the run: give what the file says, as a mapping")
    if (accelerator or {}).get("split_batches"):
        refuse("accelerator_config", "split_batches would divide the batch of one device among all")
    if not (accelerator or {}).get("use_seedable_sampler", True):
        refuse("accelerator_config", "without use_seedable_sampler a run that goes on would read other rows")
    if value("remove_unused_columns"):
        refuse("remove_unused_columns", "would remove what tells filler from tokens; data is prepared for its mode")
    if value("dataloader_persistent_workers") and not value("dataloader_num_workers"):
        refuse("dataloader_persistent_workers", "has no effect without dataloader_num_workers")
    if "do_train" in given and not value("do_train"):
        refuse("do_train", "a recipe trains; tnt eval measures the model of a folder")
    if value("fsdp_config") and not value("fsdp"):
        refuse("fsdp_config", "has no effect without fsdp")
    for name in ("data_seed", "train_sampling_strategy"):
        if value("streaming") and given.get(name) is not None:
            refuse(name, "has no effect with streaming: a stream is read in its order")
    if value("greater_is_better"):
        refuse("greater_is_better", "an evaluation gives eval_loss only, and would keep the worst")
    if value("ignore_data_skip"):
        refuse("ignore_data_skip", "a run that goes on would read other data than one that nobody stopped")
    if not any(map(value, ("eval_share", "eval_dataset_name", "eval_split"))):
        for name, off in (("eval_on_start", False), ("eval_strategy", "no")):
            if (value(name) or off) != off:
                refuse(name, "needs data to evaluate on: give eval_share, eval_split or eval_dataset_name")
    if value("load_best_model_at_end") and (value("eval_strategy") or "no") == "no":
        refuse("load_best_model_at_end", "needs evaluations; give eval_strategy, and save_strategy to match")
    if value("tokenizer") is not None and value("tokenizer_vocab_size") is not None:
        refuse("tokenizer_vocab_size", "trains a tokenizer, but tokenizer names one: give one of them")

    mode, model, trainable, preset = value("mode"), value("model"), value("trainable"), value("model") in NEW_MODELS
    if value("source") is not None:
        if "model" in given:
            refuse("model", "is what is trained, but source names a checkpoint to convert and train: give one of them")
        if value("model_config"):
            refuse("model_config", "belongs to a model that exists; with source, put the fields into convert")
        if value("inject"):
            refuse("inject", "puts memory into a live model, but source is converted: name it as model instead")
    elif value("convert"):
        refuse("convert", "needs source, the checkpoint to convert")
    elif preset and mode in ("stage2", "align", "distill", "long"):
        refuse("mode", f"goes on from a trained model; name its folder as model, not the preset {model!r}")
    elif preset and value("inject"):
        refuse("inject", f"needs a pretrained model to put the memory into, not the preset {model!r}")
    elif preset and value("tokenizer") is None and value("tokenizer_vocab_size") is None:
        refuse("tokenizer", f"must be given with the preset {model!r}, or tokenizer_vocab_size")
    if value("source") is not None and mode == "stage2":
        refuse("mode", "goes on from a trained TNT model, not from a source to convert; name its folder as model")
    if value("tokenizer_vocab_size") is not None and (value("source") is not None or not preset):
        refuse(
            "tokenizer_vocab_size",
            "trains a tokenizer for a new model; one that is trained has its own: set it to null",
        )
    if value("window_dropout_warmup_steps") and not value("window_dropout"):
        refuse("window_dropout_warmup_steps", "has no effect without window_dropout")
    if value("lora") and trainable != "lora":
        refuse("lora", f"has no effect with trainable={trainable!r}; use trainable='lora'")
    if mode == "align" and trainable != "memory":
        refuse("trainable", "mode='align' trains the memory and its gates only; use trainable='memory'")
    for name in recomputing:
        if mode == "align" and value(name):
            refuse(name, "would recompute layers without the inputs that mode='align' gives them")
    if value("teacher") is not None and mode not in ("align", "distill"):
        refuse("teacher", f"has no effect in mode={mode!r}, only in align and distill")
    if mode == "sft" and value("dataset_name") == "python-stdlib":
        refuse("dataset_name", "holds no conversations; mode='sft' needs a dataset with a column of messages")
    if value("streaming") and value("train_tokens") is None and (value("max_steps") or -1) < 1:
        refuse("streaming", "has no length that is known; give train_tokens or max_steps")
