/* Additive attention against its definition in double, over ISAs, float32 and float64, and sizes at the edges of vectors
 * and blocks. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../src/drivers.h"
#include "../../src/runtime/isa.h"
#include "../../src/runtime/memory.h"
#include "check.h"
#include "interruption.h"
#include "naive.h"

enum { QUERY, KEY, VALUE, W_QUERY, W_KEY, W_SCORE, BIAS, N_ARGUMENTS, DOUT = N_ARGUMENTS, OUT, LSE, N_ARRAYS };
static const char *const names[] = {"query",   "key",  "value", "w_query", "w_key",
                                    "w_score", "bias", "dout",  "out",     "lse"};

typedef struct additive_case {
    int64_t n_head, n_q, n_k, d_q, d_k, d_v, h;
    sdpa_dtype dtype;
    bool is_causal, has_bias;
    double scale, std;
} additive_case;

/* An array with rows of `cols`. The drivers read or write `data`, which has exactly the size needed. For a result, x is
 * the value by definition and bound the largest error. */
typedef struct array {
    int64_t n, cols;
    double *x, *bound;
    char *data;
} array;

typedef struct fixture {
    additive_case c;
    array in[N_ARRAYS], grad[N_ARGUMENTS];
    sdpa_problem p;
    sdpa_additive a;
} fixture;

static double get(const fixture *f, const array *t, int64_t i) {
    return f->c.dtype == SDPA_F64 ? ((double *)t->data)[i] : (double)((float *)t->data)[i];
}

static array new_array(const fixture *f, int64_t rows, int64_t cols, double std) {
    array t = {rows * cols, cols, NULL, NULL, NULL};
    t.x = calloc((size_t)t.n + 1, sizeof(double));
    t.bound = calloc((size_t)t.n + 1, sizeof(double));
    t.data = calloc((size_t)(t.n * sdpa_size_of(f->c.dtype)) + (t.n == 0), 1);
    for (int64_t i = 0; std > 0 && i < t.n; i++) {
        double x = std * naive_normal();
        if (f->c.dtype == SDPA_F64) {
            ((double *)t.data)[i] = x;
        } else {
            ((float *)t.data)[i] = (float)x;
        }
        t.x[i] = get(f, &t, i);
    }
    return t;
}

static void free_array(array *t) {
    free(t->x);
    free(t->bound);
    free(t->data);
}

static sdpa_tensor tensor_of(const fixture *f, const array *t) {
    const int64_t size = sdpa_size_of(f->c.dtype), matrix = t->n / f->c.n_head * size;
    return (sdpa_tensor){
        .data = t->data, .row = t->cols * size, .col = size, .head = matrix, .group = 1, .dtype = f->c.dtype};
}

static sdpa_matrix matrix_of(const fixture *f, const array *t) {
    return (sdpa_matrix){t->data, t->cols * sdpa_size_of(f->c.dtype), sdpa_size_of(f->c.dtype), f->c.dtype, false};
}

static void add(array *t, int64_t i, double term, double error) {
    t->x[i] += term;
    t->bound[i] += error;
}

/* Row `row` of x times column c of w, and the sum of the magnitudes. */
static double projected(const array *x, int64_t row, const array *w, int64_t c, double *size) {
    double sum = 0;
    for (int64_t d = 0; d < x->cols; d++) {
        double term = x->x[row * x->cols + d] * w->x[d * w->cols + c];
        sum += term;
        *size += fabs(term);
    }
    return sum;
}

/* One query: out, lse, and its share of the gradients. First-order bounds, with N the number of terms of any sum:
 *   t = tanh(a + b)  8 u, and that of a + b, N u in float64 times the sum of magnitudes: e_t; beyond the range of
 *                    exponentials a and b are rounded, and that bends t where it is not flat
 *   score            e = |scale| sum |w| (e_t + N u), the largest of all
 *   p, lse, ds       as in naive.c, from e
 *   w (1 - t^2) ds   |w| (error of ds + |ds| (2 e_t + 4 u))
 * and N u of every term of a sum, of which gradients have two. */
