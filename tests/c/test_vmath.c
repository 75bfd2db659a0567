/* Measures the error of every function of vmath.h in ulp of the exact result: for float32 at every number, for float64
 * at random ones. Compiled once per instruction set and type, and exports test_vmath_NAME_fBITS alone. */
#include "../../src/kernels/vmath.h"
#include "check.h"
#include "unit.h"

/* For emulated machines and CI: only one of this many float32s is tried, and fewer float64s are drawn by the same
 * factor. */
#ifndef STRIDE
#define STRIDE 1
#endif
#ifdef SDPA_ISA_AVX512BF16
#define SWEEP (64 * STRIDE) /* its functions are those of avx512 */
#else
#define SWEEP STRIDE
#endif
#define CHUNK 4096
#define DRAWN ((1 << 20) / CHUNK / STRIDE + 1) /* chunks */

/* The type in which exact results are computed. */
#if SDPA_REAL == 32
typedef double exact;
#define exact_abs fabs
#define exact_exp2 exp2
#define exact_tanh tanh
#define exact_log log
#define LIMIT 127
#define FRACTION 23
#define SMALLEST FLT_MIN
#else
typedef long double exact;
#define exact_abs fabsl
#define exact_exp2 exp2l
#define exact_tanh tanhl
#define exact_log log_by_exp
#define LIMIT 1023
#define FRACTION 52
#define SMALLEST DBL_MIN
#endif

#ifdef HAVE_FMA
#define FUSES 1
#else
#define FUSES 0
#endif
#ifdef HAVE_SCALE
#define SCALES 1
#else
#define SCALES 0
#endif

/* A function of x with its parameters: 2^t, t = c x - m, c = high + low with few bits in high; or tanh or log, with
 * t = x. */
typedef struct curve {
    const char *name;
    void (*compute)(const struct curve *, const real *x, real *y); /* CHUNK numbers */
    exact (*exact)(const struct curve *, real x);
    bool (*beyond)(const struct curve *, real x, real y); /* whether y is right outside the range of the bound */
    double first, last;                                   /* the range of t in which the bound holds */
    double bound;                                         /* in ulp */
    double growth;                                        /* added to the bound, times |c x| */
    bool whole;                                           /* every float32 is tried */
    real c, high, low, m;
} curve;

typedef struct worst {
    double error, excess; /* in ulp; excess over f->growth */
    real at;
    double relative; /* in u, half an ulp of 1 */
} worst;

static double ulps(real y, exact right) {
#if SDPA_REAL == 32
    const double smallest = 0x1p-126;
    double unit = fabs(right) < smallest ? smallest : fabs(right);
    uint64_t bits;
    memcpy(&bits, &unit, sizeof bits);
    bits &= UINT64_MAX << 52;
    memcpy(&unit, &bits, sizeof unit);
    return fabs(y - right) / unit * 0x1p23;
#else
    int exponent;
    frexpl(right, &exponent);
    return (double)ldexpl(fabsl(y - right), FRACTION + 1 - (exponent < -1021 ? -1021 : exponent));
#endif
}

/* -------------------------------------------------------------------------------- evaluation */

/* A loop over all `vec y`, the results of `vec x`. */
#define COMPUTE(function, result)                                                                                      \
    static void function(const curve *f, const real *from, real *to) {                                                 \
        (void)f;                                                                                                       \
        for (int i = 0; i < CHUNK; i += VL) {                                                                          \
            const vec x = vload(from + i);                                                                             \
            vstore(to + i, result);                                                                                    \
        }                                                                                                              \
    }
COMPUTE(compute_exp2, vexp2(x))
COMPUTE(compute_quick, vexp2_quick(x))
COMPUTE(compute_above, vexp2_above(vset1(f->c), x, vset1(f->m), false))
COMPUTE(compute_above_any, vexp2_above(vset1(f->c), x, vset1(f->m), true))
COMPUTE(compute_product, vexp2_product(x, f->c, f->high, f->low, -LIMIT / f->c))
COMPUTE(compute_tanh, vtanh(x))

static void compute_log(const curve *f, const real *from, real *to) {
    (void)f;
    SIMD for (int i = 0; i < CHUNK; i++) to[i] = (real)log_of((double)from[i]);
}

