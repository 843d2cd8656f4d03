"""Suite `liza`: forward and backward of LiZA's linear operators against TPTT 0.12.1 and causal SDPA.

Ours must agree with the published recurrence, token by token in float64, in outputs and all gradients, before it is
timed. TPTT's operator of the same name gets the same inputs; how far its outputs are from the recurrence is reported
and not required, as what it computes is another function. SDPA is another model and there for scale.

Axis legend: B = 1 batch   T tokens   H heads   n writes per token   D head width
"""

import contextlib
import sys
from importlib import metadata

import torch
import torch.nn.functional as F
from torch import Tensor

from tnt_hf.conversion.linear_attention import linear_attention
from tnt_hf.recipes.benchmarks.gate import require_agreement
from tnt_hf.recipes.benchmarks.measure import NOT_MEASURED, columns, spread, take_turns, times_faster, waiting
from tnt_hf.recipes.benchmarks.settings import LizaSettings


RULES = ("delta_rule", "gated_delta_rule", "delta_product", "linear")
OURS, TPTT, SDPA = "tnt-hf", "TPTT", "SDPA"
NOT_THERE = "has no such operator"
# float32 against float64, over thousands of dependent writes; of the largest entry
TOLERANCE = 1e-3


def inputs(rule: str, length: int, settings: LizaSettings) -> dict[str, Tensor]:
    """Of `linear_attention`, with unit queries and keys, in float32."""
    g = torch.Generator().manual_seed(settings.seed)
    H, D = settings.heads, settings.width
    writes = (settings.order,) if rule == "delta_product" else ()

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    found = {
        "q": F.normalize(F.silu(normal(1, length, H, D)), dim=-1),
        "k": F.normalize(F.silu(normal(1, length, H, *writes, D)), dim=-1),
        "v": normal(1, length, H, *writes, D),
        "beta": torch.rand(1, length, H, *writes, generator=g),
    }
    if rule == "gated_delta_rule":
        found["decay"] = 0.9 + 0.1 * torch.rand(1, length, H, generator=g)
    return {name: x.to(settings.device).requires_grad_() for name, x in found.items()}


def ours(rule: str, chunk_size: int, tensors: dict[str, Tensor], implementation: str = "chunk") -> Tensor:
    """`[1, T, H, D]`."""
    return linear_attention(**tensors, rule=rule, chunk_size=chunk_size, implementation=implementation)[0]


def tptt_operator(rule: str, chunk_size: int, tensors: dict[str, Tensor]) -> Tensor:
    """TPTT's operator as its attention calls it, on inputs of ours; `[1, T, H, D]`."""
    import tptt

    q, k, v, beta = (tensors[name].transpose(1, 2) for name in ("q", "k", "v", "beta"))
    if rule == "delta_product":
        q = q.unsqueeze(3).expand_as(k)
    else:
        q, k, v, beta = (x.unsqueeze(3) for x in (q, k, v, beta))  # [1, H, T, n, D]
    beta = beta[..., None].expand_as(k)
    alpha = torch.ones_like(k)
    if "decay" in tensors:
        alpha = tensors["decay"].transpose(1, 2)[..., None, None].expand_as(k)
    o, _ = tptt.LinearAttentionOp.chunk_delta_product_forward(q, k, v, alpha, beta, chunk_size, use_checkpoint=False)
    return o.transpose(1, 2)


def sdpa(tensors: dict[str, Tensor]) -> Tensor:
    """Causal attention with the same heads; of several writes per token, the last."""
    q, k, v = (x if x.dim() == 4 else x[:, :, :, -1] for x in (tensors["q"], tensors["k"], tensors["v"]))
    o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return o.transpose(1, 2)


def _call(function, tensors: dict[str, Tensor]):
    def call():
        o = function(tensors)
        d_o = torch.ones_like(o)
        return o, *torch.autograd.grad(o, list(tensors.values()), d_o, allow_unused=True)

    return call


def _double(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().double().requires_grad_() for name, x in tensors.items()}


