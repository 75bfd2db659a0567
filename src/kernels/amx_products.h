/* Products in the matrix unit AMX. Its registers hold 16 rows of 64 bytes; one instruction multiplies 16 rows of 32
 * bfloat16 with 16 lanes of 32. Queries are in the lanes, as everywhere: S^T = K Q^T and O^T = V^T P^T, so that masks,
 * maxima and sums are those of the other kernels.
 *
 * A float16 is the sum of two bfloat16, its parts, a float32 that of three. A product of two float16 is the sum of four
 * products of parts. Of the nine of two float32 six are computed: a part is at most 2^-8 of the one before, so the others
 * are at most 2^-24 of the product. Weights are rounded to 16 bits beside float16 and to 8 beside bfloat16; beside
 * float32 they keep their 24, by truncation, which takes fewer operations and leaves at most 2^-22.
 *
 * The parts of an infinity are NaN, those of a huge product may overflow with different signs, and the unit takes
 * subnormal numbers for 0. So a row is odd if it has an element that is NaN or not below AMX_MOST or, of float32, one that
 * is not 0 but below AMX_LEAST. A score goes the ordinary way if its query or its key is odd, except scores of bfloat16,
 * which has but one part, and so does a query's product of weights and values over a block where it
 * sees odd values: 0 in a masked pair's weight would not hide an infinity. Each pair is judged by its own query and key,
 * and its bits do not depend on others. */
#ifndef SDPA_KERNEL_AMX_PRODUCTS_H
#define SDPA_KERNEL_AMX_PRODUCTS_H

#include "pass.h"

/* The most queries in a unit, over which the copies that it makes of keys and values pay off. There are fewer where units
 * would be too few to keep many threads busy, but not below AMX_LEAST_QUERIES. */
#define AMX_QUERIES 384
#define AMX_LEAST_QUERIES 96
#define AMX_ENOUGH_UNITS 32
#define AMX_FEW_QUERIES 32 /* of float32 */
#define AMX_DEPTH 32       /* elements that one instruction sums, and keys or values in two registers of rows */
#define AMX_MOST_KEYS 128  /* in a block */
#define AMX_BYTES 1024     /* of a register */
#define AMX_MOST_PARTS 3

/* 2^-51, as an integer. The third part of a number from there on is a multiple of 2^-74, and its product with another
 * number's first part is at least 2^-125: a normal number. */
#define AMX_LEAST 0x26000000
#define AMX_MOST 0x5d800000 /* 2^60; a float16 reaches it only as an infinity or NaN */

enum {
    AMX_CAN = SDPA_FEATURES_OF_UNITS | SDPA_FEATURE_SOFTCAP | SDPA_FEATURE_DROPOUT | SDPA_FEATURE_SINKS |
              SDPA_FEATURE_ALIBI | SDPA_FEATURE_INVARIANT | SDPA_FEATURE_SCORE_MOD
};

typedef struct amx_scratch {
    int parts;
    int64_t d_k, d_v, block; /* rounded up to whole registers */
    char *q;                 /* panel after panel, each (parts, d_k / 2, its lanes) pairs along d */
    char *k;                 /* (block / 16, d_k / 32, parts) registers */
    char *v;                 /* (block / 32, d_v / 16, parts) registers: 16 columns by 32 keys */
    char *p[2];              /* (parts, block / 2, s_row) pairs of keys, for two panels */
    real *scores[2];         /* (block, s_row) */
    real *o;                 /* panel after panel, each (d_v, its lanes) */
    real *sum;               /* (d_v, s_row): P V of a panel and a block, beside float32 */
    real_bits *odd;          /* per query: not 0 if its scores go the ordinary way */
    bool any_odd;            /* whether any query is odd, even if its scores do not */
} amx_scratch;

/* Parts of an element. */
INLINE int amx_parts(const sdpa_problem *p) { return p->dtype == SDPA_BF16 ? 1 : p->dtype == SDPA_F16 ? 2 : 3; }

