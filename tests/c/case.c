#include "case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../src/drivers.h"
#include "../../src/kernels/kernels.h"
#include "../../src/runtime/isa.h"
#include "../../src/unit.h"
#include "check.h"

/* To and from float16 by arithmetic, because not every target has the type. */
static uint16_t half_of(double x) {
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    x = fabs(x);
    if (isnan(x)) return sign | 0x7e00;
    if (x >= 65520) return sign | 0x7c00;
    int e;
    frexp(x, &e);
    const double ulp = ldexp(1, e < -13 ? -24 : e - 11);
    x = rint(x / ulp) * ulp;
    if (x < 0x1p-14) return sign | (uint16_t)(x * 0x1p24);
    frexp(x, &e);
    return sign | (uint16_t)((e + 14) << 10) | ((uint16_t)ldexp(x, 11 - e) & 0x3ff);
}

static double of_half(uint16_t half) {
    const int e = half >> 10 & 31, digits = half & 0x3ff;
    const double x = e == 31 ? (digits ? NAN : INFINITY) : e ? ldexp(1024 + digits, e - 25) : digits * 0x1p-24;
    return half & 0x8000 ? -x : x;
}

static void put(char *at, sdpa_dtype dtype, double x) {
    float f = (float)x;
    uint32_t bits;
    switch (dtype) {
    case SDPA_F64:
        memcpy(at, &x, 8);
        break;
    case SDPA_F32:
        memcpy(at, &f, 4);
        break;
    case SDPA_F16:
        memcpy(at, &(uint16_t){half_of(x)}, 2);
        break;
    case SDPA_BOOL:
        *at = x == 0;
        break; /* a bias of 0 or -inf */
    default:
        memcpy(&bits, &f, 4);
        bits = f == f ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
        memcpy(at, &(uint16_t){(uint16_t)bits}, 2);
    }
}

double get(const char *at, sdpa_dtype dtype) {
    double x = 0;
    float f;
    uint16_t word;
    switch (dtype) {
    case SDPA_F64:
        memcpy(&x, at, 8);
        return x;
    case SDPA_F32:
        memcpy(&f, at, 4);
        return (double)f;
    case SDPA_F16:
        memcpy(&word, at, 2);
        return of_half(word);
    case SDPA_BOOL:
        return *at ? 0 : -INFINITY;
    default:
        memcpy(&word, at, 2);
        memcpy(&f, &(uint32_t){(uint32_t)word << 16}, 4);
        return (double)f;
    }
}

/* The other byte order. */
static void swap(char *at, int64_t size) {
    for (int64_t i = 0; i < size / 2; i++) {
        const char c = at[i];
        at[i] = at[size - 1 - i];
        at[size - 1 - i] = c;
    }
}

/* Element i of an array (n_batch, heads, rows, cols), whose `heads` may be 0 and whose batch may be absent. */
static char *element(const sdpa_tensor *t, int64_t heads, int64_t rows, int64_t cols, int64_t i) {
    const int64_t matrix = i / cols / rows;
    char *at = t->data + i % cols * t->col + i / cols % rows * t->row;
    return heads != SHARED ? at + matrix % heads * t->head + matrix / heads * t->batch[0] : at;
}

