/* Compares every operation of vec.h with plain C on single lanes; test_convert.c does so for half precisions. Compiled
 * once per instruction set and type, like src/kernels/kernel.c, and exports test_vec_NAME_fBITS alone. */
#include "../../src/kernels/fast/bf16_quads.h"
#include "../../src/kernels/vec.h"
#include "../../src/runtime/isa.h"
#include "check.h"
#include "unit.h"

#define SMALLEST (SDPA_REAL == 32 ? FLT_MIN : DBL_MIN)
static const real special[] = {0,
                               -0.0,
                               1,
                               -1,
                               1.5,
                               -3,
                               NAN,
                               INFINITY,
                               -INFINITY,
                               REAL_MAX,
                               -REAL_MAX,
                               SMALLEST,
                               -SMALLEST,
                               SMALLEST / 4,
                               -SMALLEST / 8,
                               REAL_EPSILON,
                               1 - REAL_EPSILON / 2};
enum { N_SPECIAL = sizeof special / sizeof special[0] };

/* Draws from (-2^limit, 2^limit), with exponents evenly distributed over `limit` on either side of 1. */
static real draw(int limit) {
    const real fraction = (real)((int64_t)random_bits() >> 2) * (real)0x1p-61;
    return (real)ldexp(fraction, (int)(random_bits() % (2 * (unsigned)limit)) - limit);
}

static real draw_integer(void) { return (real)((int)(random_bits() % 2001) - 1000); }

/* Fills the lanes with the case `i` of specials and drawn numbers. */
static void fill(real *x, int i, int step) {
    for (int l = 0; l < VL; l++) {
        const int at = i + step * l;
        x[l] = at % 3 == 2 ? draw(20) : special[at % N_SPECIAL];
    }
}

/* ------------------------------------------------------------------------------------ moves */

static void loads(void) {
    real from[2 * VL + 1], to[2 * VL + 1];
    for (int offset = 0; offset <= VL; offset++) {
        for (int i = 0; i <= 2 * VL; i++) from[i] = special[(i + offset) % N_SPECIAL], to[i] = 7;
        vstore(to + offset, vload(from + offset));
        for (int i = 0; i <= 2 * VL; i++) {
            const bool inside = i >= offset && i < offset + VL;
            CHECK(same(to[i], inside ? from[i] : 7), WHERE " offset=%d i=%d", offset, i);
        }
    }
    for (int i = 0; i < N_SPECIAL; i++) {
        const vec x = vset1(special[i]);
        for (int l = 0; l < VL; l++) CHECK(same(x[l], special[i]), WHERE " %g: lane %d", (double)special[i], l);
    }
}

/* Loads and stores at both ends of readable memory. */
static void partial_at(char *place, int n) {
    real *const p = (real *)place;
    vec x;
    for (int l = 0; l < VL; l++) x[l] = (real)(l + 1);
    for (int l = 0; l < n; l++) p[l] = special[l % N_SPECIAL];
    const vec got = vload_partial(p, n);
    for (int l = 0; l < VL; l++) CHECK(same(got[l], l < n ? special[l % N_SPECIAL] : 0), WHERE " n=%d lane %d", n, l);
    vstore_partial(p, x, n);
    for (int l = 0; l < n; l++) CHECK(p[l] == x[l], WHERE " n=%d lane %d", n, l);
}

static void partials(void) {
    const guarded g = guard_map();
    CHECK(g.begin, "no memory");
    for (int n = 0; n <= VL; n++) {
        partial_at(g.end - n * sizeof(real), n);
        partial_at(g.begin, n);
        real p[3 * VL];
        for (int i = 0; i < 3 * VL; i++) p[i] = 7;
        vstore_partial(p + VL, (vec){0}, n);
        for (int i = 0; i < 3 * VL; i++) CHECK(p[i] == (i < VL || i >= VL + n ? 7 : 0), WHERE " n=%d i=%d", n, i);
    }
    guard_unmap(g);
}

