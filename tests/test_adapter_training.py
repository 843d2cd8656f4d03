"""`Trainer` runs with memory and LoRA: the loss falls, every part learns, accumulation and resume are exact."""

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tiny import tokens
from tiny_hosts import tiny_host
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tnt_hf.conversion.adapters import get_tptt_model
from tnt_hf.conversion.inject import inject
from tnt_hf.conversion.injection_config import LiZAConfig, TNTInjectionConfig
from tnt_hf.conversion.reload import load_injected
from tnt_hf.conversion.schedules import LiZACallback, mag_modules
from tnt_hf.recipes.arguments import ModelArguments
from tnt_hf.recipes.models import load_model


LIZA = LiZAConfig(operator="delta_rule", gate="learned", chunk_size=8)
TNT = TNTInjectionConfig(global_chunk_size=8, local_chunk_sizes=[4])
MIX = TNTInjectionConfig(global_chunk_size=8, memory_gate="mix")
OPERATORS = {"liza": LIZA, "tnt": TNT}
STEPS = 8


def rows(count: int, length: int = 19) -> list[dict]:
    """Rows with 0, 5, 10, ... tokens of prompt that do not count in the loss."""
    ids = tokens(count, length)
    return [
        {"input_ids": row.tolist(), "labels": [-100] * (5 * i % 15) + row[5 * i % 15 :].tolist()}
        for i, row in enumerate(ids)
    ]


def trainer(model, folder, data, callbacks=(), **arguments) -> Trainer:
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(**{**settings, **arguments})
    return Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks))


def losses(done: Trainer) -> list[float]:
    return [entry["loss"] for entry in done.state.log_history if "loss" in entry]


