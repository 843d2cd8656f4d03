"""C source: products of small matrices and the elementwise functions of a memory network, for `native_tnt`.

Axis legend
    M, N, K of a product [M, N] = [M, K] [K, N]   VL numbers of a vector register

A chunk's matrices fit into the cache nearest the processor, where a library's call costs as much as the product. A
tile of the result stays in registers while K is run through; the compiler makes one for every width of vector that
the processor has. Travels with every pushed checkpoint.
"""

SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if REAL_BYTES == 4
typedef float real;
#else
typedef double real;
#endif

/* Bytes of a vector, and the tiles of a product in rows and vectors: as many sums as there are registers for. Where
   rows of A are neighbours in memory, a compiler loads them at once and then takes them apart: fewer, in long sums */
#if defined(__AVX512F__)
#define VB 64
#define TILE 6, 4
#define TURNED_TILE 6, 4
#elif defined(__AVX__)
#define VB 32
#define TILE 6, 2
#define TURNED_TILE 6, 2
#elif defined(__aarch64__)
#define VB 16
#define TILE 8, 2
#define TURNED_TILE 4, 4
#else
#define VB 16
#define TILE 4, 2
#define TURNED_TILE 4, 2
#endif
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)") /* "unroll" alone comes too late for it to use registers */
#else
#define UNROLL _Pragma("GCC unroll 8") /* the most that a loop has */
#endif
#define VL ((int)(VB / sizeof(real)))
typedef real vec __attribute__((vector_size(VB), aligned(sizeof(real)), may_alias));
typedef int64_t I;
#define inline_ static inline __attribute__((always_inline))
#define ROUND(n) (((n) + VL - 1) / VL * VL)
#define EACH(i, n) for (I i = 0; i < (n); i++)

/* What is added to a product: n matrices, each times a number. One of them may be where the result goes. */
typedef struct {
    int n;
    const real *x[3];
    real by[3];
} Terms;

inline_ void include(Terms *terms, real by, const real *x) {
    terms->x[terms->n] = x;
    terms->by[terms->n++] = by;
}

/* mb x nb vectors of O, `at` numbers behind its first: alpha A B + terms */
inline_ void tile(const int mb, const int nb, I K, const real *A, I as0, I as1, const real *B, I ldb, real *O, I ldo,
                  I at, real alpha, const Terms *terms) {
    vec acc[8][4];
    UNROLL for (int r = 0; r < mb; r++)
        UNROLL for (int n = 0; n < nb; n++) acc[r][n] = (vec){0};
    for (I k = 0; k < K; k++) {
        const vec *b = (const vec *)(B + k * ldb);
        UNROLL for (int r = 0; r < mb; r++) {
            real x = A[r * as0 + k * as1];
            UNROLL for (int n = 0; n < nb; n++) acc[r][n] += x * b[n];
        }
    }
    UNROLL for (int r = 0; r < mb; r++)
        UNROLL for (int n = 0; n < nb; n++) acc[r][n] *= alpha;
    for (int i = 0; i < terms->n; i++) {
        const real *x = terms->x[i] + at, by = terms->by[i];
        UNROLL for (int r = 0; r < mb; r++)
            UNROLL for (int n = 0; n < nb; n++) acc[r][n] += by * ((const vec *)(x + r * ldo))[n];
    }
    UNROLL for (int r = 0; r < mb; r++)
        UNROLL for (int n = 0; n < nb; n++) ((vec *)(O + at + r * ldo))[n] = acc[r][n];
}

/* mb rows at once as long as there are so many: with few columns it takes more of them to keep the processor busy */
inline_ void columns(const int mb, const int nb, I M, I K, const real *A, I as0, I as1, const real *B, I ldb, real *O,
                     I ldo, I at, real alpha, const Terms *terms) {
    I m = 0;
#define ROWS(n)                                                                                                      \
    for (; m + n <= M; m += n) tile(n, nb, K, A + m * as0, as0, as1, B, ldb, O, ldo, at + m * ldo, alpha, terms)
    ROWS(mb);
    if (mb > 4) ROWS(4);
    ROWS(2);
    ROWS(1);
#undef ROWS
}

