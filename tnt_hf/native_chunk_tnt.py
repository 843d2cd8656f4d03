"""C source: what both ways of a scan have in common, and one chunk's inner gradient and write, for `native_tnt`.

Axis legend
    C tokens per chunk   R = C G its query rows   ldp C rounded up to whole vectors   K key width   V value width
    L layers of the memory network   p program (grid row and head)   n chunk of all programs', as in `plan_tnt`

Names are those of `scan_tnt`, scalars' those of `native_scalars_tnt`. Travels with every pushed checkpoint.
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
    real *reach, *later, *kept, *ends; /* [C], [3]: `last_row` */
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
    x->reach = take(arena, C);
    x->later = take(arena, C);
    x->kept = take(arena, C);
    x->ends = take(arena, 3);
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

/* |x|, also where its square leaves the range */
static real length(I n, const real *x) {
    real square = dot(n, x, x), most = 0, sum = 0;
    if (square < INFINITY) return (real)sqrt(square);
    EACH(i, n) most = x[i] > most ? x[i] : -x[i] > most ? -x[i] : most;
    if (!(most > 0 && most < INFINITY)) return square;
    EACH(i, n) sum += (x[i] / most) * (x[i] / most);
    return most * (real)sqrt(sum);
}

/* |g| / bound of one token, 1 where the bound holds, from |a| and |delta| of each of L layers, C numbers apart: no
   square of theirs leaves the range; infinity, and nothing is written, where |a| |delta| does */
static real excess(I L, I C, const real *of_a, const real *of_delta, real bound) {
    real most = 0, sum = 0;
    EACH(i, L) most = of_a[i * C] * of_delta[i * C] > most ? of_a[i * C] * of_delta[i * C] : most;
    if (!(most < INFINITY)) return most;
    EACH(i, L) {
        real part = most > 0 ? of_a[i * C] * of_delta[i * C] / most : 0;
        sum += part * part;
    }
    real size = most * (real)sqrt(sum) / bound;
    return size < 1 ? 1 : size;
}

static Scalars scalars_of(const Job *job, I n) {
    const real *theta = TENSOR(THETA), *mu = TENSOR(MU), *keep = TENSOR(KEEP), *present = TENSOR(HERE);
    I at = n * job->s->C;
    return (Scalars){theta + at, mu ? mu + at : 0, keep ? keep + at : 0, present ? present + at : 0};
}

/* How much of each g_i is written, after a gradient bound. */
static void write_weights(const Job *job, I n, Inner *x) {
    const Shape *s = job->s;
    I C = s->C, L = s->L;
    Scalars g = scalars_of(job, n);
    if (s->bounded) {
        EACH(t, C) {
            EACH(i, L) {
                I m = s->width[i], k = s->width[i + 1];
                const real *a = x->a[i] + t * m, *d = x->delta[i] + t * k;
                x->size_a[i * C + t] = length(m, a);
                x->size_delta[i * C + t] = length(k, d);
            }
            x->size[t] = excess(L, C, x->size_a + t, x->size_delta + t, job->bound);
            x->shrink[t] = 1 / x->size[t];
        }
    } else
        EACH(t, C) x->shrink[t] = 1;
    last_row(C, &g, x->reach, x->later, x->kept, x->ends);
    EACH(t, C) {
        x->writes[t] = g.theta[t] * x->reach[t] * x->shrink[t];
        x->s_writes[t] = g.theta[t] * x->later[t] * x->shrink[t];
    }
}

static int mixes(const Job *job) { return TENSOR(MU) || TENSOR(KEEP); } /* or else c_{t,i} = theta_i */

static void room_rows(const Job *job, Rows *rows, real **arena) {
    I C = job->s->current && mixes(job) ? job->s->C : 0;
    rows->c = take(arena, C * C);
    rows->N = take(arena, C * C);
    rows->A = take(arena, C);
    rows->D = take(arena, C);
    rows->m = take(arena, C);
}

/* c_{t,i} of a chunk, [R, ldp], zero behind the diagonal, after a gradient bound; and what `rows` has without it */
static void read_weights(const Job *job, I n, const Inner *x, const Rows *rows, real *pairs) {
    const Shape *s = job->s;
    I C = s->C;
    Scalars g = scalars_of(job, n);
    if (mixes(job)) all_rows(C, &g, rows);
    EACH(r, job->R) {
        I t = r / s->groups;
        const real *row = mixes(job) ? rows->c + t * C : g.theta;
        EACH(i, job->ldp) pairs[r * job->ldp + i] = i <= t ? row[i] * x->shrink[i] : 0;
    }
}

/* W_C = keep W + (1 - keep) W_target + D S - sum_i writes_i a_i^T delta_i, and S_C; W may be to_W, and S to_S */
static void write_chunk(const Job *job, I p, const Inner *x, real *const *W, real *const *S, real *const *to_W,
                        real *const *to_S, real *scaled) {
    const Shape *s = job->s;
    I C = s->C;
    EACH(i, s->L) {
        I m = s->width[i], k = s->width[i + 1];
        const real *target = LAYER(TARGET_, i);
        Terms of_W = {1, {W[i]}, {x->ends[0]}};
        if (target) include(&of_W, 1 - x->ends[0], target + p * m * k);
        if (S) include(&of_W, x->ends[1], S[i]);
        EACH(t, C) EACH(j, m) scaled[t * m + j] = x->writes[t] * x->a[i][t * m + j];
        product_and(m, k, C, scaled, 1, m, x->delta[i], k, to_W[i], k, -1, &of_W);
        if (!S) continue;
        Terms of_S = {1, {S[i]}, {x->ends[2]}};
        EACH(t, C) EACH(j, m) scaled[t * m + j] = x->s_writes[t] * x->a[i][t * m + j];
        product_and(m, k, C, scaled, 1, m, x->delta[i], k, to_S[i], k, -1, &of_S);
    }
}
"""
