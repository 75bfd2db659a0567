/* The drivers against the definition, over ISAs, dtypes, options and sizes at the edges of vectors and blocks. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../src/drivers.h"
#include "../../src/kernels/kernels.h"
#include "../../src/runtime/memory.h"
#include "../../src/unit.h"
#include "case.h"
#include "check.h"

static void in_layout(const test_case *c, unsigned layout) {
    static long n_problems;
    if (n_problems++ % SAMPLE != 0) return;
    fixture *f = new_fixture(c, layout);
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

static void on_every_isa(const test_case *c) { in_layout(c, 0); }

/* The fields dtype and narrow of test_case. */
static const struct {
    sdpa_dtype all, narrow;
} dtypes[] = {{SDPA_F16, 0}, {SDPA_BF16, 0}, {SDPA_F32, 0}, {SDPA_F64, 0}, {SDPA_F32, SDPA_F16}, {SDPA_F32, SDPA_BF16}};
enum { N_DTYPES = sizeof dtypes / sizeof dtypes[0] };

/* Sizes around a vector, a query block and a key block, on one axis at a time; the other axes have odd sizes. */
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
            test_case rows = c, keys = c, depth = c, columns = c, square = c, headless = c;
            headless.n_head = 0;
            headless.n_q = rows.n_q = keys.n_k = depth.d_k = columns.d_v = square.n_q = square.n_k = edges[e];
            square.has_upper = true;
            on_every_isa(&rows);
            on_every_isa(&keys);
            on_every_isa(&depth);
            on_every_isa(&columns);
            on_every_isa(&square);
            on_every_isa(&headless);
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

/* Masks of which whole tiles are hidden or shown, beyond a strip of their outlines; what is hidden is NaN. */
static void outlines(void) {
    for (int t = 0; t < N_DTYPES; t++) {
        for (int bits = 0; bits < 4; bits++) {
            test_case c = {.n_batch = 2,
                           .n_head = 2,
                           .group = 1 + (bits & 1),
                           .n_q = 130,
                           .n_k = bits & 2 ? SDPA_STRIP + 150 : 650,
                           .d_k = 5,
                           .d_v = 3,
                           .dtype = dtypes[t].all,
                           .narrow = dtypes[t].narrow,
                           .mask = BOOL_MASK,
                           .in_blocks = true,
                           .has_upper = bits & 1,
                           .upper = 400,
                           .poisoned = true,
                           .scale = 0.4};
            on_every_isa(&c);
        }
    }
}

/* Every memory layout, with NaN in masked places. */
static void layouts(void) {
    for (int t = 0; t < N_DTYPES; t++) {
        for (unsigned layout = 0; layout < 2 * LAYOUT_SWAPPED; layout++) {
            test_case c = {.n_batch = 2,
                           .n_head = 2,
                           .group = 2,
                           .n_q = 11,
                           .n_k = 37,
                           .d_k = 9,
                           .d_v = 6,
                           .dtype = dtypes[t].all,
                           .narrow = dtypes[t].narrow,
                           .mask = (mask_kind)(layout % 3),
                           .scale = 0.25,
                           .has_upper = true,
                           .upper = 9,
                           .key_length = true,
                           .poisoned = true};
            in_layout(&c, layout);
            /* So many queries for each key head that keys and values are copied. */
            c.n_q = 60;
            c.d_k = 34;
            if (layout < 2 * LAYOUT_COLUMNS_FIRST || layout & LAYOUT_SWAPPED) in_layout(&c, layout);
        }
    }
}

/* Shapes that only wide vectors tell apart, in layouts without any mask: a last panel of few queries, full lanes beside
 * few keys, keys so many that they are fetched ahead, pairs of bfloat16 that are masked in rows of several vectors. */
static void shapes(void) {
    static const test_case cases[] = {
        {.n_q = 50, .n_k = 40, .d_k = 16, .d_v = 32},
        {.n_q = 16, .n_k = 32, .d_k = 16, .d_v = 16},
        {.n_q = 20, .n_k = 35, .d_k = 32, .d_v = 32},
        {.n_q = 20,
         .n_k = 35,
         .d_k = 16,
         .d_v = 40,
         .mask = BOOL_MASK,
         .poisoned = true,
         .has_lower = true,
         .has_upper = true},
        {.n_q = 8, .n_k = 2100, .d_k = 64, .d_v = 64},
        {.n_q = 12, .n_k = 2100, .d_k = 80, .d_v = 64},
        {.n_q = 12, .n_k = 8300, .d_k = 16, .d_v = 16},
    };
    static const unsigned layout[] = {0, LAYOUT_COLUMNS_FIRST, LAYOUT_SPACED, LAYOUT_SHIFTED, LAYOUT_SWAPPED};
    for (int t = 0; t < N_DTYPES; t++) {
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            test_case c = cases[i];
            c.n_batch = c.n_head = c.group = 1;
            c.dtype = dtypes[t].all;
            c.narrow = dtypes[t].narrow;
            c.scale = 0.2;
            for (int x = 0; x < (c.n_k < 100 ? 4 : 1); x++) in_layout(&c, layout[x]);
        }
    }
}

