"""C source: the scalars of a chunk's dual form, forward and backward, for `native_tnt`.

Axis legend
    C tokens per chunk   t token that reads   i token that writes

As in `coefficients_tnt`: by the recurrences themselves, without logarithm or division, so mu = 0 and alpha = 1 are
exact. What the chunk leaves behind takes O(C), and only reads of "current" weights need all of c. Travels with every
pushed checkpoint.
"""

SOURCE = r"""
/* Of one chunk, [C] each. keep is 1 - alpha; 0: no momentum, no forgetting, every token is there. */
typedef struct {
    const real *theta, *mu, *keep, *present;
} Scalars;

/* W_C = ends[0] W_0 + (1 - ends[0]) W_target + ends[1] S_0 - sum_i reach_i theta_i g_i and
   S_C = ends[2] S_0 - sum_i later_i theta_i g_i; kept [C]: how much of W behind i is in W_C */
static void last_row(I C, const Scalars *g, real *reach, real *later, real *kept, real *ends) {
    real a = 1, x = 0, m = 1;
    for (I i = C - 1; i >= 0; i--) {
        real mu = g->mu ? g->mu[i] : 0;
        reach[i] = x + (g->present ? g->present[i] : 1) * a;
        later[i] = m;
        kept[i] = a;
        x = mu * reach[i];
        m *= mu;
        if (g->keep) a *= g->keep[i];
    }
    ends[0] = a, ends[1] = x, ends[2] = m;
}

/* d_w, d_s: of reach_i theta_i and later_i theta_i. Adds to d_theta, d_mu and d_keep. */
static void through_last_row(I C, const Scalars *g, const real *reach, const real *later, const real *kept,
                             const real *d_w, const real *d_s, const real *d_ends, real *d_theta, real *d_mu,
                             real *d_keep) {
    real d_a = d_ends[0], d_x = d_ends[1], d_m = d_ends[2];
    EACH(i, C) {
        real mu = g->mu ? g->mu[i] : 0;
        d_theta[i] += d_w[i] * reach[i] + d_s[i] * later[i];
        if (g->mu) d_mu[i] += d_x * reach[i] + d_m * later[i];
        if (g->keep) {
            d_keep[i] += d_a * kept[i];
            d_a *= g->keep[i];
        }
        d_x = mu * d_x + d_w[i] * g->theta[i]; /* of reach_i, and so of the x behind i */
        d_a += (g->present ? g->present[i] : 1) * d_x;
        d_m = mu * d_m + d_s[i] * g->theta[i];
    }
}

/* The weights that a token reads, and the momentum there: c and N [C, C] up to the diagonal, and A, D and m, the
   product of mu, [C] */
typedef struct {
    real *c, *N, *A, *D, *m;
} Rows;

static void all_rows(I C, const Scalars *g, const Rows *r) {
    real A = 1, D = 0, m = 1;
    EACH(t, C) {
        real keep = g->keep ? g->keep[t] : 1, mu = g->mu ? g->mu[t] : 0, here = g->present ? g->present[t] : 1;
        real *N = r->N + t * C, *c = r->c + t * C;
        EACH(i, t) {
            N[i] = g->mu ? mu * N[i - C] : 0;
            c[i] = keep * c[i - C] + here * N[i];
        }
        N[t] = g->theta[t];
        c[t] = here * N[t];
        m *= mu;
        A *= keep;
        D = keep * D + here * m;
        r->m[t] = m, r->A[t] = A, r->D[t] = D;
    }
}

/* d_c [C, C] up to the diagonal, which is overwritten, d_A and d_D [C]; d_N: room for C. Adds as above. */
static void through_all_rows(I C, const Scalars *g, const Rows *r, real *d_c, const real *d_A, const real *d_D,
                             real *d_N, real *d_theta, real *d_mu, real *d_keep) {
    real to_A = 0, to_D = 0, to_m = 0;
    memset(d_N, 0, C * sizeof(real));
    for (I t = C - 1; t >= 0; t--) {
        real keep = g->keep ? g->keep[t] : 1, mu = g->mu ? g->mu[t] : 0, here = g->present ? g->present[t] : 1;
        real *d = d_c + t * C;
        const real *N = r->N + (t - 1) * C, *c = r->c + (t - 1) * C;
        to_A += d_A[t];
        to_D += d_D[t];
        to_m += here * to_D;
        EACH(i, t + 1) d_N[i] += here * d[i];
        d_theta[t] += d_N[t];
        if (g->mu) d_mu[t] += (t ? dot(t, d_N, N) : 0) + to_m * (t ? r->m[t - 1] : 1);
        if (g->keep) d_keep[t] += (t ? dot(t, d, c) + to_D * r->D[t - 1] : 0) + to_A * (t ? r->A[t - 1] : 1);
        EACH(i, t) {
            d[i - C] += keep * d[i];
            d_N[i] *= mu;
        }
        to_A *= keep;
        to_D *= keep;
        to_m *= mu;
    }
}
"""
