/* Programs on intervals. An interval holds all values that a register takes in a box of pairs; where nothing is known
 * of them it is infinite. Bounds are doubles, so integers beyond 2^52 count as unknown. */
#include "program.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

typedef struct interval {
    double least, most;
} interval;

#define EXACT 0x1p52
static const interval anything = {-INFINITY, INFINITY}, either = {0, 1};

static interval made_of(double least, double most) {
    return least >= -EXACT && most <= EXACT ? (interval){least, most} : anything;
}

static bool is_known(interval x) { return isfinite(x.least) && isfinite(x.most); }

static interval hull(const double *x, int n) {
    double least = x[0], most = x[0];
    for (int i = 1; i < n; i++) {
        least = fmin(least, x[i]);
        most = fmax(most, x[i]);
    }
    return made_of(least, most);
}

static interval product(interval a, interval b) {
    if (!is_known(a) || !is_known(b)) return anything;
    return hull((double[]){a.least * b.least, a.least * b.most, a.most * b.least, a.most * b.most}, 4);
}

static interval absolute(interval a) {
    if (!is_known(a)) return anything;
    const double most = fmax(fabs(a.least), fabs(a.most));
    return (interval){a.least <= 0 && a.most >= 0 ? 0 : fmin(fabs(a.least), fabs(a.most)), most};
}

/* Exact: the quotient of integers below 2^52 rounds to an integer only if it is within one unit, where floor and the
 * remainder decide. */
static double floor_of(double a, double b) { return (a - fmod(a, b)) / b - (fmod(a, b) != 0 && (a < 0) != (b < 0)); }

static interval floor_divided(interval a, interval b) {
    if (!is_known(a) || !is_known(b) || (b.least <= 0 && b.most >= 0)) return anything;
    const double x[] = {floor_of(a.least, b.least), floor_of(a.least, b.most), floor_of(a.most, b.least),
                        floor_of(a.most, b.most)};
    return hull(x, 4);
}

static interval remainder_of(interval a, interval b) {
    if (!is_known(b) || b.least != b.most || b.least == 0) {
        const double most = fmax(fabs(b.least), fabs(b.most));
        return is_known(b) ? (interval){-most, most} : anything;
    }
    const double m = b.least, least = m > 0 ? 0 : m + 1, most = m > 0 ? m - 1 : 0;
    if (!is_known(a) || floor_of(a.least, m) != floor_of(a.most, m)) return (interval){least, most};
    const double low = floor_of(a.least, m) * m;
    return (interval){a.least - low, a.most - low};
}

static bool is_true(interval x) { return x.least == 1; }
static bool is_false(interval x) { return x.most == 0; }
static interval truth(bool yes, bool no) { return yes ? (interval){1, 1} : no ? (interval){0, 0} : either; }

static interval is_less(interval a, interval b) { return truth(a.most < b.least, a.least >= b.most); }
static interval is_at_most(interval a, interval b) { return truth(a.most <= b.least, a.least > b.most); }
static interval is_equal(interval a, interval b) {
    const bool apart = a.most < b.least || b.most < a.least;
    return truth(a.least == a.most && b.least == b.most && a.least == b.least, apart);
}
static interval inverse(interval a) { return truth(is_false(a), is_true(a)); }

static interval either_of(interval condition, interval a, interval b) {
    if (is_true(condition)) return a;
    if (is_false(condition)) return b;
    return (interval){fmin(a.least, b.least), fmax(a.most, b.most)};
}

