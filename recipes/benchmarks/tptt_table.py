"""What TPTT 0.12.1 and tnt-hf do with the same tiny models: six properties, each measured on both sides.

    python -m tnt_hf.recipes.benchmarks.tptt_table --out results/tptt_table.json --tptt path/to/site-packages

TPTT wants an environment of its own (`pip install --no-deps tptt==0.12.1 einops`); `--tptt` names the folder that
holds it. Without that it is used if it can be imported, and is "not measured" otherwise. None of its code is kept
here. Both sides get the same random Llama, the delta rule at chunk 64, a Memory-as-Gate weight of 0.5 and LoRA (r 8,
alpha 16, on q, k, v and o; no dropout, so that runs can be compared). A row that fails on TPTT's side is reported
with its error; one that misses its target on ours stops the run.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from peft import get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.conversion import LiZACallback, LiZAConfig, inject, load_injected, lora_config
from tnt_hf.conversion.linear_attention import linear_attention
from tnt_hf.conversion.schedules import mag_modules
from tnt_hf.recipes.benchmarks.measure import NOT_MEASURED, environment, write


WEIGHT, CHUNK = 0.5, 64


class Ours:
    """tnt-hf as its documentation says to use it."""

    name = "tnt-hf"

    def operator(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        return linear_attention(q, k, v, beta=beta, chunk_size=CHUNK)[0]

    def model(self, base: Path) -> nn.Module:
        settings = LiZAConfig(operator="delta_rule", weight=WEIGHT, chunk_size=CHUNK)
        model = inject(LlamaForCausalLM.from_pretrained(base), settings)
        return get_peft_model(model, lora_config(model, lora_dropout=0.0)).eval()

    def forget(self, model: nn.Module) -> None:
        """Nothing to do: state lives in the cache."""

    def weight(self, model: nn.Module) -> float:
        return next(mag_modules(model)).weight.item()

    def set_weight(self, model: nn.Module, weight: float) -> None:
        for module in mag_modules(model):
            module.weight.fill_(weight)

    def callback(self, model: nn.Module, **options):
        return LiZACallback(**options)

    def save(self, model: nn.Module, folder: Path) -> None:
        model.save_pretrained(folder)

    def reload(self, base: Path, folder: Path) -> nn.Module:
        return load_injected(base, folder)

    reload_by_hand = None  # one way that works is enough


class Tptt:
    """TPTT with the arguments of its README."""

    name = "TPTT"

    def __init__(self):
        import tptt

        self.tptt, self.version = tptt, metadata.version("tptt")

    def operator(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).unsqueeze(3) for x in (q, k, v))  # [B, H, T, order, D]
        beta = beta.transpose(1, 2)[..., None, None].expand_as(k)
        forward = self.tptt.LinearAttentionOp.chunk_delta_product_forward
        o, _ = forward(q, k, v, torch.ones_like(k), beta, CHUNK, use_checkpoint=False)
        return o.transpose(1, 2)

    def config(self, base: Path):
        lora = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "bias": "none", "task_type": "CAUSAL_LM"}
        lora["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj"]
        return self.tptt.TpttConfig(
            base_model_config=LlamaConfig.from_pretrained(base), base_model_name=str(base), mag_weight=WEIGHT,
            operator_mode="delta_rule", max_chunk_size=CHUNK, lora_config=lora, padding_side="left",
        )  # fmt: skip

    def model(self, base: Path) -> nn.Module:
        return self.tptt.TpttModel(self.config(base)).eval()

    def forget(self, model: nn.Module) -> None:
        """Its state stays in the model from one sequence to the next."""
        model.linear_cache.reset()

    def weight(self, model: nn.Module) -> float:
        return float(next(x.memory_gate.mag_weight for x in model.modules() if hasattr(x, "memory_gate")))

    def set_weight(self, model: nn.Module, weight: float) -> None:
        for module in model.modules():
            if hasattr(module, "memory_gate"):
                module.memory_gate.mag_weight = torch.tensor(weight)

    def callback(self, model: nn.Module, **options):
        return self.tptt.LiZACallback(model, **options)

    def save(self, model: nn.Module, folder: Path) -> None:
        model.save_pretrained(folder)

    def reload(self, base: Path, folder: Path) -> nn.Module:
        """As its model cards say."""
        return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()

    def reload_by_hand(self, base: Path, folder: Path) -> nn.Module:
        """A model made anew from the same settings, then its loader for the saved tensors."""
        model = self.model(base)
        self.tptt.load_tptt_safetensors(str(folder), model.tptt_model)
        return model


# ------------------------------------------------------------------------------------------------------------ the rows


def cosine(side, base: Path, folder: Path, seed: int) -> dict:
    """Outputs of the operator in float32 against the published recurrence, token by token in float64."""
    B, T, H, D = 1, 512, 4, 64
    q, k = (F.normalize(F.silu(torch.randn(B, T, H, D)), dim=-1) for _ in range(2))
    v, beta = torch.randn(B, T, H, D), torch.rand(B, T, H)
    S, want = torch.zeros(B, H, D, D, dtype=torch.float64), []
    for q_t, k_t, v_t, b_t in zip(*(x.double().unbind(1) for x in (q, k, v, beta))):
        S = S + (b_t[..., None] * k_t)[..., None] * (v_t - (k_t[..., None, :] @ S).squeeze(-2))[..., None, :]
        want.append((q_t[..., None, :] @ S).squeeze(-2))
    got = side.operator(q, k, v, beta).double()
    return {"cosine": F.cosine_similarity(got.flatten(), torch.stack(want, 1).flatten(), dim=0).item()}


@torch.no_grad()
def cached_decode(side, base: Path, folder: Path, seed: int) -> dict:
    """A prompt of 16 tokens, then 75 one at a time with the cache, against one forward over all 91."""
    model, ids = side.model(base), torch.randint(1, 64, (1, 91))
    full = model(ids).logits[:, 16:]
    side.forget(model)
    out, steps = model(ids[:, :16], use_cache=True), []
    for t in range(16, 91):
        out = model(ids[:, t : t + 1], use_cache=True, **{CACHE_NAME: getattr(out, CACHE_NAME)})
        steps.append(out.logits)
    steps = torch.cat(steps, 1)
    agreement = (steps.argmax(-1) == full.argmax(-1)).double().mean().item()
    return {"argmax_agreement": agreement, "max_logit_difference": (steps - full).abs().max().item()}


@torch.no_grad()
def padding_leak(side, base: Path, folder: Path, seed: int) -> dict:
    """SDPA, one row left-padded: how far the logits of earlier tokens move when the last token changes; also at a
    weight of 0, where only the base's attention is left."""
    model, report = side.model(base), {}
    ids, mask = torch.randint(1, 64, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 7) % 60 + 1
    for name, weight in (("future_leak", WEIGHT), ("future_leak_of_attention", 0.0)):
        side.set_weight(model, weight)
        moved = (model(ids, attention_mask=mask).logits - model(other, attention_mask=mask).logits)[:, :-1]
        report[name] = moved[mask[:, :-1].bool()].abs().max().item()
    return report


