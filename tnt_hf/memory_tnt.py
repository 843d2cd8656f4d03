"""The memory of TNT / Titans / TTT: one recurrence, written twice and kept in agreement by tests.

Axis legend
    B batch   T tokens   H memory (key/value) heads   G query heads per memory head (Hq = H G)
    K key width   V value width   L layers of the memory network (L_M)   C tokens per chunk
    R grid rows (one shard of one document each)   N chunks of all rows

Per head, with row vectors and the memory network f(W, x) (z_1 = x W_1, a_1 = phi(z_1), ..., y = z_L, optional
LayerNorm, optional + x):

    g_t = d/dW 1/2 |f(W_xi, k_t) - v_t|^2                    at W_xi, where the chunk starts (TNT Eq. 3, 5, 6)
    S_t = mu_t S_{t-1} - theta_t g_t                         (Titans Eq. 14)
    W_t = (1 - alpha_t) W_{t-1} + alpha_t W_target + S_t     (Titans Eq. 13)
    o_t = f(W_t, q_t)  or  f(W_xi, q_t)                      read "current" (TNT Eq. 6-7) or "chunk_start" (Eq. 5)

`memory_naive` is exactly that, token by token (`step_tnt`, which also has the decode step). `memory_chunkwise` maps
tokens onto chunks of memory time (`grid_tnt`), runs the dual form (`scan_tnt`) and maps back. The gradient of the
memory's own loss is closed-form matrix algebra, so it learns in train(), eval(), no_grad() and inference_mode()
alike. Travels with every pushed checkpoint.
"""

import torch
from torch import Tensor

from .coefficients_tnt import chunk_coefficients
from .denormals_tnt import without_denormals
from .derivative_tnt import check_transforms
from .features_tnt import FEATURE_MAPS, Ring, feature_width, quadratic
from .grid_tnt import Layout, batch_layout, dense_grid
from .inputs_tnt import check_flag, check_inputs, check_number, check_positive
from .kernels_choice_tnt import choose, unsupported_projection, unsupported_scan
from .kernels_parts_tnt import INTERPRETED
from .native_build_tnt import runs_native
from .network_tnt import Net
from .operators_tnt import Like, as_operator
from .plan_tnt import Plan
from .precision_tnt import full_precision, wide
from .projection_tnt import project_queries
from .reverse_tnt import ChunkScan, layers
from .scan_tnt import offsets, scan
from .step_tnt import MemoryState, token


ACTIVATIONS = ("silu", "gelu")
READS = ("current", "chunk_start")
PROJECTIONS = ("none", "shard", "chunk")
DECAY_TARGETS = ("init", "zero")
IMPLEMENTATIONS = ("auto", "chunk", "naive", "native", "triton")


# -------------------------------------------------------------------------------------- the recurrence, token by token


def _fresh_state(init: list[Tensor], batch: int, momentum: bool, projection: bool, key_width: int) -> MemoryState:
    weights = [w.expand(batch, *w.shape) for w in init]
    H = init[0].shape[0]
    M = init[0].new_zeros(batch, H, key_width, key_width) if projection else None
    S = [torch.zeros_like(w) for w in weights] if momentum else None
    return MemoryState(weights, weights, S, M, torch.zeros(batch, dtype=torch.long, device=init[0].device))