/* Values of an integer or boolean array at flat indices `at`, which are in range if they are known. */
static interval gathered(const sdpa_argument *x, interval at, bool is_boolean) {
    const interval unknown = is_boolean ? either : anything;
    if (!x->least || !is_known(at)) return unknown;
    int64_t i = (int64_t)at.least, end = (int64_t)at.most + 1, least = INT64_MAX, most = INT64_MIN;
    while (i < end) {
        const bool whole = i % SDPA_SUMMARY == 0 && i + SDPA_SUMMARY <= end;
        int64_t low, high;
        if (whole) {
            low = x->least[i / SDPA_SUMMARY];
            high = x->most[i / SDPA_SUMMARY];
        } else {
            low = high = is_boolean ? ((const uint8_t *)x->data)[i] != 0 : ((const int64_t *)x->data)[i];
        }
        if (low < least) least = low;
        if (high > most) most = high;
        i += whole ? SDPA_SUMMARY : 1;
    }
    return made_of((double)least, (double)most);
}

/* c times the stride of an axis; unknown if c may be out of range, since the pair must then be looked at. */
static interval indexed(const sdpa_argument *x, int axis, interval c) {
    if (!is_known(c) || c.least < 0 || c.most >= (double)x->axis[axis]) return anything;
    return made_of(c.least * (double)x->stride[axis], c.most * (double)x->stride[axis]);
}

static interval shifted(interval a, interval b, bool left) {
    if (!is_known(b) || b.least != b.most || b.least < 0 || b.least > 52) return anything;
    const interval factor = {exp2(b.least), exp2(b.least)};
    return left ? product(a, factor) : floor_divided(a, factor);
}

static interval masked_by(interval a, interval b) {
    const interval known = is_known(b) && b.least >= 0 ? b : a;
    return is_known(known) && known.least >= 0 ? (interval){0, known.most} : anything;
}

/* A real number that float32 holds, too; others would be compared after a rounding of which nothing is known. */
static interval as_real(interval x) { return fabs(x.least) <= 0x1p24 && fabs(x.most) <= 0x1p24 ? x : anything; }

/* Not infinity, which is no bound: what lies below it is not NaN. */
static interval constant_real(double x) { return isfinite(x) && x == (double)(float)x ? (interval){x, x} : anything; }

static interval of_integers(const sdpa_instruction *i, interval a, interval b, interval c) {
    switch (i->op) {
    case SDPA_OP_negative_i:
        return made_of(-a.most, -a.least);
    case SDPA_OP_absolute_i:
        return absolute(a);
    case SDPA_OP_add_i:
        return made_of(a.least + b.least, a.most + b.most);
    case SDPA_OP_subtract_i:
        return made_of(a.least - b.most, a.most - b.least);
    case SDPA_OP_multiply_i:
        return product(a, b);
    case SDPA_OP_floor_divide:
        return floor_divided(a, b);
    case SDPA_OP_remainder:
        return remainder_of(a, b);
    case SDPA_OP_minimum_i:
        return (interval){fmin(a.least, b.least), fmin(a.most, b.most)};
    case SDPA_OP_maximum_i:
        return (interval){fmax(a.least, b.least), fmax(a.most, b.most)};
    case SDPA_OP_bitwise_and:
        return masked_by(a, b);
    case SDPA_OP_left_shift:
        return shifted(a, b, true);
    case SDPA_OP_right_shift:
        return shifted(a, b, false);
    case SDPA_OP_select_i:
        return either_of(a, b, c);
    case SDPA_OP_integer_of_b:
        return a;
    default:
        return anything;
    }
}

static interval of_booleans(const sdpa_instruction *i, interval a, interval b) {
    switch (i->op) {
    case SDPA_OP_less_r:
    case SDPA_OP_less_i:
        return is_less(a, b);
    case SDPA_OP_less_equal_r:
    case SDPA_OP_less_equal_i:
        return is_at_most(a, b);
    case SDPA_OP_equal_r:
    case SDPA_OP_equal_i:
        return is_equal(a, b);
    case SDPA_OP_not_equal_r:
    case SDPA_OP_not_equal_i:
        return inverse(is_equal(a, b));
    case SDPA_OP_logical_and:
        return truth(is_true(a) && is_true(b), is_false(a) || is_false(b));
    case SDPA_OP_logical_or:
        return truth(is_true(a) || is_true(b), is_false(a) && is_false(b));
    case SDPA_OP_logical_xor:
        return a.least == a.most && b.least == b.most ? truth(a.least != b.least, a.least == b.least) : either;
    default:
        return inverse(a);
    }
}