def trained(side, base: Path, folder: Path, callbacks, **options) -> tuple[nn.Module, Trainer]:
    model = side.model(base)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 64, (32, 12), generator=generator)
    arguments = TrainingArguments(
        str(folder / "run"), use_cpu=True, disable_tqdm=True, report_to=[], logging_steps=1, save_strategy="no",
        **{"learning_rate": 1e-3, "per_device_train_batch_size": 1, **options},
    )  # fmt: skip
    data = [{"input_ids": x, "labels": x} for x in ids]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[make(model) for make in callbacks])
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train()
    return model.eval(), trainer


def reload_exactness(side, base: Path, folder: Path, seed: int) -> dict:
    """Four steps, each raising the weight, then save and reload: the logits, and what became of the weight. Without
    a cache: the Trainer has turned it off in one of the two configs, and with one SDPA sums in another order."""
    callback = {"mode": "gradual", "initial_weight": 0.1, "final_weight": 0.9, "transition_step": 4}
    model, _ = trained(side, base, folder, [lambda m: side.callback(m, **callback)], max_steps=4)
    ids, ways = torch.randint(1, 64, (1, 33)), {"as documented": side.reload, "by hand": side.reload_by_hand}
    side.save(model, folder / "saved")
    report = {"trained_weight": round(side.weight(model), 6)}
    for way, load in ways.items():
        if load is None:
            continue
        with attempt(side, report, way), torch.no_grad():
            loaded = load(base, folder / "saved")
            weight, want = side.weight(loaded), model(ids, use_cache=False).logits
            report[way] = {
                "max_logit_difference": (loaded(ids, use_cache=False).logits - want).abs().max().item(),
                "weight": round(weight, 6),
            }
            if weight != side.weight(model):
                side.set_weight(loaded, side.weight(model))
                report[way]["with_the_weight_put_right"] = (
                    (loaded(ids, use_cache=False).logits - want).abs().max().item()
                )
    return report