sdpa_tensor new_tensor(fixture *f, sdpa_dtype dtype, int64_t heads, int64_t rows, int64_t cols, double *values) {
    const int64_t size = sdpa_size_of(dtype), n = (heads != SHARED ? f->c.n_batch * heads : 1) * rows * cols;
    const bool shifted = values && f->layout & LAYOUT_SHIFTED;
    sdpa_tensor t = {.dtype = dtype, .group = heads != SHARED && heads < f->c.n_head ? f->c.group : 1};
    t.swapped = values && f->layout & LAYOUT_SWAPPED && size > 1;
    int64_t stride = f->layout & LAYOUT_SPACED ? 2 * size : size;
    int64_t *const by_head[] = {&t.col, &t.row, &t.head}, *const by_row[] = {&t.col, &t.head, &t.row},
                   *const by_column[] = {&t.head, &t.row, &t.col};
    int64_t *const *order = f->layout & LAYOUT_COLUMNS_FIRST ? by_column
                            : f->layout & LAYOUT_ROWS_FIRST  ? by_row
                                                             : by_head;
    for (int axis = 0; axis < 3; axis++) {
        const int64_t length = order[axis] == &t.col ? cols : order[axis] == &t.row ? rows : heads;
        *order[axis] = length == SHARED ? 0 : stride;
        stride *= length > 0 ? length : 1;
    }
    f->strides[f->n_buffers] = heads != SHARED ? stride : 0;
    t.batch = &f->strides[f->n_buffers];
    /* No memory follows the last element. */
    const int64_t bytes =
        n ? (heads != SHARED ? f->c.n_batch : 1) * stride - (f->layout & LAYOUT_SPACED ? size : 0) : 0;
    char *memory = calloc((size_t)bytes + shifted + (n == 0), 1);
    f->buffers[f->n_buffers].dtype = dtype;
    f->buffers[f->n_buffers].bytes = (size_t)bytes + shifted;
    f->buffers[f->n_buffers++].memory = memory;
    if (!values && heads != SHARED && f->c.n_q > 0) memset(memory, GARBAGE, (size_t)bytes);
    t.data = memory + shifted;
    if (f->layout & LAYOUT_REVERSED && n) {
        t.data += (rows - 1) * t.row;
        t.row = -t.row;
    }
    for (int64_t i = 0; values && i < n; i++) {
        char *const at = element(&t, heads, rows, cols, i);
        put(at, dtype, values[i]);
        values[i] = get(at, dtype);
        if (t.swapped) swap(at, size);
    }
    return t;
}

static sdpa_tensor new_scalars(fixture *f, int64_t (*value)(const test_case *, int64_t)) {
    int64_t *data = malloc((size_t)f->c.n_batch * 8 + 1);
    f->buffers[f->n_buffers].bytes = (size_t)f->c.n_batch * 8;
    f->buffers[f->n_buffers++].memory = (char *)data;
    for (int64_t b = 0; b < f->c.n_batch; b++) data[b] = value(&f->c, b);
    static const int64_t stride = 8;
    return (sdpa_tensor){.data = (char *)data, .group = 1, .dtype = SDPA_I64, .batch = &stride};
}

static void draw(double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = naive_normal();
}

/* Sets keys and values that no query sees, and queries that see nothing, to NaN. */
static void poison(const test_case *c, naive *a) {
    const int64_t n_q = c->n_q, n_k = c->n_k;
    for (int64_t batch = 0; batch < c->n_batch; batch++) {
        bool *seen = calloc((size_t)(n_q + n_k) + 1, 1), *const seeing = seen + n_k;
        for (int64_t i = 0; i < n_q; i++) {
            for (int64_t j = 0; j < n_k; j++) {
                if (naive_visible(c, batch, i, j, a->mask[i * n_k + j])) seen[j] = seeing[i] = true;
            }
        }
        for (int64_t head = 0; head < c->n_head; head++) {
            const int64_t h = batch * c->n_head + head, kv = h / c->group;
            for (int64_t j = 0; j < n_k; j++) {
                const int64_t key = (kv * n_k + j) * c->d_k, value = (kv * n_k + j) * c->d_v;
                for (int64_t x = 0; !seen[j] && x < c->d_k; x++) a->k[key + x] = a->k_t[key + x] = NAN;
                for (int64_t y = 0; !seen[j] && y < c->d_v; y++) a->v[value + y] = a->v_t[value + y] = NAN;
            }
            for (int64_t i = 0; i < n_q; i++) {
                const int64_t query = (h * n_q + i) * c->d_k;
                for (int64_t x = 0; !seeing[i] && x < c->d_k; x++) a->q[query + x] = a->q_t[query + x] = NAN;
                for (int64_t y = 0; !seeing[i] && y < c->d_v; y++) a->dout[(h * n_q + i) * c->d_v + y] = NAN;
            }
        }
        free(seen);
    }
}