/* Whether it subtracts integers, whatever it makes of the difference. */
static bool is_difference(const sdpa_instruction *i) {
    return i->op == SDPA_OP_difference_i || i->op == SDPA_OP_difference_r || i->op == SDPA_OP_within;
}

/* a - b, or b - a where the instruction says so. */
static interval difference_of(const sdpa_instruction *i, const interval *r) {
    const bool turned = i->op != SDPA_OP_within && i->c == 1;
    const interval a = r[turned ? i->b : i->a], b = r[turned ? i->a : i->b];
    return made_of(a.least - b.most, a.most - b.least);
}

static interval step(const sdpa_program *p, const sdpa_instruction *i, const interval *r, const sdpa_box *box) {
    const int64_t *range = NULL;
    switch (i->op) {
    case SDPA_OP_batch:
        range = box->batch;
        break;
    case SDPA_OP_head:
        range = box->head;
        break;
    case SDPA_OP_query:
        range = box->query;
        break;
    case SDPA_OP_key:
        range = box->key;
        break;
    case SDPA_OP_constant_i:
        return made_of((double)p->integers[i->a], (double)p->integers[i->a]);
    case SDPA_OP_constant_b:
        return (interval){i->a, i->a};
    case SDPA_OP_constant_r:
        return constant_real(p->reals[i->a]);
    case SDPA_OP_real_of_i:
    case SDPA_OP_real_of_b:
        return as_real(r[i->a]);
    case SDPA_OP_index:
        return indexed(&p->arrays[i->a], i->b, r[i->c]);
    case SDPA_OP_gather_i:
        return gathered(&p->arrays[i->a], r[i->b], false);
    case SDPA_OP_gather_b:
        return gathered(&p->arrays[i->a], r[i->b], true);
    case SDPA_OP_difference_i:
        return difference_of(i, r);
    case SDPA_OP_difference_r:
        return as_real(difference_of(i, r));
    case SDPA_OP_less_key:
        return i->c ? is_less(r[i->b], r[i->a]) : is_less(r[i->a], r[i->b]);
    case SDPA_OP_less_equal_key:
        return i->c ? is_at_most(r[i->b], r[i->a]) : is_at_most(r[i->a], r[i->b]);
    case SDPA_OP_equal_key:
        return is_equal(r[i->a], r[i->b]);
    case SDPA_OP_within:
        return is_at_most(absolute(difference_of(i, r)), r[i->c]);
    case SDPA_OP_spread_r:
    case SDPA_OP_spread_i:
    case SDPA_OP_spread_b:
        return r[i->a];
    default:
        if (i->op >= SDPA_OP_less_r && i->op <= SDPA_OP_logical_not) return of_booleans(i, r[i->a], r[i->b]);
        if (i->op >= SDPA_OP_negative_i && i->op <= SDPA_OP_integer_of_b) {
            return of_integers(i, r[i->a], r[i->b], r[i->c]);
        }
        return anything;
    }
    return made_of((double)range[0], (double)range[1]);
}

static int length_of(const sdpa_code *c) {
    int n = 0;
    for (int s = 0; s < SDPA_N_SECTIONS; s++) n += c->n[s];
    return n;
}

sdpa_seen sdpa_program_seen(const sdpa_program *mask, const sdpa_box *box) {
    const sdpa_code *code = &mask->code[SDPA_CODE_VALUE];
    interval r[SDPA_MOST_REGISTERS];
    bool inside = true;
    for (int i = 0; i < length_of(code); i++) {
        const sdpa_instruction *x = &code->first[i];
        if (x->op == SDPA_OP_output) {
            return is_false(r[x->a]) ? SDPA_NONE_SEEN : is_true(r[x->a]) && inside ? SDPA_ALL_SEEN : SDPA_SOME_SEEN;
        }
        r[x->dst] = step(mask, x, r, box);
        inside &= x->op != SDPA_OP_index || is_known(r[x->dst]);
    }
    return SDPA_SOME_SEEN;
}