inline_ void tiled(const int mb, const int nb, I M, I N, I K, const real *A, I as0, I as1, const real *B, I ldb,
                   real *O, I ldo, real alpha, const Terms *terms) {
    I n = 0;
    for (; n + nb * VL <= N; n += nb * VL) columns(mb, nb, M, K, A, as0, as1, B + n, ldb, O, ldo, n, alpha, terms);
    if (nb > 2)
        for (; n + 2 * VL <= N; n += 2 * VL) columns(mb, 2, M, K, A, as0, as1, B + n, ldb, O, ldo, n, alpha, terms);
    for (; n + VL <= N; n += VL) columns(8, 1, M, K, A, as0, as1, B + n, ldb, O, ldo, n, alpha, terms);
    if (n < N)
        for (I m = 0; m < M; m++)
            for (I i = n; i < N; i++) {
                real x = 0;
                for (I k = 0; k < K; k++) x += A[m * as0 + k * as1] * B[k * ldb + i];
                x *= alpha;
                EACH(j, terms->n) x += terms->by[j] * terms->x[j][m * ldo + i];
                O[m * ldo + i] = x;
            }
}

/* O [M, N] = alpha A B + terms, which lie as O does and are read once, as it is written; of A's [M, K] strides one is
   1, rows of B [K, N] and O are contiguous; K may be 0 */
static void product_and(I M, I N, I K, const real *A, I as0, I as1, const real *B, I ldb, real *O, I ldo, real alpha,
                        const Terms *terms) {
    if (as0 == 1 && K >= 32) tiled(TURNED_TILE, M, N, K, A, 1, as1, B, ldb, O, ldo, alpha, terms);
    else if (as0 == 1) tiled(TILE, M, N, K, A, 1, as1, B, ldb, O, ldo, alpha, terms);
    else tiled(TILE, M, N, K, A, as0, 1, B, ldb, O, ldo, alpha, terms);
}

/* O = alpha A B, or += with `add` */
static void product(I M, I N, I K, const real *A, I as0, I as1, const real *B, I ldb, real *O, I ldo, real alpha,
                    int add) {
    Terms terms = {add, {O}, {1}};
    product_and(M, N, K, A, as0, as1, B, ldb, O, ldo, alpha, &terms);
}

/* Products over pairs of a read and a write that comes no later: of C tokens with G reads each, BLOCK tokens at once,
   what lies behind them is left out. p [C G, ldp] holds anything there. */
#define BLOCK 16
#define BLOCKS(t, end, C) for (I t = 0, end; end = t + BLOCK < (C) ? t + BLOCK : (C), t < (C); t = end)

/* p = x y^T, of x [C G, K] and y transposed, [K, ldp] */
static void pair_scores(I C, I G, I K, const real *x, const real *turned, real *p, I ldp) {
    BLOCKS(t, end, C)
        product((end - t) * G, ROUND(end), K, x + t * G * K, K, 1, turned, ldp, p + t * G * ldp, ldp, 1, 0);
}

/* O [C G, N] = alpha p y or += it, of y [C, N] */
static void pairs_times_writes(I C, I G, I N, const real *p, I ldp, const real *y, real *O, real alpha, int add) {
    BLOCKS(t, end, C)
        product((end - t) * G, N, end, p + t * G * ldp, ldp, 1, y, N, O + t * G * N, N, alpha, add);
}

/* O [C, N] = alpha p^T x or += it, of x [C G, N] */
static void pairs_times_reads(I C, I G, I N, const real *p, I ldp, const real *x, real *O, real alpha, int add) {
    BLOCKS(t, end, C) {
        const real *here = p + t * G * ldp + t;
        product(end - t, N, (C - t) * G, here, 1, ldp, x + t * G * N, N, O + t * N, N, alpha, add);
    }
}

typedef real eight __attribute__((vector_size(8 * sizeof(real)), aligned(sizeof(real)), may_alias));
#if defined(__clang__)
#define SHUFFLE __builtin_shufflevector
#elif REAL_BYTES == 4
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (int32_t __attribute__((vector_size(32)))){__VA_ARGS__})
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (int64_t __attribute__((vector_size(64)))){__VA_ARGS__})
#endif
#define ONE 0, 8, 1, 9, 4, 12, 5, 13
#define ONE_HIGH 2, 10, 3, 11, 6, 14, 7, 15
#define TWO 0, 1, 8, 9, 4, 5, 12, 13
#define TWO_HIGH 2, 3, 10, 11, 6, 7, 14, 15
#define FOUR 0, 1, 2, 3, 8, 9, 10, 11
#define FOUR_HIGH 4, 5, 6, 7, 12, 13, 14, 15