def prepare(settings: LizaSettings) -> LizaSettings:
    """Makes TPTT importable. Raises `ValueError` where the named folder does not hold it."""
    if settings.tptt is not None and str(settings.tptt) not in sys.path:
        if not (settings.tptt / "tptt").is_dir():
            raise ValueError(f"tptt={str(settings.tptt)!r}: holds no tptt")
        sys.path.append(str(settings.tptt))
    return settings


def _version() -> str | None:
    with contextlib.suppress(ImportError):
        import tptt  # noqa: F401

        return metadata.version("tptt")
    return None


def rows(settings: LizaSettings) -> list[str]:
    """One per operator and length."""
    return [f"{rule} T={length}" for rule in RULES for length in settings.lengths]


def measure(name: str, settings: LizaSettings, tell) -> dict:
    """One row."""
    rule, _, length = name.partition(" T=")
    tensors = inputs(rule, int(length), settings)
    calls = {OURS: _call(lambda x: ours(rule, settings.chunk_size, x), tensors), SDPA: _call(sdpa, tensors)}
    tell("checking")
    want = _call(lambda x: ours(rule, settings.chunk_size, x, "recurrent"), _double(tensors))()
    result = {"largest_relative_difference": require_agreement(name, calls[OURS](), want, TOLERANCE)}
    if rule == "linear":
        result[TPTT] = NOT_THERE
    elif (version := _version()) is None:
        result[TPTT] = NOT_MEASURED
    else:
        theirs = _call(lambda x: tptt_operator(rule, settings.chunk_size, x), tensors)
        with torch.no_grad():
            got = tptt_operator(rule, settings.chunk_size, tensors).double()
        cosine = F.cosine_similarity(got.flatten(), want[0].detach().flatten(), dim=0).item()
        result[TPTT] = {"version": version, "cosine_to_the_recurrence": round(cosine, 6)}
        result[TPTT]["finite"] = bool(got.isfinite().all())
        calls[TPTT] = theirs
    result["seconds"] = take_turns(calls, settings.rounds, 1, tell, waiting(settings.device))
    return result


def summary(found: dict[str, dict], settings: LizaSettings) -> dict:
    """Tokens per second by length, and how many times faster ours is."""
    clock = settings.clock
    speed: dict[str, dict] = {}
    faster: dict[str, dict] = {}
    cosines: dict[str, dict] = {}
    for row, entry in found.items():
        rule, _, length = row.partition(" T=")
        for name, clocks in entry["seconds"].items():
            if name == SDPA and rule == "delta_product":
                continue  # the same four numbers again
            key = SDPA if name == SDPA else f"{rule}, {name}"
            speed.setdefault(key, {}).setdefault(length, spread([int(length) / x for x in clocks[clock]], 1))
            if name != OURS:
                faster.setdefault(f"{rule} against {name}", {})[length] = times_faster(
                    entry["seconds"], OURS, name, clock
                )
        if isinstance(entry[TPTT], dict):
            cosines.setdefault(rule, {})[length] = entry[TPTT]["cosine_to_the_recurrence"]
    return {"tokens_per_second": speed, "times_faster": faster, "cosine_of_tptt_to_the_recurrence": cosines}


def table(result: dict) -> list[str]:
    """Speeds, ratios and what TPTT computes, by length."""
    found, lengths = result["summary"], list(map(str, result["settings"]["lengths"]))
    head = tuple(f"T = {length}" for length in lengths)
    speeds = [(name, *(f"{by[n]['median']:,.0f}" for n in lengths)) for name, by in found["tokens_per_second"].items()]
    ratios = [(name, *(f"{by[n]['median']:.2f}" for n in lengths)) for name, by in found["times_faster"].items()]
    cosines = found["cosine_of_tptt_to_the_recurrence"]
    text = [*columns([("tokens/s", *head), *speeds]), "", *columns([("times faster", *head), *ratios])]
    if cosines:
        lines = [(name, *(by[n] for n in lengths)) for name, by in cosines.items()]
        text += ["", *columns([("cosine of TPTT to the recurrence", *head), *lines])]
    return text
