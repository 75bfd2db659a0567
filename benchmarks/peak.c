/* What one core can do at best, printed as "name value": fused multiply-adds in registers in GF/s (a multiply-add is two
 * operations), bfloat16 dot products where there are any, and GB/s read from memory. The best of many short runs. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

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

#if defined(__x86_64__)
DEFINE_PEAK(avx2_f32, float, 32, 12, "+x", __attribute__((target("avx2,fma"))))
DEFINE_PEAK(avx2_f64, double, 32, 12, "+x", __attribute__((target("avx2,fma"))))
DEFINE_PEAK(avx512_f32, float, 64, 16, "+v", __attribute__((target("avx512f"))))
DEFINE_PEAK(avx512_f64, double, 64, 16, "+v", __attribute__((target("avx512f"))))

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
    }
    if (__builtin_cpu_supports("avx512f")) {
        printf("avx512_f32 %.2f\n", avx512_f32());
        printf("avx512_f64 %.2f\n", avx512_f64());
    }
    if (__builtin_cpu_supports("avx512bf16")) printf("avx512_bf16 %.2f\n", avx512_bf16());
#else
    printf("native_f32 %.2f\n", native_f32());
    printf("native_f64 %.2f\n", native_f64());
#endif
    printf("read_GBps %.2f\n", read_speed());
    return 0;
}