def _run_tokens(q, k, v, lr, init, net, options, momentum, decay, mask, segment_ids, state):
    """The recurrence over T tokens; a change of `segment_ids` between valid tokens starts a new document."""
    B, T, Hq, K = q.shape
    H = k.shape[2]
    if mask is not None:  # what is not finite at an absent token would be so times 0 too
        tensors = (q, k, v, lr, momentum, decay)
        absent = [None if x is None else ~mask.view(B, T, *[1] * (x.dim() - 2)) for x in tensors]
        q, k, v, lr, momentum, decay = (None if x is None else x.masked_fill(y, 0) for x, y in zip(tensors, absent))
    if state is None or segment_ids is not None:
        fresh = _fresh_state(init, B, momentum is not None, options["query_projection"] != "none", K)
        state = fresh if state is None else state
    segment, outputs, losses = None, [], []
    for t in range(T):
        present = None if mask is None else mask[:, t]
        if segment_ids is not None:
            here = torch.ones(B, dtype=torch.bool, device=q.device) if present is None else present
            if segment is None:
                segment, seen = segment_ids[:, t], here
            else:
                changed = here & seen & (segment_ids[:, t] != segment)
                segment, seen = torch.where(here, segment_ids[:, t], segment), seen | here
                state = _where_state(changed, fresh, state)
        o, state, loss = token(
            state,
            init,
            net,
            options,
            q[:, t].reshape(B, H, Hq // H, K),
            k[:, t, :, None],
            v[:, t, :, None],
            lr[:, t],
            None if momentum is None else momentum[:, t],
            None if decay is None else decay[:, t],
            present,
        )
        outputs.append(o.reshape(B, Hq, -1))
        losses.append(loss)
    return torch.stack(outputs, 1), state, torch.stack(losses, 1)


def _where_state(rows: Tensor, new: MemoryState, old: MemoryState) -> MemoryState:
    def pick(n, o):
        return torch.where(rows.view(-1, *[1] * (o.dim() - 1)), n, o)

    def pick_all(n, o):
        return None if o is None else [pick(x, y) for x, y in zip(n, o)]

    return MemoryState(
        pick_all(new.weights, old.weights),
        pick_all(new.chunk_weights, old.chunk_weights),
        pick_all(new.momentum, old.momentum),
        None if old.projection is None else pick(new.projection, old.projection),
        pick(new.time, old.time),
    )


# ---------------------------------------------------------------------------------------------------------- public ops


def memory_naive(q: Tensor, k: Tensor, v: Tensor, lr: Tensor, weights: list[Tensor], **options):
    """`memory_chunkwise` token by token: the recurrence as the papers print it, O(weights) work and memory per token.
    Same arguments (except `implementation`), results and errors."""
    return memory_chunkwise(q, k, v, lr, weights, implementation="naive", **options)


def _results(q, k, v, lr, weights, *, momentum=None, **options):
    """What `memory_chunkwise` returns, for `torch.export`."""
    (B, T, H, _), Hq, K = v.shape, q.shape[2], feature_width(options.get("feature_map", "identity"), q.shape[3])
    dtype = wide(torch.promote_types(q.dtype, weights[0].dtype))
    W = [Like((B, *w.shape), dtype) for w in weights]
    M = Like((B, H, K, K), dtype) if options.get("query_projection", "none") != "none" else None
    state = MemoryState(W, W, None if momentum is None else W, M, Like((B,), torch.long))
    result = Like((B, T, Hq, v.shape[3]), q.dtype), state if options.get("output_final_state") else None
    return (*result, Like((B, T, H), dtype)) if options.get("output_surprise") else result


@as_operator("memory", _results)
def memory_chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    weights: list[Tensor],
    *,
    momentum: Tensor | None = None,
    decay: Tensor | None = None,
    chunk_size: int,
    reset_interval: int | None = None,
    read: str = "current",
    query_projection: str = "none",
    normalize_projection: bool = True,
    feature_map: str = "identity",
    activation: str = "silu",
    residual: bool = False,
    layernorm: tuple[Tensor, Tensor, float] | None = None,
    decay_target: str = "init",
    omega_window: int = 1,
    omega_gate: Tensor | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    initial_state: MemoryState | None = None,
    output_final_state: bool = False,
    implementation: str = "auto",
    grad_bound: float | None = None,
    output_surprise: bool = False,
):
    """One memory over a batch of sequences: S_t = mu_t S_{t-1} - theta_t g_t, W_t = (1 - alpha_t) W_{t-1} + alpha_t
    W_target + S_t (Titans Eq. 14, 13), with g_t at W_xi, where the chunk starts (TNT Eq. 3, 5, 6).

    Args:
        q: `[B, T, Hq, K]` queries of any float dtype; Hq is a multiple of H, and the query heads of one memory head
            are adjacent.
        k, v: `[B, T, H, K]` keys and `[B, T, H, V]` values.
        lr, momentum, decay: `[B, T, H]`, the final theta >= 0, mu in [0, 1), alpha in [0, 1); nothing is scaled.
        weights: `L` tensors `[H, d_in, d_out]`, W_init; d_in of the first is K (see `feature_map`), d_out of the
            last is V.
        chunk_size: tokens that share one W_xi for their gradients.
        reset_interval: tokens of memory time between resets (before a shard's first token writes), a multiple of
            `chunk_size`; `None` = never.
        read: "current" o_t = f(W_t, q_t), or "chunk_start" o_t = f(W_xi, q_t).
        query_projection: "none", "shard" (q_t M_t since the last reset) or "chunk" (since the chunk's first token),
            its result normalised with `normalize_projection`; see `project_queries`.
        feature_map: "identity", or "quadratic": the memory sees the products of q's and k's channels,
            K (K + 1) / 2 wide (`features_tnt.quadratic`). They are made chunk by chunk, unless projected.
        activation: "silu" or "gelu" between layers. residual: f(W, x) + x (needs K = V).
        layernorm: (gain `[H, V]`, bias `[H, V]`, eps) on the network's output, before the residual.
        decay_target: forget toward W_init ("init") or 0 ("zero").
        omega_window, omega_gate: only 1 and `None`; the Omega rule comes with a later version.
        mask: `[B, T]` bool, `False` = absent: the token neither writes nor counts, its output is 0.
        segment_ids: `[B, T]` int; a change between valid tokens starts a new document (fresh memory, time 0).
        initial_state: a state to continue from, each row at its own memory time, which may be inside a chunk.
        output_final_state: also return the state after the last token.
        implementation: "chunk" (torch operations), "naive" (the only one with second derivatives and `torch.func`),
            "native" (C, compiled once for the processor) or "triton" (both raise where they cannot run), or "auto":
            "triton" on CUDA and "native" on the CPU where they can run, else "chunk". Triton multiplies bfloat16 q, k
            and v as they are. In all of them, one token after a state is the recurrence itself.
        grad_bound: limit on |g_t| over all layers (then a chunk moves the weights by at most `grad_bound` x the sum
            of its theta).
        output_surprise: also return the inner loss 1/2 |f(W_xi, k_t) - v_t|^2 before the write, `[B, T, H]`, without
            gradient.

    Returns:
        `(o [B, T, Hq, V] in q's dtype, MemoryState or None)`, plus the surprise if asked for. Gradients flow through
        states. State and arithmetic are float32 at least, float64 for float64 inputs.

    Raises:
        ValueError: a shape, dtype, option or combination that does not fit, naming it and its value.
        RuntimeError: `create_graph=True` or a `torch.func` transform with any implementation but "naive".
    """
    for name, flag in (
        ("residual", residual),
        ("normalize_projection", normalize_projection),
        ("output_final_state", output_final_state),
        ("output_surprise", output_surprise),
    ):
        check_flag(name, flag)
    for name, value, allowed in (
        ("feature_map", feature_map, FEATURE_MAPS),
        ("read", read, READS),
        ("query_projection", query_projection, PROJECTIONS),
        ("activation", activation, ACTIVATIONS),
        ("decay_target", decay_target, DECAY_TARGETS),
        ("implementation", implementation, IMPLEMENTATIONS),
        ("omega_window", omega_window, (1,)),
        ("omega_gate", omega_gate, (None,)),
    ):
        if not any(value is x or (type(value) is type(x) and value == x) for x in allowed):
            got = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name} must be one of {allowed} in this version, got {got}")
    check_inputs(
        q, k, v, lr, weights, momentum, decay, layernorm, residual, mask, segment_ids, initial_state, feature_map
    )
    check_positive("chunk_size", chunk_size)
    check_positive("reset_interval", reset_interval, optional=True)
    if reset_interval is not None and reset_interval % chunk_size:
        raise ValueError(f"reset_interval must be a multiple of chunk_size={chunk_size} tokens, got {reset_interval}")
    if grad_bound is not None:
        check_number("grad_bound", grad_bound)
    if initial_state is not None:
        for name, stored, used in (
            ("momentum", initial_state.momentum is not None, momentum is not None),
            ("projection", initial_state.projection is not None, query_projection != "none"),
        ):
            if stored != used:
                raise ValueError(f"initial_state.{name} must be {'a tensor' if used else 'None'} for these options")

    dtype = wide(torch.promote_types(q.dtype, weights[0].dtype))
    operands = q.dtype if q.dtype == torch.bfloat16 else dtype
    groups = q.shape[2] // k.shape[2]
    asked, memory = implementation, (dtype, read, weights, operands, momentum is not None, groups)
    implementation = choose("implementation", asked, q.device, unsupported_scan, *memory)
    projection = "chunk"
    if implementation == "triton" and query_projection != "none":
        sizes = dtype, feature_width(feature_map, q.shape[3]), operands, groups
        projection = choose("implementation", asked, q.device, unsupported_projection, *sizes)
    net = Net(activation, residual, 0.0 if layernorm is None else float(layernorm[2]))
    options = {
        "chunk_size": chunk_size,
        "reset_interval": reset_interval,
        "read": read,
        "query_projection": query_projection,
        "normalize_projection": normalize_projection,
        "decay_target": decay_target,
        "grad_bound": grad_bound,
        "keep_state": output_final_state,
        "keep_loss": output_surprise,
        "layernorm": None if layernorm is None else [x.to(dtype)[:, None] for x in layernorm[:2]],
        "triton": implementation == "triton",
        "native": asked if implementation == "chunk" and asked in ("auto", "native") else None,
        "projection": projection,
    }
    tokens = operands if implementation == "triton" and not INTERPRETED else dtype  # it is wrong for bfloat16

    def cast(x):
        return None if x is None else x.to(dtype)

    state = initial_state and MemoryState(
        [cast(x) for x in initial_state.weights],
        [cast(x) for x in (initial_state.chunk_weights if chunk_size > 1 else initial_state.weights)],
        initial_state.momentum and [cast(x) for x in initial_state.momentum],
        cast(initial_state.projection),
        initial_state.time,
    )
    by_token = implementation == "naive" or (q.shape[1] == 1 and state is not None and segment_ids is None)
    options["quadratic"] = feature_map == "quadratic" and not options["triton"] and query_projection == "none"
    with full_precision(q.device):
        run, given = _run_tokens if by_token else _run_chunks, q.dtype
        if feature_map == "quadratic" and (by_token or not options["quadratic"]):
            q, k = quadratic(cast(q)), quadratic(cast(k))
        o, state, loss = run(
            *(x.to(dtype if by_token else tokens) for x in (q, k, v)), cast(lr), [cast(w) for w in weights], net,
            options, cast(momentum), cast(decay), mask, segment_ids, state
        )  # fmt: skip
    result = (o.to(given), state if output_final_state else None)
    return (*result, loss.detach()) if output_surprise else result