/* --- fast paths */

static const struct {
    const char *name;
    enum sdpa_path path;
    test_case c;
    bool general; /* the forward goes the general way */
} shortcuts[] = {
    {"few keys", SDPA_PATH_FEW_KEYS, {.n_head = 1, .n_q = 5, .n_k = 7}, false},
    {"few keys, mask", SDPA_PATH_FEW_KEYS, {.n_head = 1, .n_q = 5, .n_k = 7, .mask = BOOL_MASK}, true},
    {"few keys, band", SDPA_PATH_FEW_KEYS, {.n_head = 1, .n_q = 9, .n_k = 12, .has_lower = true, .lower = -3}, true},
    {"one block", SDPA_PATH_ONE_BLOCK, {.n_head = 1, .n_q = 40, .n_k = 100}, false},
    {"one block, band", SDPA_PATH_ONE_BLOCK, {.n_head = 1, .n_q = 40, .n_k = 60, .has_upper = true, .upper = 9}, false},
    {"few queries", SDPA_PATH_FEW_QUERIES, {.n_head = 1, .n_q = 1, .n_k = 200}, false},
    {"narrow", SDPA_PATH_NARROW, {.n_head = 1, .n_q = 1, .n_k = 200, .narrow = SDPA_BF16}, false},
    {"narrow, float16", SDPA_PATH_NARROW, {.n_head = 1, .n_q = 1, .n_k = 200, .narrow = SDPA_F16}, false},
    {"AMX", SDPA_PATH_AMX, {.n_head = 1, .n_q = 40, .n_k = 100}, false},
    {"AMX, bfloat16", SDPA_PATH_AMX, {.n_head = 1, .n_q = 40, .n_k = 100, .dtype = SDPA_BF16}, false},
    {"AMX, float16", SDPA_PATH_AMX, {.n_head = 1, .n_q = 40, .n_k = 100, .dtype = SDPA_F16}, false},
    {"bf16 pairs", SDPA_PATH_BF16_PAIRS, {.n_head = 1, .n_q = 40, .n_k = 100, .dtype = SDPA_BF16}, false},
    {"fold", SDPA_PATH_FOLD, {.n_head = 4, .group = 4, .n_q = 1, .n_k = 50}, false},
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
      .offset = true},
     false},
    {"fold, open below",
     SDPA_PATH_FOLD,
     {.n_head = 4, .group = 4, .n_q = 1, .n_k = 50, .has_lower = true, .lower = -60},
     false},
    {"parts", SDPA_PATH_PARTS, {.n_head = 1, .n_q = 4, .n_k = 2100}, false},
    {"fused", SDPA_PATH_FUSED, {.n_head = 1, .n_q = 40, .n_k = 300}, false},
    {"first", SDPA_PATH_FIRST, {.n_head = 1, .n_q = 40, .n_k = 300}, false},
    {"split", SDPA_PATH_SPLIT, {.n_head = 1, .n_q = 120, .n_k = 120, .has_upper = true}, false},
};

static bool has_path(enum sdpa_path path, const fixture *f) {
    const test_case *c = &f->c;
    const char *name = sdpa_isa_get()->name;
    const struct sdpa_kernels *kernels = sdpa_pass_kernels_for(&f->p, SDPA_PASS_FORWARD);
    const bool plain = strcmp(name, "generic") == 0 || strcmp(name, "wide") == 0 || strcmp(name, "amx_model") == 0;
    if (c->narrow == SDPA_F16) return !plain;                     /* which widen float16 in more than one step */
    const bool amx = strncmp(name, "amx", 3) == 0 && c->n_q > 32; /* few queries do not go through the matrix unit */
    if (path == SDPA_PATH_AMX) return amx;
    if (path == SDPA_PATH_FEW_KEYS || (path == SDPA_PATH_ONE_BLOCK && !amx)) return kernels->lanes >= 8;
    if (path == SDPA_PATH_BF16_PAIRS) return kernels->rounds && !amx;
    return !amx;
}

/* A problem that takes a fast path takes none once it has a feature that no path knows, and its result is still
 * right. */