fixture *new_fixture(const test_case *c, unsigned layout) {
    fixture *f = calloc(1, sizeof *f);
    f->c = *c;
    f->layout = layout;
    f->a = naive_new(c);
    const int64_t heads = c->n_head, kv_heads = heads / c->group, all = c->n_batch * heads;
    const sdpa_dtype dtype = c->dtype, wide = dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32;
    draw(f->a.q, all * c->n_q * c->d_k);
    draw(f->a.k, all / c->group * c->n_k * c->d_k);
    draw(f->a.v, all / c->group * c->n_k * c->d_v);
    draw(f->a.dout, all * c->n_q * c->d_v);
    draw(f->a.dlse, all * c->n_q);
    for (int64_t i = 0; c->mask && i < c->n_q; i++) {
        for (int64_t j = 0; j < c->n_k; j++) {
            const bool hidden = c->in_blocks ? (i / 40 + j / 200) % 3 : naive_uniform() < 0.3,
                       masked = i == 1 || hidden; /* row 1 as a whole */
            f->a.mask[i * c->n_k + j] = masked ? -INFINITY : c->mask == BOOL_MASK ? 0 : naive_normal();
        }
    }
    draw(f->a.q_t, all * c->n_q * c->d_k);
    draw(f->a.k_t, all / c->group * c->n_k * c->d_k);
    draw(f->a.v_t, all / c->group * c->n_k * c->d_v);
    if (c->poisoned) poison(c, &f->a);
    sdpa_problem *p = &f->p;
    *p = (sdpa_problem){.n_axes = 1,
                        .axis = &f->c.n_batch,
                        .n_batch = c->n_batch,
                        .n_head = heads,
                        .n_q = c->n_q,
                        .n_k = c->n_k,
                        .d_k = c->d_k,
                        .d_v = c->d_v,
                        .dtype = dtype,
                        .scale = c->scale,
                        .has_lower = c->has_lower,
                        .has_upper = c->has_upper,
                        .lower = c->lower,
                        .upper = c->upper,
                        .n_workers = 1};
    p->q = new_tensor(f, dtype, heads, c->n_q, c->d_k, f->a.q);
    p->k = new_tensor(f, naive_key_dtype(c), kv_heads, c->n_k, c->d_k, f->a.k);
    p->v = new_tensor(f, naive_key_dtype(c), kv_heads, c->n_k, c->d_v, f->a.v);
    f->q_t = new_tensor(f, dtype, heads, c->n_q, c->d_k, f->a.q_t);
    f->k_t = new_tensor(f, naive_key_dtype(c), kv_heads, c->n_k, c->d_k, f->a.k_t);
    f->v_t = new_tensor(f, naive_key_dtype(c), kv_heads, c->n_k, c->d_v, f->a.v_t);
    p->dout = new_tensor(f, dtype, heads, c->n_q, c->d_v, f->a.dout);
    p->dlse = new_tensor(f, wide, heads, c->n_q, 1, f->a.dlse);
    if (c->mask) p->mask = new_tensor(f, c->mask == BOOL_MASK ? SDPA_BOOL : dtype, SHARED, c->n_q, c->n_k, f->a.mask);
    if (c->offset) p->offset = new_scalars(f, naive_offset);
    if (c->key_length) p->key_length = new_scalars(f, naive_key_length);
    p->o = new_tensor(f, dtype, heads, c->n_q, c->d_v, NULL);
    p->lse = new_tensor(f, wide, heads, c->n_q, 1, NULL);
    p->features = sdpa_problem_features(p);
    naive_compute(c, &f->a);
    return f;
}

void free_buffers(fixture *f, int from) {
    while (f->n_buffers > from) free(f->buffers[--f->n_buffers].memory);
}

void free_fixture(fixture *f) {
    free_buffers(f, 0);
    naive_free(&f->a);
    free(f);
}

