/* Prints the float32 FMA peak of one core in GF/s: independent chains in registers, the best of many short runs. */
#include <stdio.h>
#include <time.h>

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#define STEPS 50000
#define DEFINE_PEAK(name, bytes, chains, constraint, ...)                                                              \
    typedef float name##_vec __attribute__((vector_size(bytes)));                                                      \
    __VA_ARGS__ static double name(void) {                                                                             \
        double best = 0;                                                                                               \
        for (int run = 0; run < 200; run++) {                                                                          \
            name##_vec x[chains], a = {0}, b = {0};                                                                    \
            a += 0.999f, b += 1e-3f;                                                                                   \
            for (int i = 0; i < chains; i++) x[i] = a * (float)i;                                                      \
            double start = seconds();                                                                                  \
            for (int step = 0; step < STEPS; step++) {                                                                 \
                _Pragma("GCC unroll 16") for (int i = 0; i < chains; i++) {                                            \
                    x[i] = x[i] * a + b;                                                                               \
                    __asm__ volatile("" : constraint(x[i]));                                                           \
                }                                                                                                      \
            }                                                                                                          \
            double rate = 2e-9 * STEPS * chains * (bytes / 4) / (seconds() - start);                                   \
            if (rate > best) best = rate;                                                                              \
        }                                                                                                              \
        return best;                                                                                                   \
    }

#if defined(__x86_64__)
DEFINE_PEAK(avx2, 32, 12, "+x", __attribute__((target("avx2,fma"))))
DEFINE_PEAK(avx512, 64, 16, "+v", __attribute__((target("avx512f"))))
#else
DEFINE_PEAK(native, 16, 16, "+w")
#endif

int main(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) printf("avx2 %.1f\n", avx2());
    if (__builtin_cpu_supports("avx512f")) printf("avx512 %.1f\n", avx512());
#else
    printf("native %.1f\n", native());
#endif
    return 0;
}
