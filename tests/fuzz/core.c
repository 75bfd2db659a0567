/* Draws problems for the Python-free core from the bytes of libFuzzer: `make fuzz`. Half of them are compared with the
 * definition (tests/c/naive.c). The rest have the options and passes that it lacks, and random programs: any number of
 * threads must give the same bits, and every instruction set must agree with the generic kernels. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../src/drivers.h"
#include "../../src/runtime/isa.h"
#include "../c/case.h"
#include "../c/check.h"
#include "programs.h"

long n_checks, n_failures;
const char *only_isa;

bool select_isa(const char *name) { return sdpa_isa_select(name); }

enum { N_SEQUENCES = 6 };
#define MOST ((INT64_C(1) << 62) - 1) /* the widest bound that the binding lets through */

/* --- decoding; what is not there is 0 */

typedef struct stream {
    const uint8_t *at, *end;
} stream;

/* A number from 0 to most. */
static int64_t take(stream *s, int64_t most) {
    uint64_t n = s->at < s->end ? *s->at++ : 0;
    if (most > 255) n = n << 8 | (s->at < s->end ? *s->at++ : 0);
    return (int64_t)(n % (uint64_t)(most + 1));
}

/* Near 0, or far from it. */
static int64_t take_far(stream *s) {
    static const int64_t far[] = {INT64_MAX - 9, INT64_MIN + 9, MOST, -MOST, INT32_MAX, INT32_MIN};
    const int64_t n = take(s, 127);
    return n < 6 ? far[n] : n - 66;
}

static int64_t take_offset(stream *s) {
    const int64_t n = take_far(s);
    return n > SDPA_LARGEST_OFFSET ? SDPA_LARGEST_OFFSET : n < -SDPA_LARGEST_OFFSET ? -SDPA_LARGEST_OFFSET : n;
}

static void take_sizes(stream *s, test_case *c) {
    static const int64_t most[][6] = {/* n_batch, key heads, group, n_q, n_k, d */
                                      {3, 2, 3, 33, 70, 40},  {3, 2, 3, 12, 20, 12}, {1, 1, 2, 2, 9500, 17},
                                      {1, 2, 2, 300, 300, 9}, {1, 2, 1, 5, 9, 600},  {2, 3, 4, 1, 150, 70}};
    const int64_t *limit = most[take(s, 5)];
    c->n_batch = take(s, limit[0]);
    c->group = 1 + take(s, limit[2] - 1);
    c->n_head = c->group * take(s, limit[1]);
    c->n_q = take(s, limit[3]);
    c->n_k = take(s, limit[4]);
    c->d_k = take(s, limit[5]);
    c->d_v = take(s, limit[5]);
}

static test_case take_case(stream *s) {
    static const sdpa_dtype dtypes[][2] = {{SDPA_F32, 0},  {SDPA_F64, 0},        {SDPA_F16, 0},
                                           {SDPA_BF16, 0}, {SDPA_F32, SDPA_F16}, {SDPA_F32, SDPA_BF16}};
    static const double scales[] = {0.25, 0.125, 0, -0.5, 1, 0.06};
    const sdpa_dtype *dtype = dtypes[take(s, 5)];
    test_case c = {.dtype = dtype[0], .narrow = dtype[1]};
    take_sizes(s, &c);
    c.scale = scales[take(s, 5)];
    c.mask = (mask_kind)take(s, 2);
    c.has_lower = take(s, 1);
    c.has_upper = take(s, 1);
    c.offset = take(s, 1);
    c.key_length = take(s, 1) && c.n_k >= c.n_batch;
    c.lower = -(take_far(s) & MOST);
    c.upper = take_far(s) & MOST;
    c.offset_base = c.offset ? take_offset(s) : 0;
    c.poisoned = take(s, 1);
    return c;
}

/* --- what the definition lacks */

enum pass { FORWARD, TANGENT, BACKWARD, SECOND, STATISTICS, WEIGHTS, RECEIVED, N_PASSES };