/* Whether the units of this problem go through the matrix unit: not few queries, which wait for memory and over which
 * parts of keys and values do not pay. It depends on the problem alone, so that forward and backward agree on how a score
 * is rounded. */
INLINE bool amx_can(const sdpa_problem *p) {
    const int64_t few = amx_parts(p) == 3 ? AMX_FEW_QUERIES : FEW_QUERIES;
    return !(p->features & ~AMX_CAN) && (p->n_q > few || p->invariant);
}

/* Queries of a unit. */
INLINE int64_t amx_queries(const sdpa_problem *p) {
    const int64_t heads = p->n_batch * p->n_head;
    int64_t n = AMX_QUERIES;
    while (n > AMX_LEAST_QUERIES && heads * ((p->n_q + n - 1) / n) < AMX_ENOUGH_UNITS) n /= 2;
    return n;
}

/* The scratch of the scores of n_lanes queries and a block of keys, of d elements each. */
NOINLINE amx_scratch amx_score_layout(const sdpa_problem *p, int64_t d, int64_t n_lanes, int64_t block, sdpa_arena *a) {
    const bool can = amx_can(p);
    amx_scratch w = {.parts = amx_parts(p), .d_k = round_up(d, AMX_DEPTH), .block = round_up(block, AMX_DEPTH)};
    const int64_t size = 2 * w.parts * w.d_k;
    const array arrays[] = {
        ARRAY(w.q, can ? size * n_lanes : ABSENT),
        ARRAY(w.k, can ? size * w.block : ABSENT),
        ARRAY(w.odd, can ? n_lanes : ABSENT),
    };
    take_arrays(arrays, COUNT(arrays), a);
    return w;
}

/* That of the forward. */
NOINLINE void amx_layout(amx_scratch *w, const sdpa_problem *p, int64_t n_lanes, int64_t s_row, int64_t block,
                         sdpa_arena *a) {
    const bool can = amx_can(p);
    *w = amx_score_layout(p, p->d_k, n_lanes, block, a);
    w->d_v = round_up(p->d_v, AMX_DEPTH);
    const int64_t size = 2 * w->parts;
    const array arrays[] = {
        ARRAY(w->v, can ? size * w->block * w->d_v : ABSENT),
        ARRAY(w->p[0], can ? size * w->block * s_row : ABSENT),
        ARRAY(w->p[1], can ? size * w->block * s_row : ABSENT),
        ARRAY(w->scores[0], can ? w->block * s_row : ABSENT),
        ARRAY(w->scores[1], can ? w->block * s_row : ABSENT),
        ARRAY(w->o, can ? w->d_v * n_lanes : ABSENT),
        ARRAY(w->sum, can && w->parts == 3 ? w->d_v * s_row : ABSENT),
    };
    take_arrays(arrays, COUNT(arrays), a);
}

/* Whether results below the normal numbers become 0 is a mode of the thread. Such weights would slow down what follows,
 * and with AVX-512 to find them costs more than the mode. */
#ifdef HAVE_SCALE
typedef unsigned amx_modes;
INLINE amx_modes amx_flush_begin(void) {
    const amx_modes modes = _mm_getcsr();
    _mm_setcsr(modes | _MM_FLUSH_ZERO_ON);
    return modes;
}
INLINE void amx_flush_end(const amx_modes *modes) { _mm_setcsr(*modes); }
#else
typedef char amx_modes;
INLINE amx_modes amx_flush_begin(void) { return 0; }
INLINE void amx_flush_end(const amx_modes *modes) { (void)modes; }
#endif

/* ------------------------------------------------------------------------------------ products */

/* An operand in registers. Bytes from a row to the next, to the next 16 rows of the result (or lanes), to the next 32
 * steps of the sum, to the next part. */
typedef struct amx_operand {
    const char *p;
    int64_t row, next, step, part;
} amx_operand;

/* The products of parts, the smallest first, so that a sum rounds like the last of them alone. */
typedef struct amx_terms {
    int n;
    struct {
        int8_t a, b;
    } of[6];
} amx_terms;