static void one_query(fixture *f, int64_t head, int64_t i) {
    const additive_case *c = &f->c;
    const array *in = f->in;
    const int64_t n_k = c->n_k, h = c->h, d_v = c->d_v, row = head * c->n_q + i;
    const double u = c->dtype == SDPA_F64 ? 0x1p-52 : 0x1p-24;
    const double n = (double)(c->n_head * c->n_q + n_k + h + c->d_q + c->d_k + d_v + 8);
    double *t = calloc((size_t)(n_k * h) + 1, sizeof(double)), *w = calloc((size_t)n_k + 1, sizeof(double));
    double m = -INFINITY, l = 0, e_t = 0, sum_w = 0;
    for (int64_t x = 0; x < h; x++) sum_w += fabs(in[W_SCORE].x[x]);
    for (int64_t j = 0; j < n_k; j++) {
        w[j] = c->is_causal && j > i ? -INFINITY : 0;
        for (int64_t x = 0; x < h && w[j] > -INFINITY; x++) {
            double size = fabs(in[BIAS].x[x]), a = in[BIAS].x[x];
            a += projected(&in[QUERY], row, &in[W_QUERY], x, &size);
            const double b = projected(&in[KEY], head * n_k + j, &in[W_KEY], x, &size);
            const bool is_far = fmax(fabs(a), fabs(b)) > 40;
            const double rounded = is_far ? fmin(1, 4 * exp(-2 * fabs(a + b))) * 2 * u * (fabs(a) + fabs(b)) : 0;
            e_t = fmax(e_t, 8 * u + n * 0x1p-52 * size + rounded);
            t[j * h + x] = tanh(a + b);
            w[j] += c->scale * in[W_SCORE].x[x] * t[j * h + x];
        }
        m = fmax(m, w[j]);
    }
    const double e = fabs(c->scale) * sum_w * (e_t + n * u), reach = fabs(c->scale) * sum_w + log((double)n_k + 1);
    const double error = e + 8 * u * reach, lse_error = error + n * u + 4 * u * reach;
    const double r = expm1(2 * error) + (n + 24) * u, r2 = expm1(2 * error + lse_error) + (n + 24) * u;
    for (int64_t j = 0; j < n_k; j++) l += w[j] = w[j] == -INFINITY ? 0 : exp(w[j] - m);
    add(&f->in[LSE], row, m + log(l), lse_error + u);
    const double *dout = in[DOUT].x + row * d_v;
    double delta = 0, delta_size = 0, delta_error = 0;
    for (int64_t y = 0; y < d_v; y++) {
        for (int64_t j = 0; j < n_k; j++) {
            double term = w[j] / l * in[VALUE].x[(head * n_k + j) * d_v + y];
            add(&f->in[OUT], row * d_v + y, term, (r + n * u) * fabs(term));
        }
        delta += dout[y] * in[OUT].x[row * d_v + y];
        delta_size += fabs(dout[y] * in[OUT].x[row * d_v + y]);
        delta_error += fabs(dout[y]) * in[OUT].bound[row * d_v + y];
    }
    for (int64_t j = 0; j < n_k; j++) {
        const int64_t key = head * n_k + j;
        const double p = w[j] / l;
        double dp = 0, size = delta_size;
        if (p == 0) continue;
        for (int64_t y = 0; y < d_v; y++) {
            double v = in[VALUE].x[key * d_v + y];
            dp += dout[y] * v;
            size += fabs(dout[y] * v);
            add(&f->grad[VALUE], key * d_v + y, p * dout[y], (r2 + n * u) * p * fabs(dout[y]));
        }
        const double ds = c->scale * p * (dp - delta), ds_size = fabs(c->scale) * p * size;
        const double ds_error = (r2 + n * u) * ds_size + fabs(c->scale) * p * delta_error;
        for (int64_t x = 0; x < h; x++) {
            const double tanh = t[j * h + x], weight = in[W_SCORE].x[x], slope = weight * (1 - tanh * tanh);
            const double g = ds * slope, g_error = fabs(weight) * (ds_error + ds_size * (2 * e_t + (2 * n + 4) * u));
            add(&f->grad[W_SCORE], x, ds * tanh, ds_error + ds_size * (e_t + n * u));
            add(&f->grad[BIAS], x, g, g_error);
            for (int s = 0; s < 2; s++) {
                const array *tokens = &in[s ? KEY : QUERY], *weights = &in[s ? W_KEY : W_QUERY];
                const int64_t token = s ? key : row;
                for (int64_t d = 0; d < tokens->cols; d++) {
                    const double a = tokens->x[token * tokens->cols + d], b = weights->x[d * h + x];
                    add(&f->grad[s ? KEY : QUERY], token * tokens->cols + d, g * b, g_error * fabs(b));
                    add(&f->grad[s ? W_KEY : W_QUERY], d * h + x, g * a, g_error * fabs(a));
                }
            }
        }
    }
    free(t);
    free(w);
}