/* c x - m is split before it is rounded: products of a half of c and a half of x are exact. */
static exact power(const curve *f, real x) {
#if SDPA_REAL == 32
    return exact_exp2(((double)f->high * x - f->m) + (double)f->low * x);
#else
    const real front = (real)(float)x;
    const exact most = (exact)f->high * front - f->m, whole = rintl(most);
    const exact rest = (most - whole) + (exact)f->high * (x - front) + (exact)f->low * x;
    return ldexpl(exact_exp2(rest), (int)whole);
#endif
}

static exact hyperbolic(const curve *f, real x) {
    (void)f;
    /* The series is exact enough here, and faster. */
    if (fabs(x) < 0x1p-16) return x - (exact)x * x * x / 3;
    return exact_tanh(x);
}

#if SDPA_REAL == 64
/* log x: that of double and a step of Newton's method. Bochs emulates the instruction behind logl to 50 bits. */
static long double log_by_exp(long double x) {
    const long double y = log((double)x), power = expl(-y);
    return y + (fabsl(y) < 0.5L ? (x - 1) * power + expm1l(-y) : x * power - 1);
}
#endif

static exact logarithm(const curve *f, real x) {
    (void)f;
    return exact_log(x);
}

/* ----------------------------------------------------------------------------- outside bounds */

static double exponent_of(const curve *f, real x) { return (double)f->c * x - f->m; }

/* If c x is rounded, the function sees a slightly different t. */
static double margin_of(const curve *f) { return f->c == 1 ? 0 : 0.1; }

static bool is_below(const curve *f, real x, real y) {
    const bool near = exponent_of(f, x) > f->first - margin_of(f);
    return (y == 0 && !signbit(y)) || (near && y > 0 && y < (real)ldexp(1, 2 - LIMIT));
}

static bool beyond_exp2(const curve *f, real x, real y) {
    if (x != x) return y != y;
    if (x < 0) return is_below(f, x, y);
    return SCALES ? y == (real)INFINITY : y >= (real)ldexp(1, LIMIT);
}

static bool beyond_quick(const curve *f, real x, real y) {
    if (x != x || y != y) return y != y && !(fabs(x) < 0x1p40);
    if (x < 0) return is_below(f, x, y);
    return y >= (real)ldexp(SCALES ? 1 : 0.499, LIMIT) || (x > 0x1p25 && y == -(real)INFINITY);
}

/* No bound is stated for larger t. */
static bool beyond_power(const curve *f, real x, real y) {
    if (x != x) return y != y;
    return exponent_of(f, x) >= f->last - margin_of(f) || is_below(f, x, y);
}

static bool beyond_quick_power(const curve *f, real x, real y) {
    return !(exponent_of(f, x) > -0x1p40) || beyond_power(f, x, y);
}

static bool beyond_tanh(const curve *f, real x, real y) {
    (void)f;
    return x != x ? y != y : x == 0 ? same(x, y) : y == (x < 0 ? -1 : 1);
}

/* Nothing is promised of other numbers than NaN. */
static bool beyond_log(const curve *f, real x, real y) {
    (void)f;
    return x == x || y != y;
}

/* --------------------------------------------------------------------------------- measuring */

static bool inside(const curve *f, real x) {
    const double t = exponent_of(f, x), margin = margin_of(f);
    return t >= f->first + margin && t <= f->last - margin && (x != 0 || f->exact == power);
}

static void measure_one(const curve *f, real x, real y, worst *w) {
    if (!inside(f, x)) {
        CHECK(f->beyond(f, x, y), WHERE " %s(%a) = %a", f->name, (double)x, (double)y);
        return;
    }
    const exact right = f->exact(f, x);
    const double error = ulps(y, right), excess = error - f->growth * fabs((double)f->c * x);
    if (!(excess <= w->excess)) *w = (worst){error, excess, x, w->relative};
    /* An ulp is at most two roundings. */
    if (2 * error <= w->relative || exact_abs(right) < SMALLEST) return;
    const double relative = (double)(exact_abs(y - right) / exact_abs(right)) * 2 / REAL_EPSILON;
    if (!(relative <= w->relative)) w->relative = relative;
}

