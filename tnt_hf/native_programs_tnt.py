"""C source: a program's chunks from the last to the first, and what `native_tnt` calls.

Axis legend
    C tokens per chunk   R = C G its query rows   K key width   L layers of the memory network
    p program (grid row and head)   n chunk of all programs', as in `plan_tnt`

The states before the chunks of a group are written anew from the one that was kept, before its first. Programs are
shared out to threads, each of which has a room of its own: results do not depend on their number. Travels with every
pushed checkpoint.
"""

SOURCE = r"""
static void backward_program(const Job *job, I p, Backward *b) {
    const Shape *s = job->s;
    I C = s->C, R = job->R, L = s->L;
    const I *counts = job->t[COUNTS], *starts = job->t[STARTS];
    const int8_t *full = job->t[FULL];
    int momentum = TENSOR(MU) != 0, live = LAYER(D_W_END_, 0) != 0;
    I chunks = 0;
    while (chunks < s->steps && counts[chunks] > p) chunks++;
    real *d_W[MAX_LAYERS], *d_S[MAX_LAYERS];
    EACH(i, L) {
        I size = s->width[i] * s->width[i + 1];
        d_W[i] = LAYER(D_W_, i) + p * size;
        d_S[i] = momentum ? LAYER(D_S_, i) + p * size : 0;
        const real *target = LAYER(TARGET_, i);
        if (target) transpose(s->width[i], s->width[i + 1], target + p * size, b->turned_target[i], s->width[i]);
        if (!live) continue; /* they hold zeros */
        memcpy(d_W[i], LAYER(D_W_END_, i) + p * size, size * sizeof(real));
        if (full[p]) EACH(e, size) d_W[i][e] += LAYER(D_XI_END_, i)[p * size + e];
        if (momentum) memcpy(d_S[i], LAYER(D_S_END_, i) + p * size, size * sizeof(real));
    }
    for (I j1 = chunks; j1 > 0;) {
        I j0 = (j1 - 1) / s->stride * s->stride;
        for (I j = j0; j < j1; j++) { /* the states before the group's chunks */
            I q = j - j0;
            EACH(i, L) if (!q) {
                I at = (p * job->slots + j / s->stride) * s->width[i] * s->width[i + 1];
                b->W[0][i] = LAYER(KEPT_W_, i) + at;
                b->S[0][i] = momentum ? LAYER(KEPT_S_, i) + at : 0;
            }
            rebuild(job, p, starts[j] + p, &b->inner[q]);
            if (j + 1 < j1)
                write_chunk(job, p, &b->inner[q], b->W[q], momentum ? b->S[q] : 0, b->W[q + 1],
                            b->S[q + 1], b->scaled);
        }
        for (I j = j1 - 1; j >= j0; j--) {
            I q = j - j0, n = starts[j] + p, last = j == chunks - 1;
            int carried = s->carried && j == 0;
            const Inner *x = &b->inner[q];
            real *const *W = b->W[q], *const *S = momentum ? b->S[q] : 0;
            real *start[MAX_LAYERS], *d_start[MAX_LAYERS];
            EACH(i, L) {
                I m = s->width[i], k = s->width[i + 1];
                start[i] = carried ? LAYER(XI_, i) + p * m * k : W[i];
                d_start[i] = carried ? LAYER(D_XI_, i) + p * m * k : d_W[i];
                memset(b->d_a[i], 0, C * m * sizeof(real));
                memset(b->d_delta[i], 0, C * k * sizeof(real));
            }
            if (s->current) memset(b->d_pairs, 0, R * job->ldp * sizeof(real));
            EACH(t, C) b->d_writes[t] = b->d_s_writes[t] = b->d_A[t] = b->d_D[t] = 0;
            EACH(e, 3) b->d_ends[e] = 0;
            if (!last || live) through_end(job, p, x, W, S, d_W, d_S, b);
            if (s->current) read_weights(job, n, x, &b->rows, b->pairs);
            EACH(i, L)
                transpose(s->width[i], s->width[i + 1], (s->current ? W : start)[i], b->turned_W[i], s->width[i]);
            through_reads(job, p, n, x, S, d_W, d_S, b);
            if (s->bounded) through_bound(job, x, b);
            if (carried && s->current)
                EACH(i, L) transpose(s->width[i], s->width[i + 1], start[i], b->turned_W[i], s->width[i]);
            through_inner(job, p, n, x, start, b->turned_W, b);
            scalar_gradients(job, n, x, b);
            EACH(i, L) {
                I m = s->width[i], k = s->width[i + 1], keys = i ? 2 * C : C;
                I own = !carried ? R + keys : s->current ? R : 0; /* rows that saw W, and the others W_xi */
                Terms kept = {1, {d_W[i]}, {x->ends[0]}};
                product_and(m, k, own, b->left[i], 1, m, b->right[i], k, d_W[i], k, 1, &kept);
                if (carried)
                    product(m, k, R + keys - own, b->left[i] + own * m, 1, m, b->right[i] + own * k, k, d_start[i], k,
                            1, 1);
                if (last && live && !full[p])
                    EACH(e, m * k) d_start[i][e] += LAYER(D_XI_END_, i)[p * m * k + e];
            }
        }
        j1 = j0;
    }
}

/* --------------------------------------------------------------------------------------------------- entry points */

/* "omp parallel" as gcc calls it: code of other compilers, too, runs in the threads of torch's OpenMP */
void GOMP_parallel(void (*body)(void *), void *given, unsigned threads, unsigned flags);
#define IN_THREADS(body, given, threads) \
    ((threads) > 1 ? GOMP_parallel(body, given, (unsigned)(threads), 0) : body(given))
#define TAKE(next) __atomic_fetch_add(&(next), 1, __ATOMIC_RELAXED)

/* A call's threads take programs from it in turn, and run them in a room of their own. */
typedef struct {
    const Job *job;
    I next;
    int failed;
} Shared;

static Job job_of(const Shape *s, void *const *t, double eps, double bound) {
    Job job = {s, t, (real)eps, (real)bound, s->C * s->groups, ROUND(s->C), 0, 0, 0};
    job.slots = s->stride ? (s->steps + s->stride - 1) / s->stride : 0;
    EACH(i, s->L + 1) {
        if (s->width[i] > job.widest) job.widest = s->width[i];
        if (i && s->width[i] * s->width[i - 1] > job.largest) job.largest = s->width[i] * s->width[i - 1];
    }
    if (s->tokens > job.widest) job.widest = s->tokens;
    if (job.ldp > job.widest) job.widest = job.ldp;
    return job;
}

#if defined(__SSE__)
#define FLUSH unsigned mode = __builtin_ia32_stmxcsr(); __builtin_ia32_ldmxcsr(mode | 0x8040)
#define RESTORE __builtin_ia32_ldmxcsr(mode)
#else
#define FLUSH
#define RESTORE
#endif

#define RUN(name, Room)                                                                                              \
    static void name##_thread(void *given) {                                                                         \
        Shared *x = given;                                                                                           \
        Room room;                                                                                                   \
        real *arena = aligned_alloc(64, (room_##name(x->job, &room, 0) * sizeof(real) / 64 + 1) * 64);               \
        FLUSH;                                                                                                       \
        if (arena) room_##name(x->job, &room, arena);                                                                \
        for (I p; (p = TAKE(x->next)) < x->job->s->programs;) {                                                      \
            if (arena) name##_program(x->job, p, &room);                                                             \
            else x->failed = 1;                                                                                      \
        }                                                                                                            \
        free(arena);                                                                                                 \
        RESTORE;                                                                                                     \
    }                                                                                                                \
    int name(const Shape *s, void *const *t, double eps, double bound) {                                             \
        Job job = job_of(s, t, eps, bound);                                                                          \
        Shared x = {&job, 0, 0};                                                                                     \
        IN_THREADS(name##_thread, &x, s->threads);                                                                   \
        return x.failed;                                                                                             \
    }

RUN(forward, Forward)
RUN(backward, Backward)
"""
