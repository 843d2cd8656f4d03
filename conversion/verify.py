"""The parity report: what a conversion promises, measured on the source and on the result, one after the other.

Axis legend
    T tokens of the probe   V vocabulary

A fresh conversion has a closed memory and must equal its source, bit for bit, wherever no window cuts what a layer
sees. A trained one has opened its memory: how far it moved from the source is then reported, not promised. What makes
any result usable (no look into the future, decoding equal to the forward pass, padding without effect, ...) is always
promised, and checked both with the memory as it is and with its gates opened at random, so that it cannot hide.
"""

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging as hf_logging

from tnt_hf import TNTConfig, TNTForCausalLM, __version__
from tnt_hf.conversion.files import write_json
from tnt_hf.costs_tnt import BYTES, key_value_bytes, memory_state_bytes

from .ablations import ablations, opened, without_memory
from .families import FAMILIES, read_source_config, tnt_config
from .memory_use import with_peak
from .source import locate, read_json
from .verify_files import (
    check_base_weights,
    check_code,
    check_config,
    check_files,
    check_finite,
    converted_revision,
    memory_state,
    rounded_to,
    unchanged_positions,
    unlisted,
)
from .verify_measures import (
    MOST_ROUNDING,
    ROUNDING,
    addresses,
    difference,
    forward,
    move_to,
    next_token_loss,
    observe,
    perplexity_of,
    rounding,
)
from .verify_probe import FEWEST, probe_ids
from .verify_report import NOT_APPLICABLE, NOT_RUN, Report, check_place, json_ready
from .verify_structure import CHECKS, OF_ANY_LENGTH, check_padding, check_state, crossed, steady_positions
from .verify_tokenizer import check_tokenizer


FORMAT = "tnt-verify-1"
MOST_TOKENS = 2048  # of a probe: what a default may cost
FAR = 512  # tokens: a reset further away is not worth the time by default
BEYOND = 96  # tokens of a default probe behind the last boundary
OPEN = "the memory is open, so how far the result is from its source is a measurement"


def verify_conversion(
    source: str | os.PathLike,
    output: str | os.PathLike,
    *,
    text: str | None = None,
    tokens: int | None = None,
    report: str | os.PathLike | None = None,
    dtype: str | None = None,
    seed: int = 0,
    progress: bool = True,
    revision: str | None = None,
) -> dict[str, Any]:
    """
    Compare a converted checkpoint with its source and check what every result promises.

    The models are loaded one after the other, from local files or the Hub's cache, without running any of their code.

    Args:
        source: folder or Hub id that was converted. output: folder of the result, trained or not.
        text: probe text, or the path of a text file; by default text that comes with Python. If the source has no
            tokenizer, the probe is random ids.
        tokens: length T of the probe; by default enough to cross the window, the first chunk of every memory and a
            reset, if one is near, as far as the models' positions and the time it takes allow.
        report: JSON file to write.
        dtype: compute in this dtype instead of the one the result was saved in.
        seed: seed for random ids and for the gates opened in the checks.
        progress: show the current step on standard error, if that is a terminal.
        revision: of a Hub id; by default the commit that was converted.

    Returns:
        The report, JSON-serialisable: `"passed"` (bool), `"verdict"`, `"checks"` (one per promise: name, promise,
        status, measured, reason), `"memory"` (closed, open, none or unknown), `"probe"`, `"accounting"` (bytes),
        `"ablations"`, `"environment"`; `"format"`, `"source"` and `"output"` identify it.

    Raises:
        ValueError, OSError: wrong input (no such folder, a source that cannot be converted or loaded, an output that
            is not a TNT model, impossible options). A damaged output raises nothing: its checks fail.
    """
    out = Path(output)
    _check_options(out, tokens, report, dtype)
    folder = locate(source, revision or converted_revision(out, str(source)))
    fields = read_json(folder / "config.json")
    source_config = read_source_config(fields)
    found: dict[str, Any] = {"format": FORMAT, "source": str(source), "output": str(output)}
    # Beside the name of the step its number: how many there will be depends on what the steps find.
    how = {"bar_format": "verify: {desc} (step {n}, {elapsed})", "leave": False, "disable": None if progress else True}
    with tqdm(**how) as bar:
        rows = Report(lambda step: (bar.update(), bar.set_description_str(step)))

        config = _read_config(out, rows)
        state = _check_files(folder, out, source_config, config, rows)
        found |= {"memory": state, "probe": {}, "accounting": {}, "ablations": {}}
        if config is not None:
            dtype = dtype or _dtype_of(config)
            limit = unchanged_positions(source_config, config)
            length = tokens or _default_length(config, tnt_config(source_config))
            ids, noise, label = probe_ids(folder, text, length, config.vocab_size, seed)
            length = ids.shape[1]
            found["probe"] = {"text": label, "tokens": length, "dtype": dtype, "seed": seed, "equal_positions": limit}
            found["probe"]["crossed"] = crossed(config, length)
            # Short inputs, all of whose tokens see in the result what they see in the source.
            n = min(length, 256) if limit is None else max(1, min(length, limit))
            cast = rounded_to(out)
            before, peak = with_peak(lambda: _observe_source(folder, dtype, cast, ids, noise, n, rows.say))
            found["probe"]["tolerance"] = before["tolerance"]
            found["accounting"] = {"source": {"peak_anonymous_bytes": peak} | before.pop("accounting")}
            after, peak = with_peak(
                lambda: _check_result(
                    out, config, source_config.model_type, dtype, state, ids, noise, n, limit, before, seed, rows
                )
            )
            found["accounting"]["result"] = {"peak_anonymous_bytes": peak} | after.pop("accounting", {})
            found["ablations"] = after.pop("ablations", {})
        found |= rows.summary(state)
    found["environment"] = {
        "tnt_hf": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    found = json_ready(found)
    if report is not None:
        write_json(Path(report), found)
    return found


def _check_options(out: Path, tokens: int | None, report: Any, dtype: str | None) -> None:
    if not out.is_dir():
        raise FileNotFoundError(f"output={str(out)!r}: there is no such folder")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < FEWEST):
        raise ValueError(f"tokens={tokens!r}: must be an integer of at least {FEWEST}")
    if dtype is not None and dtype not in BYTES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(BYTES)}")
    if report is not None:
        check_place("report", report, [out])


