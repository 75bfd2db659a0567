/* Random programs for the fuzzer of the core (src/program.h): integers, booleans, gathers and smooth real functions,
 * whose results no rounding can change by much. Each operation is drawn. Indices may be out of range. */
#ifndef SDPA_FUZZ_PROGRAMS_H
#define SDPA_FUZZ_PROGRAMS_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../src/program.h"
#include "../c/naive.h"

enum { N_ARRAYS = 5, MOST_STEPS = 160, MOST_RUNS = 4, N_INTEGERS = 12, N_REALS = 6 };

static const int64_t some_integers[N_INTEGERS] = {0, 1, 2, -1, 3, 7, 32, 64, 100, -1000, INT32_MAX, INT64_C(1) << 40};
static const double some_reals[N_REALS] = {0, 1, -1, 0.5, 1.75, -INFINITY};

typedef struct random_program {
    sdpa_program program;
    sdpa_fault fault;
    sdpa_instruction *codes[SDPA_N_VARIANTS];
    sdpa_argument arrays[N_ARRAYS];
    void *data[N_ARRAYS], *tangents[N_ARRAYS];
    int64_t *summaries[N_ARRAYS];
    double *gradients[N_ARRAYS], *kept[MOST_RUNS][N_ARRAYS];
} random_program;

/* --- numbers */

typedef struct draw {
    uint64_t state;
} draw;

static int64_t below(draw *d, int64_t n) {
    d->state ^= d->state << 13;
    d->state ^= d->state >> 7;
    d->state ^= d->state << 17;
    return (int64_t)(d->state >> 11) % n;
}

/* --- steps */

/* Kinds of registers: i, b, r, e (a real that is the same on every machine) x (the flat index of an array) and p (a part of
 * one). */
typedef struct builder {
    draw *d;
    const sdpa_argument *arrays;
    bool is_mask;
    int section, n_registers, n[SDPA_N_SECTIONS];
    sdpa_instruction steps[SDPA_N_SECTIONS][MOST_STEPS];
    char kind[SDPA_MOST_REGISTERS];
    int of[SDPA_MOST_REGISTERS];    /* section */
    int array[SDPA_MOST_REGISTERS]; /* of a flat index */
} builder;

static int emit(builder *b, char kind, int op, int a0, int a1, int a2) {
    const int dst = b->n_registers++;
    b->steps[b->section][b->n[b->section]++] =
        (sdpa_instruction){(uint16_t)op, (uint16_t)dst, (uint16_t)a0, (uint16_t)a1, (uint16_t)a2};
    b->kind[dst] = kind;
    b->of[dst] = b->section;
    b->array[dst] = 0;
    return dst;
}

static int constant(builder *b, char kind) {
    if (kind == 'i') return emit(b, 'i', SDPA_OP_constant_i, (int)below(b->d, N_INTEGERS), 0, 0);
    if (kind == 'b') return emit(b, 'b', SDPA_OP_constant_b, (int)below(b->d, 2), 0, 0);
    return emit(b, 'e', SDPA_OP_constant_r, (int)below(b->d, N_REALS - 1), 0, 0);
}

/* A register as the present section reads it. */
static int readable(builder *b, int r) {
    if (b->of[r] != SDPA_OF_KEY || b->section != SDPA_OF_TILE) return r;
    const char kind = b->kind[r];
    const int op = kind == 'b' ? SDPA_OP_spread_b : kind == 'i' || kind == 'x' ? SDPA_OP_spread_i : SDPA_OP_spread_r;
    const int to = emit(b, kind, op, r, 0, 0);
    b->array[to] = b->array[r];
    return to;
}

/* A register of the kind, or a constant; -1 for a flat index that is not there. */
static int pick(builder *b, char kind) {
    int found[SDPA_MOST_REGISTERS], n = 0;
    for (int r = 0; r < b->n_registers; r++) {
        const bool fits = b->kind[r] == kind || (kind == 'r' && b->kind[r] == 'e');
        const bool seen = b->of[r] == SDPA_OF_UNIT || b->of[r] == b->section || b->section == SDPA_OF_TILE;
        if (fits && seen) found[n++] = r;
    }
    if (n == 0) return kind == 'x' ? -1 : constant(b, kind);
    return readable(b, found[below(b->d, n)]);
}

static int bounded_real(builder *b, int op, int x, int y) {
    return emit(b, 'r', SDPA_OP_tanh, emit(b, 'r', op, x, y, 0), 0, 0);
}

