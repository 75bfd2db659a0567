/* Programs of the user (src/program.h) on tiles. A register holds a tile, some keys by the vectors of a panel of
 * queries, so that one decision about an instruction serves up to 24 vectors. What depends on the query alone is
 * computed once per panel and block of keys, what depends on the key alone for WINDOW keys at a time. */
#ifndef SDPA_KERNEL_PROGRAM_H
#define SDPA_KERNEL_PROGRAM_H

#include "../program.h"
#include "pack.h"
#include "vmath.h"

/* The most elements of a tile, and the keys whose own values are kept. */
#define TILE_ELEMENTS (MOST_SCORE_ROWS * VL)
_Static_assert(SCORE_WIDTH <= MOST_SCORE_ROWS / SCORE_ROWS, "a tile of one vector is the largest");
#define WINDOW 128
#define SLOT_ELEMENTS (TILE_ELEMENTS > WINDOW ? TILE_ELEMENTS : WINDOW)

/* A matrix with a row for each key and a column for each lane. */
typedef struct program_input {
    const real *p;
    int64_t row;
} program_input;
typedef struct program_output {
    real *p; /* NULL: not wanted */
    int64_t row;
} program_output;

typedef struct program_run {
    const sdpa_program *program;
    const sdpa_code *code;
    enum sdpa_variant variant;
    char *registers;
    int64_t slot;    /* bytes of a register */
    sdpa_sums *sums; /* see sdpa_unit */
    int64_t batch, head, first_query, n_i;
    int64_t window, window_keys; /* the keys for which the key section has run: the first, how many */
    int64_t end_key;             /* of the block */
    int64_t row, rows;           /* of the tile, in the window */
    int nv;
    real *bad, *bad_queries, *bad_keys, *bad_pairs; /* where an index was out of range; bad: of the present section */
    bool is_mask;
    bool any_bad;        /* in bad_queries or bad_keys, so far */
    program_input in[4]; /* score, tangent, upstream, second */
    program_output out[SDPA_N_OUTPUTS];
} program_run;

/* The registers of an instruction. */
typedef struct operands {
    char *dst;
    const char *a, *b, *c;
} operands;

/* Reals of scratch for a program, or 0. */
INLINE int64_t program_size(const sdpa_program *p) {
    return p ? (sdpa_program_registers(p) + 4) * SLOT_ELEMENTS * 8 / (int64_t)sizeof(real) : 0;
}

INLINE vec lesser(vec a, vec b) { return vselect(a != a, a, vmin2(a, b)); }

/* e^x. The error is at most 1.6 ulp where the result is below 2^127 (2^1023), |x| ulp above. */
INLINE vec exponential_of(vec x) {
    const double c = M_LOG2E, c_high = (real)(SDPA_REAL == 32 ? 0x1.715p0 : 0x1.715476p0);
    const real most = (real)((SDPA_REAL == 32 ? 127 : 1023) / M_LOG2E),
               least = (real)(-(SDPA_REAL == 32 ? 126 : 1022) / M_LOG2E);
    const vec inside = vselect(x < least, vset1(least), vselect(x > most, vset1(most), x));
    vec e = vexp2_product(inside, (real)c, (real)c_high, (real)(c - c_high), least);
    e = vselect(x < least, (vec){0}, e);
    if (vany(x > most)) {
        const vec half = vexp2(vset1((real)(0.5 * M_LOG2E)) * x);
        e = vselect(x > most, half * half, e);
    }
    return vselect(x != x, x, e);
}

/* y = log x. */
NOINLINE void logarithms(real *y, const real *x, int64_t n) {
    SIMD for (int64_t i = 0; i < n; i++) {
        const double a = x[i], scaled = a < 0x1p-1000 ? a * 0x1p100 : a, shift = a < 0x1p-1000 ? 100 * M_LN2 : 0;
        const double l = log_of(scaled) - shift, other = a == 0 ? -INFINITY : a < 0 ? NAN : a; /* NaN and inf stay */
        y[i] = (real)(a > 0 && a <= DBL_MAX ? l : other);
    }
}

#define SQUARE_ROOT(x) (SDPA_REAL == 32 ? (real)sqrtf((float)(x)) : (real)sqrt((double)(x)))

/* x without its fraction; numbers beyond integers, and NaN, give the least one, as NumPy on x86 does. A program with it is
 * wide, since intervals know nothing of what it gives. */
INLINE int64_t truncated(real x) { return fabs((double)x) < 0x1p63 ? (int64_t)x : INT64_MIN; }

INLINE void read_tile(const program_run *r, const program_input *in, real *to) {
    for (int64_t i = 0; i < r->rows; i++, to += r->nv * VL) {
        for (int v = 0; v < r->nv; v++) vstore(to + v * VL, vload(in->p + i * in->row + v * VL));
    }
}

INLINE void write_tile(const program_run *r, const program_output *out, const real *from) {
    for (int64_t i = 0; i < r->rows && out->p; i++, from += r->nv * VL) {
        for (int v = 0; v < r->nv; v++) vstore(out->p + i * out->row + v * VL, vload(from + v * VL));
    }
}