static sdpa_tensor per_head(fixture *f, double *values) {
    sdpa_tensor t = new_tensor(f, f->c.dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32, f->c.n_head, 1, 1, values);
    if (!values) memset(f->buffers[f->n_buffers - 1].memory, 0, f->buffers[f->n_buffers - 1].bytes); /* dsinks */
    t.row = t.col = 0;
    return t;
}

static sdpa_tensor drawn(fixture *f, sdpa_dtype dtype, int64_t heads, int64_t rows, int64_t cols) {
    bounded b = naive_bounded(&f->c, heads, rows, cols);
    for (int64_t i = 0; i < b.n; i++) b.x[i] = naive_normal();
    sdpa_tensor t = new_tensor(f, dtype, heads, rows, cols, b.x);
    naive_free_bounded(&b);
    return t;
}

static sdpa_tensor drawn_per_head(fixture *f) {
    bounded b = naive_bounded(&f->c, f->c.n_head, 1, 1);
    for (int64_t i = 0; i < b.n; i++) b.x[i] = naive_normal();
    sdpa_tensor t = per_head(f, b.x);
    naive_free_bounded(&b);
    return t;
}

static void take_options(stream *s, fixture *f) {
    sdpa_problem *p = &f->p;
    static const double parts[] = {0, 0.1, 0.5, 1};
    p->softcap = take(s, 1) ? 3 : 0;
    p->dropout_p = parts[take(s, 3)];
    p->seed = (uint64_t)take(s, 255);
    if (take(s, 1)) p->sinks = drawn_per_head(f);
    /* Far away the bias is nothing but rounding, which differs between instruction sets. */
    if (take(s, 1) && llabs(f->c.offset_base) < 1000) p->alibi_slopes = drawn_per_head(f);
    p->invariant = take(s, 1);
    p->features = sdpa_problem_features(p);
}

/* Sequences, one after the other, instead of a batch: bounds in cu[0] of queries and in cu[1] of keys. */
static void take_sequences(stream *s, fixture *f, int64_t cu[2][N_SEQUENCES + 1]) {
    const int64_t n = 1 + take(s, N_SEQUENCES - 1), total[2] = {f->c.n_q, f->c.n_k};
    for (int side = 0; side < 2; side++) {
        cu[side][0] = 0;
        for (int64_t i = 1; i < n; i++) cu[side][i] = cu[side][i - 1] + take(s, total[side] - cu[side][i - 1]);
        cu[side][n] = total[side];
    }
    f->p.n_axes = 0;
    f->p.cu_q = cu[0];
    f->p.cu_k = cu[1];
    f->p.n_sequences = n;
}

static void add_tangents(fixture *f) {
    sdpa_problem *p = &f->p;
    const test_case *c = &f->c;
    p->q_t = drawn(f, c->dtype, c->n_head, c->n_q, c->d_k);
    p->k_t = drawn(f, naive_key_dtype(c), c->n_head / c->group, c->n_k, c->d_k);
    p->v_t = drawn(f, naive_key_dtype(c), c->n_head / c->group, c->n_k, c->d_v);
    if (p->sinks.data) p->sinks_t = drawn_per_head(f);
}