def _read_config(out: Path, rows: Report) -> TNTConfig | None:
    """The result's configuration, or `None` and a failed row."""
    kept = {}

    def read() -> tuple[bool, dict]:
        fields = read_json(out / "config.json")
        kept["type"] = fields.get("model_type")
        if kept["type"] == "tnt":
            kept["config"] = TNTConfig.from_dict(fields)
            if (stored := _dtype_of(kept["config"])) not in BYTES:
                del kept["config"]
                raise ValueError(f"dtype={stored!r}: must be one of {', '.join(BYTES)}")
        return True, {}

    rows.check("readable", "config.json holds a valid TNT configuration", read)
    if kept.get("type", "tnt") != "tnt":
        raise ValueError(
            f"output={str(out)!r}: has model_type={kept['type']!r}, not 'tnt' (source and output swapped?)"
        )
    return kept.get("config")


def _dtype_of(config: TNTConfig) -> str:
    return str(config.dtype or "float32").removeprefix("torch.")


def _check_files(
    folder: Path, out: Path, source_config: PreTrainedConfig, config: TNTConfig | None, rows: Report
) -> str:
    """The checks that need no model. Returns what the memory is: closed, open or none."""
    promise = "every file is as the conversion left it"
    if why := unlisted(out):
        rows.add("manifest", promise, NOT_APPLICABLE, reason=why)
    else:
        rows.check("manifest", promise, check_files, out)
    rows.check("finite", "no weight is infinite or NaN", check_finite, out)
    check_tokenizer(folder, out, rows)
    if config is None:
        return "unknown"
    if unlisted(out):  # a manifest has the SHA-256 of the code, which another version may have written
        promise = "the code that travels with it is the installed one"
        if auto_map := read_json(out / "config.json").get("auto_map"):  # a TNTConfig without one gets ours
            rows.check("code", promise, check_code, out, auto_map)
        else:
            rows.add("code", promise, NOT_APPLICABLE, reason="config.json has no auto_map: no code is run from there")
    state = "unknown"

    def read_gates() -> tuple[bool, dict]:
        nonlocal state
        state = memory_state(out, config)
        return True, {"memory": state}

    rows.check("gates", "the gates of every memory can be read", read_gates)
    unless = OPEN if state == "open" else ""
    promise = "the base computes with the source's fields"
    rows.check("configuration", promise, check_config, source_config, config, unless=unless)
    rows.check(
        "base weights", "every base tensor is the source's, bit by bit", check_base_weights, folder, out,
        source_config.model_type, config.tie_word_embeddings, unless=unless,
    )  # fmt: skip
    return state


