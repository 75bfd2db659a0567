/* Products of the forward of bfloat16 and float16 in the matrix unit AMX. Its registers hold 16 rows of 64 bytes; one
 * instruction multiplies 16 rows of 32 bfloat16 with 16 lanes of 32. Queries are in the lanes, as everywhere: S^T = K Q^T
 * and O^T = V^T P^T, so that masks, maxima and sums are those of the other kernels.
 *
 * A float16 is the sum of two bfloat16, its parts, the larger of which truncation takes off. A product of two is then the
 * sum of four products of parts. Weights are rounded to 16 bits beside float16 and to 8 beside bfloat16.
 *
 * The parts of an infinity are NaN. So a score of float16 goes the ordinary way if its query or its key has an element
 * that is not finite, and so does a query's product of weights and values over a block where it sees such values, of
 * either type: 0 in a masked pair's weight would not hide them. Each pair is judged by its own query and key, and its
 * bits do not depend on others. */
#ifndef SDPA_KERNEL_AMX_PRODUCTS_H
#define SDPA_KERNEL_AMX_PRODUCTS_H

#include "pass.h"

/* The most queries in a unit, over which the copies that it makes of keys and values pay off. There are fewer where units
 * would be too few to keep many threads busy, but not below AMX_LEAST_QUERIES. */
#define AMX_QUERIES 384
#define AMX_LEAST_QUERIES 96
#define AMX_ENOUGH_UNITS 32
#define AMX_DEPTH 32   /* elements that one instruction sums, and keys or values in two registers of rows */
#define AMX_BYTES 1024 /* of a register */
#define AMX_MOST_PARTS 2

enum {
    AMX_CAN = SDPA_FEATURES_OF_UNITS | SDPA_FEATURE_SOFTCAP | SDPA_FEATURE_DROPOUT | SDPA_FEATURE_SINKS |
              SDPA_FEATURE_ALIBI | SDPA_FEATURE_INVARIANT
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
    real_bits *odd;          /* per query: not 0 if its scores go the ordinary way */
    bool any_odd;
} amx_scratch;

/* Whether units of this problem may go through the matrix unit. */
INLINE bool amx_can(const sdpa_problem *p) { return sdpa_is_narrow(p->dtype) && !(p->features & ~AMX_CAN); }

/* Queries of a unit. */
INLINE int64_t amx_queries(const sdpa_problem *p) {
    const int64_t heads = p->n_batch * p->n_head;
    int64_t n = AMX_QUERIES;
    while (n > AMX_LEAST_QUERIES && heads * ((p->n_q + n - 1) / n) < AMX_ENOUGH_UNITS) n /= 2;
    return n;
}

NOINLINE void amx_layout(amx_scratch *w, const sdpa_problem *p, int64_t n_lanes, int64_t s_row, int64_t block,
                         sdpa_arena *a) {
    const bool can = amx_can(p) && (p->n_q > FEW_QUERIES || p->invariant);
    w->parts = p->dtype == SDPA_BF16 ? 1 : 2;
    w->d_k = round_up(p->d_k, AMX_DEPTH);
    w->d_v = round_up(p->d_v, AMX_DEPTH);
    w->block = round_up(block, AMX_DEPTH);
    const int64_t size = 2 * w->parts;
    const array arrays[] = {
        ARRAY(w->q, can ? size * w->d_k * n_lanes : ABSENT),
        ARRAY(w->k, can ? size * w->block * w->d_k : ABSENT),
        ARRAY(w->v, can ? size * w->block * w->d_v : ABSENT),
        ARRAY(w->p[0], can ? size * w->block * s_row : ABSENT),
        ARRAY(w->p[1], can ? size * w->block * s_row : ABSENT),
        ARRAY(w->scores[0], can ? w->block * s_row : ABSENT),
        ARRAY(w->scores[1], can ? w->block * s_row : ABSENT),
        ARRAY(w->o, can ? w->d_v * n_lanes : ABSENT),
        ARRAY(w->odd, can ? n_lanes : ABSENT),
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
    } of[4];
} amx_terms;