/* y [8, 8] = x [8, 8] transposed: pairs of rows by single numbers, by two and by four. In halves of 128 bits a shuffle
   is cheap. */
inline_ void transpose8(const real *x, I ldx, real *y, I ldy) {
    eight r[8], t[8];
    UNROLL for (int i = 0; i < 8; i++) r[i] = *(const eight *)(x + i * ldx);
    UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = SHUFFLE(r[i], r[i + 1], ONE);
        t[i + 1] = SHUFFLE(r[i], r[i + 1], ONE_HIGH);
    }
    UNROLL for (int i = 0; i < 4; i++) { /* columns 0, 2 and their next, of the upper and the lower four rows */
        int from = i / 2 * 4 + i % 2, to = i / 2 * 4 + i % 2 * 2;
        r[to] = SHUFFLE(t[from], t[from + 2], TWO);
        r[to + 1] = SHUFFLE(t[from], t[from + 2], TWO_HIGH);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        *(eight *)(y + i * ldy) = SHUFFLE(r[i], r[i + 4], FOUR);
        *(eight *)(y + (i + 4) * ldy) = SHUFFLE(r[i], r[i + 4], FOUR_HIGH);
    }
}

/* y [m, ldy] = x [n, m] transposed, with zeros behind its n columns */
static void transpose(I n, I m, const real *x, real *y, I ldy) {
    I i = 0, rows = m / 8 * 8, j;
    for (; i < rows; i += 8) {
        for (j = 0; j + 8 <= n; j += 8) transpose8(x + j * m + i, m, y + i * ldy + j, ldy);
        for (I s = i; s < i + 8; s++)
            for (I t = j; t < ldy; t++) y[s * ldy + t] = t < n ? x[t * m + s] : 0;
    }
    for (; i < m; i++)
        for (j = 0; j < ldy; j++) y[i * ldy + j] = j < n ? x[j * m + i] : 0;
}

/* ------------------------------------------------------------------------------------------- elementwise functions */

inline_ real exponential(real x) {
#if REAL_BYTES == 4
    x = x < -87.3f ? -87.3f : x > 88.3f ? 88.3f : x;
    float n = (x * 1.44269504f + 12582912.f) - 12582912.f; /* nearest integer */
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    union { int32_t i; float f; } scale = {((int32_t)n + 127) << 23};
    return p * scale.f;
#else
    return exp(x);
#endif
}

/* Phi(z) of the normal distribution, with a small relative error in its lower tail */
inline_ real normal_cdf(real z) {
#if REAL_BYTES == 4
    float x = fabsf(z) * 0.70710678f, t = 1.f / (1.f + 0.5f * x);
    float p = 0.17087277f;
    p = p * t - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    p = p * t - 1.26551223f;
    float tail = 0.5f * t * exponential(p - x * x);
    return z > 0 ? 1.f - tail : tail;
#else
    return 0.5 * erfc(-z * 0.70710678118654752440);
#endif
}

/* a = phi(z), slope = phi'(z) and bend = scale phi''(z) (without a scale: not) */
inline_ void activate(I gelu, I n, const real *restrict z, real *restrict a, real *restrict slope,
                      const real *restrict scale, real *restrict bend) {
    if (gelu) {
        EACH(i, n) {
            real x = z[i], c = normal_cdf(x), d = (real)0.39894228040143267794 * exponential((real)-0.5 * x * x);
            a[i] = x * c;
            slope[i] = c + x * d;
            if (scale) bend[i] = scale[i] * d * (2 - x * x);
        }
    } else {
        EACH(i, n) {
            real x = z[i], e = 1 / (1 + exponential(-x)), y = x * e;
            a[i] = y;
            slope[i] = e + y * (1 - e); /* 1 - y is -y where y is large */
            if (scale) bend[i] = scale[i] * (e - e * e) * (x - 2 * y + 2);
        }
    }
}