static void shuffles(void) {
    vec r[VL], x;
    for (int i = 0; i < VL; i++) {
        for (int l = 0; l < VL; l++) r[i][l] = (real)(i * VL + l);
    }
    x = r[0];
    vtranspose(r);
    for (int i = 0; i < VL; i++) {
        for (int l = 0; l < VL; l++) CHECK(r[i][l] == (real)(l * VL + i), WHERE " row %d lane %d", i, l);
    }
    enum { ROW = VL + 3 };
    real rows[VL * ROW + 1]; /* from an odd address on */
    for (int i = 0; i < VL * ROW; i++) rows[i + 1] = (real)i;
    vload_transposed(r, rows + 1, ROW);
    for (int i = 0; i < VL; i++) {
        for (int l = 0; l < VL; l++) CHECK(r[i][l] == (real)(l * ROW + i), WHERE " row %d lane %d", i, l);
    }
    for (int i = 0; i < 1000; i++) { /* integers, whose sums are exact in any order */
        vec all = {0}, of_lanes;
        for (int j = 0; j < VL; j++) {
            for (int l = 0; l < VL; l++) all[l] += r[j][l] = draw_integer();
        }
        of_lanes = vsum_of_lanes(r);
        for (int l = 0; l < VL; l++) CHECK(of_lanes[l] == all[l], WHERE " lane %d: %g", l, (double)of_lanes[l]);
    }
    for (int h = 1; h < VL; h *= 2) {
        const vec y = vswap(x, h);
        for (int l = 0; l < VL; l++) CHECK(y[l] == x[l ^ h], WHERE " h=%d lane %d", h, l);
    }
}

/* ----------------------------------------------------------------------------------- choices */

static void selections(void) {
    for (int i = 0; i < N_SPECIAL * 3; i++) {
        real a[VL], b[VL];
        fill(a, i, 1);
        fill(b, i + 1, 2);
        const uint64_t chosen = random_bits();
        ivec mask;
        for (int l = 0; l < VL; l++) mask[l] = -(real_bits)(chosen >> l & 1);
        const vec x = vselect(mask, vload(a), vload(b));
        for (int l = 0; l < VL; l++) CHECK(same(x[l], mask[l] ? a[l] : b[l]), WHERE " case %d lane %d", i, l);
    }
    const volatile real_bits true_ = -1;
    CHECK(!vany((ivec){0}) && vany(~(ivec){0}), WHERE " none, all");
    for (int l = 0; l < VL; l++) {
        ivec mask = {0};
        mask[l] = true_;
        CHECK(vany(mask), WHERE " lane %d", l);
    }
}

static real larger(real a, real b) {
#ifdef HAVE_LANES
    if (a != a) return a;
    if (a == 0 && b == 0) return signbit(a) ? b : a;
#endif
    return a > b ? a : b;
}

static real smaller(real a, real b) {
#ifdef HAVE_LANES
    if (a != a) return a;
    if (a == 0 && b == 0) return signbit(a) ? a : b;
#endif
    return a < b ? a : b;
}

static void extremes(void) {
    for (int i = 0; i < N_SPECIAL; i++) {
        for (int j = 0; j < N_SPECIAL; j++) {
            real a[VL], b[VL];
            for (int l = 0; l < VL; l++) a[l] = special[(i + l) % N_SPECIAL], b[l] = special[(j + 2 * l) % N_SPECIAL];
            const vec most = vmax2(vload(a), vload(b)), least = vmin2(vload(a), vload(b));
            for (int l = 0; l < VL; l++) {
                CHECK(same(most[l], larger(a[l], b[l])), WHERE " %g %g: %g", (double)a[l], (double)b[l],
                      (double)most[l]);
                CHECK(same(least[l], smaller(a[l], b[l])), WHERE " %g %g: %g", (double)a[l], (double)b[l],
                      (double)least[l]);
            }
        }
    }
}

/* -------------------------------------------------------------------------------- arithmetic */

static real multiply_add(real a, real b, real c) {
#ifdef HAVE_FMA
    return SDPA_REAL == 32 ? (real)fmaf((float)a, (float)b, (float)c) : (real)fma(a, b, c);
#else
    const volatile real product = a * b;
    return product + c;
#endif
}

