/* The skeleton that all passes share. A unit is a block of queries in panels, streamed over the keys that it sees in
 * blocks:
 *
 *     keys b = {.j0 = j0};
 *     while (next_seen(u, size, j1, &b)) {
 *         rows k = pack_rows(...);
 *         PANELS(q, u->n_i) { ... panel_scores, bias_block, score ... }
 *     }
 *
 * Its results go to memory at the end. This file has the parts: the scratch of a pass, blocks of keys, products with
 * them, and the end of a unit that shares gradients with others. */
#ifndef SDPA_KERNEL_PASS_H
#define SDPA_KERNEL_PASS_H

#include "dropout.h"
#include "fast/few_queries.h"
#include "logits.h"

/* One array of a pass's scratch: the offset of its pointer, and its size. */
typedef struct array {
    void *pointer;
    size_t size; /* of an element */
    int64_t n;   /* ABSENT: the pointer is NULL */
} array;

#define ABSENT (-1)
#define ARRAY(pointer, n)                                                                                              \
    { &(pointer), sizeof *(pointer), n }
#define COUNT(arrays) ((int)(sizeof(arrays) / sizeof *(arrays)))

/* Takes an array from the arena. An arena without memory only adds up the bytes. */
INLINE void take_array(const array *x, sdpa_arena *a) {
    void *memory = x->n == ABSENT ? NULL : sdpa_take(a, x->size * (size_t)x->n);
    memcpy(x->pointer, &memory, sizeof memory);
}

/* Takes the arrays in order. Passes with short units unroll this. */
INLINE void take_arrays(const array *arrays, int n_arrays, sdpa_arena *a) {
    for (int i = 0; i < n_arrays; i++) take_array(&arrays[i], a);
}

/* Keys per block of a pass: `most`, or all of them if there are fewer. */
INLINE int64_t block_keys(const sdpa_problem *p, int64_t most) {
    return p->n_k < most ? round_up(p->n_k, SCORE_ROWS) : most;
}

/* block_keys for a pass that reads d elements per key and value. A single query reads longer runs. */
INLINE int64_t run_keys(const sdpa_problem *p, int64_t d) {
    int64_t most = sdpa_key_block(p);
    const bool runs = p->n_q == 1 && few_can(p);
    while (runs && most < RUN_KEYS && most * d * (int64_t)sizeof(real) < RUN_BYTES) most *= 2;
    return block_keys(p, most);
}

/* Lanes for the queries of a unit. */
INLINE int64_t unit_lanes(const sdpa_problem *p) {
    return round_up(p->n_q < sdpa_query_block(p) ? p->n_q : sdpa_query_block(p), VL);
}

/* Lanes of the widest panel. */
INLINE int64_t panel_lanes(int64_t n_lanes) { return n_lanes < SCORE_WIDTH * VL ? n_lanes : SCORE_WIDTH * VL; }

/* `line`, or what the registers of a program need if that is more. */
COLD NOINLINE int64_t larger_than_programs(const sdpa_problem *p, int64_t line) {
    const int64_t score = program_size(p->score_mod), mask = program_size(p->mask_mod);
    const int64_t program = score > mask ? score : mask;
    return program > line ? program : line;
}

/* Elements of VL rows that may hold queries, values or a mask's entries for a block of keys; or one gradient of a sink,
 * which there is without any of these; or the registers of a program. */
INLINE int64_t line_size(const sdpa_problem *p, int64_t block) {
    const int64_t d = p->d_k > p->d_v ? p->d_k : p->d_v, n = d > block ? d : block;
    const int64_t line = VL * round_up(n > 1 ? n : 1, VL);
    if (!(p->features & (SDPA_FEATURE_SCORE_MOD | SDPA_FEATURE_MASK_MOD))) return line;
    return larger_than_programs(p, line);
}

/* The scratch of a pass that needs the scores of one panel at a time, and no values. Its units have up to n_lanes
 * queries. */