/* If all y are equal, the error is largest at the ends of a monotone row of x. */
static void measure(const curve *f, const real *x, bool monotone, worst *w) {
    real y[CHUNK];
    f->compute(f, x, y);
    real_bits bits[CHUNK], differ = 0;
    memcpy(bits, y, sizeof bits);
    SIMD for (int i = 0; i < CHUNK; i++) differ |= bits[i] ^ bits[0];
    if (monotone && !differ && inside(f, x[0]) == inside(f, x[CHUNK - 1])) {
        measure_one(f, x[0], y[0], w);
        measure_one(f, x[CHUNK - 1], y[CHUNK - 1], w);
        return;
    }
    for (int i = 0; i < CHUNK; i++) measure_one(f, x[i], y[i], w);
}

/* Where vexp2_quick gives the bits of vexp2. */
static bool agrees(const real *x, const real *quick, const real *whole) {
    const real first = -(real)0x1p40, last = SCALES ? (real)(LIMIT + 1) : LIMIT + (real)0.49;
    real_bits differ = 0;
    for (int i = 0; i < CHUNK; i++) {
        real_bits a, b;
        memcpy(&a, quick + i, sizeof a);
        memcpy(&b, whole + i, sizeof b);
        differ |= x[i] > first && x[i] < last ? a ^ b : 0;
    }
    return !differ;
}

static void compare(const curve *f, const real *x) {
    real quick[CHUNK], whole[CHUNK];
    if (f->compute != compute_quick) return;
    compute_quick(f, x, quick);
    compute_exp2(f, x, whole);
    CHECK(agrees(x, quick, whole), WHERE " vexp2_quick and vexp2 in %a .. %a", (double)x[0], (double)x[CHUNK - 1]);
}

/* ------------------------------------------------------------------------------------ inputs */

/* Numbers with consecutive bit patterns. */
#if SDPA_REAL == 32
static void sweep(const curve *f, worst *w) {
    for (uint64_t b = 0; b < UINT64_C(1) << 32; b += CHUNK * (uint64_t)SWEEP) {
        real x[CHUNK];
        for (int i = 0; i < CHUNK; i++) {
            const uint32_t bits = (uint32_t)(b + (uint64_t)i * SWEEP);
            memcpy(x + i, &bits, sizeof bits);
        }
        const bool monotone = !signbit(x[0]) == !signbit(x[CHUNK - 1]);
        compare(f, x);
        /* If its bits are those of vexp2, so are its errors. */
        const bool known = f->compute == compute_quick && monotone && inside(f, x[0]) && inside(f, x[CHUNK - 1]);
        if (!known) measure(f, x, monotone, w);
    }
}
#endif

static real uniform(real low, real high) { return low + (high - low) * ((real)(random_bits() >> 11) * (real)0x1p-53); }

/* Numbers for which t is arbitrary, next to a multiple of 1/32, or small; or arbitrary bits. */
static void draw(const curve *f, int kind, real *x) {
    for (int i = 0; i < CHUNK; i++) {
        const real t = uniform(-LIMIT - 3, LIMIT + 3);
        const real near = (real)(rint((double)t * 32) / 32) * (1 + REAL_EPSILON * (real)((int)(random_bits() % 9) - 4));
        const uint64_t bits = random_bits();
        if (kind == 0) x[i] = (t + f->m) / f->c;
        if (kind == 1) x[i] = (near + f->m) / f->c;
        if (kind == 2) x[i] = uniform(-2, 2) / f->c;
        if (kind == 3) memcpy(x + i, &bits, sizeof *x);
    }
}

static void sample(const curve *f, worst *w) {
    for (int i = 0; i < DRAWN; i++) {
        for (int kind = 0; kind < 4; kind++) {
            real x[CHUNK];
            draw(f, kind, x);
            measure(f, x, false, w);
            compare(f, x);
        }
    }
    const real special[] = {0, -0.0, NAN, -NAN, INFINITY, -INFINITY, REAL_MAX, -REAL_MAX, LIMIT, -LIMIT, LIMIT + 1};
    real x[CHUNK] = {0};
    memcpy(x, special, sizeof special);
    measure(f, x, false, w);
    compare(f, x);
}

/* ----------------------------------------------------------------------------------- curves */

/* The number of roundings of 2^-24 (2^-53) that tests/support/bounds.py allows a weight or a tanh. */
enum { MOST_RELATIVE = 8 };