/* check_bounded of what kernels of a pass computed, which may round weights and gradients. */
static void check_rounded(const fixture *f, sdpa_pass pass, const char *what, const sdpa_tensor *t, bounded expected) {
    const bool rounds = sdpa_pass_kernels_for(&f->p, pass)->rounds;
    double *bound = calloc((size_t)expected.n + 1, sizeof *bound);
    for (int64_t i = 0; i < expected.n; i++) bound[i] = expected.bound[i] + (rounds ? expected.rounded[i] : 0);
    expected.bound = bound;
    check_bounded(f, what, t, &expected);
    free(bound);
}

void check_bounded(const fixture *f, const char *what, const sdpa_tensor *t, const bounded *expected) {
    const test_case *c = &f->c;
    int64_t n_wrong = 0, worst = 0;
    double worst_excess = 0;
    for (int64_t i = 0; i < expected->n; i++) {
        double x = get(element(t, expected->heads, expected->rows, expected->cols, i), t->dtype);
        const bool same = x == expected->x[i] || (isnan(x) && isnan(expected->x[i])); /* -inf - -inf */
        double error = same ? 0 : fabs(x - expected->x[i]);
        double excess = error / (expected->bound[i] + 0x1p-1074);
        if (!(excess <= 1)) {
            n_wrong++;
            if (!(excess <= worst_excess)) {
                worst_excess = excess;
                worst = i;
            }
        }
    }
    CHECK(n_wrong == 0,
          "%s: isa %s dtype %d %d batch %ld heads %ld/%ld n_q %ld n_k %ld d_k %ld d_v %ld mask %d lower %d:%ld upper "
          "%d:%ld offset %d:%ld key_length %d scale %g poisoned %d layout %#x workers %d: %ld of %ld wrong, at %ld "
          "%.9g instead of %.9g, bound %.3g",
          what, sdpa_isa_get()->name, (int)c->dtype, (int)c->narrow, (long)c->n_batch, (long)c->n_head, (long)c->group,
          (long)c->n_q, (long)c->n_k, (long)c->d_k, (long)c->d_v, (int)c->mask, c->has_lower, (long)c->lower,
          c->has_upper, (long)c->upper, c->offset, (long)c->offset_base, c->key_length, c->scale, c->poisoned,
          f->layout, f->p.n_workers, (long)n_wrong, (long)expected->n, (long)worst,
          n_wrong ? get(element(t, expected->heads, expected->rows, expected->cols, worst), t->dtype) : 0,
          expected->x[worst], expected->bound[worst]);
}

/* Chooses all heads in reverse order, and every second query, the first of them twice. */
static void check_chosen(fixture *f, sdpa_problem w) {
    const test_case *c = &f->c;
    const int64_t n = c->n_q ? (c->n_q + 1) / 2 + 1 : 0, heads = c->n_head;
    int64_t *head = malloc((size_t)heads * 8 + 1), *query = malloc((size_t)n * 8 + 1);
    for (int64_t h = 0; h < heads; h++) head[h] = heads - 1 - h;
    for (int64_t i = 0; i < n; i++) query[i] = i ? 2 * (i - 1) : 0;
    bounded chosen = naive_bounded(c, heads, n, c->n_k), received = naive_bounded(c, heads, c->n_k, SDPA_N_RECEIVED);
    for (int64_t b = 0; b < c->n_batch; b++) {
        for (int64_t at = 0; at < heads * n * c->n_k; at++) {
            const int64_t j = at % c->n_k, i = query[at / c->n_k % n], h = at / c->n_k / n,
                          to = b * heads * n * c->n_k + at, from = ((b * heads + head[h]) * c->n_q + i) * c->n_k + j,
                          key = ((b * heads + h) * c->n_k + j) * SDPA_N_RECEIVED;
            const double x = f->a.w.x[from], bound = f->a.w.bound[from];
            chosen.x[to] = x;
            chosen.bound[to] = bound;
            received.x[key] += x;
            received.bound[key] += bound + 8 * naive_roundoff(c->dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32) * x;
            received.x[key + 1] = fmax(received.x[key + 1], x);
            received.bound[key + 1] = fmax(received.bound[key + 1], bound);
        }
    }
    w.heads = (sdpa_choice){head, heads};
    w.queries = (sdpa_choice){query, n};
    w.o = new_tensor(f, c->dtype, heads, n, c->n_k, NULL);
    CHECK(sdpa_attention_weights(&w) == SDPA_OK, "chosen weights");
    check_bounded(f, "chosen weights", &w.o, &chosen);
    w.o = new_tensor(f, c->dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32, heads, c->n_k, SDPA_N_RECEIVED, NULL);
    CHECK(sdpa_attention_received(&w) == SDPA_OK, "received");
    check_bounded(f, "received", &w.o, &received);
    naive_free_bounded(&chosen);
    naive_free_bounded(&received);
    free(head);
    free(query);
}