static void products(void) {
    for (int i = 0; i < 20000; i++) {
        real a[VL], b[VL], c[VL];
        for (int l = 0; l < VL; l++) {
            a[l] = draw(12);
            b[l] = draw(12);
            /* c is next to the product, so that a second rounding would show. */
            c[l] = i % 2 ? a[l] * b[l] : a[l] * b[l] + draw(4);
        }
        if (i < 3 * N_SPECIAL) fill(a, i, 1), fill(c, i / 3, 2);
        const vec less = vmulsub(vload(a), vload(b), vload(c)), more = vmuladd(vload(a), -vload(b), vload(c));
        for (int l = 0; l < VL; l++) {
            const real y = multiply_add(a[l], b[l], -c[l]), z = multiply_add(a[l], -b[l], c[l]);
            CHECK(same(less[l], y), WHERE " %a * %a - %a = %a, not %a", (double)a[l], (double)b[l], (double)c[l],
                  (double)y, (double)less[l]);
            CHECK(same(more[l], z) && same(muladd(a[l], -b[l], c[l]), z), WHERE " %a - %a * %a = %a, not %a",
                  (double)c[l], (double)a[l], (double)b[l], (double)z, (double)more[l]);
        }
        UNROLL for (int from = 0; from < VL; from++) {
            const vec sum = vmuladd_lane(vload(a), from, vload(b), vload(c));
            for (int l = 0; l < VL; l++) {
                const real z = multiply_add(a[from], b[l], c[l]);
                CHECK(same(sum[l], z), WHERE " %a * %a + %a = %a, not %a", (double)a[from], (double)b[l], (double)c[l],
                      (double)z, (double)sum[l]);
            }
        }
    }
}

static void finite_products(void) {
    const real factors[] = {1, 1.5, (real)M_LOG2E, REAL_MAX, SMALLEST / 4, REAL_EPSILON, 1 - REAL_EPSILON / 2};
    for (int i = 0; i < (int)(sizeof factors / sizeof factors[0]); i++) {
        for (int j = 0; j < 10 * N_SPECIAL; j++) {
            real x[VL];
            fill(x, j, 1);
            const vec y = vmul_finite(factors[i], vload(x));
            for (int l = 0; l < VL; l++) {
                real product = factors[i] * x[l];
                if (isfinite(x[l]) && isinf(product)) product = product < 0 ? -REAL_MAX : REAL_MAX;
                CHECK(same(y[l], product), WHERE " %a %a: %a", (double)factors[i], (double)x[l], (double)y[l]);
            }
        }
    }
}

static void words(void) {
    const int n = VEC_BYTES / 8;
    for (int i = 0; i < 1000; i++) {
        wide_vec x;
        for (int l = 0; l < n; l++) x[l] = i == 0 ? UINT64_MAX : random_bits();
        const uint32_t factor = i == 0 ? UINT32_MAX : (uint32_t)(random_bits() >> 16);
        const wide_vec y = vmultiply_even(x, factor);
        for (int l = 0; l < n; l++) CHECK(y[l] == (x[l] & UINT32_MAX) * factor, WHERE " case %d word %d", i, l);
    }
    const guarded g = guard_map();
    CHECK(g.begin, "no memory");
    for (int i = 0; i < 1000; i++) {
        /* No byte set, a single one, all but one, random ones, next to either end of readable memory. */
        char *const p = i % 2 ? g.begin : g.end - 32;
        const uint32_t one = 1u << (i / 3 % 32), pick[] = {0, one, ~one, (uint32_t)(random_bits() >> 8)};
        const uint32_t bits = pick[i % 4];
        for (int l = 0; l < 32; l++) p[l] = bits >> l & 1 ? (char)(1 << (i + l) % 8) : 0;
        CHECK(vbits(p) == bits, WHERE " %08x: %08x", bits, vbits(p));
    }
    guard_unmap(g);
}

/* ------------------------------------------------------------------------------- reductions */

/* The tree that vreduce_add states, on an array. */
static real tree(const real *x) {
    real sum[VL];
    memcpy(sum, x, sizeof sum);
    for (int h = VL / 2; h > 0; h /= 2) {
        for (int l = 0; l < h; l++) sum[l] += sum[l + h];
    }
    return sum[0];
}

static void reductions(void) {
    for (int i = 0; i < 1000; i++) {
        real x[VL], most = -INFINITY;
        for (int l = 0; l < VL; l++) x[l] = draw(10), most = x[l] > most ? x[l] : most;
        CHECK(same(vreduce_add(vload(x)), tree(x)), WHERE " case %d", i);
        CHECK(vreduce_max(vload(x)) == most, WHERE " case %d", i);
        x[i % VL] = NAN;
        const real any = vreduce_max(vload(x));
        bool found = false;
        for (int l = 0; l < VL; l++) found |= same(any, x[l]);
        CHECK(found, WHERE " %g is no lane", (double)any);
    }
}

