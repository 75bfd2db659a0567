#include "naive.h"

#include <math.h>
#include <stdlib.h>

static uint64_t state;

double naive_uniform(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return ((double)(state >> 11) + 0.5) * 0x1p-53;
}

/* Drawn once, for logarithm and cosine took half the time of some tests. Their number is prime, so that no row of an
 * operand equals another. */
enum { N_NORMALS = 65521 };
static double normals[N_NORMALS];
static int64_t n_used;

static void draw_normals(void) {
    for (int i = 0; i < N_NORMALS; i++) {
        normals[i] = sqrt(-2 * log(naive_uniform())) * cos(2 * M_PI * naive_uniform());
    }
}

void naive_seed(void) {
    const uint64_t seed = 0x9e3779b97f4a7c15;
    state = seed;
    if (normals[0] == 0) draw_normals();
    state = seed; /* the first call draws, and the next numbers are those after any other */
    n_used = 0;
}

double naive_normal(void) { return normals[n_used++ % N_NORMALS]; }

double naive_roundoff(sdpa_dtype dtype) {
    return dtype == SDPA_F64 ? 0x1p-53 : dtype == SDPA_F32 ? 0x1p-24 : dtype == SDPA_F16 ? 0x1p-11 : 0x1p-8;
}

static double smallest(sdpa_dtype dtype) {
    return dtype == SDPA_F64 ? 0x1p-1074 : dtype == SDPA_F32 ? 0x1p-149 : dtype == SDPA_F16 ? 0x1p-24 : 0x1p-133;
}

int64_t naive_offset(const test_case *c, int64_t batch) { return c->offset ? c->offset_base + 5 * batch - 3 : 0; }

int64_t naive_key_length(const test_case *c, int64_t batch) {
    return c->key_length ? (batch == 0 ? 0 : c->n_k - batch) : c->n_k;
}

static double *new_array(int64_t n) { return calloc((size_t)n + 1, sizeof(double)); }

bounded naive_bounded(const test_case *c, int64_t heads, int64_t rows, int64_t cols) {
    const int64_t n = (heads != SHARED ? c->n_batch * heads : 1) * rows * cols;
    return (bounded){n, heads, rows, cols, new_array(n), new_array(n), new_array(n)};
}

naive naive_new(const test_case *c) {
    int64_t heads = c->n_batch * c->n_head, kv_heads = heads / c->group;
    return (naive){
        .q = new_array(heads * c->n_q * c->d_k),
        .k = new_array(kv_heads * c->n_k * c->d_k),
        .v = new_array(kv_heads * c->n_k * c->d_v),
        .q_t = new_array(heads * c->n_q * c->d_k),
        .k_t = new_array(kv_heads * c->n_k * c->d_k),
        .v_t = new_array(kv_heads * c->n_k * c->d_v),
        .mask = new_array(c->n_q * c->n_k),
        .dout = new_array(heads * c->n_q * c->d_v),
        .dlse = new_array(heads * c->n_q),
        .w = naive_bounded(c, c->n_head, c->n_q, c->n_k),
        .o = naive_bounded(c, c->n_head, c->n_q, c->d_v),
        .o_t = naive_bounded(c, c->n_head, c->n_q, c->d_v),
        .lse = naive_bounded(c, c->n_head, c->n_q, 1),
        .statistics = naive_bounded(c, c->n_head, c->n_q, SDPA_N_STATISTICS),
        .dq = naive_bounded(c, c->n_head, c->n_q, c->d_k),
        .dk = naive_bounded(c, c->n_head / c->group, c->n_k, c->d_k),
        .dv = naive_bounded(c, c->n_head / c->group, c->n_k, c->d_v),
        .dmask = naive_bounded(c, SHARED, c->n_q, c->n_k),
    };
}

void naive_free_bounded(bounded *b) {
    free(b->x);
    free(b->bound);
    free(b->rounded);
}

void naive_free(naive *a) {
    double *arrays[] = {a->q, a->k, a->v, a->mask, a->dout, a->dlse, a->q_t, a->k_t, a->v_t};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) free(arrays[i]);
    bounded *results[] = {&a->w, &a->o, &a->o_t, &a->lse, &a->statistics, &a->dq, &a->dk, &a->dv, &a->dmask};
    for (size_t i = 0; i < sizeof results / sizeof results[0]; i++) naive_free_bounded(results[i]);
}

bool naive_visible(const test_case *c, int64_t batch, int64_t i, int64_t j, double bias) {
    const __int128 t = (__int128)i + naive_offset(c, batch);
    return j < naive_key_length(c, batch) && (!c->has_lower || j >= t + c->lower) &&
           (!c->has_upper || j <= t + c->upper) && bias != -INFINITY;
}