static const amx_terms amx_terms_of[AMX_MOST_PARTS + 1] = {
    [1] = {1, {{0, 0}}},
    [2] = {4, {{1, 1}, {0, 1}, {1, 0}, {0, 0}}},
    [3] = {6, {{2, 0}, {1, 1}, {0, 2}, {0, 1}, {1, 0}, {0, 0}}},
};

/* Products of two by nv registers at a time: c (blocks of 32 rows, nv vectors) = a b, or += a b. */
typedef struct amx_task {
    real *c;
    int64_t c_row, c_step; /* elements from a row of c to the next, from a block */
    amx_operand a, b;
    int64_t a_step; /* bytes from the a of a block to that of the next */
    int64_t steps;  /* of 32 */
    int parts, nv;
    bool adds;
    int64_t blocks; /* that are left */
    int term;       /* and the step where this one goes on */
    int64_t step;
} amx_task;

/* Zeros in, loads or stores the results. nv is a constant here and below. */
INLINE void amx_begin_block(amx_registers *r, const amx_task *t, int nv) {
    const real *c = t->c, *second = c + VL * t->c_row;
    const int64_t row = t->c_row * (int64_t)sizeof(real);
    (void)r, (void)second, (void)row;
    if (!t->adds) {
        AMX_ZERO(r, 0);
        AMX_ZERO(r, 3);
        if (nv > 1) AMX_ZERO(r, 1);
        if (nv > 1) AMX_ZERO(r, 4);
        if (nv > 2) AMX_ZERO(r, 2);
        if (nv > 2) AMX_ZERO(r, 5);
        return;
    }
    AMX_LOAD(r, 0, c, row);
    if (nv > 1) AMX_LOAD(r, 1, c + VL, row);
    if (nv > 2) AMX_LOAD(r, 2, c + 2 * VL, row);
    AMX_LOAD(r, 3, second, row);
    if (nv > 1) AMX_LOAD(r, 4, second + VL, row);
    if (nv > 2) AMX_LOAD(r, 5, second + 2 * VL, row);
}

INLINE void amx_end_block(amx_registers *r, const amx_task *t, int nv) {
    real *c = t->c, *second = c + VL * t->c_row;
    const int64_t row = t->c_row * (int64_t)sizeof(real);
    (void)r;
    AMX_STORE(r, 0, c, row);
    if (nv > 1) AMX_STORE(r, 1, c + VL, row);
    if (nv > 2) AMX_STORE(r, 2, c + 2 * VL, row);
    AMX_STORE(r, 3, second, row);
    if (nv > 1) AMX_STORE(r, 4, second + VL, row);
    if (nv > 2) AMX_STORE(r, 5, second + 2 * VL, row);
}

/* One step. Three vectors take six registers for results, so each operand has one that is loaded anew. Returns whether
 * the task has ended. */
INLINE bool amx_step(amx_registers *r, amx_task *t, int nv) {
    const amx_terms *terms = &amx_terms_of[t->parts];
    if (t->term == 0 && t->step == 0) amx_begin_block(r, t, nv);
    const char *x = t->a.p + terms->of[t->term].a * t->a.part + t->step * t->a.step;
    const char *y = t->b.p + terms->of[t->term].b * t->b.part + t->step * t->b.step;
    AMX_LOAD(r, 6, x, t->a.row);
    AMX_LOAD(r, 7, y, t->b.row);
    AMX_MULTIPLY(r, 0, 6, 7);
    if (nv < 3) {
        AMX_LOAD(r, 2, x + t->a.next, t->a.row);
        AMX_MULTIPLY(r, 3, 2, 7);
    }
    if (nv == 2) {
        AMX_LOAD(r, 5, y + t->b.next, t->b.row);
        AMX_MULTIPLY(r, 1, 6, 5);
        AMX_MULTIPLY(r, 4, 2, 5);
    }
    if (nv == 3) {
        AMX_LOAD(r, 7, y + t->b.next, t->b.row);
        AMX_MULTIPLY(r, 1, 6, 7);
        AMX_LOAD(r, 7, y + 2 * t->b.next, t->b.row);
        AMX_MULTIPLY(r, 2, 6, 7);
        AMX_LOAD(r, 6, x + t->a.next, t->a.row);
        AMX_MULTIPLY(r, 5, 6, 7);
        AMX_LOAD(r, 7, y + t->b.next, t->b.row);
        AMX_MULTIPLY(r, 4, 6, 7);
        AMX_LOAD(r, 7, y, t->b.row);
        AMX_MULTIPLY(r, 3, 6, 7);
    }
    if (++t->step < t->steps) return false;
    t->step = 0;
    if (++t->term < terms->n) return false;
    t->term = 0;
    amx_end_block(r, t, nv);
    t->c += t->c_step;
    t->a.p += t->a_step;
    return --t->blocks == 0;
}