/* y [rows, (D / 2 + 1) D] = products x_i x_{(i + s) mod D} of x [rows, D], s by s: `features_tnt.ring_products` */
static void ring_products(I rows, I D, const real *x, real *y) {
    EACH(r, rows) EACH(s, D / 2 + 1) {
        const real *row = x + r * D;
        real *out = y + (r * (D / 2 + 1) + s) * D, by = s == 0 || 2 * s == D ? 1 : (real)1.41421356237309504880;
        EACH(i, D - s) out[i] = by * row[i] * row[i + s];
        for (I i = D - s; i < D; i++) out[i] = by * row[i] * row[i + s - D];
    }
}

/* d_x += what flows to x from the gradient of its products */
static void through_ring_products(I rows, I D, const real *grad, const real *x, real *d_x) {
    EACH(r, rows) EACH(s, D / 2 + 1) {
        const real *row = x + r * D, *g = grad + (r * (D / 2 + 1) + s) * D;
        real *out = d_x + r * D, by = s == 0 || 2 * s == D ? 1 : (real)1.41421356237309504880;
        EACH(i, D - s) out[i] += by * g[i] * row[i + s];
        EACH(i, D - s) out[i + s] += by * g[i] * row[i];
        for (I i = D - s; i < D; i++) {
            out[i] += by * g[i] * row[i + s - D];
            out[i + s - D] += by * g[i] * row[i];
        }
    }
}

/* Of an address: gcc 14 for aarch64 breaks off at a parameter that is a vector aligned as its numbers are. */
inline_ real sum_of(const vec *x) {
    real part[VL];
    *(vec *)part = *x;
    UNROLL for (int n = VL / 2; n; n /= 2)
        UNROLL for (int l = 0; l < n; l++) part[l] += part[l + n];
    return part[0];
}

/* The sum of n terms, each a function of its place i, as numbers of a type. Four sums at once: one waits for itself */
#define SUM(n, term)                                                                                                  \
    vec sum[4] = {{0}, {0}, {0}, {0}};                                                                                \
    real rest = 0;                                                                                                    \
    I i = 0;                                                                                                          \
    for (; i + 4 * VL <= n; i += 4 * VL) EACH(u, 4) sum[u] += term(vec, i + u * VL);                                  \
    for (; i + VL <= n; i += VL) sum[0] += term(vec, i);                                                              \
    for (; i < n; i++) rest += term(real, i);                                                                         \
    sum[0] = (sum[0] + sum[1]) + (sum[2] + sum[3]);                                                                   \
    return rest + sum_of(sum)
#define AT(type, x, i) (*(const type *)(x + (i)))

inline_ real dot(I n, const real *x, const real *y) {
#define TERM(type, i) AT(type, x, i) * AT(type, y, i)
    SUM(n, TERM);
#undef TERM
}

/* x . (y - z) */
inline_ real dot_difference(I n, const real *x, const real *y, const real *z) {
#define TERM(type, i) AT(type, x, i) * (AT(type, y, i) - AT(type, z, i))
    SUM(n, TERM);
#undef TERM
}

inline_ real total(I n, const real *x) {
#define TERM(type, i) AT(type, x, i)
    SUM(n, TERM);
#undef TERM
}

/* h = (y - mean) / s per row, inverse = 1 / s */
static void standardise(I rows, I n, real eps, const real *y, real *restrict h, real *restrict inverse) {
    EACH(r, rows) {
        const real *x = y + r * n;
        real *out = h + r * n, mean = total(n, x) / n;
        EACH(i, n) out[i] = x[i] - mean;
        real by = 1 / (real)sqrt(dot(n, out, out) / n + eps);
        EACH(i, n) out[i] *= by;
        inverse[r] = by;
    }
}

/* out = grad times the Jacobian of h; they may be one */
static void through_standardise(I rows, I n, const real *grad, const real *h, const real *inverse, real *out) {
    EACH(r, rows) {
        const real *g = grad + r * n, *x = h + r * n;
        real *y = out + r * n, mean = total(n, g) / n, along = dot(n, g, x) / n, by = inverse[r];
        EACH(i, n) y[i] = (g[i] - mean - x[i] * along) * by;
    }
}
"""
