"""C source: one program of `scan_tnt.scan`, chunk by chunk, for `native_tnt`.

Axis legend
    C tokens per chunk   R = C G its query rows   ldp C rounded up to whole vectors   K key width   V value width
    L layers of the memory network   p program (grid row and head)   n chunk of all programs', as in `plan_tnt`

Names are those of `scan_tnt`; PAIRS, KEEP, CARRY, S_WRITES and S_CARRY are c, A, D, s_end and m_end of
`coefficients_tnt`. Travels with every pushed checkpoint.
"""

SOURCE = r"""
typedef struct {
    I programs, steps, C, groups, L, threads, gelu, residual, current, carried, keep_state, stride, bounded;
    I quadratic, tokens; /* whether the network sees products of q and k, and the width of these */
    I heads, absent;     /* with SLOTS: memory heads, and what stands there where there is no token */
    I width[];
} Shape;

typedef struct {
    const Shape *s;
    void *const *t;
    real eps, bound;
    I R, ldp, slots; /* query rows of a chunk; row length of [R, C] matrices; kept states of a program */
    I widest, largest;
} Job;

#define TENSOR(kind) ((real *)job->t[kind])
#define LAYER(kind, i) ((real *)job->t[FIXED + (kind) * s->L + (i)])

/* ---------------------------------------------------------------------------------------------- a chunk's tokens */

/* Which row of k and v, and which group of rows of q, token t of chunk n has: those of all chunks one after the other,
   or with SLOTS, [N / heads, C], rows of [tokens, heads]; -1 where there is no token */
inline_ I row_of(const Job *job, I n, I t) {
    const Shape *s = job->s;
    const I *slots = job->t[SLOTS];
    if (!slots) return n * s->C + t;
    I token = slots[n / s->heads * s->C + t];
    return token == s->absent ? -1 : token * s->heads + n % s->heads;
}

/* y [C, size] = the rows of x that belong to chunk n, 0 where there is no token */
static void gather(const Job *job, I n, I size, const real *x, real *y) {
    EACH(t, job->s->C) {
        I row = row_of(job, n, t);
        if (row < 0) memset(y + t * size, 0, size * sizeof(real));
        else memcpy(y + t * size, x + row * size, size * sizeof(real));
    }
}

/* And back, to the tokens that there are */
static void scatter(const Job *job, I n, I size, const real *y, real *x) {
    EACH(t, job->s->C) {
        I row = row_of(job, n, t);
        if (row >= 0) memcpy(x + row * size, y + t * size, size * sizeof(real));
    }
}

/* ------------------------------------------------------------------------------------------------------- one chunk */

/* What the inner gradient of one chunk is made of. */
typedef struct {
    const real *a[MAX_LAYERS]; /* [C, d_in], of the tokens or in own_a */
    real *own_a[MAX_LAYERS], *delta[MAX_LAYERS], *slope[MAX_LAYERS], *bend[MAX_LAYERS];
    real *k, *offset;                  /* [C, tokens]; [C, V], all of the error f(W, k) - v but the weights' part */
    real *error, *h, *inverse, *u;     /* [C, V], [C] */
    real *shrink, *writes, *s_writes;  /* [C]: of g_i, how much is kept, goes to W_C and goes to S_C */
    real *size, *size_a, *size_delta;  /* of |g_i| / bound; [C], [L, C] */
} Inner;

inline_ real *take(real **arena, I n) {
    real *here = *arena;
    *arena += (n + 15) / 16 * 16;
    return here;
}

static void room_inner(const Job *job, Inner *x, real **arena) {
    const Shape *s = job->s;
    I C = s->C, L = s->L, V = s->width[L];
    EACH(i, L) {
        x->own_a[i] = i || s->quadratic ? take(arena, C * s->width[i]) : 0;
        x->slope[i] = i ? take(arena, C * s->width[i]) : 0;
        x->bend[i] = i ? take(arena, C * s->width[i]) : 0;
        x->delta[i] = take(arena, C * s->width[i + 1]);
    }
    x->k = take(arena, C * s->tokens);
    x->offset = take(arena, C * V);
    x->error = take(arena, C * V);
    x->h = take(arena, C * V);
    x->u = take(arena, C * V);
    x->inverse = take(arena, C);
    x->shrink = take(arena, C);
    x->writes = take(arena, C);
    x->s_writes = take(arena, C);
    x->size = take(arena, C);
    x->size_a = take(arena, C * L);
    x->size_delta = take(arena, C * L);
}

/* What the gradient is made of besides the weights: the chunk's keys, as the network sees them, and, if `values`, the
   offset */
static void inner_tokens(const Job *job, I p, I n, int values, Inner *x) {
    const Shape *s = job->s;
    I C = s->C, V = s->width[s->L];
    gather(job, n, s->tokens, TENSOR(KEY), x->k);
    x->a[0] = s->quadratic ? x->own_a[0] : x->k;
    if (s->quadratic) ring_products(C, s->tokens, x->k, x->own_a[0]);
    if (!values) return;
    const real *bias = TENSOR(BIAS);
    real *offset = x->offset;
    gather(job, n, V, TENSOR(VALUE), offset);
    if (s->residual) EACH(e, C * V) offset[e] = x->k[e] - offset[e];
    else EACH(e, C * V) offset[e] = -offset[e];
    if (bias) EACH(t, C) EACH(e, V) offset[t * V + e] += bias[p * V + e];
}

/* From y (with a LayerNorm) or the error (without) of the top layer: error, delta and what their derivatives need. */
static void top_gradient(const Job *job, I p, const real *top, int is_error, Inner *x) {
    const Shape *s = job->s;
    I C = s->C, V = s->width[s->L];
    const real *offset = x->offset, *gain = TENSOR(GAIN);
    real *delta = x->delta[s->L - 1];
    if (!gain) {
        EACH(i, C * V) delta[i] = is_error ? top[i] : top[i] + offset[i];
        memcpy(x->error, delta, C * V * sizeof(real));
        return;
    }
    gain += p * V;
    standardise(C, V, job->eps, top, x->h, x->inverse);
    EACH(t, C) EACH(i, V) {
        I at = t * V + i;
        x->error[at] = offset[at] + gain[i] * x->h[at];
        x->u[at] = gain[i] * x->error[at];
    }
    through_standardise(C, V, x->u, x->h, x->inverse, delta);
}

/* |g| / bound of one token, 1 where the bound holds, from |a| and |delta| of each of L layers, C numbers apart: no
   square of theirs leaves the range */
static real excess(I L, I C, const real *of_a, const real *of_delta, real bound) {
    real most = 0, sum = 0;
    EACH(i, L) most = of_a[i * C] * of_delta[i * C] > most ? of_a[i * C] * of_delta[i * C] : most;
    EACH(i, L) {
        real part = most > 0 ? of_a[i * C] * of_delta[i * C] / most : 0;
        sum += part * part;
    }
    real size = most * (real)sqrt(sum) / bound;
    return size < 1 ? 1 : size;
}

/* How much of each g_i is written, after a gradient bound. */
static void write_weights(const Job *job, I n, Inner *x) {
    const Shape *s = job->s;
    I C = s->C, L = s->L, rows = s->current ? C : 1;
    const real *theta = TENSOR(THETA) + n * C, *pairs = TENSOR(PAIRS), *of_S = TENSOR(S_WRITES);
    if (s->bounded) {
        EACH(t, C) {
            EACH(i, L) {
                I m = s->width[i], k = s->width[i + 1];
                const real *a = x->a[i] + t * m, *d = x->delta[i] + t * k;
                x->size_a[i * C + t] = (real)sqrt(dot(m, a, a));
                x->size_delta[i * C + t] = (real)sqrt(dot(k, d, d));
            }
            x->size[t] = excess(L, C, x->size_a + t, x->size_delta + t, job->bound);
            x->shrink[t] = 1 / x->size[t];
        }
    } else
        EACH(t, C) x->shrink[t] = 1;
    const real *last = pairs ? pairs + (n * rows + rows - 1) * C : theta;
    EACH(t, C) {
        x->writes[t] = last[t] * x->shrink[t];
        if (of_S) x->s_writes[t] = of_S[n * C + t] * x->shrink[t];
    }
}

/* c_{t,i} of a chunk, [R, ldp], zero behind the diagonal */
static void read_weights(const Job *job, I n, const Inner *x, real *pairs) {
    const Shape *s = job->s;
    I C = s->C;
    const real *theta = TENSOR(THETA) + n * C, *all = TENSOR(PAIRS);
    EACH(r, job->R) {
        I t = r / s->groups;
        const real *row = all ? all + (n * C + t) * C : theta;
        EACH(i, job->ldp) pairs[r * job->ldp + i] = i <= t ? row[i] * x->shrink[i] : 0;
    }
}

/* W_C = keep W + (1 - keep) W_target + D S - sum_i writes_i a_i^T delta_i, and S_C; `from` may be `to` */
static void write_chunk(const Job *job, I p, I n, const Inner *x, real *const *W, real *const *S, real *const *to_W,
                        real *const *to_S, real *scaled) {
    const Shape *s = job->s;
    I C = s->C, rows = s->current ? C : 1, last = n * rows + rows - 1;
    const real *keep = TENSOR(KEEP), *carry = TENSOR(CARRY), *of_S = TENSOR(S_CARRY);
    EACH(i, s->L) {
        I m = s->width[i], k = s->width[i + 1], size = m * k;
        const real *w = W[i], *target = LAYER(TARGET_, i), *old = S ? S[i] : 0;
        real *out = to_W[i], A = keep ? keep[last] : 1, D = old ? carry[last] : 0;
        if (keep && target) {
            target += p * size;
            EACH(j, size) out[j] = target[j] + A * (w[j] - target[j]);
            w = out;
        }
        if (old) {
            real by = w == out && keep && target ? 1 : A;
            EACH(j, size) out[j] = by * w[j] + D * old[j];
        } else if (!target && (keep || out != w))
            EACH(j, size) out[j] = A * w[j];
        EACH(t, C) EACH(j, m) scaled[t * m + j] = x->writes[t] * x->a[i][t * m + j];
        product(m, k, C, scaled, 1, m, x->delta[i], k, out, k, -1, 1);
        if (!S) continue;
        real M = of_S[n], *out_S = to_S[i];
        EACH(j, size) out_S[j] = M * old[j];
        EACH(t, C) EACH(j, m) scaled[t * m + j] = x->s_writes[t] * x->a[i][t * m + j];
        product(m, k, C, scaled, 1, m, x->delta[i], k, out_S, k, -1, 1);
    }
}


/* ------------------------------------------------------------------------------------------------- the forward */

typedef struct {
    Inner inner;
    real *W[MAX_LAYERS], *S[MAX_LAYERS];
    real *z[MAX_LAYERS], *grad_act[MAX_LAYERS], *y[MAX_LAYERS], *x, *slope, *turned, *pairs, *p, *more, *scaled;
    real *q, *products, *o, *h, *inverse; /* [R, tokens], what the network sees of them, [R, V] */
} Forward;

static I room_forward(const Job *job, Forward *f, real *arena) {
    const Shape *s = job->s;
    real *begin = arena;
    I C = s->C, R = job->R, L = s->L;
    room_inner(job, &f->inner, &arena);
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
static void read_layer(const Job *job, I p, I n, I i, const real *x, Forward *f, real *const *W, real *const *S,
                       real *y) {
    const Shape *s = job->s;
    I C = s->C, R = job->R, m = s->width[i], k = s->width[i + 1], ldp = job->ldp;
    product(R, k, m, x, m, 1, W[i], k, y, k, 1, 0);
    if (!s->current) return;
    const real *keep = TENSOR(KEEP), *carry = TENSOR(CARRY), *target = LAYER(TARGET_, i);
    if (keep && target) product(R, k, m, x, m, 1, target + p * m * k, k, f->more, k, 1, 0);
    if (keep) EACH(r, R) {
        real A = keep[n * C + r / s->groups];
        if (target) EACH(j, k) y[r * k + j] = f->more[r * k + j] + A * (y[r * k + j] - f->more[r * k + j]);
        else EACH(j, k) y[r * k + j] *= A;
    }
    if (S) {
        product(R, k, m, x, m, 1, S[i], k, f->more, k, 1, 0);
        EACH(r, R) {
            real D = carry[n * C + r / s->groups];
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
    int momentum = TENSOR(S_CARRY) != 0, taped = LAYER(Z_KEY_, 0) != 0;
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
        if (s->current) read_weights(job, n, x, f->pairs);
        EACH(i, L) { /* the reads */
            I k = s->width[i + 1];
            real *out = i == L - 1 ? f->o : f->x;
            real *z = taped && LAYER(Z_READ_, i) ? LAYER(Z_READ_, i) + n * R * k : out;
            read_layer(job, p, n, i, in, f, s->current ? f->W : start, S, z);
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
        write_chunk(job, p, n, x, f->W, S, f->W, f->S, f->scaled);
    }
    if (s->keep_state) EACH(i, L) {
        I size = s->width[i] * s->width[i + 1];
        memcpy(LAYER(W_END_, i) + p * size, f->W[i], size * sizeof(real));
        if (full[p]) memcpy(LAYER(XI_END_, i) + p * size, f->W[i], size * sizeof(real));
        if (momentum) memcpy(LAYER(S_END_, i) + p * size, f->S[i], size * sizeof(real));
    }
}
"""
