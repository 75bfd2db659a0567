/* What one core can do at best, printed as "name value": fused multiply-adds in registers in GF/s (a multiply-add is two
 * operations), bfloat16 dot products where there are any, the tanh of sums in 1e9 per second, and GB/s read from memory.
 * The best of many short runs. */
#include "seconds.h"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

#define STEPS 20000
#define RUNS 200
/* Independent chains x = x a + b, as many as registers allow, each kept in its register. */
#define DEFINE_PEAK(name, real, bytes, chains, constraint, ...)                                                        \
    typedef real name##_vec __attribute__((vector_size(bytes)));                                                       \
    __VA_ARGS__ static double name(void) {                                                                             \
        double best = 0;                                                                                               \
        for (int run = 0; run < RUNS; run++) {                                                                         \
            name##_vec x[chains], a = {0}, b = {0};                                                                    \
            a += (real)0.999, b += (real)1e-3;                                                                         \
            for (int i = 0; i < chains; i++) x[i] = a * (real)i;                                                       \
            double start = seconds();                                                                                  \
            for (int step = 0; step < STEPS; step++) {                                                                 \
                _Pragma("GCC unroll 16") for (int i = 0; i < chains; i++) {                                            \
                    x[i] = x[i] * a + b;                                                                               \
                    __asm__ volatile("" : constraint(x[i]));                                                           \
                }                                                                                                      \
            }                                                                                                          \
            double rate = 2e-9 * STEPS * chains * (bytes / sizeof(real)) / (seconds() - start);                        \
            if (rate > best) best = rate;                                                                              \
        }                                                                                                              \
        return best;                                                                                                   \
    }

/* w0 tanh(a0 + b0) + w1 tanh(a1 + b1) from exponentials, as src/kernels/additive.h computes it, in registers: chains
 * of sums that wait for nothing but themselves. */
#define DEFINE_TANH(name, vec, least, constraint, ...)                                                                 \
    __VA_ARGS__ static double name(void) {                                                                             \
        enum { CHAINS = 4, LANES = sizeof(vec) / sizeof(float) };                                                      \
        double best = 0;                                                                                               \
        for (int run = 0; run < RUNS; run++) {                                                                         \
            vec sum[CHAINS] = {{0}}, e0 = {0}, e1 = {0}, b0, b1, w0, w1;                                               \
            e0 += 1.5f, e1 += 0.5f, b0 = e1 + 0.25f, b1 = e0 + 0.25f, w0 = e0 * 0.01f, w1 = e1 * 0.01f;                \
            const vec most = b0 * 0x1p30f;                                                                             \
            double start = seconds();                                                                                  \
            for (int step = 0; step < STEPS; step++) {                                                                 \
                _Pragma("GCC unroll 4") for (int i = 0; i < CHAINS; i++) {                                             \
                    __asm__ volatile("" : constraint(e0), constraint(e1));                                             \
                    vec n0 = least(most, e0 * b0 - 1), n1 = least(most, e1 * b1 - 1), d0 = n0 + 2, d1 = n1 + 2;        \
                    sum[i] += ((w0 * n0) * d1 + (w1 * n1) * d0) / (d0 * d1);                                           \
                }                                                                                                      \
            }                                                                                                          \
            double rate = 2e-9 * STEPS * CHAINS * LANES / (seconds() - start);                                         \
            for (int i = 0; i < CHAINS; i++) __asm__ volatile("" : constraint(sum[i]));                                \
            if (rate > best) best = rate;                                                                              \
        }                                                                                                              \
        return best;                                                                                                   \
    }

#if defined(__x86_64__)
DEFINE_PEAK(avx2_f32, float, 32, 12, "+x", __attribute__((target("avx2,fma"))))
DEFINE_PEAK(avx2_f64, double, 32, 12, "+x", __attribute__((target("avx2,fma"))))
DEFINE_PEAK(avx512_f32, float, 64, 16, "+v", __attribute__((target("avx512f"))))
DEFINE_PEAK(avx512_f64, double, 64, 16, "+v", __attribute__((target("avx512f"))))
DEFINE_TANH(avx2_tanh, avx2_f32_vec, _mm256_min_ps, "+x", __attribute__((target("avx2,fma"))))
DEFINE_TANH(avx512_tanh, avx512_f32_vec, _mm512_min_ps, "+v", __attribute__((target("avx512f"))))

__attribute__((target("avx512f,avx512bf16"))) static double avx512_bf16(void) {
    double best = 0;
    for (int run = 0; run < RUNS; run++) {
        __m512 x[16];
        __m512bh a = (__m512bh)_mm512_setzero_si512();
        for (int i = 0; i < 16; i++) x[i] = _mm512_set1_ps((float)i);
        double start = seconds();
        for (int step = 0; step < STEPS; step++) {
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                x[i] = _mm512_dpbf16_ps(x[i], a, a);
                __asm__ volatile("" : "+v"(x[i]));
            }
        }
        double rate = 2e-9 * STEPS * 16 * 32 / (seconds() - start);
        if (rate > best) best = rate;
    }
    return best;
}
#else
DEFINE_PEAK(native_f32, float, 16, 16, "+w")
DEFINE_PEAK(native_f64, double, 16, 16, "+w")
DEFINE_TANH(native_tanh, native_f32_vec, vminq_f32, "+w")
#endif

/* Larger than any cache by far, so that every byte comes from memory. */
static double read_speed(void) {
    size_t n = (size_t)1 << 26;
    uint32_t *data = malloc(n * sizeof *data), sum = 0;
    if (!data) return 0;
    for (size_t i = 0; i < n; i++) data[i] = (uint32_t)i;
    double best = 0;
    for (int run = 0; run < 5; run++) {
        double start = seconds();
        for (size_t i = 0; i < n; i++) sum += data[i];
        __asm__ volatile("" : "+r"(sum));
        double rate = 1e-9 * (double)(n * sizeof *data) / (seconds() - start);
        if (rate > best) best = rate;
    }
    free(data);
    return best;
}

int main(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        printf("avx2_f32 %.2f\n", avx2_f32());
        printf("avx2_f64 %.2f\n", avx2_f64());
        printf("avx2_tanh %.2f\n", avx2_tanh());
    }
    if (__builtin_cpu_supports("avx512f")) {
        printf("avx512_f32 %.2f\n", avx512_f32());
        printf("avx512_f64 %.2f\n", avx512_f64());
        printf("avx512_tanh %.2f\n", avx512_tanh());
    }
    if (__builtin_cpu_supports("avx512bf16")) printf("avx512_bf16 %.2f\n", avx512_bf16());
#else
    printf("native_f32 %.2f\n", native_f32());
    printf("native_f64 %.2f\n", native_f64());
    printf("native_tanh %.2f\n", native_tanh());
#endif
    printf("read_GBps %.2f\n", read_speed());
    return 0;
}