static sdpa_status run(fixture *f, enum pass pass, sdpa_stage stage) {
    sdpa_problem p = f->p;
    const test_case *c = &f->c;
    const sdpa_dtype wide = c->dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32, narrow = naive_key_dtype(c);
    if (pass == TANGENT || pass == SECOND) p.o_t = new_tensor(f, c->dtype, c->n_head, c->n_q, c->d_v, NULL);
    if (pass == FORWARD || pass == TANGENT) {
        p.o = new_tensor(f, c->dtype, c->n_head, c->n_q, c->d_v, NULL);
        p.lse = new_tensor(f, wide, c->n_head, c->n_q, 1, NULL);
        return pass == FORWARD ? sdpa_attention_forward(&p) : sdpa_attention_tangent(&p);
    }
    if (pass >= STATISTICS) p.lse.data = NULL;
    if (pass == STATISTICS) {
        p.o = new_tensor(f, wide, c->n_head, c->n_q, SDPA_N_STATISTICS, NULL);
        return sdpa_attention_statistics(&p);
    }
    if (pass == RECEIVED) {
        p.o = new_tensor(f, wide, c->n_head, c->n_k, SDPA_N_RECEIVED, NULL);
        return sdpa_attention_received(&p);
    }
    if (pass == WEIGHTS) {
        p.o = new_tensor(f, c->dtype, c->n_head, c->n_q, c->n_k, NULL);
        p.stage = stage;
        return sdpa_attention_weights(&p);
    }
    p.dq = new_tensor(f, c->dtype, c->n_head, c->n_q, c->d_k, NULL);
    const unsigned layout = f->layout;
    f->layout &= ~(unsigned)(LAYOUT_COLUMNS_FIRST | LAYOUT_SPACED); /* rows in one piece */
    p.dk = new_tensor(f, narrow, c->n_head / c->group, c->n_k, c->d_k, NULL);
    p.dv = new_tensor(f, narrow, c->n_head / c->group, c->n_k, c->d_v, NULL);
    f->layout = layout;
    if (c->mask == BIAS_MASK) p.dmask = new_tensor(f, c->dtype, SHARED, c->n_q, c->n_k, NULL);
    if (p.sinks.data) p.dsinks = per_head(f, NULL);
    return pass == BACKWARD ? sdpa_attention_backward(&p) : sdpa_attention_second(&p);
}

/* Results, by their buffers: of one thread and of three. */
static void check_bits(const fixture *f, int a, int b) {
    CHECK(f->buffers[a].bytes == f->buffers[b].bytes &&
              memcmp(f->buffers[a].memory, f->buffers[b].memory, f->buffers[a].bytes) == 0,
          "result %d differs between threads", a);
}

/* Of two instruction sets. The bound finds what is computed of the wrong numbers, not the last digit. */
static void check_close(const fixture *f, int a, int b, enum pass pass) {
    const sdpa_dtype dtype = f->buffers[a].dtype;
    const size_t size = (size_t)sdpa_size_of(dtype), n = f->buffers[a].bytes / size;
    const double bound = f->c.dtype == SDPA_F64 ? 1e-9 : f->c.dtype == SDPA_F32 && !f->c.narrow ? 1e-3 : 0.1;
    double largest = 1;
    for (size_t i = 0; i < n; i++) {
        const double x = fabs(get(f->buffers[b].memory + i * size, dtype));
        if (isfinite(x)) largest = fmax(largest, x);
    }
    for (size_t i = 0; i < n; i++) {
        const double x = get(f->buffers[a].memory + i * size, dtype), y = get(f->buffers[b].memory + i * size, dtype);
        CHECK(x == y || (isnan(x) && isnan(y)) || fabs(x - y) <= bound * largest,
              "pass %d, result %d, element %zu of %zu: %.9g, generic %.9g", (int)pass, a, i, n, x, y);
    }
}

/* Programs of the problem; NULL: none. */
typedef struct functions {
    random_program *score, *mask;
} functions;

static functions take_functions(stream *s, fixture *f) {
    sdpa_problem *p = &f->p;
    const int64_t which = take(s, 3), seed = take(s, 65535), sequences = p->cu_q ? p->n_sequences : f->c.n_batch;
    const int64_t first = naive_offset(&f->c, 0), last = naive_offset(&f->c, sequences - 1);
    functions none = {NULL, NULL}, found = none;
    if (llabs(first) > 1000 || sequences * f->c.n_head * f->c.n_q * f->c.n_k == 0) return none;
    const sdpa_box box = {{0, sequences - 1}, {0, f->c.n_head - 1}, {first, last + f->c.n_q - 1}, {0, f->c.n_k - 1}};
    const bool is_double = f->c.dtype == SDPA_F64;
    if (which & 1) found.score = new_program((uint64_t)seed + 1, false, is_double, &box);
    if (which & 2) found.mask = new_program((uint64_t)seed + 70000, true, is_double, &box);
    p->score_mod = found.score ? &found.score->program : NULL;
    p->mask_mod = found.mask ? &found.mask->program : NULL;
    p->features = sdpa_problem_features(p);
    return found;
}

/* A run of the pass; whether an index was out of range. */
static bool run_functions(fixture *f, const functions *g, enum pass pass, sdpa_stage stage, int number) {
    begin_run(g->score);
    begin_run(g->mask);
    CHECK(run(f, pass, stage) == SDPA_OK, "pass %d", (int)pass);
    const bool score = end_run(g->score, number), mask = end_run(g->mask, number);
    return score || mask;
}