/* The logits of a row, -inf where masked, and what the bounds of its statistics need, as in one_head: u, the error of an
 * exponent, and that of a weight; the largest magnitude of a logit; its lse and weights. */
typedef struct logit_row {
    const double *z, *p;
    double lse, lse_error, u, error, relative, largest, tiny;
    int64_t n, d;
} logit_row;

/* With e the error of a logit, (d_k + n_k + 12) u times the largest S, and X = sum p |log p|:
 *   entropy       r X + 2 h + (n_k + 16) u (1 + X)
 *   sum of p^c    (1 + r + u)^c - 1 + (n_k + 8) u of it; the largest weight like c = 1 without the sum
 *   mean          e
 *   variance      2 e sqrt(variance) + e^2 + (n_k + 8) u of it
 * A row without keys has neither mean nor variance. */
static void row_statistics(const logit_row *row, double *x, double *bound) {
    const double n = (double)row->n, roundings = (n + 8) * row->u,
                 e = ((double)row->d + n + 12) * row->u * row->largest;
    double sums[4] = {0}, entropy = 0, size = 0, most = 0, total = 0, count = 0, squares = 0;
    for (int64_t j = 0; j < row->n; j++) {
        if (row->z[j] == -INFINITY) continue;
        const double p = row->p[j], log_p = row->z[j] - row->lse;
        for (int c = 1; c < 4; c++) sums[c] += pow(p, c);
        entropy -= p * log_p;
        size += p * fabs(log_p);
        most = fmax(most, p);
        total += row->z[j];
        count++;
    }
    const double mean = total / count; /* NaN without keys */
    for (int64_t j = 0; j < row->n; j++) {
        if (row->z[j] != -INFINITY) squares += (row->z[j] - mean) * (row->z[j] - mean);
    }
    const double variance = squares / count, r = row->relative + row->u, tiny = n * row->tiny;
    const double values[SDPA_N_STATISTICS] = {row->lse, entropy, most, sums[2], sums[3], mean, variance};
    const double bounds[SDPA_N_STATISTICS] = {row->lse_error,
                                              r * size + 2 * row->error + (n + 16) * row->u * (1 + size) +
                                                  tiny * (1 + 2 * row->largest),
                                              r * most + tiny,
                                              (pow(1 + r, 2) - 1 + roundings) * sums[2] + tiny,
                                              (pow(1 + r, 3) - 1 + roundings) * sums[3] + tiny,
                                              e,
                                              2 * e * sqrt(variance) + e * e + roundings * variance};
    for (int c = 0; c < SDPA_N_STATISTICS; c++) {
        x[c] = values[c];
        bound[c] = count > 0 ? bounds[c] : 0;
    }
}

/* The tangent of row i of o, from its weights p, -inf logits z being masked. T, the tangent of a logit, errs by e, (2 d_k +
 * 8) u times the largest sum of magnitudes M; T - mu by E = 2 e + (2 r + (n_k + 8) u) M, and o_t by
 *   sum p |v| (E + (r + (2 n_k + 8) u) (2 M + E)) + (r + (n_k + 4) u) sum p |v_t|. */
static void row_tangent(const test_case *c, naive *a, int64_t h, int64_t i, const logit_row *row) {
    const int64_t n_k = c->n_k, d_k = c->d_k, d_v = c->d_v, kv = h / c->group;
    const double *q = a->q + (h * c->n_q + i) * d_k, *q_t = a->q_t + (h * c->n_q + i) * d_k;
    const double *k = a->k + kv * n_k * d_k, *k_t = a->k_t + kv * n_k * d_k, *v = a->v + kv * n_k * d_v,
                 *v_t = a->v_t + kv * n_k * d_v;
    double *o_t = a->o_t.x + (h * c->n_q + i) * d_v, *bound = a->o_t.bound + (h * c->n_q + i) * d_v;
    double *t = new_array(n_k), mu = 0, most = 0;
    for (int64_t j = 0; j < n_k; j++) {
        double magnitude = 0;
        for (int64_t x = 0; x < d_k && row->z[j] != -INFINITY; x++) {
            const double first = q_t[x] * k[j * d_k + x], second = q[x] * k_t[j * d_k + x];
            t[j] += c->scale * (first + second);
            magnitude += fabs(c->scale) * (fabs(first) + fabs(second));
        }
        mu += row->p[j] * t[j];
        most = fmax(most, magnitude);
    }
    const double n = (double)n_k, u = row->u, r = row->relative,
                 error = 2 * (double)(2 * d_k + 8) * u * most + (2 * r + (n + 8) * u) * most;
    for (int64_t y = 0; y < d_v; y++) {
        double size = 0, size_t = 0, largest = 0;
        for (int64_t j = 0; j < n_k; j++) {
            if (row->z[j] == -INFINITY) continue;
            const double value = fabs(v[j * d_v + y]), tangent = fabs(v_t[j * d_v + y]);
            o_t[y] += row->p[j] * ((t[j] - mu) * v[j * d_v + y] + v_t[j * d_v + y]);
            size += row->p[j] * value;
            size_t += row->p[j] * tangent;
            largest = fmax(largest, 2 * most * value + tangent);
        }
        bound[y] = size * (error + (r + (2 * n + 8) * u) * (2 * most + error)) + (r + (n + 4) * u) * size_t +
                   n * row->tiny * largest + naive_roundoff(c->dtype) * fabs(o_t[y]) + smallest(c->dtype);
    }
    free(t);
}

