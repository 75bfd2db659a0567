/* From products of queries and keys to logits: scale, softcap and bias, their factors and slopes, and the sink, which
 * is one more logit. No other file of the kernels reads softcap. */
#ifndef SDPA_KERNEL_LOGITS_H
#define SDPA_KERNEL_LOGITS_H

#include "common.h"
#include "scores.h"

/* Features under which weights come directly from the accumulators. With a softcap the logits are not linear in them,
 * and additive scores are not products. */
enum {
    FUSED_CAN = SDPA_FEATURES_OF_UNITS | SDPA_FEATURE_DROPOUT | SDPA_FEATURE_SINKS | SDPA_FEATURE_ALIBI |
                SDPA_FEATURE_INVARIANT | SDPA_FEATURE_SCORE_MOD
};

/* Features under which no block stores logits, rounded, with what masks and biases add to them. */
enum {
    UNROUNDED_CAN = SDPA_FEATURE_OFFSET | SDPA_FEATURE_SOFTCAP | SDPA_FEATURE_DROPOUT | SDPA_FEATURE_SINKS |
                    SDPA_FEATURE_SCALES | SDPA_FEATURE_ADDITIVE
};

INLINE bool may_round(const sdpa_problem *p) { return (p->features & ~UNROUNDED_CAN) != 0; }

INLINE bool is_capped(const sdpa_problem *p) { return p->softcap != 0; }

/* A capped score times this is the tanh; 0 without a cap. */
INLINE real inverse_cap(const sdpa_problem *p) { return is_capped(p) ? (real)(1 / p->softcap) : 0; }

/* Whether a logit is a score, which score() computes, times a factor, plus the bias. If not, score_logits also stores h,
 * the tanh of the softcap, for slope_at and bend_of. A score_mod computes scores in natural units, after the softcap. */
INLINE bool is_linear(const sdpa_problem *p) { return !is_capped(p) || p->score_mod; }

/* Whether the derivative of a logit with respect to its scaled product is 1. */
INLINE bool is_straight(const sdpa_problem *p) { return !is_capped(p) && !p->score_mod; }

/* The head's scale, whose sign the queries carry, so that the largest product is that of the largest score. own_scale:
 * it has a gradient and a tangent. */
INLINE bool own_scale(const sdpa_unit *u) { return u->scales.data; }
INLINE real scale_of(const sdpa_unit *u) { return (real)u->scale; }
INLINE real sign_of_scale(const sdpa_unit *u) { return u->scale < 0 ? -1 : 1; }
INLINE real scale_factor(const sdpa_unit *u) { return (real)fabs(u->scale); }

/* The factor of scores where logits are linear. */
INLINE real product_factor(const sdpa_unit *u, double unit) {
    return (real)(u->problem->score_mod ? unit : fabs(u->scale) * unit);
}

/* The last factor before the bias is added. */
INLINE double logit_factor(const sdpa_unit *u) {
    return u->problem->score_mod ? 1 : is_linear(u->problem) ? fabs(u->scale) : u->problem->softcap;
}

/* The derivative of a logit with respect to its scaled product. h is the array that score filled, with the slope itself
 * if there is a score_mod, or NULL if logits are straight. */
INLINE vec slope_at(const sdpa_problem *p, const real *h, int64_t at) {
    if (!h) return vset1(1);
    return p->score_mod ? vload(h + at) : vmuladd(-vload(h + at), vload(h + at), vset1(1));
}

/* The second derivative is bend_of(p) * h * slope. */
INLINE real bend_of(const sdpa_problem *p) { return -2 * inverse_cap(p); }

/* The value of log2(e) that the rounded factor of a unit's logits contains. Converting lse to or from log2 units with
 * any other value would add that rounding to the error of lse; weights are not affected. */
INLINE double log2_e_of(const sdpa_unit *u) {
    const double factor = logit_factor(u), unit = (real)(factor * M_LOG2E) / factor;
    return fabs(unit - M_LOG2E) < REAL_EPSILON ? unit : M_LOG2E; /* the latter if the factor is 0 or subnormal */
}

/* The unit's sink in log2 units, or -inf; a double, because rounding it would show in lse. One of +inf is NaN, as the row
 * of such a score: its keys' weights would be 0, but not what follows from the quotients of infinities. */