#if VEC_BYTES >= 32
/* Integers, whose sums are exact in any order. */
static void sums(void) {
    for (int i = 0; i < 1000; i++) {
        vec x[4][4];
        real all[4][4] = {{0}};
        for (int j = 0; j < 16; j++) {
            for (int l = 0; l < VL; l++) all[j / 4][j % 4] += x[j / 4][j % 4][l] = draw_integer();
        }
        const vec four = vfour(x[0]), sum = vsum4(x[0]);
        for (int l = 0; l < VL; l++) {
            const vec own = x[0][l % 4];
            const int f = l / 4 * 4;
            CHECK(four[l] == own[f] + own[f + 1] + own[f + 2] + own[f + 3], WHERE " lane %d: %g", l, (double)four[l]);
            CHECK(sum[l] == all[0][l % 4], WHERE " lane %d: %g", l, (double)sum[l]);
        }
#if VEC_BYTES == 64
        const vec every = vsums((const vec(*)[4])x);
        for (int l = 0; l < VL; l++) CHECK(every[l] == all[l / 4][l % 4], WHERE " lane %d: %g", l, (double)every[l]);
#endif
    }
}
#endif

/* --------------------------------------------------------------------------- optional macros */

#ifdef HAVE_SCALE
static void check_rest(real x, real rest, int bits) {
    const real r = isfinite(x) ? x - (real)ldexpl(rintl(ldexpl(x, bits)), -bits) : x == x ? 0 : x;
    CHECK(rest == r || (rest != rest && r != r), WHERE " %a to %d bits: %a", (double)x, bits, (double)rest);
}

static void scaling(void) {
    for (int i = 0; i < 20000; i++) {
        real x[VL], n[VL], y[VL];
        for (int l = 0; l < VL; l++) {
            x[l] = i % 4 ? draw(30) : (real)ldexp((double)draw_integer(), -5); /* ties */
            n[l] = draw(i % 2 ? 8 : 12);
            y[l] = draw(9);
        }
        if (i < 3 * N_SPECIAL) fill(x, i, 1), fill(y, i, 2);
        const vec a = vload(x), whole = vrest(a, 0), sixteenths = vrest(a, 4);
        const vec scaled = vscale(a, vload(n), vload(y), -126);
        for (int l = 0; l < VL; l++) {
            check_rest(x[l], whole[l], 0);
            check_rest(x[l], sixteenths[l], 4);
            const real power = y[l] < -126 ? 0 : (real)ldexpl(x[l], (int)floor(n[l]));
            CHECK(same(scaled[l], power), WHERE " %a 2^%a: %a", (double)x[l], (double)n[l], (double)scaled[l]);
        }
    }
}

#if SDPA_REAL == 32
static void choosing(void) {
    float numbers[VL];
    for (int l = 0; l < VL; l++) numbers[l] = special[l];
    for (int i = 0; i < 1000; i++) {
        ivec index;
        for (int l = 0; l < VL; l++) index[l] = (int32_t)(random_bits() >> 8);
        const vec x = vchoose(vload(numbers), (vec)index);
        for (int l = 0; l < VL; l++) CHECK(same(x[l], numbers[index[l] & 15]), WHERE " %08x", (unsigned)index[l]);
    }
}
#endif
#endif

#ifdef HAVE_AMX
/* Without subnormal numbers. */
static float flush(float x) { return fabsf(x) < FLT_MIN ? copysignf(0, x) : x; }

static float amx_half(int32_t pair, bool high) {
    const uint32_t bits = high ? (uint32_t)pair & 0xffff0000 : (uint32_t)pair << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return flush(x);
}

