"""What `test_accelerator.py` asks of another device, in a process of its own: accelerator_cases.py [MODE...]. Prints a
line of JSON for each answer, [case, what is wrong or null]."""

import json
import sys
from functools import partial

import accelerator
import torch
from accelerate.hooks import attach_execution_device_hook
from tiny import MODES, left_padded, tiny_model, tokens
from tiny_hosts import MODES as INJECTED
from tiny_hosts import tiny_host
from transformers.utils import logging

from tnt_hf.conversion import inject
from tnt_hf.conversion.sensitivity import window_errors
from tnt_hf.recipes.evaluation_perplexity import Rows, token_losses


ROWS = tokens(2, 40)
PADDED = left_padded([tokens(40, seed=3), tokens(29, seed=4)])
PACKED = torch.cat([torch.arange(17), torch.arange(23)]).repeat(2, 1)


def pair(mode: str):
    """The same model on the CPU and on the device."""
    if mode in MODES:
        return tiny_model(**MODES[mode]), tiny_model(**MODES[mode]).to("gpu")
    operator = INJECTED[mode.removeprefix("injected ")]
    here, there = (inject(tiny_host("llama", torch.float64), operator) for _ in range(2))
    there.load_state_dict(here.state_dict())
    return here, there.to("gpu")


def equal(there: torch.Tensor, here: torch.Tensor, what: str) -> None:
    """The same operations in float64; some take other ways on a CPU."""
    torch.testing.assert_close(there.detach().cpu(), here.detach(), rtol=1e-9, atol=1e-9, msg=lambda m: f"{what}: {m}")


def moved(inputs: dict) -> dict:
    return {name: x.to("gpu") if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


def trains(mode: str, **inputs) -> None:
    """Loss and gradients of all parameters."""
    here, there = pair(mode)
    inputs = {"input_ids": ROWS, "labels": ROWS, "use_cache": False, **inputs}
    losses = here(**inputs).loss, there(**moved(inputs)).loss
    equal(*reversed(losses), "loss")
    for loss in losses:
        loss.backward()
    for (name, p), q in zip(here.named_parameters(), there.parameters()):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            equal(q.grad, p.grad, name)


def generates(mode: str, **options) -> None:
    """Tokens behind rows of different lengths."""
    here, there = pair(mode)
    inputs = {"input_ids": PADDED[0], "attention_mask": PADDED[1], "max_new_tokens": 12, "do_sample": False, **options}
    assert there.generate(**moved(inputs)).tolist() == here.generate(**inputs).tolist()


@torch.no_grad()
def goes_on(mode: str) -> None:
    """Logits of pieces of a row."""
    here, there = pair(mode)
    caches = None, None
    for piece in ROWS.split([13, 1, 1, 7, 18], 1):
        outs = [
            model(input_ids=piece.to(model.device), past_key_values=cache, use_cache=True)
            for model, cache in zip((here, there), caches)
        ]
        caches = [out.past_key_values for out in outs]
        equal(outs[1].logits, outs[0].logits, f"{piece.shape[1]} tokens")


def waits(mode: str, hooked: bool = False) -> None:
    """For no value: a step of training, and a token behind a prompt. hooked: as `device_map="auto"` leaves a model."""
    model, ids = pair(mode)[1], ROWS.to("gpu")
    if hooked:
        attach_execution_device_hook(model, torch.device("gpu:0"))
    accelerator.READ.clear()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    assert not accelerator.READ, f"training reads {accelerator.READ}"
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
        accelerator.READ.clear()
        for _ in range(9):  # over the ends of chunks
            model(input_ids=ids[:, :1], past_key_values=cache)
    assert not accelerator.READ, f"decoding reads {accelerator.READ}"


@torch.no_grad()
def is_evaluated(mode: str) -> None:
    """Perplexity, and what a window does to a layer, without a number in float64."""
    model = (tiny_model(**MODES[mode]) if mode in MODES else tiny_host("llama", torch.float32)).float().to("gpu")
    accelerator.WIDENED.clear()
    [losses] = token_losses(model, Rows([ROWS[0]], [0]), 1)
    assert losses.dtype == torch.float64 and losses.device.type == "cpu"
    if mode not in MODES:
        assert max(window_errors(model, ROWS.to("gpu"), 8)) > 0
    assert not accelerator.WIDENED, accelerator.WIDENED


def notices(_: str) -> None:
    """That a CPU tensor is among a device's: the rest proves nothing otherwise."""
    try:
        torch.ones(2, device="gpu") + torch.ones(2)
    except RuntimeError as error:
        assert "two devices" in str(error)
    else:
        raise AssertionError("tensors of two devices were added")
    accelerator.READ.clear()
    torch.ones(2, device="gpu").sum().item()
    assert accelerator.READ


ASKED = {
    "train": trains,
    "train, padded": partial(trains, input_ids=PADDED[0], labels=PADDED[0], attention_mask=PADDED[1]),
    "train, packed": partial(trains, position_ids=PACKED),
    "generate": generates,
    "generate, beams": partial(generates, num_beams=2),
    "generate without a cache": partial(generates, use_cache=False),
    "go on": goes_on,
    "wait for no value": waits,
    "wait for no value, with hooks": partial(waits, hooked=True),
    "is evaluated": is_evaluated,
    "notice what is elsewhere": notices,
}
# an injected memory has no static cache
OURS = {"generate, static cache": partial(generates, cache_implementation="static", disable_compile=True)}


if __name__ == "__main__":
    logging.set_verbosity_error()
    for mode in sys.argv[1:] or [*MODES, *(f"injected {operator}" for operator in INJECTED)]:
        for name, ask in (ASKED | OURS if mode in MODES else ASKED).items():
            try:
                ask(mode)
                wrong = None
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            print(json.dumps([f"{mode}: {name}", wrong]), flush=True)