typedef struct score_scratch {
    real *q;      /* pack_panels of d_k, signed so that the factor of the scores is >= 0 */
    real *s;      /* (block, s_row): scores of a panel */
    real *k;      /* pack_rows */
    real *k_tail; /* (SCORE_ROWS, d_k) */
    real *line;
    int64_t n_lanes, s_row, block;
} score_scratch;

NOINLINE score_scratch score_layout(const sdpa_problem *p, int64_t n_lanes, sdpa_arena *a) {
    score_scratch w = {.block = run_keys(p, p->d_k), .n_lanes = n_lanes};
    w.s_row = panel_lanes(w.n_lanes);
    const array arrays[] = {
        ARRAY(w.q, p->d_k * w.n_lanes),           ARRAY(w.s, w.block * w.s_row),
        ARRAY(w.k, w.block * row_stride(p->d_k)), ARRAY(w.k_tail, SCORE_ROWS * p->d_k),
        ARRAY(w.line, line_size(p, w.block)),
    };
    take_arrays(arrays, COUNT(arrays), a);
    return w;
}

/* A block of keys, j0 .. j0+n-1. */
typedef struct keys {
    int64_t j0, n;
} keys;

/* The first key of the first block of a pass over keys j0 .. j1-1: j0 or, if results must not depend on j0, the start
 * of the block that holds it. */
INLINE int64_t first_block(const sdpa_problem *p, int64_t j0, int64_t j1) {
    return p->invariant && j0 < j1 ? j0 - j0 % sdpa_key_block(p) : j0;
}

/* Moves b on to the next block, of at most `size` keys. False once b->j0 is `end`, or earlier if the call was
 * interrupted. */
INLINE bool next_keys(const sdpa_unit *u, int64_t size, int64_t end, keys *b) {
    b->j0 += b->n;
    b->n = end - b->j0 < size ? end - b->j0 : size;
    return b->n > 0 && !sdpa_run_stopped(u->run);
}

/* next_keys, but for blocks that masks hide. */
INLINE bool next_seen(const sdpa_unit *u, int64_t size, int64_t end, keys *b) {
    do {
        if (!next_keys(u, size, end, b)) return false;
    } while (is_hidden(u, b->j0, b->n));
    return true;
}

/* Describes the products of panel q of x (pack_panels of `depth`) with rows y, to be written to s. The caller sets
 * whatever else the mode needs. */
INLINE scores panel_scores(const real *x, panel q, const rows *y, int64_t depth, real *s, int64_t s_row) {
    return (scores){.j0 = y->j0,
                    .x = x + q.i * depth,
                    .y = y->p,
                    .y_row = y->row,
                    .y_tail = y->tail,
                    .tail_row = y->tail_row,
                    .n = y->n,
                    .depth = depth,
                    .s = s,
                    .s_row = s_row};
}

/* Rows j0 .. j0+n-1 of a block. j0 - y->j0 is a multiple of SCORE_ROWS, and so is n unless these rows are the last. */
INLINE rows part_of_rows(const rows *y, int64_t j0, int64_t n) {
    rows part = *y;
    part.p += (j0 - y->j0) * y->row;
    part.j0 = j0;
    part.n = n;
    return part;
}

/* s (n, nv vectors) = x. */
INLINE void fill_panel(real *s, int64_t s_row, int nv, int64_t n, vec x) {
    for (int64_t j = 0; j < n; j++) {
        for (int v = 0; v < nv; v++) vstore(s + j * s_row + v * VL, x);
    }
}

/* The part of s from lane i on; NULL if s is NULL. */
INLINE real *lane_of(real *s, int64_t i) { return s ? s + i : NULL; }

/* A block of weights, or of their gradients: n keys from j0 on by n_i queries in the lanes. */
typedef struct weight_block {
    const real *p;
    int64_t row, n_i, j0, n;
    int64_t diagonal; /* see struct gemm */
    bool in_order;
    bool fresh;
} weight_block;