def _default_length(config: TNTConfig, expected: TNTConfig) -> int:
    edges = [config.sliding_window]
    for spec in config.memory_specs if config.memory_layer_indices else []:
        edges += [spec.chunk_size, spec.reset_interval if (spec.reset_interval or 0) <= FAR else None]
    length = max((x for x in edges if x is not None), default=0) + BEYOND
    # The longer of both, so that a RoPE that scales from another length on is seen to.
    steady = max(min(c.max_position_embeddings, steady_positions(c) or MOST_TOKENS) for c in (config, expected))
    return max(FEWEST, min(length, MOST_TOKENS, steady))


@contextmanager
def _no_bars() -> Iterator[None]:
    """The steps are named by `progress`; the library's own bars would come between them."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _observe_source(
    folder: Path, dtype: str, cast: str | None, ids: Tensor, noise: Tensor, n: int, say: Callable
) -> dict[str, Any]:
    """What the result shall equal, computed in `dtype` with weights that were rounded to `cast` as the result's."""
    say("source: loading")
    try:
        with _no_bars():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, cast or dtype)).eval()
    except Exception as error:  # a source that does not load is wrong input, whatever the library raises for it
        raise ValueError(f"source={str(folder)!r} does not load: {type(error).__name__}: {error}") from error
    for parameter in model.parameters():  # and not buffers: those of RoPE are float32 in every model
        parameter.data = parameter.data.to(getattr(torch, dtype))
    found = observe(model, ids, noise, n, lambda step: say(f"source: {step}"))
    T = ids.shape[1]
    kv_bytes = sum(key_value_bytes(tnt_config(model.config), T, dtype))
    loss = next_token_loss(found["text"][None], ids)
    accounting = {"parameters": model.num_parameters(), "kv_bytes": {T: kv_bytes}}
    say("source: longer padded rows")
    shown = check_padding(model, ids, found["text"][None], 0, MOST_ROUNDING)[1]["worst_token"]
    found["tolerance"], found["attention"] = rounding(found, model.dtype, shown), model.config._attn_implementation
    found["addresses"], found["padded rows"] = addresses(model), shown
    return found | {"accounting": accounting | {"loss": loss, "perplexity": perplexity_of(loss)}}


def _check_result(
    out, config, source_type, dtype, state, ids, noise, n, limit, before, seed, rows: Report
) -> dict[str, Any]:
    """Every check that needs the loaded result, and its accounting and ablations."""
    loaded = {}

    def load() -> tuple[bool, dict]:
        with _no_bars():
            loaded["model"], info = TNTForCausalLM.from_pretrained(
                out, dtype=getattr(torch, dtype), attn_implementation=before["attention"], output_loading_info=True
            )
        move_to(loaded["model"].eval(), before["addresses"])
        problems = {name: sorted(map(str, info[name])) for name in info if info[name]}
        loaded["full"] = forward(loaded["model"], ids)
        return not problems, problems

    rows.check("loads", "loads with every tensor in its place and none besides", load)
    if "full" not in loaded:
        parity = [("parity", "equals the source"), ("silent", "a closed memory changes nothing")]
        for name, promise, *_ in [*parity, *CHECKS, ("state size", "as computed")]:
            rows.add(name, promise, NOT_RUN, reason="the result does not load")
        return {}
    model, full = loaded["model"], loaded["full"]
    unless = OPEN if state == "open" else ""
    # One product of fused weights rounds differently from several; the library's norms are float32 in a float64 model.
    exact = not FAMILIES[source_type].fused and dtype != "float64"
    compared = model, ids, noise, n, limit, exact, before, rows
    rows.check("parity", _parity_promise(limit, exact), _parity, *compared, unless=unless)
    promise = "switching a closed memory off changes no bit"
    if state == "closed":
        rows.check("silent", promise, _silent, model, ids, full)
    else:
        why = "the model has no memory" if state == "none" else OPEN
        rows.add("silent", promise, NOT_APPLICABLE, reason=why)
    steady = steady_positions(config)
    moves = "" if steady is None or ids.shape[1] <= steady else f"beyond {steady} tokens RoPE depends on the length"
    if before["padded rows"] > MOST_ROUNDING / 2:
        moves = f"padding alone moves the source's own logits by {before['padded rows']:.2g} std in {dtype}"
    for name, promise, function in CHECKS:
        why = moves if name in OF_ANY_LENGTH else ""
        rows.check(name, promise, _both_ways, function, model, ids, full, seed, before["tolerance"], unless=why)
    promised = memory_state_bytes(config, dtype)
    promise = "bytes of state per sequence are as computed, at any length"
    rows.check("state size", promise, check_state, model, ids, promised)
    memory = sum(p.numel() for name, p in model.named_parameters() if ".memory." in name)
    total = model.num_parameters()
    accounting = {"parameters": total, "base_parameters": total - memory, "memory_parameters": memory}
    accounting["memory_state_bytes"] = promised
    sizes = rows.measured("state size").get("at_tokens", {})
    accounting["kv_bytes"] = {n: x["kv_bytes"] for n, x in sizes.items()}
    loss = next_token_loss(full, ids)
    accounting |= {"loss": loss, "perplexity": perplexity_of(loss)}
    what = "what each branch adds to the probe text (table below)"
    rows.check("branches", what, _ablations, model, ids, full, before["text"], unless="a measurement")
    return {"accounting": accounting, "ablations": rows.measured("branches")}


