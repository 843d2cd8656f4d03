"""C source: one program of `scan_tnt.scan`, chunk by chunk, for `native_tnt`.

Axis legend
    C tokens per chunk   R = C G its query rows   ldp C rounded up to whole vectors   K key width   V value width
    L layers of the memory network   p program (grid row and head)   n chunk of all programs', as in `plan_tnt`

Names are those of `scan_tnt`, scalars' those of `native_scalars_tnt`. Travels with every pushed checkpoint.
"""

SOURCE = r"""
/* ------------------------------------------------------------------------------------------------- the forward */

typedef struct {
    Inner inner;
    real *W[MAX_LAYERS], *S[MAX_LAYERS];
    real *z[MAX_LAYERS], *grad_act[MAX_LAYERS], *y[MAX_LAYERS], *x, *slope, *turned, *pairs, *p, *more, *scaled;
    Rows rows;
    real *q, *products, *o, *h, *inverse; /* [R, tokens], what the network sees of them, [R, V] */
} Forward;

static I room_forward(const Job *job, Forward *f, real *arena) {
    const Shape *s = job->s;
    real *begin = arena;
    I C = s->C, R = job->R, L = s->L;
    room_inner(job, &f->inner, &arena);
    room_rows(job, &f->rows, &arena);
    EACH(i, L) {
        I size = s->width[i] * s->width[i + 1];
        f->W[i] = take(&arena, size);
        f->S[i] = take(&arena, size);
        f->z[i] = take(&arena, C * s->width[i + 1]);
        f->y[i] = take(&arena, R * s->width[i + 1]);
        f->grad_act[i] = i ? take(&arena, C * s->width[i]) : 0;
    }
    f->q = take(&arena, R * s->tokens);
    f->products = take(&arena, s->quadratic ? R * s->width[0] : 0);
    f->o = take(&arena, R * s->width[L]);
    f->x = take(&arena, (R + C) * job->widest);
    f->slope = take(&arena, (R + C) * job->widest);
    f->turned = take(&arena, job->largest + job->widest * job->ldp);
    f->pairs = take(&arena, s->current ? R * job->ldp : 0);
    f->p = take(&arena, s->current ? R * job->ldp : 0);
    f->more = take(&arena, R * job->widest);
    f->scaled = take(&arena, C * job->widest);
    f->h = take(&arena, R * job->widest);
    f->inverse = take(&arena, R);
    return arena - begin;
}

/* q . k of the chunk, [R, ldp]; of their products it is the square */
static void token_scores(const Job *job, const real *q, const real *k, real *turned, real *p) {
    I C = job->s->C, D = job->s->tokens;
    transpose(C, D, k, turned, job->ldp);
    pair_scores(C, job->s->groups, D, q, turned, p, job->ldp);
}

/* y [R, d_out] = what x [R, d_in] reads of layer i */
static void read_layer(const Job *job, I p, I i, const real *x, Forward *f, real *const *W, real *const *S,
                       real *y) {
    const Shape *s = job->s;
    I C = s->C, R = job->R, m = s->width[i], k = s->width[i + 1], ldp = job->ldp;
    product(R, k, m, x, m, 1, W[i], k, y, k, 1, 0);
    if (!s->current) return;
    int keep = TENSOR(KEEP) != 0;
    const real *target = LAYER(TARGET_, i);
    if (keep && target) product(R, k, m, x, m, 1, target + p * m * k, k, f->more, k, 1, 0);
    if (keep) EACH(r, R) {
        real A = f->rows.A[r / s->groups];
        if (target) EACH(j, k) y[r * k + j] = f->more[r * k + j] + A * (y[r * k + j] - f->more[r * k + j]);
        else EACH(j, k) y[r * k + j] *= A;
    }
    if (S) {
        product(R, k, m, x, m, 1, S[i], k, f->more, k, 1, 0);
        EACH(r, R) {
            real D = f->rows.D[r / s->groups];
            EACH(j, k) y[r * k + j] += D * f->more[r * k + j];
        }
    }
    if (i || !s->quadratic) {
        transpose(C, m, f->inner.a[i], f->turned, ldp);
        pair_scores(C, s->groups, m, x, f->turned, f->p, ldp);
    } else
        token_scores(job, f->q, f->inner.k, f->turned, f->p);
    EACH(j, R * ldp) f->p[j] *= i || !s->quadratic ? f->pairs[j] : f->pairs[j] * f->p[j];
    pairs_times_writes(C, s->groups, k, f->p, ldp, f->inner.delta[i], y, -1, 1);
}

static void forward_program(const Job *job, I p, Forward *f) {
    const Shape *s = job->s;
    I C = s->C, G = s->groups, R = job->R, L = s->L, D = s->tokens, V = s->width[L];
    const I *counts = job->t[COUNTS], *starts = job->t[STARTS];
    const int8_t *full = job->t[FULL];
    int momentum = TENSOR(MU) != 0, taped = LAYER(Z_KEY_, 0) != 0;
    real *const *S = momentum ? f->S : 0;
    I chunks = 0;
    while (chunks < s->steps && counts[chunks] > p) chunks++;
    EACH(i, L) {
        I size = s->width[i] * s->width[i + 1];
        memcpy(f->W[i], LAYER(W_, i) + p * size, size * sizeof(real));
        if (momentum && LAYER(S_, i)) memcpy(f->S[i], LAYER(S_, i) + p * size, size * sizeof(real));
        else if (momentum) memset(f->S[i], 0, size * sizeof(real));
    }
    for (I j = 0; j < chunks; j++) {
        I n = starts[j] + p;
        real *start[MAX_LAYERS];
        EACH(i, L) {
            I size = s->width[i] * s->width[i + 1];
            start[i] = s->carried && j == 0 ? LAYER(XI_, i) + p * size : f->W[i];
            if (taped && j % s->stride == 0) {
                I at = (p * job->slots + j / s->stride) * size;
                memcpy(LAYER(KEPT_W_, i) + at, f->W[i], size * sizeof(real));
                if (momentum) memcpy(LAYER(KEPT_S_, i) + at, f->S[i], size * sizeof(real));
            }
        }
        const real *in = s->quadratic ? f->products : f->q;
        Inner *x = &f->inner;
        gather(job, n, G * D, TENSOR(QUERY), f->q);
        if (s->quadratic) ring_products(R, D, f->q, f->products);
        inner_tokens(job, p, n, 1, x);
        EACH(i, L) { /* the key's pass */
            I m = s->width[i], k = s->width[i + 1];
            real *z = taped && (i < L - 1 || TENSOR(GAIN)) ? LAYER(Z_KEY_, i) + n * C * k : f->z[i];
            product(C, k, m, x->a[i], m, 1, start[i], k, z, k, 1, 0);
            if (i < L - 1) {
                activate(s->gelu, C * k, z, x->own_a[i + 1], x->slope[i + 1], 0, 0);
                x->a[i + 1] = x->own_a[i + 1];
            }
        }
        top_gradient(job, p, taped && TENSOR(GAIN) ? LAYER(Z_KEY_, L - 1) + n * C * V : f->z[L - 1], 0, x);
        if (taped && !TENSOR(GAIN)) memcpy(LAYER(Z_KEY_, L - 1) + n * C * V, x->error, C * V * sizeof(real));
        for (I i = L - 1; i > 0; i--) {
            I m = s->width[i], k = s->width[i + 1];
            real *g = taped ? LAYER(GRAD_ACT_, i - 1) + n * C * m : f->grad_act[i];
            transpose(m, k, start[i], f->turned, m);
            product(C, m, k, x->delta[i], k, 1, f->turned, m, g, m, 1, 0);
            EACH(e, C * m) x->delta[i - 1][e] = g[e] * x->slope[i][e];
        }
        write_weights(job, n, x);
        if (s->current) read_weights(job, n, x, &f->rows, f->pairs);
        EACH(i, L) { /* the reads */
            I k = s->width[i + 1];
            real *out = i == L - 1 ? f->o : f->x;
            real *z = taped && LAYER(Z_READ_, i) ? LAYER(Z_READ_, i) + n * R * k : out;
            read_layer(job, p, i, in, f, s->current ? f->W : start, S, z);
            if (i < L - 1) {
                activate(s->gelu, R * k, z, f->y[i], f->slope, 0, 0);
                in = f->y[i];
            } else if (TENSOR(GAIN)) {
                const real *gain = TENSOR(GAIN) + p * V, *bias = TENSOR(BIAS) + p * V;
                standardise(R, V, job->eps, z, f->h, f->inverse);
                EACH(r, R) EACH(e, V) out[r * V + e] = bias[e] + gain[e] * f->h[r * V + e];
            }
        }
        if (s->residual) EACH(e, R * V) f->o[e] += f->q[e];
        scatter(job, n, G * V, f->o, TENSOR(O));
        if (TENSOR(LOSS)) EACH(t, C) TENSOR(LOSS)[n * C + t] = (real)0.5 * dot(V, x->error + t * V, x->error + t * V);
        int last = j == chunks - 1;
        if (last && !s->keep_state) break;
        if (last && !full[p])
            EACH(i, L) {
                I size = s->width[i] * s->width[i + 1];
                memcpy(LAYER(XI_END_, i) + p * size, start[i], size * sizeof(real));
            }
        write_chunk(job, p, x, f->W, S, f->W, f->S, f->scaled);
    }
    if (s->keep_state) EACH(i, L) {
        I size = s->width[i] * s->width[i + 1];
        memcpy(LAYER(W_END_, i) + p * size, f->W[i], size * sizeof(real));
        if (full[p]) memcpy(LAYER(XI_END_, i) + p * size, f->W[i], size * sizeof(real));
        if (momentum) memcpy(LAYER(S_END_, i) + p * size, f->S[i], size * sizeof(real));
    }
}
"""