@torch.compiler.disable
@without_denormals
def _run_chunks(q, k, v, lr, init, net, options, momentum, decay, mask, segment_ids, state):
    check_transforms()
    C, interval, kind = options["chunk_size"], options["reset_interval"], options["query_projection"]
    M = state and state.projection
    if kind != "none":
        q, M = project_queries(
            q, k, reset_interval=C if kind == "chunk" else interval, normalize=options["normalize_projection"],
            mask=mask, segment_ids=segment_ids, initial_state=state and (M, state.time), output_final_state=True,
            implementation=options["projection"],
        )  # fmt: skip
    B, T, Hq, _ = q.shape
    H = k.shape[2]
    if mask is None and segment_ids is None and state is None:
        layout = Layout(H, [dense_grid(B, T, C, interval, q.device)])
    else:
        alike = segment_ids is not None and state is None and not options["keep_state"]
        layout = batch_layout(q, H, mask, segment_ids, state and state.time, C, interval, alike=alike)
    if options["native"]:
        read = (q, k, v, lr, momentum, decay, *(options["layernorm"] or ()))
        options["native"] = runs_native("implementation", options["native"], init, read)
    dense, none = options["triton"] and layout.there is None, [None] * len(layout.grids)
    whole, apart = dense or options["native"] and len(layout.grids) == 1, options["triton"] or options["native"]
    if whole:
        rows, keys, values = [q], [k], [v]
    else:
        q, values = q.unflatten(2, (H, -1)), layout.programs(v)
        rows = layout.rows(q) if apart else layout.rows(q, k[:, :, :, None])
        keys = layout.programs(k) if apart else none
    padded = momentum is not None and any(grid.padded for grid in layout.grids)
    scalars = (lr, momentum, decay, torch.ones_like(lr) if padded else None)
    scalars = zip(*(none if x is None else layout.programs(x) for x in scalars))
    parts = zip(layout.grids, rows, keys, values, scalars)
    results = [_run_grid(*part, whole, H, Hq // H, init, net, options, state, M) for part in parts]
    o, losses, states = zip(*results)
    loss = layout.tokens(losses) if options["keep_loss"] else None
    if whole:
        return o[0], states[0], loss
    o = [y.unflatten(1, (grid.size[2], -1)) for y, grid in zip(o, layout.grids)]
    return layout.tokens(o).flatten(2, 3), states[0], loss


def _run_grid(grid, rows, k, v, scalars, whole, H, G, init, net, options, state, M):
    """The scan over one grid: outputs `[N H, C G, V]`, losses, and the state behind each batch row's last token.
    rows are q, and in torch k as well, which others take apart. whole: q, k, v and the outputs are as the batch has
    them. M is the projection's state there."""
    C, (theta, mu, decay, present) = options["chunk_size"], scalars
    given = state or MemoryState([None] * len(init), [None] * len(init), None, None, None)
    full = grid.full if isinstance(grid.full, bool) else grid.full.repeat_interleave(H)
    counts, starts = ([n * H for n in x] for x in (grid.counts, grid.starts))
    plan = Plan(
        net, counts, starts, G, options["read"] == "current", state is not None and C > 1, full,
        options["keep_state"], options["keep_loss"], options["grad_bound"],
        grid.dense(H) if whole and options["triton"] else None, options["quadratic"], torch.is_grad_enabled(),
        grid.places() if whole and options["native"] else None,
    )  # fmt: skip
    mu = mu if present is None else torch.where(present > 0, mu, 1.0)
    keep = None if decay is None else 1 - decay
    W = [grid.rowwise(w, x) for w, x in zip(init, given.weights)]
    xi = [grid.rowwise(w, x) for w, x in zip(init, given.chunk_weights)] if plan.carried else None
    S = given.momentum and [grid.rowwise(torch.zeros_like(w), x) for w, x in zip(init, given.momentum)]
    target = None
    if keep is not None and options["decay_target"] == "init":
        target = [grid.rowwise(w, None) for w in init]
    if plan.quadratic:
        ring = Ring.of(rows.shape[-1], W[0])
        for x in (W, xi, S, target):
            if x is not None:
                x[0] = ring.enter(x[0])
    ln = options["layernorm"] and [grid.rowwise(x, None) for x in options["layernorm"]]
    if options["triton"]:
        from .kernels_tnt import triton_scan

        o, loss, *final = triton_scan(plan, rows, k, v, (theta, mu, keep, present), ln, target, xi, W, S)
    else:
        if options["native"]:
            from .native_tnt import native_scan

            o, loss, *final = native_scan(plan, rows, k, v, (theta, mu, keep, present), ln, target, xi, W, S)
        else:
            coef = chunk_coefficients(theta, mu, keep, present, plan.current)
            o, loss, *final = _scan_torch(plan, rows, v, coef, ln, target, xi, W, S)
        if plan.quadratic:
            final = [y and [ring.leave(y[0]), *y[1:]] for y in final]
    if not plan.keep_state:
        return o, loss, None
    W, xi, S = (y and [z.unflatten(0, (-1, H))[grid.last_row] for z in y] for y in final)
    return o, loss, MemoryState(W, W if C == 1 else xi, S, M, grid.time.clone())  # other calls may use the grid


def _scan_torch(plan, qk, v, coef, ln, target, xi, W, S):
    none = [None] * len(W)
    flat = [*W, *(xi or none), *(S or none), *(target or none)]
    needs_grad = torch.is_grad_enabled() and any(
        isinstance(y, Tensor) and y.requires_grad for y in (qk, v, *coef, *(ln or ()), *flat)
    )
    if not needs_grad:
        return scan(plan, qk, offsets(plan, qk, v, ln), coef, ln, target, xi, W, S)
    o, loss, *final = ChunkScan.apply(plan, len(W), qk, v, *coef, *(ln or (None, None)), *flat)
    return o, loss, *layers(final, len(W), 3)