static void hold(const curve *f) {
    worst w = {0, -INFINITY, 0, 0};
    sample(f, &w);
#if SDPA_REAL == 32
    if (f->whole) sweep(f, &w);
#endif
    const char *beside = f->growth ? " + 0.7 |c x|" : "";
    printf("vmath      %-10s f%d  %-23s %7.3f ulp at %.9g, bound %g%s\n", TEXT(SDPA_ISA), SDPA_REAL, f->name, w.error,
           (double)w.at, f->bound, beside);
    CHECK(w.excess <= f->bound, WHERE " %s(%a): %g ulp", f->name, (double)w.at, w.error);
    CHECK(w.relative <= MOST_RELATIVE || f->growth, WHERE " %s: %g u", f->name, w.relative);
}

/* The t of the least result that is not 0, and of the largest that is as exact as the others. */
static double first_exponent(void) {
    return SCALES ? 1 - LIMIT : 0.5 - LIMIT + 0x1p-42; /* 0.5 - LIMIT itself is rounded down */
}
/* Where n, not t, is compared with the least exponent. */
static double first_whole(void) { return SCALES && SDPA_REAL == 32 ? 1 - LIMIT - 1 / 32.0 : 0.5 - LIMIT; }
static double last_exponent(void) { return SCALES ? nextafter(LIMIT + 1, 0) : LIMIT + (real)0.49; }

static void powers(void) {
    curve f = {.name = "vexp2",
               .compute = compute_exp2,
               .exact = power,
               .beyond = beyond_exp2,
               .first = first_exponent(),
               .last = last_exponent(),
               .bound = !FUSES            ? 1.3
                        : SDPA_REAL == 32 ? 1.0
                                          : 1.1,
               .c = 1,
               .high = 1,
               .whole = true};
    hold(&f);
    f.name = "vexp2_quick";
    f.compute = compute_quick;
    f.beyond = beyond_quick;
    hold(&f);
}

/* The high part of c, with at most half the bits. */
static real front_of(real c) {
    real_bits bits;
    memcpy(&bits, &c, sizeof bits);
    bits &= SDPA_REAL == 32 ? ~(int64_t)0xfff : ~(int64_t)0x7ffffff;
    memcpy(&c, &bits, sizeof bits);
    return c;
}

static void products(void) {
    const double units[] = {M_LOG2E, M_LOG2E / 0.37, 0.0123};
    for (int i = 0; i < 3; i++) {
        char name[64];
        snprintf(name, sizeof name, "vexp2_product %.4g", units[i]);
        const real c = (real)units[i], high = front_of(c);
        hold(&(curve){.name = name,
                      .compute = compute_product,
                      .exact = power,
                      .beyond = beyond_power,
                      .first = SCALES ? first_whole() : first_exponent(),
                      .last = LIMIT,
                      .bound = FUSES ? 1.3 : 1.6,
                      .c = c,
                      .high = high,
                      .low = (real)(units[i] - (double)high),
                      .whole = i == 0});
    }
}

static void shifted(void) {
    const real c = (real)(M_LOG2E / 8), shifts[] = {0, 100, -1001, 0x1p19};
    for (int i = 0; i < 8; i++) {
        const bool any = i % 2;
        char name[64];
        snprintf(name, sizeof name, "vexp2_above%s %.0f", any ? " any" : "", (double)shifts[i / 2]);
        hold(&(curve){.name = name,
                      .compute = any ? compute_above_any : compute_above,
                      .exact = power,
                      .beyond = any ? beyond_power : beyond_quick_power,
                      .first = first_whole(),
                      .last = LIMIT + 0.49,
                      .bound = 1.1,
                      .growth = FUSES ? 0 : 0.7,
                      .c = c,
                      .high = front_of(c),
                      .low = c - front_of(c),
                      .m = shifts[i / 2]});
    }
}

void UNIT_NAME(test_vmath)(void);
void UNIT_NAME(test_vmath)(void) {
    powers();
    products();
    shifted();
    hold(&(curve){.name = "vtanh",
                  .compute = compute_tanh,
                  .exact = hyperbolic,
                  .beyond = beyond_tanh,
                  .first = -REAL_MAX,
                  .last = REAL_MAX,
                  .bound = 4.2,
                  .c = 1,
                  .whole = true});
    hold(&(curve){.name = "log",
                  .compute = compute_log,
                  .exact = logarithm,
                  .beyond = beyond_log,
                  .first = (double)SMALLEST,
                  .last = REAL_MAX,
                  .bound = SDPA_REAL == 32 ? 0.51 : 0.9,
                  .c = 1,
                  .whole = true});
}