/* First-order bounds, u being the unit roundoff of the arithmetic; a sum of n products errs by at most n u times the sum
 * of their magnitudes in any order (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). With
 * S = |scale| sum |q k| + |bias| and M the largest S of the row + log n_k:
 *   exponent s - m:  h = (d_k + 8) u (S + M)
 *   weight p:        r p, r = expm1(2 max h) + (n_k + 24) u, plus what underflows: 2^60 times the smallest normal number
 *   lse:             max h + (n_k + 16) u + 4 u M
 *   o:               (r + (n_k + 2) u) sum p |v|
 *   p from lse:      r' = expm1(2 max h + error of lse) + 24 u
 *   ds = p (dp - delta): with A = p (sum |dout v| + sum |dout o| + |dlse|),
 *                    (r' + (d_v + 8) u) A + p (sum |dout| (error of o) + d_v u sum |dout o|)
 *   dq, dk, dv, dmask: sum of the errors of the terms, + (number of terms + 4) u times the sum of magnitudes
 * and each result is rounded to its own type. Where p is rounded, o errs by u' (1 + r) sum p |v| more and dv by
 * u' (1 + r') sum p |dout|; where ds is, dq and dk by u' times the sums of |ds| and its error. u' is that of the type, for
 * float16 2^-17, because p and ds then have 16 bits; for float32 u, since products of parts leave out small terms. */
