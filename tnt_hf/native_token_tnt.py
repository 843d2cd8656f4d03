"""C source: a few tokens of all memories of a layer, one after the other and in place, for `native_step_tnt`.

Axis legend
    B batch   H memory heads   G query heads per memory head   D head width   K width of the feature map's keys
    L layers of the memory network   p program (row b and head h), which shares nothing with others

From the projections to the norm over the sum of the memories, as `tokens_tnt.memory_token`, `step_tnt.project_step`
and `step_tnt.memory_step` have it. Travels with every pushed checkpoint.
"""

SOURCE = r"""
typedef struct {
    I rows, tokens, H, G, D, L, hidden, projections, memories, threads, taps, silu, quadratic, value_norm, normalize;
    I gelu, residual, to_init, bounded, stride[3]; /* from one token of q, k, v to the next */
    I width[]; /* [L + 1]; then the interval of each projection (0: never reset), and of each memory a Spec */
} Call;

typedef struct {
    I C, interval, current, projection; /* which, or -1 */
} Spec;

enum { HIDDEN, OF_Q, OF_K, OF_V, TAPS_Q, TAPS_K, TAPS_V, TAIL, TIME, PRESENT, NORM, SUM, SURPRISES, PROJECTIONS };
enum { GATE_LR, GATE_MU = 2, GATE_ALPHA = 4, GIVEN_GAIN = 6, GIVEN_BIAS, PER_MEMORY }; /* gates: weight and bias */
enum { INIT, NOW, START, MOMENTUM, PER_LAYER };

/* n channels of one token: y = their taps over it and those before, which move on */
static void convolve(I n, I taps, const real *x, real *tail, const real *weight, real *y) {
    if (!taps) memcpy(y, x, n * sizeof(real));
    else EACH(c, n) {
        real sum = 0, *before = tail + c * taps;
        const real *w = weight + c * (taps + 1);
        EACH(j, taps) sum += before[j] * w[j];
        y[c] = sum + x[c] * w[taps];
        EACH(j, taps - 1) before[j] = before[j + 1];
        before[taps - 1] = x[c];
    }
}

static void to_unit(I n, real *x) {
    real size = (real)sqrt(dot(n, x, x));
    size = size > (real)1e-12 ? size : (real)1e-12; /* of F.normalize */
    EACH(i, n) x[i] /= size;
}

inline_ real sigmoid(real x) {
    return 1 / (1 + exponential(-x));
}

/* Head h's gate: the sigmoid of a linear layer of x */
static real gate(I n, const real *x, void *const *layer, I h) {
    const real *weight = layer[0], *bias = layer[1];
    return sigmoid(dot(n, x, weight + h * n) + (bias ? bias[h] : 0));
}

/* y [n (n + 1) / 2] = `features_tnt.quadratic` of x */
static void quadratic_keys(I n, const real *x, real *y) {
    EACH(i, n) for (I j = i; j < n; j++) *y++ = x[i] * (j == i ? x[j] : x[j] * (real)1.41421356237309504880);
}

/* y [G, K] = q M, M + u^T u being M: what was there and the newest one apart, for behind a reset u's direction is the
   answer's, which a rounded u^T u would blur */
static void project_token(I G, I K, const real *q, const real *u, real *M, int reset, int normalize, real *y) {
    if (reset) memset(M, 0, K * K * sizeof(real));
    product(G, K, K, q, K, 1, M, K, y, K, 1, 0);
    EACH(g, G) {
        real along = dot(K, q + g * K, u);
        EACH(i, K) y[g * K + i] += along * u[i];
        if (normalize) to_unit(K, y + g * K);
    }
    EACH(r, K) EACH(i, K) M[r * K + i] += u[r] * u[i];
}

/* y [rows, d_out of the top] = f(W, x); room for two matrices [rows, widest] and more */
static void apply_network(const Call *s, I rows, real eps, const real *x, real *const *W, const real *gain,
                          const real *bias, real *y, real *room, I widest) {
    real *z = room, *a = room + rows * widest, *slope = room + 2 * rows * widest;
    const real *in = x;
    I V = s->width[s->L];
    EACH(i, s->L) {
        I m = s->width[i], k = s->width[i + 1];
        int last = i == s->L - 1;
        product(rows, k, m, in, m, 1, W[i], k, last ? y : z, k, 1, 0);
        if (!last) activate(s->gelu, rows * k, z, a, slope, 0, 0), in = a;
    }
    if (gain) {
        standardise(rows, V, eps, y, z, a);
        EACH(r, rows) EACH(e, V) y[r * V + e] = bias[e] + gain[e] * z[r * V + e];
    }
    if (s->residual) EACH(e, rows * V) y[e] += x[e];
}

/* One layer's weights n numbers further: w = (1 - alpha) w + alpha target + s, s = mu s - step */
inline_ void write_row(I n, real *restrict w, real *restrict s, const real *restrict target, real alpha, real mu,
                       real by, const real *restrict delta) {
    if (target) EACH(i, n) w[i] += alpha * (target[i] - w[i]);
    else if (alpha != 0) EACH(i, n) w[i] *= 1 - alpha;
    if (!s) EACH(i, n) w[i] += by * delta[i];
    else EACH(i, n) {
        s[i] = mu * s[i] + by * delta[i];
        w[i] += s[i];
    }
}

/* out [G, V] = the token's read of one memory, whose state it moves on; returns its inner loss */
static real memory_token(const Call *s, const Spec *of, I p, I now, const real *x, const real *q, const real *k,
                         const real *v, void *const *given, void *const *layers, real eps, real bound, real scale,
                         real *out, real *room, I widest) {
    I L = s->L, h = p % s->H, V = s->width[L];
    const real *gain = given[GIVEN_GAIN], *bias = given[GIVEN_BIAS], *a[MAX_LAYERS];
    real *W[MAX_LAYERS], *from[MAX_LAYERS], *S[MAX_LAYERS], *delta[MAX_LAYERS], *slope[MAX_LAYERS];
    int reset = of->interval && now % of->interval == 0;
    if (gain) gain += h * V, bias += h * V;
    EACH(i, L) {
        I size = s->width[i] * s->width[i + 1];
        void *const *layer = layers + i * PER_LAYER;
        const real *init = (const real *)layer[INIT] + h * size;
        W[i] = (real *)layer[NOW] + p * size;
        from[i] = of->C > 1 ? (real *)layer[START] + p * size : W[i];
        S[i] = layer[MOMENTUM] ? (real *)layer[MOMENTUM] + p * size : 0;
        if (!reset) continue;
        memcpy(W[i], init, size * sizeof(real));
        if (of->C > 1) memcpy(from[i], init, size * sizeof(real));
        if (S[i]) memset(S[i], 0, size * sizeof(real));
    }
    /* the inner gradient, at W_xi */
    real *z = room, *error = room + widest, *h_top = room + 2 * widest, inverse;
    room += 3 * widest;
    a[0] = k;
    EACH(i, L) {
        I m = s->width[i], n = s->width[i + 1];
        delta[i] = room, room += widest;
        product(1, n, m, a[i], m, 1, from[i], n, z, n, 1, 0);
        if (i == L - 1) break;
        real *next = room;
        slope[i + 1] = room + widest, room += 2 * widest;
        activate(s->gelu, n, z, next, slope[i + 1], 0, 0);
        a[i + 1] = next;
    }
    EACH(e, V) error[e] = (s->residual ? k[e] : 0) - v[e];
    if (gain) {
        standardise(1, V, eps, z, h_top, &inverse);
        EACH(e, V) {
            error[e] += bias[e] + gain[e] * h_top[e];
            z[e] = gain[e] * error[e];
        }
        through_standardise(1, V, z, h_top, &inverse, delta[L - 1]);
    } else
        EACH(e, V) delta[L - 1][e] = error[e] += z[e];
    for (I i = L - 1; i > 0; i--) {
        I m = s->width[i], n = s->width[i + 1];
        EACH(r, m) delta[i - 1][r] = slope[i][r] * dot(n, from[i] + r * n, delta[i]);
    }
    real theta = scale * gate(s->hidden, x, given + GATE_LR, h), alpha = 0, mu = 0;
    int forgets = given[GATE_ALPHA] != 0;
    if (s->bounded) {
        real of_a[MAX_LAYERS], of_delta[MAX_LAYERS];
        EACH(i, L) {
            of_a[i] = length(s->width[i], a[i]);
            of_delta[i] = length(s->width[i + 1], delta[i]);
        }
        theta /= excess(L, 1, of_a, of_delta, bound);
    }
    if (forgets) alpha = gate(s->hidden, x, given + GATE_ALPHA, h);
    if (S[0]) mu = gate(s->hidden, x, given + GATE_MU, h);
    if (!of->current) apply_network(s, s->G, eps, q, from, gain, bias, out, room, widest);
    EACH(i, L) {
        I m = s->width[i], n = s->width[i + 1];
        const real *target = forgets && s->to_init ? (const real *)layers[i * PER_LAYER + INIT] + h * m * n : 0;
        EACH(r, m)
            write_row(n, W[i] + r * n, S[i] ? S[i] + r * n : 0, target ? target + r * n : 0, alpha, mu,
                      -theta * a[i][r], delta[i]);
    }
    if (of->current) apply_network(s, s->G, eps, q, W, gain, bias, out, room, widest);
    if (of->C > 1 && (now + 1) % of->C == 0)
        EACH(i, L) memcpy(from[i], W[i], s->width[i] * s->width[i + 1] * sizeof(real));
    return (real)0.5 * dot(V, error, error);
}

/* Program p at token `row` of all [rows, tokens], memory time `now` */
static void token_program(const Call *s, void *const *t, const double *scales, I p, I row, I now, real *room,
                          I widest) {
    I G = s->G, D = s->D, H = s->H, K = s->width[0], L = s->L, b = p / H, h = p % H, at = row * H + h;
    const int8_t *present = t[PRESENT];
    void *const *M = t + PROJECTIONS, *const *memory = M + s->projections;
    real *sum = (real *)t[SUM] + at * G * D, *surprise = t[SURPRISES];
    memset(sum, 0, G * D * sizeof(real));
    if (surprise) surprise[at] = 0;
    if (present && !present[row]) return;
    real *parts = room, *q = parts + (G + 2) * D, *k = q + G * K, *v = parts + (G + 1) * D, *out = k + K;
    room = out + G * D;
    I channels[3] = {G * D, D, D}, all = (G + 2) * H * D, first = 0, done = 0;
    EACH(i, 3) {
        I n = channels[i];
        const real *x = (const real *)t[OF_Q + i] + row * s->stride[i] + h * n, *w = t[TAPS_Q + i];
        real *tail = t[TAIL], *y = parts + done;
        if (s->taps) tail += (b * all + first + h * n) * s->taps, w += h * n * (s->taps + 1);
        convolve(n, s->taps, x, tail, w, y);
        if (i < 2 && s->silu) EACH(c, n) y[c] *= sigmoid(y[c]);
        if (i < 2 || s->value_norm) EACH(g, n / D) to_unit(D, y + g * D);
        first += H * n, done += n;
    }
    if (s->quadratic) EACH(g, G + 1) quadratic_keys(D, parts + g * D, q + g * K); /* k comes behind q */
    else memcpy(q, parts, (G + 1) * D * sizeof(real));
    real *projected = room;
    room += s->projections * G * K;
    const I *intervals = s->width + L + 1;
    EACH(i, s->projections)
        project_token(G, K, q, k, (real *)M[i] + p * K * K, intervals[i] && now % intervals[i] == 0, s->normalize,
                      projected + i * G * K);
    const Spec *specs = (const Spec *)(intervals + s->projections);
    EACH(i, s->memories) {
        void *const *given = memory + i * (PER_MEMORY + L * PER_LAYER);
        const real *query = specs[i].projection < 0 ? q : projected + specs[i].projection * G * K;
        real loss = memory_token(s, specs + i, p, now, (const real *)t[HIDDEN] + row * s->hidden, query, k, v, given,
                                 given + PER_MEMORY, (real)scales[0], (real)scales[1], (real)scales[3 + i], out, room,
                                 widest);
        if (surprise) surprise[at] += loss / s->memories;
        EACH(e, G * D) sum[e] += out[e];
    }
    const real *norm = t[NORM];
    if (norm) EACH(g, G) {
        real *y = sum + g * D, by = 1 / (real)sqrt(dot(D, y, y) / D + (real)scales[2]);
        EACH(e, D) y[e] *= by * norm[e];
    }
}

int omp_get_thread_num(void);
int omp_get_num_threads(void);

typedef struct {
    const Call *s;
    void *const *t;
    const double *scales;
    I widest;
    int failed;
} SharedToken;

/* A thread has the same programs at every token: their memories are in its cache. */
static void token_thread(void *given) {
    SharedToken *x = given;
    const Call *s = x->s;
    I programs = s->rows * s->H, threads = 1, thread = 0;
    if (s->threads > 1) threads = omp_get_num_threads(), thread = omp_get_thread_num();
    I size = (2 * s->G + 2) * s->D + ((1 + s->projections) * s->G + 1) * s->width[0];
    size += 3 * (1 + s->L + s->G) * x->widest;
    real *room = aligned_alloc(64, (size * sizeof(real) / 64 + 1) * 64);
    FLUSH;
    for (I p = thread * programs / threads; p < (thread + 1) * programs / threads; p++) {
        I row = p / s->H * s->tokens, now = ((const int64_t *)x->t[TIME])[p / s->H];
        const int8_t *present = x->t[PRESENT];
        if (!room) x->failed = 1;
        else EACH(j, s->tokens) { /* its memories stay in the cache */
            token_program(s, x->t, x->scales, p, row + j, now, room, x->widest);
            now += !present || present[row + j];
        }
    }
    free(room);
    RESTORE;
}

/* scales: eps, bound, eps of the norm, and of each memory the largest theta */
int token(const Call *s, void *const *t, const double *scales) {
    SharedToken x = {s, t, scales, s->D, 0};
    EACH(i, s->L + 1) x.widest = s->width[i] > x.widest ? s->width[i] : x.widest;
    x.widest = ROUND(x.widest);
    IN_THREADS(token_thread, &x, s->threads);
    const int8_t *present = t[PRESENT];
    EACH(row, s->rows * s->tokens)((int64_t *)t[TIME])[row / s->tokens] += !present || present[row];
    return x.failed;
}
"""
