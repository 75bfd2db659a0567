/* Compares convert.h, and the operations of vec.h on half precisions, with plain C on single elements. Compiled once
 * per instruction set and type, like src/kernels/kernel.c, and exports test_convert_NAME_fBITS alone. */
#include "../../src/kernels/convert.h"
#include "check.h"
#include "unit.h"

/* --------------------------------------------------------------------------- half precisions */

/* A 16-bit format, described by the number of bits in its fraction. */
typedef struct half_format {
    const char *name;
    int fraction, bias;
    float (*widen)(uint16_t);
    uint16_t (*narrow)(float);
} half_format;

static float widen_one_f16(uint16_t h) { return widen_f16(h); }
static uint16_t narrow_one_f16(float x) { return narrow_f16(x); }
static float widen_one_bf16(uint16_t h) { return widen_bf16(h); }
static uint16_t narrow_one_bf16(float x) { return narrow_bf16(x); }
static const half_format f16 = {"f16", 10, 15, widen_one_f16, narrow_one_f16};
static const half_format bf16 = {"bf16", 7, 127, widen_one_bf16, narrow_one_bf16};

static uint16_t infinite_half(const half_format *f) { return (uint16_t)(0x7fff >> f->fraction << f->fraction); }

/* The value of bits without a sign. The pattern of infinity counts as the next power of two, which is how rounding
 * treats it. */
static double half_value(const half_format *f, uint16_t h) {
    const int exponent = h >> f->fraction, rest = h & ((1 << f->fraction) - 1);
    const int units = exponent ? rest + (1 << f->fraction) : rest;
    return ldexp(units, (exponent ? exponent : 1) - f->bias - f->fraction);
}

static void widening(const half_format *f) {
    for (int h = 0; h < 0x10000; h++) {
        const uint16_t size = h & 0x7fff, infinite = infinite_half(f);
        const float got = f->widen((uint16_t)h), x = size == infinite ? INFINITY : (float)half_value(f, size);
        const bool right = size > infinite ? got != got : fabsf(got) == x && !signbit(got) == (h < 0x8000);
        CHECK(right, WHERE " %s %04x: %a", f->name, h, (double)got);
    }
}

/* The value of half h and its neighbours, the middle between h and h + 1 and its neighbours, and the halves they round
 * to. */
enum { PLACES = 6 };
static void places(const half_format *f, uint16_t h, float *x, uint16_t *rounded) {
    const float at = (float)half_value(f, h), middle = (float)((half_value(f, h) + half_value(f, h + 1)) / 2);
    const float all[PLACES] = {nextafterf(at, 0),     at,     nextafterf(at, INFINITY),
                               nextafterf(middle, 0), middle, nextafterf(middle, INFINITY)};
    const uint16_t up = h + 1, even = h % 2 ? up : h, halves[PLACES] = {h, h, h, h, even, up};
    memcpy(x, all, sizeof all);
    memcpy(rounded, halves, sizeof halves);
}

static void narrowing(const half_format *f) {
    for (int h = 0; h < infinite_half(f); h++) {
        float x[PLACES];
        uint16_t rounded[PLACES];
        places(f, (uint16_t)h, x, rounded);
        for (int i = 0; i < PLACES; i++) {
            CHECK(f->narrow(x[i]) == rounded[i], WHERE " %s %a: %04x", f->name, (double)x[i], f->narrow(x[i]));
            CHECK(f->narrow(-x[i]) == (rounded[i] | 0x8000), WHERE " %s %a: %04x", f->name, (double)-x[i],
                  f->narrow(-x[i]));
        }
    }
    const uint16_t infinite = infinite_half(f);
    CHECK(f->narrow(INFINITY) == infinite && f->narrow(-INFINITY) == (infinite | 0x8000), WHERE " %s infinity",
          f->name);
    CHECK(f->narrow(FLT_MAX) == infinite && f->narrow(-FLT_MAX) == (infinite | 0x8000), WHERE " %s overflow", f->name);
    for (int i = 0; i < 23; i++) {
        const uint32_t bits = 0x7f800000u | 1u << i;
        float nan;
        memcpy(&nan, &bits, sizeof nan);
        CHECK((f->narrow(nan) & 0x7fff) > infinite && (f->narrow(-nan) & 0x7fff) > infinite, WHERE " %s NaN %08x",
              f->name, bits);
    }
}

#if SDPA_REAL == 32
/* The vectors agree with the single conversions, which are compared with plain C above, also at odd addresses. */
static void widen_vectors(void) {
    char memory[2 * VL + 1];
    for (int h = 0; h < 0x10000; h += VL) {
        for (int l = 0; l < VL; l++) memcpy(memory + 1 + 2 * l, &(uint16_t){(uint16_t)(h + l)}, 2);
        const vec x = vwiden_f16(memory + 1), y = vwiden_bf16(memory + 1);
        for (int l = 0; l < VL; l++) {
            CHECK(same(x[l], widen_f16((uint16_t)(h + l))), WHERE " f16 %04x", h + l);
            CHECK(same(y[l], widen_bf16((uint16_t)(h + l))), WHERE " bf16 %04x", h + l);
        }
    }
}
#endif

#if defined(HAVE_F16) && SDPA_REAL == 32
static void narrow_vectors(void) {
    char memory[2 * VL + 1];
    for (int h = 0; h < 0x7c00; h += VL) {
        float x[VL][PLACES];
        uint16_t rounded[PLACES];
        for (int l = 0; l < VL; l++) places(&f16, (uint16_t)(h + l), x[l], rounded);
        for (int i = 0; i < 2 * PLACES; i++) {
            vec in;
            for (int l = 0; l < VL; l++) in[l] = i < PLACES ? x[l][i] : -x[l][i - PLACES];
            vnarrow_f16(memory + 1, in);
            for (int l = 0; l < VL; l++) {
                uint16_t got;
                memcpy(&got, memory + 1 + 2 * l, 2);
                CHECK(got == narrow_f16(in[l]), WHERE " %a: %04x", (double)in[l], got);
            }
        }
    }
}
#endif