static fixture *new_fixture(const additive_case *c) {
    fixture *f = calloc(1, sizeof *f);
    f->c = *c;
    const int64_t n = c->n_head;
    const struct {
        int64_t rows, cols;
        double std;
    } shapes[] = {
        {n * c->n_q, c->d_q, 1},
        {n * c->n_k, c->d_k, 1},
        {n * c->n_k, c->d_v, 1},
        {c->d_q, c->h, c->std / sqrt((double)c->d_q + 1)},
        {c->d_k, c->h, c->std / sqrt((double)c->d_k + 1)},
        {1, c->h, 1},
        {1, c->h, c->has_bias},
        {n * c->n_q, c->d_v, 1},
        {n * c->n_q, c->d_v, 0},
        {n * c->n_q, 1, 0},
    };
    for (int i = 0; i < N_ARRAYS; i++) f->in[i] = new_array(f, shapes[i].rows, shapes[i].cols, shapes[i].std);
    for (int i = 0; i < N_ARGUMENTS; i++) f->grad[i] = new_array(f, shapes[i].rows, shapes[i].cols, 0);
    sdpa_problem *p = &f->p;
    *p = (sdpa_problem){.n_batch = 1,
                        .n_head = n,
                        .n_q = c->n_q,
                        .n_k = c->n_k,
                        .d_k = c->d_k,
                        .d_v = c->d_v,
                        .dtype = c->dtype,
                        .scale = c->scale,
                        .has_upper = c->is_causal,
                        .n_workers = 1};
    sdpa_tensor *tensors[N_ARRAYS] = {&p->q, &p->k, &p->v, NULL, NULL, NULL, NULL, &p->dout, &p->o, &p->lse};
    sdpa_tensor *gradients[] = {&p->dq, &p->dk, &p->dv};
    for (int i = 0; i < N_ARRAYS; i++) {
        if (tensors[i]) *tensors[i] = tensor_of(f, &f->in[i]);
        if (i < W_QUERY) *gradients[i] = tensor_of(f, &f->grad[i]);
    }
    p->features = sdpa_problem_features(p);
    f->a = (sdpa_additive){.n_hidden = c->h, .d_q = c->d_q};
    sdpa_matrix *weights[] = {&f->a.w_query, &f->a.w_key, &f->a.w_score, &f->a.bias};
    sdpa_matrix *of_weights[] = {&f->a.dw_query, &f->a.dw_key, &f->a.dw_score, &f->a.dbias};
    for (int i = W_QUERY; i < N_ARGUMENTS; i++) {
        if (i == BIAS && !c->has_bias) continue;
        *weights[i - W_QUERY] = matrix_of(f, &f->in[i]);
        *of_weights[i - W_QUERY] = matrix_of(f, &f->grad[i]);
    }
    for (int64_t head = 0; head < n; head++) {
        for (int64_t i = 0; i < c->n_q; i++) one_query(f, head, i);
    }
    return f;
}

static void free_fixture(fixture *f) {
    for (int i = 0; i < N_ARRAYS; i++) free_array(&f->in[i]);
    for (int i = 0; i < N_ARGUMENTS; i++) free_array(&f->grad[i]);
    free(f);
}

static void check_array(const fixture *f, const char *what, const array *t) {
    const additive_case *c = &f->c;
    const double u = naive_roundoff(c->dtype);
    int64_t n_wrong = 0, worst = 0;
    for (int64_t i = 0; i < t->n; i++) {
        double error = t->x[i] == get(f, t, i) ? 0 : fabs(t->x[i] - get(f, t, i)); /* -inf - -inf */
        if (error <= t->bound[i] + u * fabs(t->x[i]) + 0x1p-126) continue;
        n_wrong++;
        worst = i;
    }
    CHECK(n_wrong == 0,
          "%s: isa %s dtype %d heads %ld n_q %ld n_k %ld d_q %ld d_k %ld d_v %ld h %ld causal %d bias %d std %g "
          "workers %d: %ld of %ld wrong, at %ld %.9g instead of %.9g, bound %.3g",
          what, sdpa_isa_get()->name, (int)c->dtype, (long)c->n_head, (long)c->n_q, (long)c->n_k, (long)c->d_q,
          (long)c->d_k, (long)c->d_v, (long)c->h, c->is_causal, c->has_bias, c->std, f->p.n_workers, (long)n_wrong,
          (long)t->n, (long)worst, get(f, t, worst), t->x[worst], t->bound[worst]);
}