/* Runs n_steps instructions on n elements, a multiple of VL; wide: with integers of 64 bits beside float32. */
#define narrow_run_section OF_BASE(narrow_run_section)
#define wide_run_section OF_BASE(wide_run_section)
SHARED void narrow_run_section(program_run *r, const sdpa_instruction *first, int n_steps, int64_t n);
#if SDPA_REAL == 32
SHARED void wide_run_section(program_run *r, const sdpa_instruction *first, int n_steps, int64_t n);
#endif

#if OWNS_SHARED
#define INTEGER_BITS SDPA_REAL
#define NAME(x) narrow_##x
#include "program_steps.h"
#if SDPA_REAL == 32
#define INTEGER_BITS 64
#define NAME(x) wide_##x
#include "program_steps.h"
#endif
#endif

INLINE void run_section(program_run *r, enum sdpa_section section, int64_t n) {
    const sdpa_instruction *first = r->code->first;
    for (int s = 0; s < (int)section; s++) first += r->code->n[s];
#if SDPA_REAL == 32
    if (r->program->wide) {
        wide_run_section(r, first, r->code->n[section], n);
        return;
    }
#endif
    narrow_run_section(r, first, r->code->n[section], n);
}

/* Whether any of n elements, a multiple of VL, is not 0. */
INLINE bool any_bits(const real *p, int64_t n) {
    ivec any = {0};
    for (int64_t x = 0; x < n; x += VL) any |= (ivec)vload(p + x);
    return vany(any);
}

/* Runs a section on its first n elements, and repeats these in its registers. Integers that are
 * wider than reals are computed again instead. */
INLINE void run_repeated(program_run *r, enum sdpa_section section, int64_t n) {
    const int64_t end = section == SDPA_OF_UNIT ? SLOT_ELEMENTS : TILE_ELEMENTS;
    if (r->program->wide && SDPA_REAL == 32) {
        run_section(r, section, end);
        return;
    }
    run_section(r, section, n);
    const sdpa_instruction *first = r->code->first;
    for (int s = 0; s < (int)section; s++) first += r->code->n[s];
    for (int i = 0; i < r->code->n[section]; i++) {
        real *p = (real *)(r->registers + first[i].dst * r->slot);
        for (int64_t x = n; x < end; x += VL) vstore(p + x, vload(p + x - n));
    }
}

/* Begins a code for the queries of a panel and the keys of block b: n_i queries in nv vectors. `scratch`: program_size. */
NOINLINE void begin_program(program_run *r, const sdpa_program *p, enum sdpa_variant variant, const sdpa_unit *u,
                            const block *b, real *scratch) {
    const int64_t slot = SLOT_ELEMENTS * (p->wide && SDPA_REAL == 32 ? 8 : (int64_t)sizeof(real));
    *r = (program_run){.program = p,
                       .code = &p->code[variant],
                       .variant = variant,
                       .is_mask = p == u->problem->mask_mod,
                       .registers = (char *)scratch,
                       .slot = slot,
                       .sums = u->sums,
                       .batch = u->batch,
                       .head = u->head,
                       .first_query = b->i0 + u->offset,
                       .n_i = b->n_i,
                       .end_key = b->j0 + b->n_j,
                       .window = -1,
                       .nv = (int)(round_up(b->n_i, VL) / VL)};
    char *behind = r->registers + r->code->n_registers * slot;
    r->bad_queries = r->bad = (real *)behind;
    r->bad_keys = (real *)(behind + slot);
    r->bad_pairs = (real *)(behind + 2 * slot);
    if (r->code->checks) {
        memset(r->bad_queries, 0, sizeof(real) * SLOT_ELEMENTS);
        memset(r->bad_keys, 0, sizeof(real) * SLOT_ELEMENTS);
        memset(r->bad_pairs, 0, sizeof(real) * SLOT_ELEMENTS);
    }
    run_repeated(r, SDPA_OF_UNIT, VL);
    for (int64_t x = VL; x < r->nv * VL && r->code->checks; x += VL) vstore(r->bad + x, vload(r->bad));
    run_repeated(r, SDPA_OF_QUERY, r->nv * VL);
    r->any_bad = r->code->checks && any_bits(r->bad_queries, r->nv * VL);
}

/* The values that belong to keys, for those from j on. */
NOINLINE void begin_window(program_run *r, int64_t j) {
    const int64_t left = r->end_key - j, n = left < WINDOW ? left : WINDOW;
    r->window = j;
    r->window_keys = n;
    r->bad = r->bad_keys;
    run_section(r, SDPA_OF_KEY, round_up(n, VL));
    r->any_bad |= r->code->checks && any_bits(r->bad_keys, round_up(n, VL));
}

/* Looks for an index out of range at a pair whose bias is not -inf; s (rows, s_row), or NULL: all are visible. Pairs that
 * a mask hides whatever it reads there are passed over, alone as in a tile (seen_by_program). */