/* Adds to the gradient of keys or values: rows j0 .. of d (.., width) += alpha a b, where b is the unit's rows of q or
 * dO. Does nothing if d or b is absent. */
INLINE void add_to_keys(const sdpa_matrix *d, int64_t width, const weight_block *a, const rows *b, real alpha,
                        bool finite) {
    if (!d->data || !b->p) return;
    gemm g = {.c = (real *)(d->data + a->j0 * d->row),
              .c_row = d->row / (int64_t)sizeof(real),
              .a = a->p,
              .a_stride = a->row,
              .b = b->p,
              .b_row = b->row,
              .m = a->n,
              .n = width,
              .depth = a->n_i,
              .diagonal = a->diagonal,
              .alpha = alpha,
              .fresh = a->fresh};
    multiply(&g, false, finite);
}

/* c (n_i, width) = row_scale c + alpha a^T b, where b is rows of keys or values. row_scale NULL means 1; otherwise
 * alpha is 1. Does nothing if b is absent. */
INLINE void add_to_queries(real *c, int64_t c_row, int64_t width, const weight_block *a, const rows *b,
                           const vec *row_scale, real alpha, bool finite) {
    gemm g = {.c = c,
              .c_row = c_row,
              .a = a->p,
              .a_stride = a->row,
              .b = b->p,
              .b_row = b->row,
              .m = a->n_i,
              .n = width,
              .depth = a->n,
              .diagonal = a->diagonal,
              .row_scale = (const real *)row_scale,
              .alpha = alpha,
              .in_order = a->in_order,
              .fresh = a->fresh};
    if (b->p) multiply(&g, true, finite);
}

/* Clears dK and dV of a fresh unit, except the rows of keys b, which will be written. */
NOINLINE void clear_keys(const sdpa_unit *u, keys b) {
    const sdpa_matrix *d[] = {&u->dk, &u->dv};
    const int64_t width[] = {u->problem->d_k, u->problem->d_v};
    for (int x = 0; x < 2 && u->fresh; x++) {
        for (int64_t j = 0; j < u->problem->n_k && d[x]->data; j++) {
            if (j == b.j0) j += b.n;
            if (j < u->problem->n_k) memset(d[x]->data + j * d[x]->row, 0, sizeof(real) * (size_t)width[x]);
        }
    }
}

/* What a unit adds to the gradients of its head. */
typedef struct head_sums {
#define SUM(name, rows, columns) double name;
    SDPA_HEAD_GRADIENTS(SUM)
#undef SUM
} head_sums;

INLINE void add_to_head(const sdpa_matrix *d, double sum, real *line) {
    const real rounded = (real)sum;
    if (d->data) add_row(d->data, 0, d->dtype, &rounded, 1, line);
}

/* The number of key blocks that hold n_keys keys. */
INLINE int64_t blocks_of(const sdpa_problem *p, int64_t n_keys) {
    return (n_keys + sdpa_key_block(p) - 1) / sdpa_key_block(p);
}

/* Key blocks first .. last-1. */
typedef struct key_blocks {
    int64_t first, last;
} key_blocks;

/* Those that a unit which sees keys j0 .. j1-1 goes through: theirs or, where threads share its group, all of its turn. */
INLINE key_blocks blocks_to_pass(const sdpa_unit *u, int64_t j0, int64_t j1) {
    const int64_t first = j0 / sdpa_key_block(u->problem);
    key_blocks blocks = {first, j0 < j1 ? blocks_of(u->problem, j1) : first};
    sdpa_turn_blocks(u, &blocks.first, &blocks.last);
    return blocks;
}

/* Whether a unit that sees keys j0 .. j1-1 sees none of a block. */
INLINE bool sees_none_of(const sdpa_unit *u, int64_t j0, int64_t j1, int64_t block) {
    const int64_t size = sdpa_key_block(u->problem), first = block * size;
    return j0 >= j1 || first + size <= j0 || first >= j1 || is_hidden(u, first, size);
}

