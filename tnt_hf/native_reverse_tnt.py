"""C source: one chunk of the outer backward of `reverse_tnt`, for `native_tnt`.

Axis legend
    C tokens per chunk   R = C G its query rows   ldp C rounded up to whole vectors   K key width   V value width
    L layers of the memory network   p program (grid row and head)   n chunk of all programs', as in `plan_tnt`

Names are those of `block_tnt`. Travels with every pushed checkpoint.
"""

SOURCE = r"""
typedef struct {
    Inner *inner;                          /* of each chunk of a group */
    real *(*W)[MAX_LAYERS], *(*S)[MAX_LAYERS]; /* before each of them */
    real *d_a[MAX_LAYERS], *d_delta[MAX_LAYERS], *left[MAX_LAYERS], *right[MAX_LAYERS], *read_slope[MAX_LAYERS];
    real *turned_W[MAX_LAYERS], *turned_target[MAX_LAYERS], *turned;
    real *pairs, *p, *g, *d_pairs, *d_y, *r, *more, *scaled, *h, *inverse;
    real *q, *d_o, *d_q, *d_k, *d_error;
    real *d_tokens, *dots; /* of q and k, past their products */
    Rows rows;
    real *d_writes, *d_s_writes, *d_A, *d_D, *d_c, *d_N, d_ends[3];
} Backward;

static I room_backward(const Job *job, Backward *b, real *arena) {
    const Shape *s = job->s;
    real *begin = arena;
    I C = s->C, R = job->R, L = s->L, stride = s->stride;
    b->inner = (Inner *)take(&arena, (stride * sizeof(Inner) + sizeof(real) - 1) / sizeof(real));
    b->W = (void *)take(&arena, (stride * sizeof(*b->W) + sizeof(real) - 1) / sizeof(real));
    b->S = (void *)take(&arena, (stride * sizeof(*b->S) + sizeof(real) - 1) / sizeof(real));
    int real_room = begin != 0; /* the first call only counts */
    EACH(q, stride) {
        Inner spare, *x = real_room ? &b->inner[q] : &spare;
        room_inner(job, x, &arena);
        EACH(i, L) {
            I size = s->width[i] * s->width[i + 1];
            real *w = q ? take(&arena, size) : 0, *m = q && TENSOR(MU) ? take(&arena, size) : 0;
            if (real_room) b->W[q][i] = w, b->S[q][i] = m;
        }
    }
    EACH(i, L) {
        I m = s->width[i], k = s->width[i + 1];
        b->d_a[i] = take(&arena, C * m);
        b->d_delta[i] = take(&arena, C * k);
        b->left[i] = take(&arena, (R + 2 * C) * m);
        b->right[i] = take(&arena, (R + 2 * C) * k);
        b->read_slope[i] = take(&arena, R * m);
        b->turned_W[i] = take(&arena, m * k);
        b->turned_target[i] = take(&arena, LAYER(TARGET_, i) ? m * k : 0);
    }
    b->turned = take(&arena, job->largest + job->widest * job->ldp);
    I pairs = s->current ? R * job->ldp : 0;
    b->pairs = take(&arena, pairs);
    b->p = take(&arena, pairs);
    b->g = take(&arena, pairs);
    b->d_pairs = take(&arena, pairs);
    b->d_y = take(&arena, R * job->widest);
    b->r = take(&arena, R * job->widest);
    b->more = take(&arena, (R + C) * job->widest);
    b->scaled = take(&arena, (R + C) * job->widest);
    b->h = take(&arena, (R + C) * job->widest);
    b->inverse = take(&arena, R + C);
    b->q = take(&arena, s->quadratic ? R * s->tokens : 0);
    b->d_o = take(&arena, R * s->width[L]);
    b->d_q = take(&arena, R * s->tokens);
    b->d_k = take(&arena, C * s->tokens);
    b->d_error = take(&arena, C * s->width[L]);
    b->d_tokens = take(&arena, s->quadratic ? (R + C) * s->tokens : 0);
    b->dots = take(&arena, s->quadratic ? pairs : 0);
    b->d_writes = take(&arena, C);
    b->d_s_writes = take(&arena, C);
    room_rows(job, &b->rows, &arena);
    b->d_A = take(&arena, C);
    b->d_D = take(&arena, C);
    b->d_c = take(&arena, s->current && mixes(job) ? C * C : 0);
    b->d_N = take(&arena, C);
    return arena - begin;
}

/* The chunk's inner gradient again, from the tape: elementwise work only. */
static void rebuild(const Job *job, I p, I n, Inner *x) {
    const Shape *s = job->s;
    I C = s->C, L = s->L, V = s->width[L];
    inner_tokens(job, p, n, TENSOR(GAIN) != 0, x);
    top_gradient(job, p, LAYER(Z_KEY_, L - 1) + n * C * V, 1, x);
    for (I i = L - 1; i > 0; i--) {
        I m = s->width[i];
        const real *g = LAYER(GRAD_ACT_, i - 1) + n * C * m;
        activate(s->gelu, C * m, LAYER(Z_KEY_, i - 1) + n * C * m, x->own_a[i], x->slope[i], g, x->bend[i]);
        x->a[i] = x->own_a[i];
        EACH(e, C * m) x->delta[i - 1][e] = g[e] * x->slope[i][e];
    }
    write_weights(job, n, x);
}

/* y -= x scale_t per row of n */
inline_ void subtract_scaled(I rows, I n, const real *scale, const real *x, real *y) {
    EACH(t, rows) EACH(i, n) y[t * n + i] -= scale[t] * x[t * n + i];
}

/* Through -sum_i weight_i a_i^T delta_i of layer i, in a state whose gradient is d */
static void through_writes(const Job *job, I i, const real *d, const Inner *x, const real *weight, real *d_weight,
                           Backward *b) {
    const Shape *s = job->s;
    I C = s->C, m = s->width[i], k = s->width[i + 1];
    product(C, k, m, x->a[i], m, 1, d, k, b->more, k, 1, 0);
    EACH(t, C) d_weight[t] -= dot(k, b->more + t * k, x->delta[i] + t * k);
    subtract_scaled(C, k, weight, b->more, b->d_delta[i]);
    transpose(m, k, d, b->turned, m);
    product(C, m, k, x->delta[i], k, 1, b->turned, m, b->more, m, 1, 0);
    subtract_scaled(C, m, weight, b->more, b->d_a[i]);
}

/* The state behind the chunk, whose gradient is d_W, d_S: what it is made of, but for the state before it */
static void through_end(const Job *job, I p, const Inner *x, real *const *W, real *const *S, real *const *d_W,
                        real *const *d_S, Backward *b) {
    const Shape *s = job->s;
    EACH(i, s->L) {
        I size = s->width[i] * s->width[i + 1], n;
        const real *d = d_W[i], *w = W[i], *target = LAYER(TARGET_, i);
        through_writes(job, i, d, x, x->writes, b->d_writes, b);
        if (S) through_writes(job, i, d_S[i], x, x->s_writes, b->d_s_writes, b);
        for (I e = 0; e < size; e += n) { /* so many that they are near when they are read again */
            n = size - e < 512 ? size - e : 512;
            if (target) b->d_ends[0] += dot_difference(n, d + e, w + e, target + p * size + e);
            else if (TENSOR(KEEP)) b->d_ends[0] += dot(n, d + e, w + e);
            if (!S) continue;
            b->d_ends[1] += dot(n, d + e, S[i] + e);
            b->d_ends[2] += dot(n, d_S[i] + e, S[i] + e);
        }
    }
}

/* d of q or k (`rows` tokens x) from the gradient of what the network sees of them; so_far: what went past it */
static void token_gradient(const Job *job, I rows, const real *grad, const real *x, const real *so_far, real *d) {
    const Shape *s = job->s;
    I size = rows * s->tokens * (I)sizeof(real);
    if (!s->quadratic) memcpy(d, grad, size);
    else {
        if (s->current) memcpy(d, so_far, size);
        else memset(d, 0, size);
        through_ring_products(rows, s->tokens, grad, x, d);
    }
}

/* Through the reads of weights that are `turned_W`: leaves x and (scaled) d_y in left and right, and d_q. d_W: of the
   state behind the chunk, and d_S, which becomes that of the momentum before it */
static void through_reads(const Job *job, I p, I n, const Inner *x, real *const *S, real *const *d_W, real *const *d_S,
                          Backward *b) {
    const Shape *s = job->s;
    I C = s->C, G = s->groups, R = job->R, L = s->L, D = s->tokens, V = s->width[L], ldp = job->ldp;
    I mixed = s->current ? R : 0; /* reads that see the target and the momentum */
    const real *keep = s->current && TENSOR(KEEP) ? b->rows.A : 0, *carry = b->rows.D, *d_o = b->d_o;
    real *q = s->quadratic ? b->q : b->left[0];
    gather(job, n, G * V, TENSOR(D_O), b->d_o);
    gather(job, n, G * D, TENSOR(QUERY), q);
    if (s->quadratic) ring_products(R, D, q, b->left[0]);
    for (I i = 1; i < L; i++) {
        I m = s->width[i];
        activate(s->gelu, R * m, LAYER(Z_READ_, i - 1) + n * R * m, b->left[i], b->read_slope[i], 0, 0);
    }
    if (TENSOR(GAIN)) {
        const real *gain = TENSOR(GAIN) + p * V;
        real *d_gain = TENSOR(D_GAIN) + p * V, *d_bias = TENSOR(D_BIAS) + p * V;
        standardise(R, V, job->eps, LAYER(Z_READ_, L - 1) + n * R * V, b->h, b->inverse);
        EACH(r, R) EACH(e, V) {
            I at = r * V + e;
            d_gain[e] += d_o[at] * b->h[at];
            d_bias[e] += d_o[at];
            b->d_y[at] = gain[e] * d_o[at];
        }
        through_standardise(R, V, b->d_y, b->h, b->inverse, b->d_y);
    } else
        memcpy(b->d_y, d_o, R * V * sizeof(real));
    for (I i = L - 1; i >= 0; i--) {
        I m = s->width[i], k = s->width[i + 1], size = m * k;
        const real *in = b->left[i], *target = LAYER(TARGET_, i);
        product(R, m, k, b->d_y, k, 1, b->turned_W[i], m, b->r, m, 1, 0);
        memcpy(b->right[i], b->d_y, R * k * sizeof(real));
        if (keep) EACH(r, R) EACH(e, k) b->right[i][r * k + e] *= keep[r / s->groups];
        if (keep && target) {
            product(R, m, k, b->d_y, k, 1, b->turned_target[i], m, b->more, m, 1, 0);
            EACH(r, R) {
                I t = r / s->groups;
                real A = keep[t], *of_W = b->r + r * m, *of_target = b->more + r * m;
                b->d_A[t] += dot_difference(m, in + r * m, of_W, of_target);
                EACH(e, m) of_W[e] = of_target[e] + A * (of_W[e] - of_target[e]);
                EACH(e, k) b->scaled[r * k + e] = (1 - A) * b->d_y[r * k + e];
            }
        } else if (keep)
            EACH(r, R) {
                I t = r / s->groups;
                b->d_A[t] += dot(m, in + r * m, b->r + r * m);
                EACH(e, m) b->r[r * m + e] *= keep[t];
            }
        if (target) {
            real *d_target = LAYER(D_TARGET_, i) + p * size;
            Terms terms = {2, {d_target, d_W[i]}, {1, 1 - x->ends[0]}};
            product_and(m, k, mixed, in, 1, m, b->scaled, k, d_target, k, 1, &terms);
        }
        if (s->current && S) {
            transpose(m, k, S[i], b->turned, m);
            product(R, m, k, b->d_y, k, 1, b->turned, m, b->more, m, 1, 0);
            EACH(r, R) {
                real D = carry[r / s->groups];
                b->d_D[r / s->groups] += dot(m, in + r * m, b->more + r * m);
                EACH(e, m) b->r[r * m + e] += D * b->more[r * m + e];
                EACH(e, k) b->scaled[r * k + e] = D * b->d_y[r * k + e];
            }
        }
        if (S) {
            Terms terms = {2, {d_S[i], d_W[i]}, {x->ends[2], x->ends[1]}};
            product_and(m, k, mixed, in, 1, m, b->scaled, k, d_S[i], k, 1, &terms);
        }
        if (s->current) {
            int squared = s->quadratic && i == 0;
            if (squared) {
                token_scores(job, q, x->k, b->turned, b->dots);
                EACH(e, R * ldp) b->p[e] = b->dots[e] * b->dots[e];
            } else {
                transpose(C, m, x->a[i], b->turned, ldp);
                pair_scores(C, G, m, in, b->turned, b->p, ldp);
            }
            transpose(C, k, x->delta[i], b->turned, ldp);
            pair_scores(C, G, k, b->d_y, b->turned, b->g, ldp);
            EACH(e, R * ldp) {
                b->d_pairs[e] -= b->g[e] * b->p[e];
                b->g[e] *= b->pairs[e];
                b->p[e] *= b->pairs[e];
            }
            if (squared) {
                EACH(e, R * ldp) b->g[e] *= 2 * b->dots[e];
                pairs_times_writes(C, G, D, b->g, ldp, x->k, b->d_tokens, -1, 0);
                pairs_times_reads(C, G, D, b->g, ldp, q, b->d_tokens + R * D, -1, 0);
            } else {
                pairs_times_writes(C, G, m, b->g, ldp, x->a[i], b->r, -1, 1);
                pairs_times_reads(C, G, m, b->g, ldp, in, b->d_a[i], -1, 1);
            }
            pairs_times_reads(C, G, k, b->p, ldp, b->d_y, b->d_delta[i], -1, 1);
        }
        if (i) EACH(e, R * m) b->d_y[e] = b->r[e] * b->read_slope[i][e];
        else token_gradient(job, R, b->r, q, b->d_tokens, b->d_q);
    }
    if (s->residual) EACH(e, R * D) b->d_q[e] += d_o[e];
    scatter(job, n, G * D, b->d_q, TENSOR(D_QUERY));
}

/* Through the scale of a gradient bound: every use of g_i is linear in delta_i. */
static void through_bound(const Job *job, const Inner *x, Backward *b) {
    const Shape *s = job->s;
    I C = s->C;
    real rounding = REAL_BYTES == 4 ? 16 * 1.1920929e-07 : 16 * 2.220446049250313e-16;
    EACH(t, C) {
        if (!(x->size[t] > 1 + rounding)) continue;
        real along = 0, share = 1 / (x->size[t] * job->bound);
        EACH(i, s->L) {
            I k = s->width[i + 1];
            along += dot(k, x->delta[i] + t * k, b->d_delta[i] + t * k);
        }
        EACH(i, s->L) {
            I m = s->width[i], k = s->width[i + 1];
            real of_delta = share * x->size_a[i * C + t], of_a = share * x->size_delta[i * C + t];
            of_a *= of_a * along;
            of_delta *= of_delta * along;
            EACH(e, m) b->d_a[i][t * m + e] -= of_a * x->a[i][t * m + e];
            EACH(e, k) b->d_delta[i][t * k + e] -= of_delta * x->delta[i][t * k + e];
        }
    }
}

/* Through the inner gradient: a and delta as functions of k, offset and the weights `start`. */
static void through_inner(const Job *job, I p, I n, const Inner *x, real *const *start, real *const *turned,
                          Backward *b) {
    const Shape *s = job->s;
    I C = s->C, R = job->R, L = s->L, V = s->width[L], D = s->tokens;
    EACH(i, L) {
        I m = s->width[i], k = s->width[i + 1];
        memcpy(b->left[i] + R * m, x->a[i], C * m * sizeof(real));
        if (i == 0) continue;
        real *d_g = b->left[i] + (R + C) * m;
        memcpy(b->right[i] + (R + C) * k, x->delta[i], C * k * sizeof(real));
        EACH(e, C * m) d_g[e] = b->d_delta[i - 1][e] * x->slope[i][e];
        product(C, k, m, d_g, m, 1, start[i], k, b->d_delta[i], k, 1, 1);
    }
    real *lam = b->d_delta[L - 1], *d_z = b->right[L - 1] + R * V, *d_error = b->d_error;
    if (!TENSOR(GAIN)) {
        memcpy(d_z, lam, C * V * sizeof(real));
        memcpy(d_error, lam, C * V * sizeof(real));
    } else {
        const real *gain = TENSOR(GAIN) + p * V;
        real *d_gain = TENSOR(D_GAIN) + p * V, *d_bias = TENSOR(D_BIAS) + p * V;
        through_standardise(C, V, lam, x->h, x->inverse, b->h);
        EACH(t, C) {
            const real *l = lam + t * V, *h = x->h + t * V, *u = x->u + t * V;
            real by = x->inverse[t] / V, u_h = dot(V, u, h) * by, along_h = dot(V, l, h) * by;
            EACH(e, V) {
                real d_u = b->h[t * V + e], g = gain[e], back = g * d_u;
                d_gain[e] += d_u * x->error[t * V + e] + back * h[e];
                d_bias[e] += back;
                d_error[t * V + e] = back;
                d_z[t * V + e] = g * back - l[e] * u_h - u[e] * along_h;
            }
        }
        through_standardise(C, V, d_z, x->h, x->inverse, d_z);
        EACH(t, C) {
            real along_top = dot(V, lam + t * V, x->delta[L - 1] + t * V) * x->inverse[t] / V;
            EACH(e, V) d_z[t * V + e] -= x->h[t * V + e] * along_top;
        }
    }
    for (I i = L - 1; i >= 0; i--) {
        I m = s->width[i], k = s->width[i + 1];
        product(C, m, k, b->right[i] + R * k, k, 1, turned[i], m, b->d_a[i], m, 1, 1);
        if (i) {
            real *below = b->right[i - 1] + R * m;
            EACH(e, C * m) below[e] = b->d_delta[i - 1][e] * x->bend[i][e] + b->d_a[i][e] * x->slope[i][e];
        }
    }
    token_gradient(job, C, b->d_a[0], x->k, b->d_tokens + R * D, b->d_k);
    if (s->residual) EACH(e, C * D) b->d_k[e] += d_error[e];
    EACH(e, C * V) d_error[e] = -d_error[e]; /* which is v's */
    scatter(job, n, D, b->d_k, TENSOR(D_KEY));
    scatter(job, n, V, d_error, TENSOR(D_VALUE));
}

/* What the chunk's scalars get. */
static void scalar_gradients(const Job *job, I n, const Inner *x, Backward *b) {
    const Shape *s = job->s;
    I C = s->C, ldp = job->ldp;
    real *d_theta = TENSOR(D_THETA) + n * C;
    if (!mixes(job)) {
        if (s->current) EACH(r, job->R) EACH(i, r / s->groups + 1) b->d_writes[i] += b->d_pairs[r * ldp + i];
        EACH(i, C) d_theta[i] = b->d_writes[i] * x->shrink[i];
        return;
    }
    Scalars g = scalars_of(job, n);
    real *d_mu = g.mu ? TENSOR(D_MU) + n * C : 0, *d_keep = g.keep ? TENSOR(D_KEEP) + n * C : 0;
    EACH(i, C) {
        b->d_writes[i] *= x->shrink[i];
        b->d_s_writes[i] *= x->shrink[i];
    }
    through_last_row(C, &g, x->reach, x->later, x->kept, b->d_writes, b->d_s_writes, b->d_ends, d_theta, d_mu, d_keep);
    if (!s->current) return;
    memset(b->d_c, 0, C * C * sizeof(real));
    EACH(r, job->R) EACH(i, r / s->groups + 1)
        b->d_c[r / s->groups * C + i] += b->d_pairs[r * ldp + i] * x->shrink[i];
    through_all_rows(C, &g, &b->rows, b->d_c, b->d_A, b->d_D, b->d_N, d_theta, d_mu, d_keep);
}
"""