/* 1 + |x|, for functions that want a positive number. */
static int positive(builder *b, int x) {
    const int one = emit(b, 'e', SDPA_OP_constant_r, 1, 0, 0);
    return emit(b, 'r', SDPA_OP_add_r, emit(b, 'r', SDPA_OP_absolute_r, x, 0, 0), one, 0);
}

static void real_step(builder *b) {
    static const int two[] = {SDPA_OP_add_r, SDPA_OP_subtract_r, SDPA_OP_multiply_r, SDPA_OP_minimum_r,
                              SDPA_OP_maximum_r};
    const int x = pick(b, 'r'), y = pick(b, 'r');
    switch (below(b->d, 8)) {
    case 0:
        bounded_real(b, SDPA_OP_divide, x, positive(b, y));
        break;
    case 1:
        bounded_real(b, SDPA_OP_exp, emit(b, 'r', SDPA_OP_tanh, x, 0, 0), 0);
        break;
    case 2:
        bounded_real(b, below(b->d, 2) ? SDPA_OP_log : SDPA_OP_sqrt, positive(b, x), 0);
        break;
    case 3:
        emit(b, 'r', SDPA_OP_select_r, pick(b, 'b'), x, y);
        break;
    case 4:
        emit(b, 'r', SDPA_OP_tanh, emit(b, 'r', SDPA_OP_add_product, x, y, pick(b, 'r')), 0, 0);
        break;
    case 5:
        emit(b, 'r', SDPA_OP_tanh, emit(b, 'r', SDPA_OP_subtract_product, x, y, pick(b, 'r')), 0, 0);
        break;
    case 6:
        if (below(b->d, 2)) {
            emit(b, 'e', SDPA_OP_real_of_b, pick(b, 'b'), 0, 0);
        } else {
            emit(b, 'r', SDPA_OP_negative_r, x, 0, 0);
        }
        break;
    default:
        bounded_real(b, two[below(b->d, 5)], x, y);
    }
}

/* i modulo n, one of `some_integers`. */
static int modulo(builder *b, int i, int64_t n) {
    int at = 1;
    for (int x = 0; x < N_INTEGERS; x++) at = some_integers[x] == n ? x : at;
    return emit(b, 'i', SDPA_OP_remainder, i, emit(b, 'i', SDPA_OP_constant_i, at, 0, 0), 0);
}

static void integer_step(builder *b) {
    static const int two[] = {SDPA_OP_add_i,      SDPA_OP_subtract_i,  SDPA_OP_multiply_i, SDPA_OP_floor_divide,
                              SDPA_OP_remainder,  SDPA_OP_minimum_i,   SDPA_OP_maximum_i,  SDPA_OP_bitwise_and,
                              SDPA_OP_bitwise_or, SDPA_OP_bitwise_xor, SDPA_OP_left_shift, SDPA_OP_right_shift};
    const int x = pick(b, 'i');
    switch (below(b->d, 5)) {
    case 0:
        emit(b, 'i', below(b->d, 2) ? SDPA_OP_negative_i : SDPA_OP_absolute_i, x, 0, 0);
        break;
    case 1:
        emit(b, 'i', SDPA_OP_select_i, pick(b, 'b'), x, pick(b, 'i'));
        break;
    case 2:
        if (below(b->d, 2)) {
            emit(b, 'e', SDPA_OP_real_of_i, modulo(b, x, 7), 0, 0);
        } else {
            emit(b, 'i', SDPA_OP_integer_of_r, pick(b, 'e'), 0, 0);
        }
        break;
    default:
        emit(b, 'i', two[below(b->d, 12)], x, pick(b, 'i'), 0);
    }
}

static void boolean_step(builder *b) {
    static const int of_two[] = {SDPA_OP_less_i, SDPA_OP_less_equal_i, SDPA_OP_equal_i,      SDPA_OP_not_equal_i,
                                 SDPA_OP_less_r, SDPA_OP_equal_r,      SDPA_OP_less_equal_r, SDPA_OP_not_equal_r};
    static const int logical[] = {SDPA_OP_logical_and, SDPA_OP_logical_or, SDPA_OP_logical_xor};
    const int64_t which = below(b->d, 12);
    if (which < 8) {
        const char kind = which < 4 ? 'i' : 'e';
        const int x = pick(b, kind);
        emit(b, 'b', of_two[which], x, pick(b, kind), 0);
    } else if (which < 11) {
        const int x = pick(b, 'b');
        emit(b, 'b', logical[which - 8], x, pick(b, 'b'), 0);
    } else if (below(b->d, 2)) {
        emit(b, 'b', SDPA_OP_logical_not, pick(b, 'b'), 0, 0);
    } else {
        emit(b, 'i', SDPA_OP_integer_of_b, pick(b, 'b'), 0, 0);
    }
}