COLD NOINLINE void find_fault(const program_run *r, const real *s, int64_t s_row) {
    for (int64_t i = 0; i < r->rows; i++) {
        for (int64_t l = 0; l < r->n_i; l++) {
            const real_bits *pairs = (const real_bits *)r->bad_pairs, *queries = (const real_bits *)r->bad_queries;
            const int64_t x = i * r->nv * VL + l;
            const bool wrong = pairs[x] | queries[l] | ((const real_bits *)r->bad_keys)[r->row + i];
            if (!wrong || (s && s[i * s_row + l] == -(real)INFINITY)) continue;
            const int64_t place[] = {r->batch, r->head, r->first_query + l, r->window + r->row + i};
            const sdpa_box pair = {
                {place[0], place[0]}, {place[1], place[1]}, {place[2], place[2]}, {place[3], place[3]}};
            if (r->is_mask && sdpa_program_seen(r->program, &pair) == SDPA_NONE_SEEN) continue;
            sdpa_program_fail(r->program, r->variant, place);
            return;
        }
    }
}

/* Where the score of the next tile is to be written, nv vectors a row. */
INLINE real *score_register(const program_run *r) {
    const sdpa_instruction *first = r->code->first;
    for (int s = 0; s < SDPA_OF_TILE; s++) first += r->code->n[s];
    return (real *)(r->registers + (first->op == SDPA_OP_score ? first->dst : r->code->n_registers + 3) * r->slot);
}

/* Where run_tile leaves the value, nv vectors a row, if that is a register of the tile, to be written to; else NULL. */
INLINE real *value_register(const program_run *r) {
    const sdpa_instruction *x = r->code->first, *end = x;
    for (int s = 0; s < SDPA_N_SECTIONS; s++) end += r->code->n[s];
    const int early = (int)(end - x) - r->code->n[SDPA_OF_TILE]; /* registers */
    real *value = NULL;
    for (x += early; x < end; x++) {
        const real *set = (const real *)(r->registers + x->dst * r->slot);
        if (x->op == SDPA_OP_output && x->dst == SDPA_OUT_VALUE) {
            value = x->a < early ? NULL : (real *)(r->registers + x->a * r->slot);
        } else if (x->op != SDPA_OP_output && set == value) {
            return NULL; /* used again */
        }
    }
    return value;
}

/* Runs the code on a tile: `rows` keys from j on, at most TILE_ELEMENTS elements, inputs and outputs as r says. s: see
 * find_fault. */
NOINLINE void run_tile(program_run *r, int64_t j, int64_t rows, const real *s, int64_t s_row) {
    if (r->window < 0 || j < r->window || j + rows > r->window + r->window_keys) begin_window(r, j);
    r->row = j - r->window;
    r->rows = rows;
    const int64_t n = rows * r->nv * VL;
    r->bad = r->bad_pairs;
    if (r->code->checks_pairs) memset(r->bad, 0, sizeof(real) * (size_t)n);
    run_section(r, SDPA_OF_TILE, n);
    if (r->variant > SDPA_CODE_SLOPE) return; /* other codes follow these */
    if (r->any_bad || (r->code->checks_pairs && any_bits(r->bad_pairs, n))) find_fault(r, s, s_row);
}

/* What the unit's mask, a program, lets through of a block. */
INLINE sdpa_seen seen_by_program(const sdpa_unit *u, const block *b) {
    const int64_t query = b->i0 + u->offset;
    const sdpa_box box = {
        {u->batch, u->batch}, {u->head, u->head}, {query, query + b->n_i - 1}, {b->j0, b->j0 + b->n_j - 1}};
    return sdpa_program_seen(u->problem->mask_mod, &box);
}

/* s (n_j, s_row) = -inf where the unit's mask, a program, is false, elsewhere 0. `more`: s holds a bias already, which
 * stays where the mask is true. */
NOINLINE void mask_by_program(const sdpa_unit *u, const block *b, real *s, int64_t s_row, real *scratch, bool more) {
    program_run r;
    vec copy[SCORE_ROWS * SCORE_WIDTH];
    begin_program(&r, u->problem->mask_mod, SDPA_CODE_VALUE, u, b, scratch);
    const vec *visible = (const vec *)value_register(&r);
    if (!visible) {
        r.out[SDPA_OUT_VALUE] = (program_output){(real *)copy, r.nv * VL};
        visible = copy;
    }
    for (int64_t j = 0; j < b->n_j; j += SCORE_ROWS) {
        const int64_t rows = b->n_j - j < SCORE_ROWS ? b->n_j - j : SCORE_ROWS;
        run_tile(&r, b->j0 + j, rows, more ? s + j * s_row : NULL, s_row);
        for (int64_t i = 0; i < rows; i++) {
            for (int v = 0; v < r.nv; v++) {
                real *to = s + (j + i) * s_row + v * VL;
                const ivec shown = (ivec)visible[i * r.nv + v];
                vstore(to, more ? vselect(shown, vload(to), vset1(-INFINITY)) : (vec)(~shown & (ivec)vset1(-INFINITY)));
            }
        }
    }
}

#endif