static bool is_integer(const sdpa_instruction *x) {
    return x->op <= SDPA_OP_key || x->op == SDPA_OP_constant_i ||
           (x->op >= SDPA_OP_negative_i && x->op <= SDPA_OP_right_shift) || x->op == SDPA_OP_select_i ||
           x->op == SDPA_OP_integer_of_r || x->op == SDPA_OP_gather_i;
}

/* c times the stride of an axis, as the kernels clamp it: 0 where c is out of range. */
static interval clamped(const sdpa_argument *x, int axis, interval c) {
    const double end = fmax((double)x->axis[axis] - 1, 0), stride = (double)x->stride[axis];
    const bool inside = c.least >= 0 && c.most <= end;
    return (interval){inside ? c.least * stride : 0, fmax(fmin(c.most, end), 0) * stride};
}

bool sdpa_program_is_narrow(const sdpa_program *p, const sdpa_box *box) {
    for (int v = 0; v < SDPA_N_VARIANTS; v++) {
        const sdpa_code *code = &p->code[v];
        interval r[SDPA_MOST_REGISTERS];
        for (int i = 0; code->first && i < length_of(code); i++) {
            const sdpa_instruction *x = &code->first[i];
            if (x->op == SDPA_OP_output || x->op == SDPA_OP_scatter) continue;
            const interval found =
                x->op == SDPA_OP_index ? clamped(&p->arrays[x->a], x->b, r[x->c]) : step(p, x, r, box);
            const interval whole = is_difference(x) ? difference_of(x, r) : found;
            const bool integer = is_integer(x) || x->op == SDPA_OP_index || is_difference(x);
            r[x->dst] = found;
            /* A distance is as narrow as its negative. */
            if (integer && !(whole.least > INT32_MIN && whole.most <= INT32_MAX)) return false;
        }
    }
    return true;
}

/* ------------------------------------------------------------------------------------ real numbers */

#define LARGEST_SCORE 1e12

/* Bounds as the arithmetic holds them: too large numbers are infinite, too small ones 0. */
static interval rounded(interval x, double largest) {
    if (isnan(x.least + x.most)) return anything; /* as from -inf to inf */
    const double least = x.least > 0 && x.least < 1 / largest ? 0 : x.least,
                 most = x.most < 0 && x.most > -1 / largest ? 0 : x.most;
    return (interval){least < -largest ? -INFINITY : least, most > largest ? INFINITY : most};
}

/* Where infinity meets 0 or infinity, a corner is NaN. */
static interval around(double w, double x, double y, double z) {
    if (isnan(w + x + y + z)) return anything;
    return (interval){fmin(fmin(w, x), fmin(y, z)), fmax(fmax(w, x), fmax(y, z))};
}

static interval real_absolute(interval a) {
    return (interval){fmax(0, fmax(a.least, -a.most)), fmax(fabs(a.least), fabs(a.most))};
}

/* The product of two registers. */
static interval real_product(const interval *r, int i, int j) {
    const interval a = i == j ? real_absolute(r[i]) : r[i], b = i == j ? a : r[j];
    return around(a.least * b.least, a.least * b.most, a.most * b.least, a.most * b.most);
}

static interval real_quotient(interval a, interval b) {
    if (!(b.least * b.most > 0)) return anything;
    return around(a.least / b.least, a.least / b.most, a.most / b.least, a.most / b.most);
}

static interval real_sum(interval a, interval b) { return (interval){a.least + b.least, a.most + b.most}; }
static interval opposite(interval a) { return (interval){-a.most, -a.least}; }
static interval of_integer(interval a) { return (interval){fmax(a.least, -0x1p63), fmin(a.most, 0x1p63)}; }