/* Ends a unit, when its turn has come: adds dq (n_i, dq_row), dmask (one element per query, for a mask that is
 * broadcast over keys) and the sums of the head to the gradients that are wanted. dq that is the unit's own is written,
 * not added. */
NOINLINE void store_gradients(const sdpa_unit *u, const real *dq, int64_t dq_row, const real *dmask,
                              const head_sums *sums, real *line) {
    if (!sdpa_turn_wait_last(u)) return;
    const sdpa_matrix *q = &u->dq, *mask = &u->dmask;
    for (int64_t i = 0; i < u->n_i; i++) {
        const int64_t row = u->i0 + i;
        char *to = q->data ? q->data + row * q->row : NULL;
        if (to && u->own_dq) {
            store(to, dq + i * dq_row, u->problem->d_k, q->col, q->dtype);
        } else if (to) {
            add_row(to, q->col, q->dtype, dq + i * dq_row, u->problem->d_k, line);
        }
        if (mask->data && mask->col == 0) add_row(mask->data + row * mask->row, 0, mask->dtype, dmask + i, 1, line);
    }
#define ADD(name, rows, columns) add_to_head(&u->name, sums->name, line);
    SDPA_HEAD_GRADIENTS(ADD)
#undef ADD
    if (u->sums) sdpa_program_add_sums(u->problem->score_mod, u->sums);
    sdpa_turn_end(u);
}

/* t = t times `factor` for a panel. */
INLINE void scale_panel(const scores *t, panel q, real factor) {
    for (int64_t j = 0; j < t->n; j++) {
        for (int x = 0; x < q.nv; x++) {
            vstore(t->s + j * t->s_row + x * VL, factor * vload(t->s + j * t->s_row + x * VL));
        }
    }
}

/* The running softmax of queries: the maximum m in log2 units, its rounding error `low` where m is huge (else 0), and
 * the sum l of 2^(c s - m - low). `rounded`: some blocks store logits, rounded, with what masks and biases add to them; a
 * huge m is then taken from rounded logits in all blocks, or equal ones would weigh differently, and low is 0. */
typedef struct running {
    real *m, *low, *l;
    bool rounded;
} running;

/* Given the maxima `sum` of a block's scores for the queries from i on, moves m and low and sets alpha = 2^(old m - new
 * m) and shift = m. If `exact` is not NULL, m moves only where exact is not 0, where m is not set yet, or where it is
 * stale. */
INLINE void move_maximum(const running *row, int64_t i, int nv, const real *exact, real c, vec *sum, vec *alpha,
                         vec *shift) {
    const vec factor = vset1(c);
    for (int x = 0; x < nv; x++) {
        real *m = row->m + i + x * VL, *low = row->low + i + x * VL;
        vec old = vload(m), old_low = vload(low), most = factor * sum[x];
        ivec moves = most > old;
        if (exact) {
            moves &= (old == -(real)INFINITY) | (vload(exact + i + x * VL) != 0) |
                     (vmulsub(factor, sum[x], old) > STALE_LIMIT);
        }
        vec new = vselect(moves, most, old);
        /* For the maximum itself 2^(c s - m) is 2^(rounding error of m) instead of 1. This is the same in all blocks
         * and harmless, unless m is so large that it overflows. */
        const ivec apart = row->rounded ? (ivec){0} : is_huge(most);
        vec rest = vselect(apart, vmulsub(factor, sum[x], most), (vec){0});
        vec new_low = vselect(moves, vselect(rest - rest == 0, rest, (vec){0}), old_low);
        vstore(m, new);
        vstore(low, new_low);
        /* A query that has seen no key yet has m = -inf: shift by 0, so that 2^(-inf - 0) = 0. */
        shift[x] = vselect(new == -(real)INFINITY, (vec){0}, new);
        alpha[x] = vexp2((old - shift[x]) + (old_low - new_low));
        sum[x] = (vec){0};
    }
}

#endif