/* A product in the registers, bit for bit. Rows lie apart in memory; every tenth element is tiny or huge. */
static void amx_products(void) {
    enum { ROWS = 16, APART = 24 };
    amx_registers registers;
    static int32_t a[ROWS][APART], b[ROWS][APART];
    static float c[ROWS][APART], before[ROWS][APART];
    if (SDPA_REAL != 32) return;
#ifdef SDPA_ISA_AMX
    if (!sdpa_amx_permitted()) return;
#endif
    for (int round = 0; round < 50; round++) {
        for (int i = 0; i < ROWS; i++) {
            for (int l = 0; l < APART; l++) {
                const bool far = random_bits() % 10 == 0;
                const float x[] = {(float)draw(far ? 120 : 4), (float)draw(4), (float)draw(far ? 140 : 4),
                                   (float)draw(4)};
                uint32_t bits[4];
                memcpy(bits, x, sizeof bits);
                a[i][l] = (int32_t)(bits[0] >> 16 | (bits[1] & 0xffff0000));
                b[i][l] = (int32_t)(bits[3] >> 16 | (bits[2] & 0xffff0000));
                c[i][l] = before[i][l] = (float)draw(4);
            }
        }
        amx_begin(&registers);
        AMX_LOAD(&registers, 3, c, sizeof c[0]);
        AMX_LOAD(&registers, 6, a, sizeof a[0]);
        AMX_LOAD(&registers, 7, b, sizeof b[0]);
        AMX_MULTIPLY(&registers, 3, 6, 7);
        AMX_STORE(&registers, 3, c, sizeof c[0]);
        if (round % 2) AMX_ZERO(&registers, 3);
        if (round % 2) AMX_STORE(&registers, 3, b, sizeof b[0]);
        amx_end(&registers);
        for (int i = 0; i < ROWS; i++) {
            for (int l = 0; l < APART; l++) {
                float sums[2] = {0, 0};
                for (int k = 0; k < 2 * ROWS && round % 2 == 0; k++) {
                    const float x = amx_half(a[i][k / 2], k % 2), y = amx_half(b[k / 2][l], k % 2);
                    sums[k % 2] = flush(fmaf(x, y, sums[k % 2]));
                }
                float expected = l < ROWS ? flush(before[i][l] + flush(sums[0] + sums[1])) : before[i][l];
                if (round % 2 == 0) {
                    CHECK(memcmp(&c[i][l], &expected, sizeof expected) == 0, WHERE " %d, %d: %a, expected %a", i, l,
                          (double)c[i][l], (double)expected);
                } else if (l < ROWS) {
                    CHECK(b[i][l] == 0, WHERE " %d, %d: not cleared", i, l);
                }
            }
        }
    }
    const ivec large = (ivec){0} + 7, small = (ivec){0} - 7;
    CHECK(vmost_bits(large, small)[VL - 1] == 7 && vmost_bits(small, large)[0] == 7, WHERE " vmost_bits");
}
#endif

#ifdef HAVE_BF16_PAIRS
/* Rounds to the nearest number of 8 bits, ties to even; a NaN gives its high half, made quiet. */
static uint32_t bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return bits >> 16 | 0x40;
    const uint32_t rest = bits & 0xffff, odd = bits >> 16 & 1;
    return (bits >> 16) + (rest > 0x8000 || (rest == 0x8000 && odd));
}

static uint32_t pair_of(float low, float high) { return bfloat16(low) | bfloat16(high) << 16; }