static void clear_gradients(fixture *f) {
    for (int i = 0; i < N_ARGUMENTS; i++) memset(f->grad[i].data, 0, (size_t)(f->grad[i].n * sdpa_size_of(f->c.dtype)));
}

static void on_every_isa(const additive_case *c) {
    fixture *f = new_fixture(c);
    const char *before = sdpa_isa_get()->name;
    int n;
    const sdpa_isa *list = sdpa_isa_list(&n);
    for (int isa = 0; isa < n; isa++) {
        if (!select_isa(list[isa].name)) continue;
        for (f->p.n_workers = 1; f->p.n_workers <= 3; f->p.n_workers += 2) {
            CHECK(sdpa_additive_forward(&f->p, &f->a) == SDPA_OK, "forward");
            check_array(f, names[OUT], &f->in[OUT]);
            check_array(f, names[LSE], &f->in[LSE]);
            clear_gradients(f);
            CHECK(sdpa_additive_backward(&f->p, &f->a) == SDPA_OK, "backward");
            for (int i = 0; i < N_ARGUMENTS - !c->has_bias; i++) check_array(f, names[i], &f->grad[i]);
        }
    }
    sdpa_isa_select(before);
    free_fixture(f);
}

/* Every allocation fails once. */
static void faults(const additive_case *c) {
    fixture *f = new_fixture(c);
    f->p.n_workers = 2;
    for (int routine = 0; routine < 2; routine++) {
        sdpa_status (*call)(const sdpa_problem *, const sdpa_additive *) =
            routine ? sdpa_additive_backward : sdpa_additive_forward;
        int n = 0;
        sdpa_status status = SDPA_NO_MEMORY;
        for (; status == SDPA_NO_MEMORY && n < 100; n++) {
            clear_gradients(f);
            sdpa_alloc_fail_after(n);
            status = call(&f->p, &f->a);
            sdpa_alloc_fail_after(-1);
        }
        CHECK(status == SDPA_OK && n > 2, "routine %d: status %d after %d allocations", routine, (int)status, n);
    }
    free_fixture(f);
}

static sdpa_status run_forward(void *context) {
    const fixture *f = context;
    return sdpa_additive_forward(&f->p, &f->a);
}

static sdpa_status run_backward(void *context) {
    const fixture *f = context;
    return sdpa_additive_backward(&f->p, &f->a);
}

static void interruption(const additive_case *c) {
    fixture *f = new_fixture(c);
    f->p.interrupted = poll_countdown;
    for (f->p.n_workers = 1; f->p.n_workers <= 3; f->p.n_workers += 2) {
        check_interrupted("additive forward", f->p.n_workers, run_forward, f);
        check_interrupted("additive backward", f->p.n_workers, run_backward, f);
    }
    free_fixture(f);
}

void test_additive(void) {
    naive_seed();
    const int64_t edges[] = {0, 1, 2, 3, 8, 15, 17, 47, 48, 49, 97, 129};
    for (int t = 0; t < 2; t++) {
        const additive_case c = {.n_head = 1,
                                 .n_q = 5,
                                 .n_k = 7,
                                 .d_q = 3,
                                 .d_k = 4,
                                 .d_v = 5,
                                 .h = 6,
                                 .dtype = t ? SDPA_F64 : SDPA_F32,
                                 .has_bias = true,
                                 .scale = 0.7,
                                 .std = 1};
        for (size_t e = 0; e < sizeof edges / sizeof edges[0]; e++) {
            additive_case queries = c, keys = c, of_query = c, of_key = c, columns = c, hidden = c;
            queries.n_q = keys.n_k = of_query.d_q = of_key.d_k = columns.d_v = hidden.h = edges[e];
            on_every_isa(&queries);
            on_every_isa(&keys);
            on_every_isa(&of_query);
            on_every_isa(&of_key);
            on_every_isa(&columns);
            on_every_isa(&hidden);
        }
        additive_case heads = c;
        heads.n_head = 3;
        heads.n_q = heads.n_k = 101;
        heads.is_causal = true;
        heads.has_bias = false;
        heads.scale = -1.3;
        on_every_isa(&heads);
        heads.std = t ? 500 : 60; /* beyond the range of exponentials */
        heads.scale = 0.1;
        on_every_isa(&heads);
        faults(&heads);
        interruption(&heads);
    }
}