/* What a step to a real number gives; other steps are those of integers. */
static interval real_step(const sdpa_program *p, const sdpa_instruction *i, const interval *r, const sdpa_box *box) {
    switch (i->op) {
    case SDPA_OP_score:
        return (interval){-LARGEST_SCORE, LARGEST_SCORE};
    case SDPA_OP_constant_r:
        return (interval){p->reals[i->a], p->reals[i->a]};
    case SDPA_OP_gather_r:
        return (interval){p->arrays[i->a].low, p->arrays[i->a].high};
    case SDPA_OP_real_of_i:
        return of_integer(r[i->a]);
    case SDPA_OP_difference_r:
        return of_integer(difference_of(i, r));
    case SDPA_OP_real_of_b:
        return r[i->a];
    case SDPA_OP_negative_r:
        return opposite(r[i->a]);
    case SDPA_OP_absolute_r:
        return real_absolute(r[i->a]);
    case SDPA_OP_sqrt:
        return (interval){sqrt(fmax(r[i->a].least, 0)), sqrt(fmax(r[i->a].most, 0))};
    case SDPA_OP_exp:
        return (interval){exp(r[i->a].least), exp(r[i->a].most)};
    case SDPA_OP_log:
        return (interval){log(fmax(r[i->a].least, 0)), log(fmax(r[i->a].most, 0))};
    case SDPA_OP_tanh:
        return (interval){tanh(r[i->a].least), tanh(r[i->a].most)};
    case SDPA_OP_add_r:
        return real_sum(r[i->a], r[i->b]);
    case SDPA_OP_subtract_r:
        return real_sum(r[i->a], opposite(r[i->b]));
    case SDPA_OP_multiply_r:
        return real_product(r, i->a, i->b);
    case SDPA_OP_divide:
        return real_quotient(r[i->a], r[i->b]);
    case SDPA_OP_minimum_r:
        return (interval){fmin(r[i->a].least, r[i->b].least), fmin(r[i->a].most, r[i->b].most)};
    case SDPA_OP_maximum_r:
        return (interval){fmax(r[i->a].least, r[i->b].least), fmax(r[i->a].most, r[i->b].most)};
    case SDPA_OP_select_r:
        return around(r[i->b].least, r[i->b].most, r[i->c].least, r[i->c].most);
    case SDPA_OP_add_product:
        return real_sum(r[i->a], real_product(r, i->b, i->c));
    case SDPA_OP_subtract_product:
        return real_sum(r[i->a], opposite(real_product(r, i->b, i->c)));
    case SDPA_OP_less_r:
    case SDPA_OP_less_equal_r:
    case SDPA_OP_equal_r:
    case SDPA_OP_not_equal_r:
        return either; /* bounds know nothing of roundings */
    default:
        return step(p, i, r, box);
    }
}

bool sdpa_program_may_mask(const sdpa_program *p, double largest) {
    const sdpa_box all = {{0, INT32_MAX}, {0, INT32_MAX}, {INT32_MIN, INT32_MAX}, {0, INT32_MAX}};
    const sdpa_code *code = &p->code[SDPA_CODE_VALUE];
    interval r[SDPA_MOST_REGISTERS];
    for (int i = 0; i < length_of(code); i++) {
        const sdpa_instruction *x = &code->first[i];
        if (x->op == SDPA_OP_output) return r[x->a].least == -INFINITY;
        r[x->dst] = rounded(real_step(p, x, r, &all), largest);
    }
    return false;
}

int sdpa_program_registers(const sdpa_program *p) {
    int n = 0;
    for (int v = 0; v < SDPA_N_VARIANTS; v++) {
        if (p->code[v].first && p->code[v].n_registers > n) n = p->code[v].n_registers;
    }
    return n;
}