NOINLINE bool amx_step_1(amx_registers *r, amx_task *t) { return amx_step(r, t, 1); }
NOINLINE bool amx_step_2(amx_registers *r, amx_task *t) { return amx_step(r, t, 2); }
NOINLINE bool amx_step_3(amx_registers *r, amx_task *t) { return amx_step(r, t, 3); }

/* Products that are computed between the steps of other work, which they overlap: the unit runs beside the vectors. */
typedef struct amx_queue {
    amx_registers *registers;
    amx_task tasks[2];
    int n, at;
} amx_queue;

/* Adds a task, unless it is empty. */
INLINE void amx_push(amx_queue *queue, const amx_task *t) {
    if (t->blocks > 0) queue->tasks[queue->n++] = *t;
}

INLINE int64_t amx_steps_left(const amx_queue *queue) {
    int64_t steps = 0;
    for (int i = queue->at; i < queue->n; i++) {
        const amx_task *t = &queue->tasks[i];
        steps += t->blocks * t->steps * amx_terms_of[t->parts].n;
    }
    return steps;
}

/* Computes the next steps, at most so many. */
NOINLINE void amx_advance(amx_queue *queue, int64_t steps) {
    static bool (*const step[])(amx_registers * r, amx_task * t) = {NULL, amx_step_1, amx_step_2, amx_step_3};
    for (; steps > 0 && queue->at < queue->n; steps--) {
        amx_task *t = &queue->tasks[queue->at];
        if (step[t->nv](queue->registers, t)) queue->at++;
    }
}

/* ------------------------------------------------------------------------------------ packing */

/* Splits x into parts, the largest first, each in the high halves of the lanes. Those of an element are all of it; three
 * are rounded to nearest. Those of a `weight`, a constant, are truncated, and the last is rounded. */
INLINE void amx_split(vec x, int parts, bool weight, ivec *part) {
    UNROLL for (int i = 0; i < parts - 1; i++) {
        part[i] = (!weight && parts == 3 ? (ivec)x + 0x8000 : (ivec)x) & ~0xffff;
        x -= (vec)part[i];
    }
    part[parts - 1] = weight ? (ivec)x + 0x8000 : (ivec)x;
}

/* Pairs of the high halves. */
INLINE ivec amx_pair(ivec even, ivec odd) {
    typedef uint32_t words __attribute__((vector_size(VEC_BYTES)));
    return (ivec)((words)even >> 16) | (odd & ~0xffff);
}

/* The high halves of two vectors, one after the other. */
INLINE vec amx_high_halves(ivec first, ivec second) {
    typedef uint16_t halves __attribute__((vector_size(VEC_BYTES)));
    return (vec)__builtin_shufflevector((halves)first, (halves)second, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25,
                                        27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63);
}

/* Rows of a block of keys or values, which are widened on the way to one or two parts or, if they have no unit stride,
 * before. */
INLINE rows amx_rows(const sdpa_matrix *m, int64_t j0, int64_t n, int64_t d, int parts, real *copy) {
    return parts < 3 && is_narrow(m, d) ? narrow_rows(m, j0, n) : pack_rows(m, j0, n, d, 1, copy, NULL);
}