static void fast_paths(void) {
    for (size_t s = 0; s < sizeof shortcuts / sizeof shortcuts[0]; s++) {
        const enum sdpa_path path = shortcuts[s].path;
        const bool forward = path != SDPA_PATH_ONE_BLOCK && !shortcuts[s].general,
                   backward = path == SDPA_PATH_ONE_BLOCK || path == SDPA_PATH_FEW_KEYS || path == SDPA_PATH_AMX;
        test_case c = shortcuts[s].c;
        c.n_batch = 1;
        c.d_k = c.d_v = 16;
        c.scale = 0.25;
        if (!c.group) c.group = 1;
        if (!c.dtype) c.dtype = SDPA_F32;
        fixture *f = new_fixture(&c, 0);
        const char *before = sdpa_isa_get()->name;
        int n;
        const sdpa_isa *list = sdpa_isa_list(&n);
        for (int i = 0; i < n; i++) {
            if (!select_isa(list[i].name)) continue;
            const struct {
                const char *name;
                sdpa_status (*call)(const sdpa_problem *);
            } calls[] = {{"forward", sdpa_attention_forward},
                         {"backward", sdpa_attention_backward},
                         {"forward mode", sdpa_attention_tangent},
                         {"double backward", sdpa_attention_second},
                         {"statistics", sdpa_attention_statistics}};
            const int first_buffer = f->n_buffers, n_calls = path == SDPA_PATH_AMX ? 5 : 1 + backward;
            sdpa_problem p = f->p;
            p.dq = new_tensor(f, c.dtype, c.n_head, c.n_q, c.d_k, NULL);
            p.o_t = new_tensor(f, c.dtype, c.n_head, c.n_q, c.d_v, NULL);
            p.q_t = f->q_t;
            p.k_t = f->k_t;
            p.v_t = f->v_t;
            for (int x = 0; x < n_calls; x++) {
                if (x == 4) p.o = new_tensor(f, p.lse.dtype, c.n_head, c.n_q, SDPA_N_STATISTICS, NULL);
                for (int unknown = 0; unknown < 2; unknown++) {
                    p.features = f->p.features | (unknown ? SDPA_FEATURE_UNKNOWN : 0);
                    for (int y = 0; y < SDPA_N_PATHS; y++) sdpa_taken[y] = 0;
                    CHECK(calls[x].call(&p) == SDPA_OK, "%s: %s", shortcuts[s].name, calls[x].name);
                    const bool expected = !unknown && has_path(path, f) && (x > 0 || forward);
                    CHECK((sdpa_taken[path] > 0) == expected, "isa %s, %s: %s taken %ld times, unknown %d",
                          list[i].name, calls[x].name, shortcuts[s].name, (long)sdpa_taken[path], unknown);
                    for (int y = 0; y < SDPA_N_PATHS && unknown; y++) {
                        CHECK(sdpa_taken[y] == 0, "isa %s, %s of %s: path %d taken", list[i].name, calls[x].name,
                              shortcuts[s].name, y);
                    }
                }
            }
            free_buffers(f, first_buffer);
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
        fixture *f = new_fixture(&c, 0);
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
        /* The errors of the parts, including rounding, and of the merge are together within twice those of a whole
         * call. */
        for (int64_t i = 0; i < f->a.o.n; i++) {
            f->a.o.bound[i] = 2 * f->a.o.bound[i] + 2 * naive_roundoff(c.dtype);
        }
        for (int64_t i = 0; i < f->a.lse.n; i++) f->a.lse.bound[i] *= 2;
        check_bounded(f, "merged o", &p.o, &f->a.o);
        check_bounded(f, "merged lse", &p.lse, &f->a.lse);
        free_fixture(f);
    }
}

/* --- allocation faults */

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
        fixture *f = new_fixture(&c, 0);
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
                p.dmask = new_tensor(f, c.dtype, SHARED, c.n_q, c.n_k, NULL);
                sdpa_alloc_fail_after(n);
                status = routine == 0 ? sdpa_attention_forward(&p) : sdpa_attention_backward(&p);
                sdpa_alloc_fail_after(-1);
                free_buffers(f, first_buffer);
            }
            CHECK(status == SDPA_OK && n > 1, "routine %d dtype %d: status %d after %d allocations", routine,
                  (int)c.dtype, (int)status, n);
        }
        free_fixture(f);
    }
}

void test_attention(void) {
    naive_seed();
    sizes();
    options();
    test_outline();
    outlines();
    layouts();
    shapes();
    fast_paths();
    merging();
}

/* Tests of threads and faults, small enough for ThreadSanitizer. A sample has each group and each mask once. */
void test_disturbed(void) {
    naive_seed();
    for (int group = 1; group <= 4; group *= 2) {
        for (int mask = NO_MASK; mask <= BIAS_MASK; mask++) {
            if (SAMPLE > 1 && group != 1 << mask) continue;
            test_case c = {.n_batch = 1,
                           .n_head = 4,
                           .group = group,
                           .n_q = 300,
                           .n_k = 400,
                           .d_k = 32,
                           .d_v = 32,
                           .dtype = dtypes[group - 1].all,
                           .mask = (mask_kind)mask,
                           .in_blocks = group > 1,
                           .scale = 0.2,
                           .has_upper = mask == NO_MASK};
            fixture *f = new_fixture(&c, 0);
            f->p.n_workers = 4;
            check_case(f);
            free_fixture(f);
        }
    }
    faults();
    test_interruption();
}