void sdpa_program_fail(const sdpa_program *p, enum sdpa_variant variant, const int64_t place[4]) {
    const sdpa_code *code = &p->code[variant];
    const sdpa_box pair = {{place[0], place[0]}, {place[1], place[1]}, {place[2], place[2]}, {place[3], place[3]}};
    interval r[SDPA_MOST_REGISTERS];
    int none = 0;
    if (!atomic_compare_exchange_strong(&p->fault->found, &none, 1)) return;
    *p->fault = (sdpa_fault){.found = 1, .batch = place[0], .head = place[1], .query = place[2], .key = place[3]};
    for (int i = 0; i < length_of(code); i++) {
        const sdpa_instruction *x = &code->first[i];
        if (x->op == SDPA_OP_output) continue;
        r[x->dst] = step(p, x, r, &pair);
        if (x->op != SDPA_OP_index) continue;
        const interval at = r[x->c];
        if (at.least >= 0 && at.most < (double)p->arrays[x->a].axis[x->b]) continue;
        p->fault->array = x->a;
        p->fault->axis = x->b;
        p->fault->index = is_known(at) ? (int64_t)at.least : SDPA_UNKNOWN_INDEX;
        if (is_known(at)) return; /* else it may be right, and another wrong */
    }
}

/* ------------------------------------------------------------------------------------ sums of gradients */

/* Gradients of so many elements together, a quarter of a megabyte, are summed in whole copies. */
#define SMALL_SUMS (INT64_C(1) << 15)

/* The instruction before `end` of a code with scatters that set a register; those of a tile are used again. */
static const sdpa_instruction *setter(const sdpa_code *code, int end, int r) {
    while (end-- > 0) {
        const sdpa_instruction *x = &code->first[end];
        if (x->dst == r && x->op != SDPA_OP_scatter) return x;
    }
    return NULL;
}

/* Along which axes of an array the index of a scatter is the number of the batch, the head and the query; -1: none. */
typedef struct unit_axes {
    int axis[3];
} unit_axes;

static void find_axes(const sdpa_program *p, const sdpa_code *code, int end, int r, const sdpa_box *box,
                      unit_axes *to) {
    const int64_t *ranges[] = {box->batch, box->head, box->query};
    const int ops[] = {SDPA_OP_batch, SDPA_OP_head, SDPA_OP_query};
    const sdpa_instruction *x = setter(code, end, r);
    /* A sum of an index per axis. */
    for (; x && x->op == SDPA_OP_add_i; x = setter(code, (int)(x - code->first), x->a)) {
        find_axes(p, code, (int)(x - code->first), x->b, box, to);
    }
    while (x && x->op == SDPA_OP_spread_i) x = setter(code, (int)(x - code->first), x->a);
    if (!x || x->op != SDPA_OP_index) return;
    const sdpa_instruction *of = setter(code, (int)(x - code->first), x->c);
    for (int i = 0; of && i < 3; i++) {
        const bool inside = ranges[i][0] >= 0 && ranges[i][1] < p->arrays[x->a].axis[x->b];
        if (of->op == ops[i] && inside) to->axis[i] = x->b;
    }
}

/* Whether all scatters into an array have indices that tell its unit, by the same axes. */
static bool is_own(const sdpa_program *p, int array, const sdpa_box *box) {
    unit_axes first = {{-1, -1, -1}};
    bool any = false;
    for (int v = SDPA_CODE_SCATTER; v <= SDPA_CODE_SCATTER_SECOND; v++) {
        const sdpa_code *code = &p->code[v];
        for (int i = 0; code->first && i < length_of(code); i++) {
            if (code->first[i].op != SDPA_OP_scatter || code->first[i].a != array) continue;
            unit_axes found = {{-1, -1, -1}};
            find_axes(p, code, i, code->first[i].b, box, &found);
            if (!any) first = found;
            any = true;
            if (memcmp(&first, &found, sizeof found) != 0) return false;
        }
    }
    const bool batch = first.axis[0] >= 0 || box->batch[0] == box->batch[1];
    const bool head = first.axis[1] >= 0 || box->head[0] == box->head[1];
    return any && batch && head && first.axis[2] >= 0;
}