def test_an_adapter_of_the_hub_is_trained_on_as_one_of_a_folder_is(tmp_path, monkeypatch):
    tiny_host("llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    repository, commit = tmp_path / "cache" / "models--owner--adapter", "a" * 40
    get_tptt_model(base, TNT).save_pretrained(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    names = "owner/adapter", str(repository / "snapshots" / commit)
    found = [load_model(name, ModelArguments(model=name, trainable="lora")) for name in names]
    ids = tokens(1, 12)
    assert torch.equal(found[0](ids).logits, found[1](ids).logits)
    assert found[0].peft_config["default"].tnt_injection == found[1].peft_config["default"].tnt_injection


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_the_loss_falls_and_every_part_learns(kind, operator, tmp_path):
    model = get_tptt_model(tiny_host(kind), OPERATORS[operator])
    start = {name: x.detach().clone() for name, x in model.named_parameters()}
    schedule = LiZACallback("gradual", transition_step=STEPS)
    done = trainer(model, tmp_path, rows(4), [schedule] if operator == "liza" else [])
    done.train()
    assert losses(done)[-1] < 0.9 * losses(done)[0]
    for name, x in model.named_parameters():
        assert torch.equal(x, start[name]) != x.requires_grad, name
    moved = [name for name, x in model.named_parameters() if x.requires_grad]
    parts = [".lora_A.", ".lora_B.", *([".beta_proj."] if operator == "liza" else [".weights.", ".gate.scale"])]
    assert all(any(part in name for name in moved) for part in parts)
    for module in mag_modules(model):
        assert module.weight.item() == pytest.approx(0.5)
    if operator == "liza":
        logged = [entry["mag_weight"] for entry in done.state.log_history if "loss" in entry]
        assert logged[-1] == pytest.approx(0.5) and logged == sorted(logged)


@pytest.mark.parametrize("operator", OPERATORS)
def test_four_batches_of_one_are_one_batch_of_four(operator, tmp_path):
    """With SGD, whose step is the gradient: Adam would hide a wrong scale and blow up rounding."""
    results = []
    for batch, steps in ((4, 1), (1, 4)):
        torch.manual_seed(0)  # LoRA's A is random
        model = get_tptt_model(tiny_host("llama"), OPERATORS[operator], lora={"lora_dropout": 0.0})
        done = trainer(
            model,
            tmp_path,
            rows(4),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
            max_steps=3,
            optim="sgd",
            learning_rate=0.5,
        )
        done.train()
        results.append((losses(done), {name: x for name, x in model.named_parameters() if x.requires_grad}))
    (one, weights), (other, accumulated) = results
    assert one[0] != pytest.approx(one[-1], rel=1e-2)
    assert other == pytest.approx(one, rel=1e-5)  # the ratio that is 8 in TPTT; logged with six digits
    for name, x in weights.items():
        # three steps of rounding (1e-7 of a gradient of about 1, times 0.5)
        torch.testing.assert_close(accumulated[name], x, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("config", [LIZA, MIX], ids=["liza", "mix"])
def test_a_resumed_run_is_the_uninterrupted_one(config, tmp_path):
    base = tiny_host("llama")
    base.save_pretrained(tmp_path / "base")
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "per_device_train_batch_size": 2}

    def run(**changes):
        model = get_tptt_model(tmp_path / "base", config)
        return trainer(
            model, tmp_path / "run", rows(8), [LiZACallback("ramp", transition_step=6)], **options, **changes
        )

    whole = run()
    whole.train()
    resumed = run()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    expected = whole.model.state_dict()
    for name, x in resumed.model.state_dict().items():
        assert torch.equal(x, expected[name]), name
    for step, weight in ((3, 0.25), (6, 0.5)):
        loaded = load_injected(tmp_path / "run" / f"checkpoint-{step}")
        assert {module.weight.item() for module in mag_modules(loaded)} == {weight}
    own, theirs = loaded.state_dict(), whole.model.state_dict()
    assert all(torch.equal(x, theirs[name]) for name, x in own.items() if "lora" in name or "modules_to_save" in name)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(operator, reentrant):
    ids, gradients = tokens(2, 19), []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = get_tptt_model(tiny_host("llama"), OPERATORS[operator], lora={"lora_dropout": 0.0}).train()
        with torch.no_grad():
            for name, x in model.named_parameters():
                if "lora_B" in name or "gate.scale" in name:
                    x.fill_(0.1)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients.append({name: x.grad for name, x in model.named_parameters() if x.requires_grad} | {"loss": loss})
    plain, recomputed = gradients
    assert all(torch.equal(plain[name], x) for name, x in recomputed.items())
    assert all(plain[name].abs().max() > 0 for name in plain if "lr_proj" not in name and ".weights." not in name)


def test_bfloat16_trains_with_float32_adapters(tmp_path):
    model = get_tptt_model(tiny_host("qwen3", torch.bfloat16), TNT)
    done = trainer(model, tmp_path, rows(4), bf16=True)
    done.train()
    assert losses(done)[-1] < 0.9 * losses(done)[0]
    assert {x.dtype for name, x in model.named_parameters() if ".lora_" in name or ".memories." in name} == {
        torch.float32
    }


@pytest.mark.parametrize(
    "fields", [{"target_modules": ["q_proj", "embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}]
)
def test_trained_embeddings_come_with_the_adapter(fields, tmp_path):
    model, ids = get_tptt_model(tiny_host("qwen3"), TNT, lora=fields), tokens(2, 19)
    trainer(model, tmp_path, rows(4)).train()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(load_injected(tiny_host("qwen3"), tmp_path).eval()(ids).logits, model.eval()(ids).logits)
    name = str(tmp_path / "adapter_model.safetensors")
    stored = load_file(name)
    of_tokens = next(x for x in stored if "embed_tokens" in x and x.endswith("weight"))
    save_file({**stored, of_tokens: stored[of_tokens][1:].contiguous()}, name, {"format": "pt"})
    with pytest.raises(ValueError, match=r"embed_tokens.*has shape \(\d+, \d+\), the model needs"):
        load_injected(tiny_host("qwen3"), tmp_path)


def test_an_injected_model_without_lora_trains_and_loads(tmp_path):
    model = inject(tiny_host("gpt2"), TNT)
    done = trainer(model, tmp_path, rows(4))
    done.train()
    assert losses(done)[-1] < 0.9 * losses(done)[0]
    done.save_model(str(tmp_path / "model"))
    ids = tokens(2, 19)
    with torch.no_grad():
        assert torch.equal(load_injected(tmp_path / "model")(ids).logits, model.eval()(ids).logits)