/* VL elements of row j from column c on. dtype, a constant, is that of the rows. */
INLINE vec amx_element(const rows *x, sdpa_dtype dtype, int64_t j, int64_t c) {
    if (sdpa_is_narrow(dtype)) return vload_as(dtype, x->narrow.data + j * x->narrow.row + 2 * c);
    return vload(x->p + j * x->row + c);
}

/* Sets odd[j] to whether row j is odd. */
COLD NOINLINE void amx_find_odd(const sdpa_matrix *m, int64_t j0, int64_t n, int64_t d, int parts, real *line,
                                bool *odd) {
    for (int64_t j = 0; j < n; j++) {
        load(line, m->data + (j0 + j) * m->row, d, m->col, m->dtype, m->swapped);
        odd[j] = false;
        for (int64_t c = 0; c < d; c++) {
            int32_t bits;
            memcpy(&bits, line + c, sizeof bits);
            bits &= 0x7fffffff;
            odd[j] |= bits >= AMX_MOST || (parts == 3 && bits != 0 && bits < AMX_LEAST);
        }
    }
}

/* The magnitudes, as integers, that the lanes have seen: the largest and, but for 0, one below the smallest. */
typedef struct amx_range {
    ivec most, least;
} amx_range;

INLINE amx_range amx_no_range(void) { return (amx_range){{0}, (ivec){0} + INT32_MAX}; }

/* `parts` is a constant here and below. */
INLINE void amx_see(amx_range *range, vec x, int parts) {
    const ivec magnitude = (ivec)x & ~SIGN_BIT;
    range->most = vmost_bits(range->most, magnitude);
    if (parts == 3) range->least = vleast_bits(range->least, (magnitude - 1) & ~SIGN_BIT);
}

/* The lanes that have seen an odd element. */
INLINE ivec amx_is_odd(const amx_range *range) { return (range->most >= AMX_MOST) | (range->least < AMX_LEAST - 1); }

/* Keys as registers at w->k, rows after the last and columns from d on 0. Returns whether a row is odd. */
INLINE bool amx_pack_keys_as(const amx_scratch *w, const rows *k, sdpa_dtype dtype, int64_t d, int parts) {
    amx_range range = amx_no_range();
    const int64_t steps = w->d_k / AMX_DEPTH;
    for (int64_t j = 0; j < round_up(k->n, AMX_DEPTH); j++) {
        for (int64_t step = 0; step < steps; step++) {
            const int64_t c = step * AMX_DEPTH;
            const vec first = j < k->n && c < d ? amx_element(k, dtype, j, c) : (vec){0},
                      second = j < k->n && c + VL < d ? amx_element(k, dtype, j, c + VL) : (vec){0};
            ivec x[AMX_MOST_PARTS], y[AMX_MOST_PARTS];
            if (parts > 1) amx_see(&range, first, parts);
            if (parts > 1) amx_see(&range, second, parts);
            amx_split(first, parts, false, x);
            amx_split(second, parts, false, y);
            char *to = w->k + (j / VL * steps + step) * parts * AMX_BYTES + j % VL * VEC_BYTES;
            UNROLL for (int i = 0; i < parts; i++) {
                vstore((real *)(to + i * AMX_BYTES), amx_high_halves(x[i], y[i]));
            }
        }
    }
    return vany(amx_is_odd(&range));
}

/* Values as registers at w->v, transposed; keys after the last, columns from d on, and rows that are odd (or NULL) are
 * 0. Returns whether a row is odd. */