void sdpa_program_share(sdpa_program *p, sdpa_argument *arrays, const sdpa_box *box) {
    p->n_shared = 0;
    p->has_gradients = false;
    for (int x = 0; x < p->n_arrays; x++) {
        arrays[x].own = arrays[x].gradient && is_own(p, x, box);
        p->has_gradients |= arrays[x].gradient != NULL;
        if (arrays[x].gradient && !arrays[x].own) p->n_shared += arrays[x].size;
    }
}

static size_t head_bytes(const sdpa_program *p) { return sizeof(sdpa_sums) + (size_t)p->n_arrays * sizeof(sdpa_reach); }

size_t sdpa_program_sums_bytes(const sdpa_program *p, int64_t n_elements) {
    return head_bytes(p) + (size_t)n_elements * sizeof(double);
}

void sdpa_program_clear_sums(const sdpa_program *p, sdpa_sums *sums, int64_t n_elements) {
    sums->values = (double *)((char *)sums + head_bytes(p));
    memset(sums->values, 0, (size_t)n_elements * sizeof(double));
    double *next = sums->values;
    for (int x = 0; x < p->n_arrays; x++) {
        const sdpa_argument *a = &p->arrays[x];
        sums->reach[x] = (sdpa_reach){a->own ? a->gradient : next, 0, INT64_MAX, -1};
        if (a->gradient && !a->own && !sdpa_program_has_reaches(p)) next += a->size;
    }
}

bool sdpa_program_has_reaches(const sdpa_program *p) { return p->n_shared > SMALL_SUMS; }

/* The elements of an array that an index is brought to; of an unknown one all. */
static interval within(const sdpa_argument *a, interval at) {
    const double end = (double)a->size - 1;
    return (interval){at.least > 0 ? fmin(at.least, end) : 0, at.most < end ? fmax(at.most, 0) : end};
}

int64_t sdpa_program_set_reaches(const sdpa_program *p, const sdpa_box *box, sdpa_sums *sums) {
    const sdpa_code *code = &p->code[SDPA_CODE_SCATTER];
    interval r[SDPA_MOST_REGISTERS];
    for (int i = 0; code->first && i < length_of(code); i++) {
        const sdpa_instruction *x = &code->first[i];
        if (x->op == SDPA_OP_index) {
            r[x->dst] = clamped(&p->arrays[x->a], x->b, r[x->c]);
        } else if (x->op == SDPA_OP_scatter) {
            const sdpa_argument *a = &p->arrays[x->a];
            sdpa_reach *reach = &sums->reach[x->a];
            if (!a->gradient || a->own || a->size == 0) continue;
            const interval at = within(a, r[x->b]);
            if (at.least < (double)reach->least) reach->least = (int64_t)at.least;
            if (at.most > (double)reach->most) reach->most = (int64_t)at.most;
        } else {
            r[x->dst] = step(p, x, r, box);
        }
    }
    int64_t n = 0;
    for (int x = 0; x < p->n_arrays; x++) {
        sdpa_reach *reach = &sums->reach[x];
        if (reach->most < 0) continue;
        const int64_t size = reach->most - reach->least + 1;
        *reach = (sdpa_reach){sums->values + n, reach->least, INT64_MAX, -1};
        n += size;
    }
    return n;
}

void sdpa_program_add_sums(const sdpa_program *p, sdpa_sums *sums) {
    for (int x = 0; x < p->n_arrays; x++) {
        const sdpa_argument *a = &p->arrays[x];
        sdpa_reach *reach = &sums->reach[x];
        for (int64_t i = reach->least; i <= reach->most && !a->own; i++) {
            a->gradient[i] += reach->values[i - reach->low];
            reach->values[i - reach->low] = 0;
        }
        reach->least = INT64_MAX;
        reach->most = -1;
    }
}