/* -------------------------------------------------------------------------------------- rows */

static const sdpa_dtype dtypes[] = {SDPA_BOOL, SDPA_F16, SDPA_BF16, SDPA_F32, SDPA_F64};
enum { N_DTYPES = sizeof dtypes / sizeof dtypes[0], MOST = 2 * VL + 3 };

/* The element whose bytes, in either order, are at p. */
static real element(const char *p, sdpa_dtype dtype, bool swapped) {
    const int size = (int)sdpa_size_of(dtype);
    char bytes[8];
    for (int i = 0; i < size; i++) bytes[i] = p[swapped ? size - 1 - i : i];
    uint16_t half;
    float single;
    double twice;
    memcpy(&half, bytes, 2);
    memcpy(&single, bytes, 4);
    memcpy(&twice, bytes, 8);
    switch (dtype) {
    case SDPA_BOOL:
        return bytes[0] ? 0 : -(real)INFINITY;
    case SDPA_F16:
        return widen_f16(half);
    case SDPA_BF16:
        return widen_bf16(half);
    case SDPA_F32:
        return single;
    default:
        return (real)twice;
    }
}

/* The first element of a row of n elements that lies at the end of readable memory, or `shift` bytes before it. Strides
 * may be negative. */
static char *row_in(guarded g, int64_t n, int64_t stride, int size, int shift) {
    const int64_t last = n > 0 ? (n - 1) * stride : 0, most = last > 0 ? last : 0;
    return g.end - shift - (n > 0 ? size : 0) - most;
}

static void load_row(guarded g, sdpa_dtype dtype, bool swapped, int64_t stride, int shift, int64_t n) {
    const int size = (int)sdpa_size_of(dtype);
    const char *const src = row_in(g, n, stride, size, shift);
    real got[MOST + 2], *const dst = got + 1;
    for (int i = 0; i < MOST + 2; i++) got[i] = 7;
    load(dst, src, n, stride, dtype, swapped);
    CHECK(got[0] == 7 && dst[n] == 7, WHERE " dtype %d stride %d n=%d: wrote past it", dtype, (int)stride, (int)n);
    for (int64_t i = 0; i < n; i++) {
        const real x = element(src + i * stride, dtype, swapped);
        CHECK(same(dst[i], x), WHERE " dtype %d swapped %d stride %d n=%d i=%d: %a, not %a", dtype, swapped,
              (int)stride, (int)n, (int)i, (double)dst[i], (double)x);
    }
}

static void store_row(guarded g, sdpa_dtype dtype, int64_t stride, int shift, int64_t n) {
    const int size = (int)sdpa_size_of(dtype);
    char *const dst = row_in(g, n, stride, size, shift);
    real src[MOST];
    for (int i = 0; i < MOST; i++) src[i] = (real)ldexp((double)(int32_t)random_bits(), (int)(random_bits() % 64) - 62);
    const int64_t length = g.end - g.begin;
    memset(g.begin, 0x5a, (size_t)length);
    store(dst, src, n, stride, dtype);
    for (int64_t i = 0; i < n; i++) {
        char *const p = dst + i * stride;
        real x = src[stride ? i : n - 1], rounded = x;
        if (dtype == SDPA_F32) rounded = (float)x;
        if (dtype == SDPA_F16) rounded = widen_f16(narrow_f16((float)x));
        if (dtype == SDPA_BF16) rounded = widen_bf16(narrow_bf16((float)x));
        const real got = element(p, dtype, false);
        CHECK(same(got, rounded), WHERE " dtype %d stride %d n=%d i=%d: %a, not %a", dtype, (int)stride, (int)n, (int)i,
              (double)got, (double)rounded);
    }
    for (int64_t i = 0; i < n; i++) memset(dst + i * stride, 0x5a, (size_t)size);
    int64_t touched = 0;
    for (int64_t i = 0; i < length; i++) touched += g.begin[i] != 0x5a;
    CHECK(touched == 0, WHERE " dtype %d stride %d n=%d: %d bytes beside it", dtype, (int)stride, (int)n, (int)touched);
}

static void rows(void) {
    const guarded g = guard_map();
    CHECK(g.begin, "no memory");
    for (int d = 0; d < N_DTYPES; d++) {
        const sdpa_dtype dtype = dtypes[d];
        const int size = (int)sdpa_size_of(dtype);
        const int64_t strides[] = {size, 0, -size, 2 * size, size + 1, -size - 3};
        for (int s = 0; s < 6; s++) {
            for (int n = 0; n <= MOST; n++) {
                for (char *p = g.begin; p < g.end; p++) *p = (char)(random_bits() >> 20 & (n % 2 ? 0xff : 0x81));
                for (int shift = 0; shift < 2; shift++) {
                    load_row(g, dtype, false, strides[s], shift, n);
                    if (dtype != SDPA_BOOL) load_row(g, dtype, true, strides[s], shift, n);
                }
                for (int shift = 0; shift < 2 && dtype != SDPA_BOOL; shift++) store_row(g, dtype, strides[s], shift, n);
            }
        }
    }
    guard_unmap(g);
}

void UNIT_NAME(test_convert)(void);
void UNIT_NAME(test_convert)(void) {
    widening(&f16);
    widening(&bf16);
    narrowing(&f16);
    narrowing(&bf16);
#if SDPA_REAL == 32
    widen_vectors();
#endif
#if defined(HAVE_F16) && SDPA_REAL == 32
    narrow_vectors();
#endif
    rows();
}