/* An element of an array, seldom with an index that may be out of range. */
static void gather_step(builder *b) {
    const int array = (int)below(b->d, N_ARRAYS);
    const sdpa_argument *a = &b->arrays[array];
    int flat = -1;
    for (int axis = 0; axis < a->n_axes; axis++) {
        int i = pick(b, 'i');
        if (below(b->d, 40)) i = modulo(b, i, a->axis[axis]);
        const int part = emit(b, 'p', SDPA_OP_index, array, axis, i);
        flat = flat < 0 ? part : emit(b, 'p', SDPA_OP_add_i, flat, part, 0);
    }
    if (flat < 0) flat = emit(b, 'x', SDPA_OP_constant_i, 0, 0, 0);
    b->kind[flat] = 'x';
    b->array[flat] = array;
    const int op = a->kind == 'f' ? SDPA_OP_gather_r : a->kind == 'i' ? SDPA_OP_gather_i : SDPA_OP_gather_b;
    emit(b, a->kind == 'f' ? 'e' : a->kind, op, array, flat, 0);
}

/* An integer register of the section of keys. */
static int of_keys(builder *b) {
    int found[SDPA_MOST_REGISTERS], n = 0;
    for (int r = 0; r < b->n_registers; r++) {
        if (b->kind[r] == 'i' && b->of[r] == SDPA_OF_KEY) found[n++] = r;
    }
    return found[below(b->d, n)]; /* the key itself, if nothing else */
}

/* What only the section of pairs has: operations that read a register of keys as it is. */
static void key_step(builder *b) {
    static const int of_two[] = {SDPA_OP_less_key, SDPA_OP_less_equal_key, SDPA_OP_equal_key};
    const int64_t which = below(b->d, 6);
    const int x = pick(b, 'i'), key = of_keys(b), turned = (int)below(b->d, 2);
    if (which < 3) {
        emit(b, 'b', of_two[which], x, key, turned);
    } else if (which == 3) {
        emit(b, 'b', SDPA_OP_within, x, key, pick(b, 'i'));
    } else if (which == 4) {
        emit(b, 'i', SDPA_OP_difference_i, x, key, turned);
    } else { /* x / (1 + |x|), since a large number magnifies rounding */
        const int difference = emit(b, 0, SDPA_OP_difference_r, x, key, turned), size = positive(b, difference);
        for (int r = difference; r <= size; r++) b->kind[r] = 0;
        emit(b, 'e', SDPA_OP_divide, difference, size, 0);
    }
}

static void any_steps(builder *b, int section) {
    static void (*const steps[])(builder *) = {real_step,    integer_step, integer_step,
                                               boolean_step, gather_step,  key_step};
    static const int inputs[] = {SDPA_OP_batch, SDPA_OP_query, SDPA_OP_key, SDPA_OP_score};
    b->section = section;
    if (section != SDPA_OF_TILE || !b->is_mask) emit(b, section == SDPA_OF_TILE ? 'r' : 'i', inputs[section], 0, 0, 0);
    if (section == SDPA_OF_UNIT) emit(b, 'i', SDPA_OP_head, 0, 0, 0);
    const int most = 40 + 45 * section; /* registers; a step needs 19 at most */
    const int kinds = section == SDPA_OF_TILE ? 6 : 5;
    for (int64_t i = below(b->d, 6); i > 0 && b->n_registers < most; i--) steps[below(b->d, kinds)](b);
}

/* --- codes */

static void effect(builder *b, int op, int dst, int a0, int a1, int a2) {
    emit(b, 0, op, a0, a1, a2);
    b->n_registers--;
    b->steps[SDPA_OF_TILE][b->n[SDPA_OF_TILE] - 1].dst = (uint16_t)dst;
}