/* Next to the middle between two numbers of bfloat16, on either side, or the middle itself. */
static float tie(int i) {
    const uint32_t bits = 0x3f808000u + (random_bits() % 512u << 16) + (uint32_t)(i % 3) - 1;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static double half_of(int32_t pair, bool high) {
    const uint32_t bits = high ? (uint32_t)pair & 0xffff0000 : (uint32_t)pair << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#ifdef HAVE_BF16_QUADS
/* Rows of pairs come back as they were stored, and a tile of quads has the bits of one of pairs, whatever its height and
 * its layout. */
static void bf16_quads(void) {
    enum { DEPTH = 7, HEIGHT = 8, WIDTH = 2, ROW = WIDTH * VL };
    for (int round = 0; round < 500; round++) {
        const int depth = 1 + round % DEPTH;
        real rows[DEPTH][ROW], kept[DEPTH][ROW], across[DEPTH][HEIGHT], a[HEIGHT][DEPTH], kept_a[DEPTH][HEIGHT];
        for (int k = 0; k < depth; k++) {
            for (int c = 0; c < ROW; c += VL) {
                vec even, odd;
                for (int l = 0; l < VL; l++) even[l] = draw(20), odd[l] = draw(20);
                vstore(rows[k] + c, vpair(even, odd));
                store_pairs(kept[k] + c, ROW, k, vload(rows[k] + c));
            }
            for (int i = 0; i < HEIGHT; i += VL) {
                vec even, odd;
                for (int l = 0; l < VL; l++) even[l] = draw(20), odd[l] = draw(20);
                vstore(across[k] + i, vpair(even, odd));
                store_pairs(kept_a[k] + i, HEIGHT, k, vload(across[k] + i));
            }
            for (int i = 0; i < HEIGHT; i++) a[i][k] = across[k][i];
        }
        vec expected[HEIGHT][MAX_WIDTH], of_columns[HEIGHT][MAX_WIDTH], of_rows[HEIGHT][MAX_WIDTH];
        for (int i = 0; i < HEIGHT; i++) {
            for (int j = 0; j < WIDTH; j++) {
                vec sum = {draw(20), draw(20), draw(20), draw(20)};
                of_columns[i][j] = of_rows[i][j] = sum;
                for (int k = 0; k < depth; k++) {
                    int32_t pair;
                    memcpy(&pair, &a[i][k], sizeof pair);
                    sum = vdot(sum, pair, vload(rows[k] + j * VL));
                    if (k == depth / 2 * 2 - 1) expected[i][j] = sum;
                }
                if (depth == 1) expected[i][j] = of_rows[i][j];
            }
        }
        for (int k = 0; k < depth; k++) {
            for (int c = 0; c < ROW; c += VL) {
                const vec back = load_pairs(kept[k] + c, ROW, k, depth);
                CHECK(memcmp(&back, rows[k] + c, sizeof back) == 0, WHERE " depth %d row %d column %d", depth, k, c);
            }
        }
        const int64_t by_columns =
                          tile_by_quads(of_columns, HEIGHT, WIDTH, true, kept_a[0], 1, HEIGHT, kept[0], ROW, depth),
                      by_rows = tile_by_quads(of_rows, HEIGHT, WIDTH, false, a[0], DEPTH, 1, kept[0], ROW, depth);
        CHECK(by_columns == depth / 2 * 2 && by_rows == by_columns, WHERE " depth %d: %ld, %ld", depth,
              (long)by_columns, (long)by_rows);
        for (int i = 0; i < HEIGHT; i++) {
            for (int j = 0; j < WIDTH; j++) {
                CHECK(memcmp(&of_columns[i][j], &expected[i][j], sizeof(vec)) == 0, WHERE " columns, depth %d", depth);
                CHECK(memcmp(&of_rows[i][j], &expected[i][j], sizeof(vec)) == 0, WHERE " rows, depth %d", depth);
            }
        }
    }
}
#endif

static void bf16_pairs(void) {
    for (int i = 0; i < 20000; i++) {
        float even[VL], odd[VL], sum[VL];
        ivec lanes;
        const bool exact = i % 2; /* integers that bfloat16 holds, or numbers that it rounds */
        for (int l = 0; l < VL; l++) {
            even[l] = exact ? (float)((int)draw_integer() / 8) : draw(20);
            odd[l] = exact ? (float)((int)draw_integer() / 8) : draw(20);
            sum[l] = exact ? (float)draw_integer() : draw(20);
            lanes[l] = (int32_t)pair_of(even[l], odd[l]);
        }
        if (i % 8 == 2) even[i / 8 % VL] = i % 16 == 2 ? INFINITY : NAN, odd[i / 8 % VL] = -FLT_MAX;
        for (int l = 0; l < VL && i % 8 == 4; l++) even[l] = tie(l), odd[l] = -tie(l + 1);
        const ivec pair = (ivec)vpair(vload(even), vload(odd));
        const int32_t factor = lanes[0];
        const vec dot = vdot(vload(sum), factor, (vec)lanes);
        for (int l = 0; l < VL; l++) {
            CHECK((uint32_t)pair[l] == pair_of(even[l], odd[l]), WHERE " %a %a: %08x", (double)even[l], (double)odd[l],
                  (unsigned)pair[l]);
            const double low = half_of(lanes[l], false) * half_of(factor, false);
            const double high = half_of(lanes[l], true) * half_of(factor, true);
            const double error = fabs(dot[l] - (sum[l] + low + high));
            const double unit = BF16_QUADS ? 2 * FLT_EPSILON : FLT_EPSILON; /* Arm rounds both sums to odd */
            const double most = exact ? 0 : unit * (fabs(sum[l]) + fabs(low) + fabs(high));
            CHECK(error <= most, WHERE " case %d lane %d: off by %g", i, l, error);
        }
    }
}
#endif

void UNIT_NAME(test_vec)(void);
void UNIT_NAME(test_vec)(void) {
    loads();
    partials();
    shuffles();
    selections();
    extremes();
    products();
    finite_products();
    words();
    reductions();
#if VEC_BYTES >= 32
    sums();
#endif
#ifdef HAVE_SCALE
    scaling();
#if SDPA_REAL == 32
    choosing();
#endif
#endif
#ifdef HAVE_BF16_PAIRS
    bf16_pairs();
#endif
#ifdef HAVE_BF16_QUADS
    bf16_quads();
#endif
#ifdef HAVE_AMX
    amx_products();
#endif
}