INLINE bool amx_pack_values_as(const amx_scratch *w, const rows *v, sdpa_dtype dtype, int64_t d, int parts,
                               const bool *odd) {
    amx_range range = amx_no_range();
    char *to = w->v;
    for (int64_t j0 = 0; j0 < v->n; j0 += AMX_DEPTH) {
        for (int64_t c = 0; c < w->d_v; c += VL, to += parts * AMX_BYTES) {
            vec pairs[AMX_MOST_PARTS][VL];
            for (int64_t j = 0; j < VL; j++) {
                ivec x[2][AMX_MOST_PARTS];
                UNROLL for (int half = 0; half < 2; half++) {
                    const int64_t row = j0 + 2 * j + half;
                    const bool there = row < v->n && c < d && !(odd && odd[row]);
                    const vec element = there ? amx_element(v, dtype, row, c) : (vec){0};
                    amx_see(&range, element, parts);
                    amx_split(element, parts, false, x[half]);
                }
                UNROLL for (int i = 0; i < parts; i++) pairs[i][j] = (vec)amx_pair(x[0][i], x[1][i]);
            }
            UNROLL for (int i = 0; i < parts; i++) {
                vec r[VL];
                UNROLL for (int l = 0; l < VL; l++) r[l] = pairs[i][l];
                vtranspose(r);
                UNROLL for (int l = 0; l < VL; l++) vstore((real *)(to + i * AMX_BYTES + l * VEC_BYTES), r[l]);
            }
        }
    }
    return vany(amx_is_odd(&range));
}

/* Both with the type of the rows and the number of parts as constants. */
NOINLINE bool amx_pack_keys(const amx_scratch *w, const rows *k, int64_t d) {
    const bool narrow = k->narrow.data != NULL;
    if (w->parts == 3) return amx_pack_keys_as(w, k, SDPA_F32, d, 3);
    if (w->parts == 1) return narrow ? amx_pack_keys_as(w, k, SDPA_BF16, d, 1) : amx_pack_keys_as(w, k, SDPA_F32, d, 1);
    return narrow ? amx_pack_keys_as(w, k, SDPA_F16, d, 2) : amx_pack_keys_as(w, k, SDPA_F32, d, 2);
}

NOINLINE bool amx_pack_values(const amx_scratch *w, const rows *v, int64_t d, const bool *odd) {
    const bool narrow = v->narrow.data != NULL;
    if (w->parts == 3) return amx_pack_values_as(w, v, SDPA_F32, d, 3, odd);
    if (w->parts == 1) {
        return narrow ? amx_pack_values_as(w, v, SDPA_BF16, d, 1, odd) : amx_pack_values_as(w, v, SDPA_F32, d, 1, odd);
    }
    return narrow ? amx_pack_values_as(w, v, SDPA_F16, d, 2, odd) : amx_pack_values_as(w, v, SDPA_F32, d, 2, odd);
}

/* Packs the panels at w->q, as pack_panels left them, into pairs of adjacent rows, and finds the odd queries. */
NOINLINE void amx_pack_queries(amx_scratch *w, const real *q, int64_t n_i, int64_t d) {
    ivec any = {0};
    PANELS (panel, n_i) {
        const int64_t row = panel.nv * VL, part = w->d_k / 2 * row;
        const real *from = q + panel.i * d;
        real *to = (real *)w->q + w->parts * w->d_k / 2 * panel.i;
        for (int x = 0; x < panel.nv; x++) {
            amx_range range = amx_no_range();
            for (int64_t c = 0; c < w->d_k; c += 2) {
                const vec even = c < d ? vload(from + c * row + x * VL) : (vec){0},
                          odd = c + 1 < d ? vload(from + (c + 1) * row + x * VL) : (vec){0};
                ivec first[AMX_MOST_PARTS], second[AMX_MOST_PARTS];
                amx_see(&range, even, 3);
                amx_see(&range, odd, 3);
                amx_split(even, AMX_MOST_PARTS, false, first);
                amx_split(odd, AMX_MOST_PARTS, false, second);
                for (int i = 0; i < w->parts; i++) {
                    vstore(to + i * part + c / 2 * row + x * VL, (vec)amx_pair(first[i], second[i]));
                }
            }
            if (w->parts < 3) range.least = (ivec){0} + INT32_MAX;
            const ivec is_odd = amx_is_odd(&range), by_vectors = w->parts > 1 ? is_odd : (ivec){0};
            memcpy(w->odd + panel.i + x * VL, &by_vectors, sizeof by_vectors);
            any |= is_odd;
        }
    }
    w->any_odd = vany(any);
}

#endif