def accumulation(side, base: Path, folder: Path, seed: int) -> dict:
    """Loss and gradient norm that the Trainer logs for 8 sequences, one at a time over all at once; nothing learnt."""
    logs = []
    for batch, steps in ((1, 8), (8, 1)):
        options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps}
        torch.manual_seed(seed)  # the same LoRA on both
        _, trainer = trained(side, base, folder, [], max_steps=1, learning_rate=0.0, **options)
        logs.append(trainer.state.log_history[0])
    return {
        name: logs[0][key] / logs[1][key] for name, key in (("loss_ratio", "loss"), ("gradient_ratio", "grad_norm"))
    }


def ramp(side, base: Path, folder: Path, seed: int) -> dict:
    """The callback's mode `ramp` over two steps."""
    callback = {"mode": "ramp", "final_weight": WEIGHT, "transition_step": 2}
    model, _ = trained(side, base, folder, [lambda m: side.callback(m, **callback)], max_steps=2)
    return {"weight": side.weight(model)}


ROWS = {
    "delta rule at chunk 64: cosine to the float64 recurrence": (cosine, lambda r: abs(r["cosine"] - 1) < 1e-9),
    "cached decode: argmax agreement with one forward": (cached_decode, lambda r: r["argmax_agreement"] == 1.0),
    "SDPA and padding: change of the past by a future token": (padding_leak, lambda r: not any(r.values())),
    "save and reload: logits and the trained weight": (
        reload_exactness,
        lambda r: r["as documented"] == {"max_logit_difference": 0.0, "weight": r["trained_weight"]},
    ),
    # 1e-4: another order of sums in float32
    "gradient accumulation by 8: ratio of loss and gradient": (
        accumulation,
        lambda r: all(abs(ratio - 1) < 1e-4 for ratio in r.values()),
    ),
    "callback mode ramp: the final weight": (ramp, lambda r: r["weight"] == WEIGHT),
}


# ------------------------------------------------------------------------------------------------------------- running


@contextlib.contextmanager
def attempt(side, report: dict, key: str):
    """What TPTT cannot do is a result; what tnt-hf cannot do stops the run."""
    try:
        yield
    except Exception as error:
        if side.name == Ours.name:
            raise
        report[key] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}


def tiny_llama(folder: Path) -> Path:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def measure(side, row, seeds: int) -> list[dict]:
    results = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        result: dict = {}
        with tempfile.TemporaryDirectory() as folder:
            base = tiny_llama(Path(folder) / "base")
            with attempt(side, result, "row"):
                result = row(side, base, Path(folder), seed)
            # a folder of this run says nothing later
            results.append(json.loads(json.dumps(result.get("row", result)).replace(folder, "")))
    return results


def peer(path: Path | None):
    if path is not None:
        sys.path.append(str(path))
    try:
        return Tptt()
    except ImportError as error:
        if path is not None:
            raise SystemExit(f"--tptt: TPTT cannot be imported from there: {error}") from error
        return None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--tptt", type=Path, help="folder to import tptt and einops from")
    parser.add_argument("--seeds", type=int, default=3, help="models and inputs per row")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    theirs, ours = peer(args.tptt), Ours()
    more = {"seeds": args.seeds, "tptt": theirs.version if theirs else NOT_MEASURED}
    report = {"environment": environment(0, **more), "rows": {}}
    for name, (row, holds) in ROWS.items():
        results = measure(ours, row, args.seeds)
        if not all(map(holds, results)):
            raise SystemExit(f"{name}: tnt-hf misses its target: {results}")
        entry = {"tnt-hf": results, "TPTT": measure(theirs, row, args.seeds) if theirs else NOT_MEASURED}
        report["rows"][name] = entry
        print(f"{name}\n  tnt-hf  {results[0]}\n  TPTT    {entry['TPTT'][0] if theirs else NOT_MEASURED}", flush=True)
    if args.out is not None:
        write(args.out, report)


if __name__ == "__main__":
    main()