static void check_gradients(const fixture *f, const random_program *p) {
    const double bound = f->c.dtype == SDPA_F64 ? 1e-9 : f->c.dtype == SDPA_F32 && !f->c.narrow ? 1e-3 : 0.1;
    for (int x = 0; p && x < N_ARRAYS; x++) {
        const double *one = p->kept[0][x], *three = p->kept[1][x], *generic = p->kept[2][x];
        const size_t n = one ? (size_t)p->arrays[x].size : 0;
        CHECK(!n || memcmp(one, three, n * sizeof *one) == 0, "gradient %d differs between threads", x);
        double largest = 1;
        for (size_t i = 0; i < n; i++) largest = isfinite(generic[i]) ? fmax(largest, fabs(generic[i])) : largest;
        for (size_t i = 0; i < n; i++) {
            const bool same = one[i] == generic[i] || (isnan(one[i]) && isnan(generic[i]));
            CHECK(same || fabs(one[i] - generic[i]) <= bound * largest,
                  "gradient %d, element %zu of %zu: %.9g, generic %.9g", x, i, n, one[i], generic[i]);
        }
    }
}

static void check_pass(stream *s, fixture *f, const functions *g) {
    const enum pass pass = (enum pass)take(s, f->p.cu_q ? STATISTICS : N_PASSES - 1);
    const sdpa_stage stage = (sdpa_stage)take(s, 3);
    if (pass == TANGENT || pass == SECOND) add_tangents(f);
    CHECK(sdpa_attention_forward(&f->p) == SDPA_OK, "forward");
    f->layout &= ~(unsigned)(LAYOUT_SHIFTED | LAYOUT_SWAPPED);
    const int first = f->n_buffers;
    const bool fault = run_functions(f, g, pass, stage, 0);
    const int n = f->n_buffers - first;
    f->p.n_workers = 3;
    CHECK(run_functions(f, g, pass, stage, 1) == fault, "an index out of range by the number of threads");
    for (int i = 0; i < n && !fault; i++) check_bits(f, first + i, first + n + i);
    sdpa_isa_select("generic");
    CHECK(run_functions(f, g, pass, stage, 2) == fault, "an index out of range by the instruction set");
    for (int i = 0; i < n && !fault; i++) check_close(f, first + i, first + 2 * n + i, pass);
    if (!fault && (pass == BACKWARD || pass == SECOND)) check_gradients(f, g->score);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    stream s = {data, data + size};
    naive_seed();
    int n;
    const sdpa_isa *list = sdpa_isa_list(&n);
    const int isa = (int)take(&s, n - 1);
    if (!sdpa_isa_select(list[isa].name)) return -1;
    const bool plain = take(&s, 1);
    const unsigned layout = (unsigned)take(&s, 63);
    test_case c = take_case(&s);
    const bool packed = !plain && take(&s, 3) == 3;
    if (packed) {
        c.n_batch = 1;
        c.mask = NO_MASK;
        c.offset = c.key_length = false;
    }
    fixture *f = new_fixture(&c, layout);
    f->p.n_workers = 1 + (int)take(&s, 1);
    if (plain) {
        check_case(f);
    } else {
        int64_t cu[2][N_SEQUENCES + 1];
        take_options(&s, f);
        if (packed) take_sequences(&s, f, cu);
        functions g = take_functions(&s, f);
        check_pass(&s, f, &g);
        free_program(g.score);
        free_program(g.mask);
    }
    free_fixture(f);
    fflush(stdout);
    if (n_failures) abort();
    return 0;
}

#ifdef SDPA_FUZZ_BLIND
/* The fuzzer's library, without its own main and without its feedback from the code: `make fuzz-ci`. */
int LLVMFuzzerRunDriver(int *argc, char ***argv, int (*one_input)(const uint8_t *, size_t));

int main(int argc, char **argv) { return LLVMFuzzerRunDriver(&argc, &argv, LLVMFuzzerTestOneInput); }
#endif
