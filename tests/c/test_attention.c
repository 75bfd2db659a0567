/* The drivers against the definition, over ISAs, dtypes, options and sizes at the edges of vectors and blocks. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../src/drivers.h"
#include "../../src/runtime/isa.h"
#include "../../src/kernels/kernels.h"
#include "../../src/runtime/memory.h"
#include "check.h"
#include "naive.h"

/* --- numbers */

static size_t size_of(sdpa_dtype dtype) {
    return dtype == SDPA_F64 || dtype == SDPA_I64 ? 8 : dtype == SDPA_F32 ? 4 : dtype == SDPA_BOOL ? 1 : 2;
}

static void put(char *at, sdpa_dtype dtype, double x) {
    float f = (float)x;
    uint32_t bits;
    _Float16 half = (_Float16)f;
    switch (dtype) {
    case SDPA_F64:
        memcpy(at, &x, 8);
        break;
    case SDPA_F32:
        memcpy(at, &f, 4);
        break;
    case SDPA_F16:
        memcpy(at, &half, 2);
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

static double get(const char *at, sdpa_dtype dtype) {
    double x = 0;
    float f;
    _Float16 half;
    uint16_t word;
    switch (dtype) {
    case SDPA_F64:
        memcpy(&x, at, 8);
        return x;
    case SDPA_F32:
        memcpy(&f, at, 4);
        return (double)f;
    case SDPA_F16:
        memcpy(&half, at, 2);
        return (double)(float)half;
    case SDPA_BOOL:
        return *at ? 0 : -INFINITY;
    default:
        memcpy(&word, at, 2);
        memcpy(&f, &(uint32_t){(uint32_t)word << 16}, 4);
        return (double)f;
    }
}

/* --- one case: the descriptor, its buffers (of exactly the size needed, so that ASan sees what is read beyond) */

typedef struct fixture {
    test_case c;
    naive a;
    sdpa_problem p;
    char *buffers[24];
    int n_buffers;
} fixture;

enum { GARBAGE = 0x5a };

/* (n_batch, heads, rows, cols), contiguous. heads = 0: the same for every batch entry and head. Without values, what a driver
 * has to write or to clear holds garbage. */
static sdpa_tensor new_tensor(fixture *f, sdpa_dtype dtype, int64_t heads, int64_t rows, int64_t cols, double *values) {
    const int64_t size = (int64_t)size_of(dtype), matrix = rows * cols * size;
    int64_t n = (heads ? f->c.n_batch * heads : 1) * rows * cols;
    char *data = malloc((size_t)(n * size) + (n == 0));
    f->buffers[f->n_buffers++] = data;
    if (!values) memset(data, heads && f->c.n_q > 0 ? GARBAGE : 0, (size_t)(n * size));
    for (int64_t i = 0; values && i < n; i++) {
        put(data + i * size, dtype, values[i]);
        values[i] = get(data + i * size, dtype);
    }
    sdpa_tensor t = {.data = data, .row = cols * size, .col = size, .head = heads ? matrix : 0, .dtype = dtype};
    t.group = heads && heads < f->c.n_head ? f->c.group : 1;
    t.batch[0] = heads * matrix;
    return t;
}

static sdpa_tensor new_scalars(fixture *f, int64_t (*value)(const test_case *, int64_t)) {
    int64_t *data = malloc((size_t)f->c.n_batch * 8 + 1);
    f->buffers[f->n_buffers++] = (char *)data;
    for (int64_t b = 0; b < f->c.n_batch; b++) data[b] = value(&f->c, b);
    sdpa_tensor t = {.data = (char *)data, .group = 1, .dtype = SDPA_I64};
    t.batch[0] = 8;
    return t;
}

static void draw(double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = naive_normal();
}

static fixture *new_fixture(const test_case *c) {
    fixture *f = calloc(1, sizeof *f);
    f->c = *c;
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
            bool masked = i == 1 || naive_uniform() < 0.3; /* row 1 as a whole */
            f->a.mask[i * c->n_k + j] = masked ? -INFINITY : c->mask == BOOL_MASK ? 0 : naive_normal();
        }
    }
    sdpa_problem *p = &f->p;
    *p = (sdpa_problem){.n_axes = 1,
                        .axis = {c->n_batch},
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
    p->dout = new_tensor(f, dtype, heads, c->n_q, c->d_v, f->a.dout);
    p->dlse = new_tensor(f, wide, heads, c->n_q, 1, f->a.dlse);
    if (c->mask) p->mask = new_tensor(f, c->mask == BOOL_MASK ? SDPA_BOOL : dtype, 0, c->n_q, c->n_k, f->a.mask);
    if (c->offset) p->offset = new_scalars(f, naive_offset);
    if (c->key_length) p->key_length = new_scalars(f, naive_key_length);
    p->o = new_tensor(f, dtype, heads, c->n_q, c->d_v, NULL);
    p->lse = new_tensor(f, wide, heads, c->n_q, 1, NULL);
    p->features = sdpa_problem_features(p);
    naive_compute(c, &f->a);
    return f;
}

static void free_fixture(fixture *f) {
    for (int i = 0; i < f->n_buffers; i++) free(f->buffers[i]);
    naive_free(&f->a);
    free(f);
}

static void check_bounded(const fixture *f, const char *what, const sdpa_tensor *t, const bounded *expected) {
    const test_case *c = &f->c;
    int64_t n_wrong = 0, worst = 0;
    double worst_excess = 0;
    for (int64_t i = 0; i < expected->n; i++) {
        double x = get(t->data + i * (int64_t)size_of(t->dtype), t->dtype);
        double error = x == expected->x[i] ? 0 : fabs(x - expected->x[i]); /* -inf - -inf */
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
          "%d:%ld "
          "offset %d key_length %d scale %g workers %d: %ld of %ld wrong, at %ld %.9g instead of %.9g, bound %.3g",
          what, sdpa_isa_get()->name, (int)c->dtype, (int)c->narrow, (long)c->n_batch, (long)c->n_head, (long)c->group,
          (long)c->n_q, (long)c->n_k, (long)c->d_k, (long)c->d_v, (int)c->mask, c->has_lower, (long)c->lower,
          c->has_upper, (long)c->upper, c->offset, c->key_length, c->scale, f->p.n_workers, (long)n_wrong,
          (long)expected->n, (long)worst, get(t->data + worst * (int64_t)size_of(t->dtype), t->dtype),
          expected->x[worst], expected->bound[worst]);
}

static bounded new_expected(int64_t n) {
    return (bounded){n, calloc((size_t)n + 1, sizeof(double)), calloc((size_t)n + 1, sizeof(double))};
}

static void free_expected(bounded *e) {
    free(e->x);
    free(e->bound);
}

/* The weights of all heads in reverse order, and of every second query, the first of them twice. */
static void check_chosen(fixture *f, sdpa_problem w) {
    const test_case *c = &f->c;
    const int64_t n = c->n_q ? (c->n_q + 1) / 2 + 1 : 0, heads = c->n_head;
    int64_t *head = malloc((size_t)heads * 8 + 1), *query = malloc((size_t)n * 8 + 1);
    for (int64_t h = 0; h < heads; h++) head[h] = heads - 1 - h;
    for (int64_t i = 0; i < n; i++) query[i] = i ? 2 * (i - 1) : 0;
    bounded chosen = new_expected(c->n_batch * heads * n * c->n_k),
            received = new_expected(c->n_batch * heads * c->n_k * SDPA_N_RECEIVED);
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
    CHECK(sdpa_attention_weights(&w, SDPA_WEIGHTS) == SDPA_OK, "chosen weights");
    check_bounded(f, "chosen weights", &w.o, &chosen);
    w.o = new_tensor(f, c->dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32, heads, c->n_k, SDPA_N_RECEIVED, NULL);
    CHECK(sdpa_attention_received(&w) == SDPA_OK, "received");
    check_bounded(f, "received", &w.o, &received);
    free_expected(&chosen);
    free_expected(&received);
    free(head);
    free(query);
}

static void check_case(fixture *f) {
    sdpa_problem p = f->p;
    const test_case *c = &f->c;
    const int first_buffer = f->n_buffers;
    CHECK(sdpa_attention_forward(&p) == SDPA_OK, "forward");
    const bool pairs = c->dtype == SDPA_BF16 && sdpa_isa_get()->bf16->pairs;
    check_bounded(f, "o", &p.o, pairs ? &f->a.o_rounded : &f->a.o);
    check_bounded(f, "lse", &p.lse, &f->a.lse);

    p.dq = new_tensor(f, c->dtype, c->n_head, c->n_q, c->d_k, NULL);
    p.dk = new_tensor(f, naive_key_dtype(c), c->n_head / c->group, c->n_k, c->d_k, NULL);
    p.dv = new_tensor(f, naive_key_dtype(c), c->n_head / c->group, c->n_k, c->d_v, NULL);
    if (c->mask == BIAS_MASK) p.dmask = new_tensor(f, c->dtype, 0, c->n_q, c->n_k, NULL);
    CHECK(sdpa_attention_backward(&p) == SDPA_OK, "backward");
    check_bounded(f, "dq", &p.dq, &f->a.dq);
    check_bounded(f, "dk", &p.dk, &f->a.dk);
    check_bounded(f, "dv", &p.dv, &f->a.dv);
    if (p.dmask.data) check_bounded(f, "dmask", &p.dmask, &f->a.dmask);

    sdpa_problem w = f->p;
    w.o = new_tensor(f, c->dtype, c->n_head, c->n_q, c->n_k, NULL);
    w.lse.data = NULL;
    CHECK(sdpa_attention_weights(&w, SDPA_WEIGHTS) == SDPA_OK, "weights");
    check_bounded(f, "weights", &w.o, &f->a.w);
    check_chosen(f, w);

    while (f->n_buffers > first_buffer) free(f->buffers[--f->n_buffers]);
}

static void on_every_isa(const test_case *c) {
    fixture *f = new_fixture(c);
    const char *before = sdpa_isa_get()->name;
    int n;
    const sdpa_isa *list = sdpa_isa_list(&n);
    for (int i = 0; i < n; i++) {
        if (!select_isa(list[i].name)) continue;
        for (f->p.n_workers = 1; f->p.n_workers <= 3; f->p.n_workers += 2) {
            check_case(f);
        }
    }
    sdpa_isa_select(before);
    free_fixture(f);
}

/* dtype and narrow of test_case. */
static const struct {
    sdpa_dtype all, narrow;
} dtypes[] = {{SDPA_F16, 0}, {SDPA_BF16, 0}, {SDPA_F32, 0}, {SDPA_F64, 0}, {SDPA_F32, SDPA_F16}, {SDPA_F32, SDPA_BF16}};
enum { N_DTYPES = sizeof dtypes / sizeof dtypes[0] };

/* Sizes around a vector, a query block, a key block; one axis at a time, the others odd. */
static void sizes(void) {
    const int64_t edges[] = {0,  1,  2,  3,  4,  5,  7,  8,  9,  15,  16,  17,  31, 33,
                             47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 200};
    for (int t = 0; t < N_DTYPES; t++) {
        for (size_t e = 0; e < sizeof edges / sizeof edges[0]; e++) {
            test_case c = {.n_batch = 1,
                           .n_head = 1,
                           .group = 1,
                           .n_q = 5,
                           .n_k = 7,
                           .d_k = 3,
                           .d_v = 5,
                           .dtype = dtypes[t].all,
                           .narrow = dtypes[t].narrow,
                           .scale = 0.37};
            test_case rows = c, keys = c, depth = c, columns = c, square = c;
            rows.n_q = keys.n_k = depth.d_k = columns.d_v = square.n_q = square.n_k = edges[e];
            square.has_upper = true;
            on_every_isa(&rows);
            on_every_isa(&keys);
            on_every_isa(&depth);
            on_every_isa(&columns);
            on_every_isa(&square);
        }
    }
}

static void options(void) {
    for (int t = 0; t < N_DTYPES; t++) {
        for (int mask = NO_MASK; mask <= BIAS_MASK; mask++) {
            for (int bits = 0; bits < 16; bits++) {
                test_case c = {.n_batch = 2,
                               .n_head = 4,
                               .group = bits & 1 ? 2 : 1,
                               .n_q = 101,
                               .n_k = 139,
                               .d_k = 17,
                               .d_v = 9,
                               .dtype = dtypes[t].all,
                               .narrow = dtypes[t].narrow,
                               .mask = (mask_kind)mask,
                               .scale = bits & 1 ? -0.5 : 0.25,
                               .has_upper = bits & 2,
                               .upper = 0,
                               .has_lower = bits & 4,
                               .lower = -20,
                               .offset = bits & 8,
                               .key_length = bits & 4};
                on_every_isa(&c);
            }
        }
        test_case large = {.n_batch = 1,
                           .n_head = 1,
                           .group = 1,
                           .n_q = 130,
                           .n_k = 260,
                           .d_k = 300,
                           .d_v = 290,
                           .dtype = dtypes[t].all,
                           .narrow = dtypes[t].narrow,
                           .scale = 0.06};
        on_every_isa(&large);
    }
}

/* --- fast paths */

static const struct {
    const char *name;
    enum sdpa_path path;
    test_case c;
} shortcuts[] = {
    {"small", SDPA_PATH_SMALL, {.n_head = 1, .n_q = 5, .n_k = 7}},
    {"few", SDPA_PATH_FEW, {.n_head = 1, .n_q = 1, .n_k = 200}},
    {"narrow", SDPA_PATH_NARROW, {.n_head = 1, .n_q = 1, .n_k = 200, .narrow = SDPA_F16}},
    {"pairs", SDPA_PATH_PAIRS, {.n_head = 1, .n_q = 40, .n_k = 100, .dtype = SDPA_BF16}},
    {"fold", SDPA_PATH_FOLD, {.n_head = 4, .group = 4, .n_q = 1, .n_k = 50}},
    {"fold, open band",
     SDPA_PATH_FOLD,
     {.n_head = 4,
      .group = 4,
      .n_q = 1,
      .n_k = 50,
      .has_lower = true,
      .lower = -60,
      .has_upper = true,
      .upper = 60,
      .offset = true}},
    {"parts", SDPA_PATH_PARTS, {.n_head = 1, .n_q = 1, .n_k = 9000}},
    {"fused", SDPA_PATH_FUSED, {.n_head = 1, .n_q = 40, .n_k = 300}},
    {"first", SDPA_PATH_FIRST, {.n_head = 1, .n_q = 40, .n_k = 300}},
    {"split", SDPA_PATH_SPLIT, {.n_head = 1, .n_q = 120, .n_k = 120, .has_upper = true}},
};

static bool has_path(enum sdpa_path path, sdpa_dtype dtype) {
    const struct sdpa_kernels *kernels = dtype == SDPA_BF16 ? sdpa_isa_get()->bf16 : sdpa_isa_get()->f32;
    return path == SDPA_PATH_SMALL ? kernels->lanes >= 8 : path == SDPA_PATH_PAIRS ? kernels->pairs : true;
}

/* A problem that takes a fast path takes none once it has a feature that they do not know, and is as right. */
static void fast_paths(void) {
    for (size_t s = 0; s < sizeof shortcuts / sizeof shortcuts[0]; s++) {
        const enum sdpa_path path = shortcuts[s].path;
        test_case c = shortcuts[s].c;
        c.n_batch = 1;
        c.d_k = c.d_v = 16;
        c.scale = 0.25;
        if (!c.group) c.group = 1;
        if (c.dtype != SDPA_BF16) c.dtype = SDPA_F32;
        fixture *f = new_fixture(&c);
        const char *before = sdpa_isa_get()->name;
        int n;
        const sdpa_isa *list = sdpa_isa_list(&n);
        for (int i = 0; i < n; i++) {
            if (!select_isa(list[i].name)) continue;
            const struct {
                const char *name;
                sdpa_status (*call)(const sdpa_problem *);
            } calls[] = {{"forward", sdpa_attention_forward}, {"backward", sdpa_attention_backward}};
            const int first_buffer = f->n_buffers;
            sdpa_problem p = f->p;
            p.dq = new_tensor(f, c.dtype, c.n_head, c.n_q, c.d_k, NULL);
            for (int x = 0; x < (path == SDPA_PATH_SMALL ? 2 : 1); x++) {
                for (int unknown = 0; unknown < 2; unknown++) {
                    p.features = f->p.features | (unknown ? SDPA_FEATURE_UNKNOWN : 0);
                    for (int y = 0; y < SDPA_N_PATHS; y++) sdpa_taken[y] = 0;
                    CHECK(calls[x].call(&p) == SDPA_OK, "%s: %s", shortcuts[s].name, calls[x].name);
                    const bool expected = !unknown && has_path(path, c.dtype);
                    CHECK((sdpa_taken[path] > 0) == expected, "isa %s, %s: %s taken %ld times, unknown %d",
                          list[i].name, calls[x].name, shortcuts[s].name, (long)sdpa_taken[path], unknown);
                    for (int y = 0; y < SDPA_N_PATHS && unknown; y++) {
                        CHECK(sdpa_taken[y] == 0, "isa %s, %s of %s: path %d taken", list[i].name, calls[x].name,
                              shortcuts[s].name, y);
                    }
                }
            }
            while (f->n_buffers > first_buffer) free(f->buffers[--f->n_buffers]);
            f->p.features |= SDPA_FEATURE_UNKNOWN;
            check_case(f);
            f->p.features &= ~(unsigned)SDPA_FEATURE_UNKNOWN;
        }
        sdpa_isa_select(before);
        free_fixture(f);
    }
}

/* --- merging */

static void merging(void) {
    for (int t = 0; t < N_DTYPES; t++) {
        test_case c = {.n_batch = 2,
                       .n_head = 3,
                       .group = 1,
                       .n_q = 19,
                       .n_k = 90,
                       .d_k = 8,
                       .d_v = 21,
                       .dtype = dtypes[t].all,
                       .narrow = dtypes[t].narrow,
                       .mask = BOOL_MASK,
                       .scale = 0.3};
        fixture *f = new_fixture(&c);
        sdpa_problem p = f->p, part = f->p;
        const sdpa_dtype wide = c.dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32;
        sdpa_tensor outs[3], lses[3];
        for (int s = 0; s < 3; s++) {
            part.o = outs[s] = new_tensor(f, c.dtype, c.n_head, c.n_q, c.d_v, NULL);
            part.lse = lses[s] = new_tensor(f, wide, c.n_head, c.n_q, 1, NULL);
            const int64_t begin[] = {0, 1, 40, 90};
            part.n_k = begin[s + 1] - begin[s];
            part.k.data = p.k.data + begin[s] * p.k.row;
            part.v.data = p.v.data + begin[s] * p.v.row;
            part.mask.data = p.mask.data + begin[s] * p.mask.col;
            CHECK(sdpa_attention_forward(&part) == SDPA_OK, "part %d", s);
        }
        CHECK(sdpa_attention_merge(&p, 3, outs, lses) == SDPA_OK, "merge");
        /* The parts' own errors, rounding included, and those of the merge: all within twice a whole call's. */
        for (int64_t i = 0; i < f->a.o.n; i++) {
            f->a.o.bound[i] = 2 * f->a.o.bound[i] + 2 * naive_roundoff(c.dtype);
        }
        for (int64_t i = 0; i < f->a.lse.n; i++) f->a.lse.bound[i] *= 2;
        check_bounded(f, "merged o", &p.o, &f->a.o);
        check_bounded(f, "merged lse", &p.lse, &f->a.lse);
        free_fixture(f);
    }
}

/* --- allocation faults and interruption */

static void faults(void) {
    test_case c = {.n_batch = 2,
                   .n_head = 2,
                   .group = 2,
                   .n_q = 130,
                   .n_k = 150,
                   .d_k = 33,
                   .d_v = 32,
                   .mask = BIAS_MASK,
                   .scale = 0.2};
    for (int t = 0; t < N_DTYPES; t++) {
        c.dtype = dtypes[t].all;
        c.narrow = dtypes[t].narrow;
        fixture *f = new_fixture(&c);
        f->p.n_workers = 2;
        for (int routine = 0; routine < 2; routine++) {
            int n = 0;
            sdpa_status status = SDPA_NO_MEMORY;
            for (; status == SDPA_NO_MEMORY && n < 100; n++) {
                int first_buffer = f->n_buffers;
                sdpa_problem p = f->p;
                p.dq = new_tensor(f, c.dtype, c.n_head, c.n_q, c.d_k, NULL);
                p.dk = new_tensor(f, c.dtype, c.n_head / c.group, c.n_k, c.d_k, NULL);
                p.dv = new_tensor(f, c.dtype, c.n_head / c.group, c.n_k, c.d_v, NULL);
                p.dmask = new_tensor(f, c.dtype, 0, c.n_q, c.n_k, NULL);
                sdpa_alloc_fail_after(n);
                status = routine == 0 ? sdpa_attention_forward(&p) : sdpa_attention_backward(&p);
                sdpa_alloc_fail_after(-1);
                while (f->n_buffers > first_buffer) free(f->buffers[--f->n_buffers]);
            }
            CHECK(status == SDPA_OK && n > 1, "routine %d dtype %d: status %d after %d allocations", routine,
                  (int)c.dtype, (int)status, n);
        }
        free_fixture(f);
    }
}

static double interrupt_at;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int poll_clock(void) { return seconds() >= interrupt_at; }

/* A call of many seconds ends within one: many units, units that wait for each other, or a single one. */
static void interruption(void) {
    const int64_t n_queries[] = {32768, 32768, 90}, n_keys[] = {1 << 20, 32768, 1 << 26};
    for (int shape = 0; shape < 3; shape++) {
        test_case c = {.n_batch = 1, .n_head = 1, .group = 1, .d_k = 64, .d_v = 64, .dtype = SDPA_F32, .scale = 0.125};
        fixture *f = new_fixture(&c);
        sdpa_problem p = f->p;
        const int64_t n_q = n_queries[shape], n_k = n_keys[shape];
        p.n_q = n_q;
        p.n_k = n_k;
        p.interrupted = poll_clock;
        p.o = new_tensor(f, c.dtype, 1, n_q, 64, NULL);
        p.dq = new_tensor(f, c.dtype, 1, n_q, 64, NULL);
        p.lse = new_tensor(f, c.dtype, 1, n_q, 1, NULL);
        p.q = p.dout = p.k = p.v = new_tensor(f, c.dtype, 1, 1, 64, NULL);
        p.dlse.data = NULL;
        p.q.row = p.dout.row = p.k.row = p.v.row = 0; /* inputs may share memory */
        if (shape == 1) {
            p.dk = new_tensor(f, c.dtype, 1, n_k, 64, NULL);
            p.dv = new_tensor(f, c.dtype, 1, n_k, 64, NULL);
        }
        for (int routine = 0; routine < 2; routine++) {
            for (p.n_workers = 1; p.n_workers <= 3; p.n_workers++) {
                double start = seconds();
                interrupt_at = start + 0.1;
                sdpa_status status = routine == 0 ? sdpa_attention_forward(&p) : sdpa_attention_backward(&p);
                double took = seconds() - start;
                CHECK(status == SDPA_INTERRUPTED && took < TIME_LIMIT,
                      "routine %d shape %d workers %d: status %d after %.3f s", routine, shape, p.n_workers,
                      (int)status, took);
            }
        }
        free_fixture(f);
    }
}

void test_attention(void) {
    naive_seed();
    sizes();
    options();
    fast_paths();
    merging();
}

/* What threads and faults can disturb, small enough for ThreadSanitizer. */
void test_disturbed(void) {
    naive_seed();
    for (int group = 1; group <= 4; group *= 2) {
        for (int mask = NO_MASK; mask <= BIAS_MASK; mask++) {
            test_case c = {.n_batch = 1,
                           .n_head = 4,
                           .group = group,
                           .n_q = 300,
                           .n_k = 400,
                           .d_k = 32,
                           .d_v = 32,
                           .dtype = dtypes[group - 1].all,
                           .mask = (mask_kind)mask,
                           .scale = 0.2,
                           .has_upper = mask == NO_MASK};
            fixture *f = new_fixture(&c);
            f->p.n_workers = 4;
            check_case(f);
            free_fixture(f);
        }
    }
    faults();
    interruption();
}