static const amx_terms amx_terms_of[AMX_MOST_PARTS + 1] = {
    [1] = {1, {{0, 0}}},
    [2] = {4, {{1, 1}, {0, 1}, {1, 0}, {0, 0}}},
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

/* Takes the parts off x, the largest first, each in the high halves of the lanes. `rounds` the last one. */
INLINE void amx_split(vec x, int parts, bool rounds, ivec *part) {
    UNROLL for (int i = 0; i < parts - 1; i++) {
        part[i] = (ivec)x & ~0xffff;
        x -= (vec)part[i];
    }
    part[parts - 1] = rounds ? (ivec)x + 0x8000 : (ivec)x;
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

/* Rows of a block of keys or values, which are widened on the way to their parts or, if they have no unit stride,
 * before. */
INLINE rows amx_rows(const sdpa_matrix *m, int64_t j0, int64_t n, int64_t d, real *copy) {
    return is_narrow(m, d) ? narrow_rows(m, j0, n) : pack_rows(m, j0, n, d, 1, copy, NULL);
}

/* VL elements of row j from column c on. dtype, a constant, is that of the rows. */
INLINE vec amx_element(const rows *x, sdpa_dtype dtype, int64_t j, int64_t c) {
    if (sdpa_is_narrow(dtype)) return vload_as(dtype, x->narrow.data + j * x->narrow.row + 2 * c);
    return vload(x->p + j * x->row + c);
}

/* Sets odd[j] to whether row j has an element that is not finite. */
COLD NOINLINE void amx_find_odd(const sdpa_matrix *m, int64_t j0, int64_t n, int64_t d, real *line, bool *odd) {
    for (int64_t j = 0; j < n; j++) {
        load(line, m->data + (j0 + j) * m->row, d, m->col, m->dtype, m->swapped);
        odd[j] = !all_finite(line, d, 1, d);
    }
}

/* Keeps the largest magnitude that a lane has seen, as an integer, for amx_is_odd: whether one was not finite. */
INLINE void amx_see(ivec *most, vec x) { *most = vmost_bits(*most, (ivec)x & ~SIGN_BIT); }
INLINE ivec amx_is_odd(ivec most) { return most >= 0x7f800000; }

/* Keys as registers at w->k, rows after the last and columns from d on 0. Returns whether an element is odd. */
INLINE bool amx_pack_keys_as(const amx_scratch *w, const rows *k, sdpa_dtype dtype, int64_t d, int parts) {
    ivec most = {0};
    const int64_t steps = w->d_k / AMX_DEPTH;
    for (int64_t j = 0; j < round_up(k->n, AMX_DEPTH); j++) {
        for (int64_t step = 0; step < steps; step++) {
            const int64_t c = step * AMX_DEPTH;
            const vec first = j < k->n && c < d ? amx_element(k, dtype, j, c) : (vec){0},
                      second = j < k->n && c + VL < d ? amx_element(k, dtype, j, c + VL) : (vec){0};
            ivec x[AMX_MOST_PARTS], y[AMX_MOST_PARTS];
            if (parts > 1) amx_see(&most, first);
            if (parts > 1) amx_see(&most, second);
            amx_split(first, parts, false, x);
            amx_split(second, parts, false, y);
            char *to = w->k + (j / VL * steps + step) * parts * AMX_BYTES + j % VL * VEC_BYTES;
            UNROLL for (int i = 0; i < parts; i++) {
                vstore((real *)(to + i * AMX_BYTES), amx_high_halves(x[i], y[i]));
            }
        }
    }
    return vany(amx_is_odd(most));
}

/* Values as registers at w->v, transposed; keys after the last, columns from d on, and rows that are odd (or NULL) are
 * 0. Returns whether an element is odd. */
INLINE bool amx_pack_values_as(const amx_scratch *w, const rows *v, sdpa_dtype dtype, int64_t d, int parts,
                               const bool *odd) {
    ivec most = {0};
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
                    amx_see(&most, element);
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
    return vany(amx_is_odd(most));
}

/* Both with the type of the rows and the number of parts as constants. */
NOINLINE bool amx_pack_keys(const amx_scratch *w, const rows *k, int64_t d) {
    const bool narrow = k->narrow.data != NULL;
    if (w->parts == 1) return narrow ? amx_pack_keys_as(w, k, SDPA_BF16, d, 1) : amx_pack_keys_as(w, k, SDPA_F32, d, 1);
    return narrow ? amx_pack_keys_as(w, k, SDPA_F16, d, 2) : amx_pack_keys_as(w, k, SDPA_F32, d, 2);
}

NOINLINE bool amx_pack_values(const amx_scratch *w, const rows *v, int64_t d, const bool *odd) {
    const bool narrow = v->narrow.data != NULL;
    if (w->parts == 1) {
        return narrow ? amx_pack_values_as(w, v, SDPA_BF16, d, 1, odd) : amx_pack_values_as(w, v, SDPA_F32, d, 1, odd);
    }
    return narrow ? amx_pack_values_as(w, v, SDPA_F16, d, 2, odd) : amx_pack_values_as(w, v, SDPA_F32, d, 2, odd);
}

/* Packs the panels at w->q, as pack_panels left them, into pairs of adjacent rows, and finds the queries with odd
 * elements. */
NOINLINE void amx_pack_queries(amx_scratch *w, const real *q, int64_t n_i, int64_t d) {
    ivec any = {0};
    PANELS (panel, n_i) {
        const int64_t row = panel.nv * VL, part = w->d_k / 2 * row;
        const real *from = q + panel.i * d;
        real *to = (real *)w->q + w->parts * w->d_k / 2 * panel.i;
        for (int x = 0; x < panel.nv; x++) {
            ivec most = {0};
            for (int64_t c = 0; c < w->d_k; c += 2) {
                const vec even = c < d ? vload(from + c * row + x * VL) : (vec){0},
                          odd = c + 1 < d ? vload(from + (c + 1) * row + x * VL) : (vec){0};
                ivec first[AMX_MOST_PARTS], second[AMX_MOST_PARTS];
                amx_see(&most, even);
                amx_see(&most, odd);
                amx_split(even, AMX_MOST_PARTS, false, first);
                amx_split(odd, AMX_MOST_PARTS, false, second);
                for (int i = 0; i < w->parts; i++) {
                    vstore(to + i * part + c / 2 * row + x * VL, (vec)amx_pair(first[i], second[i]));
                }
            }
            const ivec is_odd = w->parts > 1 ? amx_is_odd(most) : (ivec){0};
            memcpy(w->odd + panel.i + x * VL, &is_odd, sizeof is_odd);
            any |= is_odd;
        }
    }
    w->any_odd = vany(any);
}

#endif