def _parity_promise(limit: int | None, exact: bool) -> str:
    how = "bit by bit" if exact else "to rounding"
    if limit is None:
        return f"equals the source {how}: text, random ids, padded, cached"
    return f"equals the source {how} within the window of {limit}: text, padded, cached"


def _parity(model, ids: Tensor, noise: Tensor, n: int, limit: int | None, exact: bool, before: dict, rows: Report):
    after = observe(model, ids, noise, n, lambda step: rows.say(f"result: {step}"))
    found = {name: difference(after[name], before[name]) for name in after}
    promised = [name for name in found if limit is None or name not in ("text", "random")]
    bitwise = all(found[name].bitwise for name in promised)
    tolerance = max(before["tolerance"], ROUNDING[torch.float32])
    holds = all(
        found[name].finite and (found[name].bitwise if exact else found[name].within(tolerance)) for name in promised
    )
    measured = {"bitwise": bitwise, "max_abs": max(found[name].max_abs for name in promised)}
    if limit is not None:
        # A masked kernel may add up in another order than one that never sees what the mask hides.
        first = difference(after["text"][:limit], before["text"][:limit])
        holds = holds and first.within(tolerance)
        measured["first positions of a longer text"] = first.as_dict()
    measured |= {name: x.as_dict() for name, x in found.items()}
    return holds, measured


def _silent(model, ids: Tensor, full: Tensor):
    with without_memory(model):
        without = forward(model, ids)
    found = difference(full, without)
    return found.bitwise, found.as_dict()


def _both_ways(function: Callable, model, ids: Tensor, full: Tensor, seed: int, tolerance: float):
    """A check with the memory as it is and, where there is one, with its gates opened at random: one branch more, that
    rounds as well."""
    holds, measured = function(model, ids, full, seed, tolerance)
    measured = {"as it is": measured}
    if model.config.memory_layer_indices:
        with opened(model, seed):
            twice = min(MOST_ROUNDING, 2 * tolerance)
            also, measured["gates opened"] = function(model, ids, forward(model, ids), seed, twice)
        holds = holds and also
    return holds, measured


def _ablations(model, ids: Tensor, full: Tensor, source: Tensor) -> tuple[bool, dict[str, Any]]:
    """Loss, perplexity and distances of the text with all branches and with one switched off."""
    found = {}
    everything = {"all branches": None} | ablations(model)
    for name, off in everything.items():
        logits = full
        if off is not None:
            with off():
                logits = forward(model, ids)
        loss, to_source = next_token_loss(logits, ids), difference(logits[0], source)
        found[name] = {
            "loss": loss,
            "perplexity": perplexity_of(loss),
            "kl_from_source": to_source.kl,
            "top1": to_source.top1,
        }
        found[name]["kl_from_all_branches"] = difference(logits, full).kl
    return True, found