static void one_head(const test_case *c, naive *a, int64_t batch, int64_t head) {
    const int64_t n_q = c->n_q, n_k = c->n_k, d_k = c->d_k, d_v = c->d_v;
    const int64_t h = batch * c->n_head + head, kv = h / c->group;
    const double *k = a->k + kv * n_k * d_k, *v = a->v + kv * n_k * d_v;
    double *dk = a->dk.x + kv * n_k * d_k, *dk_bound = a->dk.bound + kv * n_k * d_k,
           *dk_rounded = a->dk.rounded + kv * n_k * d_k;
    double *dv = a->dv.x + kv * n_k * d_v, *dv_bound = a->dv.bound + kv * n_k * d_v,
           *dv_rounded = a->dv.rounded + kv * n_k * d_v;
    /* Doubled for float64: the double arithmetic here errs as much. */
    const double u = c->dtype == SDPA_F64 ? 0x1p-52 : 0x1p-24;
    const double tiny = c->dtype == SDPA_F64 ? 0x1p-962 : 0x1p-66;
    const double u_out = naive_roundoff(c->dtype), u_rounded = c->dtype == SDPA_F16 ? 0x1p-17 : u_out;
    const double summands = (double)(n_q * c->n_batch * c->n_head + n_k + 4); /* at least those of any gradient */

    for (int64_t i = 0; i < n_q; i++) {
        const double *q = a->q + (h * n_q + i) * d_k, *dout = a->dout + (h * n_q + i) * d_v;
        double *w = a->w.x + (h * n_q + i) * n_k, *w_bound = a->w.bound + (h * n_q + i) * n_k;
        double *o = a->o.x + (h * n_q + i) * d_v, *o_bound = a->o.bound + (h * n_q + i) * d_v;
        double *dq = a->dq.x + (h * n_q + i) * d_k, *dq_bound = a->dq.bound + (h * n_q + i) * d_k,
               *dq_rounded = a->dq.rounded + (h * n_q + i) * d_k;
        double m = -INFINITY, largest = 0, l = 0;
        for (int64_t j = 0; j < n_k; j++) {
            double bias = a->mask[i * n_k + j], s = 0, magnitude = 0;
            w[j] = -INFINITY;
            if (!naive_visible(c, batch, i, j, bias)) continue;
            for (int64_t x = 0; x < d_k; x++) {
                s += q[x] * k[j * d_k + x];
                magnitude += fabs(q[x] * k[j * d_k + x]);
            }
            w[j] = c->scale * s + bias;
            magnitude = fabs(c->scale) * magnitude + fabs(bias);
            m = fmax(m, w[j]);
            largest = fmax(largest, magnitude);
        }
        double reach = largest + log((double)n_k + 1), error = (double)(d_k + 8) * u * (largest + reach);
        double *z = new_array(n_k);
        for (int64_t j = 0; j < n_k; j++) {
            z[j] = w[j];
            w_bound[j] = w[j] != -INFINITY; /* masked ones are exactly 0 */
            w[j] = w[j] == -INFINITY ? 0 : exp(w[j] - m);
            l += w[j];
        }
        a->lse.x[h * n_q + i] = m == -INFINITY ? -INFINITY : m + log(l);
        double lse_error = error + (double)(n_k + 16) * u + 4 * u * reach;
        a->lse.bound[h * n_q + i] = lse_error;

        double r = expm1(2 * error) + (double)(n_k + 24) * u;
        for (int64_t j = 0; j < n_k; j++) {
            w[j] = l > 0 ? w[j] / l : 0;
            w_bound[j] *= (r + u_out) * w[j] + tiny + smallest(c->dtype);
        }
        const logit_row row = {z, w, a->lse.x[h * n_q + i], lse_error, u, error, r, largest, tiny, n_k, d_k};
        row_statistics(&row, a->statistics.x + (h * n_q + i) * SDPA_N_STATISTICS,
                       a->statistics.bound + (h * n_q + i) * SDPA_N_STATISTICS);
        row_tangent(c, a, h, i, &row);
        free(z);
        double delta = -a->dlse[h * n_q + i], delta_size = fabs(delta), delta_error = 0;
        for (int64_t y = 0; y < d_v; y++) {
            double sum = 0, size = 0, largest_v = 0;
            for (int64_t j = 0; j < n_k; j++) {
                if (w_bound[j] == 0) continue; /* may be NaN */
                sum += w[j] * v[j * d_v + y];
                size += w[j] * fabs(v[j * d_v + y]);
                largest_v = fmax(largest_v, fabs(v[j * d_v + y]));
            }
            o[y] = sum;
            o_bound[y] = (r + (double)(n_k + 2) * u) * size + (double)n_k * tiny * largest_v + u_out * fabs(sum) +
                         smallest(c->dtype);
            a->o.rounded[(h * n_q + i) * d_v + y] = u_rounded * (1 + r) * size;
            delta += dout[y] * sum;
            delta_size += fabs(dout[y] * sum);
            delta_error += fabs(dout[y]) * o_bound[y];
        }
        double r2 = expm1(2 * error + lse_error) + 24 * u;
        for (int64_t j = 0; j < n_k; j++) {
            if (w[j] == 0) continue;
            double dp = 0, size = delta_size;
            for (int64_t y = 0; y < d_v; y++) {
                dp += dout[y] * v[j * d_v + y];
                size += fabs(dout[y] * v[j * d_v + y]);
                dv[j * d_v + y] += w[j] * dout[y];
                dv_bound[j * d_v + y] += (r2 + summands * u) * (w[j] + tiny) * fabs(dout[y]);
                dv_rounded[j * d_v + y] += u_rounded * (1 + r2) * w[j] * fabs(dout[y]);
            }
            double ds = w[j] * (dp - delta);
            double ds_size = (w[j] + tiny) * size;
            double ds_error = (r2 + ((double)d_v + 8 + summands) * u) * ds_size +
                              (w[j] + tiny) * (delta_error + (double)d_v * u * delta_size);
            for (int64_t x = 0; x < d_k; x++) {
                dq[x] += c->scale * ds * k[j * d_k + x];
                dq_bound[x] += fabs(c->scale) * ds_error * fabs(k[j * d_k + x]);
                dq_rounded[x] += u_rounded * fabs(c->scale) * (fabs(ds) + ds_error) * fabs(k[j * d_k + x]);
                dk[j * d_k + x] += c->scale * ds * q[x];
                dk_bound[j * d_k + x] += fabs(c->scale) * ds_error * fabs(q[x]);
                dk_rounded[j * d_k + x] += u_rounded * fabs(c->scale) * (fabs(ds) + ds_error) * fabs(q[x]);
            }
            a->dmask.x[i * n_k + j] += ds;
            a->dmask.bound[i * n_k + j] += ds_error;
        }
    }
}

void naive_compute(const test_case *c, naive *a) {
    for (int64_t batch = 0; batch < c->n_batch; batch++) {
        for (int64_t head = 0; head < c->n_head; head++) one_head(c, a, batch, head);
    }
    bounded *gradients[] = {&a->dq, &a->dk, &a->dv, &a->dmask};
    for (size_t g = 0; g < sizeof gradients / sizeof gradients[0]; g++) {
        const sdpa_dtype dtype = g == 1 || g == 2 ? naive_key_dtype(c) : c->dtype;
        for (int64_t i = 0; i < gradients[g]->n; i++) {
            double rounding = naive_roundoff(dtype) * (fabs(gradients[g]->x[i]) + gradients[g]->bound[i]);
            gradients[g]->bound[i] += rounding + smallest(dtype);
        }
    }
}