INLINE double sink_of(const sdpa_unit *u) {
    const double sink = (double)scalar_of(&u->sinks, -(real)INFINITY) * log2_e_of(u);
    return sink == INFINITY ? NAN : sink;
}

/* How far, in log2 units, a sink may lie above the maximum of the keys before their weights leave the range. */
#define HIGHEST_SINK (SDPA_REAL == 32 ? 120 : 1000)

/* Adds the sink, a logit without a value, to a query's sum l of 2^(s - m - low), in log2 units; *term is what it adds.
 * Returns the factor of earlier sums: 1, or 0 if the sink outweighs all keys, whose weights 2^(s - m) then are 0. */
INLINE real add_sink(double sink, real *m, real *low, real *l, real *term) {
    *term = 0;
    if (sink == -INFINITY) return 1;
    const double above = sink - *m - *low;
    const bool outweighs = above > HIGHEST_SINK;
    *term = outweighs ? 1 : (real)exp2(above);
    *l = outweighs ? 1 : *l + *term;
    if (!outweighs) return 1;
    *m = REAL_MAX;
    *low = 0;
    return 0;
}

/* See score_cap. A scale of 0 makes NaN of an infinite product, as without a cap. */
INLINE score_cap cap_of(const sdpa_unit *u) {
    const double exact = fmin(fabs(u->scale) / u->problem->softcap, REAL_MAX); /* beyond that tanh is 1 */
    real factor = (real)exact;
    if ((double)factor > exact) factor *= 1 - REAL_EPSILON;
    const double least = fmax(exact * REAL_EPSILON * REAL_EPSILON, REAL_TRUE_MIN);
    return (score_cap){.factor = factor, .low = exact > 0 ? (real)fmax(exact - (double)factor, least) : 0};
}

/* Lets score() apply the unit's score_mod, if there is one, to block b; t->ds is NULL or takes slopes. `scratch`:
 * program_size. */
INLINE void use_program(scores *t, score_program *g, const sdpa_unit *u, const block *b, real *scratch) {
    const sdpa_problem *p = u->problem;
    if (!p->score_mod) return;
    begin_program(&g->run, p->score_mod, t->ds ? SDPA_CODE_SLOPE : SDPA_CODE_VALUE, u, b, scratch);
    g->capped = is_capped(p);
    g->c = g->capped ? (real)p->softcap : scale_factor(u);
    if (g->capped) g->cap = cap_of(u);
    t->program = g;
}

/* s = the capped scores of a block, in units of 1 / unit, plus what s holds. */
INLINE void score_capped(scores *t, int nv, const sdpa_unit *u, double unit) {
    t->c = (real)(unit * u->problem->softcap);
    t->cap = cap_of(u);
    score(t, nv, SCORE_CAPPED);
}

/* s = the logits of a block in log2 units (`unit` = log2 e) or natural ones (`unit` = 1), after scale, cap and bias,
 * for any options; t->extreme = their maximum. `bias` says what s already holds. */
NOINLINE void score_logits(scores *t, int nv, const sdpa_unit *u, enum bias_kind bias, double unit) {
    const sdpa_problem *p = u->problem;
    t->c = (real)(unit * logit_factor(u));
    if (bias == BIAS_NONE) {
        for (int64_t j = 0; j < t->n; j++) {
            for (int x = 0; x < nv; x++) vstore(t->s + j * t->s_row + x * VL, (vec){0});
        }
    }
    if (is_linear(p)) {
        score(t, nv, SCORE_BIASED);
    } else {
        score_capped(t, nv, u, unit);
    }
}

/* score_logits up to a factor, which is returned: if logits are scaled products, s holds the products themselves. */
INLINE real score_products(scores *t, int nv, const sdpa_unit *u, enum bias_kind bias, double unit) {
    if (bias != BIAS_NONE || !is_linear(u->problem)) {
        score_logits(t, nv, u, bias, unit);
        return 1;
    }
    if (t->given != t->s) {
        score(t, nv, SCORE_RAW);
    } else {
        for (int x = 0; x < nv; x++) {
            vec most = vload(t->extreme + x * VL);
            for (int64_t j = 0; j < t->n; j++) most = vmax2(vload(t->s + j * t->s_row + x * VL), most);
            vstore(t->extreme + x * VL, most);
        }
    }
    return product_factor(u, unit);
}

#endif