static void finish(random_program *p, int variant, const builder *b) {
    sdpa_code *code = &p->program.code[variant];
    int n = 0;
    for (int s = 0; s < SDPA_N_SECTIONS; s++) n += code->n[s] = b->n[s];
    sdpa_instruction *to = p->codes[variant] = malloc((size_t)n * sizeof *to);
    code->first = to;
    code->n_registers = b->n_registers;
    for (int s = 0; s < SDPA_N_SECTIONS; s++) {
        for (int i = 0; i < b->n[s]; i++, to++) {
            *to = b->steps[s][i];
            code->checks |= to->op == SDPA_OP_index;
            code->checks_pairs |= to->op == SDPA_OP_index && s == SDPA_OF_TILE;
        }
    }
}

static void finish_mask(random_program *p, builder *b) {
    effect(b, SDPA_OP_output, SDPA_OUT_VALUE, pick(b, 'b'), 0, 0);
    finish(p, SDPA_CODE_VALUE, b);
}

static int input(builder *b, int op) { return emit(b, 'r', op, 0, 0, 0); }

/* x y, and a third of it from the tangent of an array, if there is one. */
static int moved(builder *b, int x, int y, int index) {
    const int product = emit(b, 'r', SDPA_OP_multiply_r, x, y, 0);
    if (index < 0 || b->arrays[b->array[index]].kind != 'f') return product;
    const int own = emit(b, 'e', SDPA_OP_gather_tangent, b->array[index], index, 0);
    return emit(b, 'r', SDPA_OP_add_r, product, own, 0);
}

/* The codes of a function of scores. They are no derivatives of each other, but their sizes are those of some. */
static void finish_score(random_program *p, builder *base) {
    const int score = base->steps[SDPA_OF_TILE][0].dst, index = pick(base, 'x');
    int value = emit(base, 'r', SDPA_OP_add_r, score, emit(base, 'r', SDPA_OP_tanh, pick(base, 'r'), 0, 0), 0);
    if (below(base->d, 3) == 0) {
        const int hidden = emit(base, 'e', SDPA_OP_constant_r, N_REALS - 1, 0, 0);
        value = emit(base, 'r', SDPA_OP_select_r, pick(base, 'b'), value, hidden);
        p->program.masks = true;
    }
    const int slope = emit(base, 'r', SDPA_OP_tanh, pick(base, 'r'), 0, 0), bend = pick(base, 'r');
    for (int variant = 0; variant < SDPA_N_VARIANTS; variant++) {
        builder b = *base;
        const bool scatters = variant >= SDPA_CODE_SCATTER;
        if (scatters && (index < 0 || b.arrays[b.array[index]].kind != 'f')) continue;
        if (variant <= SDPA_CODE_SLOPE) effect(&b, SDPA_OP_output, SDPA_OUT_VALUE, value, 0, 0);
        if (variant == SDPA_CODE_SLOPE || variant == SDPA_CODE_SECOND) {
            effect(&b, SDPA_OP_output, SDPA_OUT_SLOPE, slope, 0, 0);
        }
        if (variant == SDPA_CODE_TANGENT || variant == SDPA_CODE_SECOND) {
            const int tangent = input(&b, SDPA_OP_tangent);
            effect(&b, SDPA_OP_output, SDPA_OUT_TANGENT, moved(&b, slope, tangent, index), 0, 0);
            if (variant == SDPA_CODE_SECOND) {
                effect(&b, SDPA_OP_output, SDPA_OUT_BEND, emit(&b, 'r', SDPA_OP_multiply_r, bend, tangent, 0), 0, 0);
            }
        }
        if (scatters) {
            int change = emit(&b, 'r', SDPA_OP_multiply_r, slope, input(&b, SDPA_OP_upstream), 0);
            if (variant == SDPA_CODE_SCATTER_SECOND) {
                change = emit(&b, 'r', SDPA_OP_add_product, change, bend, input(&b, SDPA_OP_second));
            }
            effect(&b, SDPA_OP_scatter, 0, b.array[index], index, change);
        }
        finish(p, variant, &b);
    }
}

/* --- arrays */