/* Drivers take operands as they lie. The binding has keys and values with gaps copied before; both are tried. */
static sdpa_status run(sdpa_status (*driver)(const sdpa_problem *), const sdpa_problem *p) {
    return p->n_workers > 1 ? sdpa_compact(p, driver) : driver(p);
}

void check_case(fixture *f) {
    sdpa_problem p = f->p;
    const test_case *c = &f->c;
    const int first_buffer = f->n_buffers;
    CHECK(run(sdpa_attention_forward, &p) == SDPA_OK, "forward");
    check_rounded(f, SDPA_PASS_FORWARD, "o", &p.o, f->a.o);
    check_bounded(f, "lse", &p.lse, &f->a.lse);

    p.dq = new_tensor(f, c->dtype, c->n_head, c->n_q, c->d_k, NULL);
    const unsigned layout = f->layout;
    f->layout &= ~(unsigned)(LAYOUT_COLUMNS_FIRST | LAYOUT_SPACED); /* rows in one piece */
    p.dk = new_tensor(f, naive_key_dtype(c), c->n_head / c->group, c->n_k, c->d_k, NULL);
    p.dv = new_tensor(f, naive_key_dtype(c), c->n_head / c->group, c->n_k, c->d_v, NULL);
    f->layout = layout;
    if (c->mask == BIAS_MASK) p.dmask = new_tensor(f, c->dtype, SHARED, c->n_q, c->n_k, NULL);
    CHECK(run(sdpa_attention_backward, &p) == SDPA_OK, "backward");
    check_rounded(f, SDPA_PASS_BACKWARD, "dq", &p.dq, f->a.dq);
    check_rounded(f, SDPA_PASS_BACKWARD, "dk", &p.dk, f->a.dk);
    check_rounded(f, SDPA_PASS_BACKWARD, "dv", &p.dv, f->a.dv);
    if (p.dmask.data) check_bounded(f, "dmask", &p.dmask, &f->a.dmask);

    sdpa_problem w = f->p;
    w.o = new_tensor(f, c->dtype, c->n_head, c->n_q, c->n_k, NULL);
    w.lse.data = NULL;
    CHECK(run(sdpa_attention_weights, &w) == SDPA_OK, "weights");
    check_bounded(f, "weights", &w.o, &f->a.w);
    check_chosen(f, w);
    w.o = new_tensor(f, f->p.lse.dtype, c->n_head, c->n_q, SDPA_N_STATISTICS, NULL);
    CHECK(run(sdpa_attention_statistics, &w) == SDPA_OK, "statistics");
    check_bounded(f, "statistics", &w.o, &f->a.statistics);

    sdpa_problem t = f->p;
    t.q_t = f->q_t;
    t.k_t = f->k_t;
    t.v_t = f->v_t;
    t.o = new_tensor(f, c->dtype, c->n_head, c->n_q, c->d_v, NULL);
    t.o_t = new_tensor(f, c->dtype, c->n_head, c->n_q, c->d_v, NULL);
    t.lse.data = NULL;
    CHECK(run(sdpa_attention_tangent, &t) == SDPA_OK, "tangent");
    check_bounded(f, "tangent", &t.o_t, &f->a.o_t);

    free_buffers(f, first_buffer);
}