/* Elements with a NaN behind nothing: memory of just their size, which the sanitizer guards. */
static void draw_array(random_program *p, draw *d, int x, bool is_mask, bool is_double) {
    static const int64_t sizes[] = {1, 2, 3, 7, 32, 64, 100}; /* all in some_integers */
    sdpa_argument *a = &p->arrays[x];
    a->kind = "ffib"[below(d, 4)];
    a->n_axes = (int)below(d, 4);
    a->size = 1;
    for (int i = a->n_axes - 1; i >= 0; i--) {
        a->axis[i] = sizes[below(d, 7)];
        if (a->size * a->axis[i] > 100000) a->axis[i] = 1;
        a->stride[i] = a->size;
        a->size *= a->axis[i];
    }
    const size_t each = a->kind == 'b' ? 1 : a->kind == 'i' || is_double ? 8 : 4, n = (size_t)a->size;
    p->data[x] = malloc(n * each);
    if (a->kind == 'f') p->tangents[x] = malloc(n * each);
    for (size_t i = 0; i < n; i++) {
        if (a->kind == 'b') ((char *)p->data[x])[i] = (char)below(d, 2);
        if (a->kind == 'i') ((int64_t *)p->data[x])[i] = below(d, 8) ? below(d, 64) : (INT64_C(1) << 33) - below(d, 99);
        for (int t = 0; t < 2 && a->kind == 'f'; t++) {
            void *to = t ? p->tangents[x] : p->data[x];
            const double value = naive_normal();
            if (is_double) {
                ((double *)to)[i] = value;
            } else {
                ((float *)to)[i] = (float)value;
            }
        }
    }
    a->data = p->data[x];
    a->tangent = p->tangents[x];
    if (a->kind == 'f' && !is_mask && below(d, 4)) a->gradient = p->gradients[x] = calloc(n, sizeof(double));
    if (a->kind == 'f' || below(d, 4) == 0) return;
    const int64_t n_summaries = (a->size + SDPA_SUMMARY - 1) / SDPA_SUMMARY;
    int64_t *least = p->summaries[x] = malloc((size_t)n_summaries * 16), *most = least + n_summaries;
    for (int64_t i = 0; i < a->size; i++) {
        const int64_t value = a->kind == 'b' ? ((char *)p->data[x])[i] : ((int64_t *)p->data[x])[i];
        int64_t *low = &least[i / SDPA_SUMMARY], *high = &most[i / SDPA_SUMMARY];
        *low = i % SDPA_SUMMARY == 0 || value < *low ? value : *low;
        *high = i % SDPA_SUMMARY == 0 || value > *high ? value : *high;
    }
    a->least = least;
    a->most = most;
}

/* --- programs */

static random_program *new_program(uint64_t seed, bool is_mask, bool is_double, const sdpa_box *box) {
    random_program *p = calloc(1, sizeof *p);
    draw d = {seed * 2654435761u + 88172645463325252u};
    for (int x = 0; x < N_ARRAYS; x++) draw_array(p, &d, x, is_mask, is_double);
    builder b = {.d = &d, .arrays = p->arrays, .is_mask = is_mask};
    for (int s = 0; s < SDPA_N_SECTIONS; s++) any_steps(&b, s);
    p->program.arrays = p->arrays;
    p->program.n_arrays = N_ARRAYS;
    p->program.reals = some_reals;
    p->program.integers = some_integers;
    p->program.fault = &p->fault;
    if (is_mask) {
        finish_mask(p, &b);
    } else {
        finish_score(p, &b);
    }
    p->program.wide = !sdpa_program_is_narrow(&p->program, box);
    if (!p->program.code[SDPA_CODE_SCATTER].first) {
        for (int x = 0; x < N_ARRAYS; x++) p->arrays[x].gradient = NULL;
    }
    sdpa_program_share(&p->program, p->arrays, box);
    return p;
}

static void free_program(random_program *p) {
    if (!p) return;
    for (int v = 0; v < SDPA_N_VARIANTS; v++) free(p->codes[v]);
    for (int x = 0; x < N_ARRAYS; x++) {
        free(p->data[x]);
        free(p->tangents[x]);
        free(p->summaries[x]);
        free(p->gradients[x]);
        for (int run = 0; run < MOST_RUNS; run++) free(p->kept[run][x]);
    }
    free(p);
}

/* Before and after a run: clears the gradients and the fault; keeps the gradients. */
static void begin_run(random_program *p) {
    if (!p) return;
    memset(&p->fault, 0, sizeof p->fault);
    for (int x = 0; x < N_ARRAYS; x++) {
        if (p->gradients[x]) memset(p->gradients[x], 0, (size_t)p->arrays[x].size * sizeof(double));
    }
}

static bool end_run(random_program *p, int run) {
    for (int x = 0; p && x < N_ARRAYS; x++) {
        const size_t bytes = (size_t)p->arrays[x].size * sizeof(double);
        if (!p->gradients[x]) continue;
        p->kept[run][x] = malloc(bytes);
        memcpy(p->kept[run][x], p->gradients[x], bytes);
    }
    return p && p->fault.found;
}

#endif
