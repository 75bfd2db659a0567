#include "isa.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

static bool has_generic(void) { return true; }

#if defined(__x86_64__)
#include <cpuid.h>

enum { BIT_XMM = 1 << 1, BIT_YMM = 1 << 2, BIT_OPMASK = 1 << 5, BIT_ZMM_HIGH = 1 << 6, BIT_ZMM_16_31 = 1 << 7 };

/* Whether the operating system saves these register states at a context switch. A CPU may have instructions whose
 * registers the system would lose. */
static bool os_saves(uint32_t states) {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) {
        return false;
    }
    uint32_t low, high;
    /* Inline assembly, because the intrinsic would need a -m flag. */
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & states) == states;
}

/* All of x86-64-v3, the level that the avx2 kernels are compiled for. */
static bool has_avx2(void) {
    const uint32_t leaf1 = bit_AVX | bit_FMA | bit_F16C | bit_MOVBE;
    const uint32_t leaf7 = bit_AVX2 | bit_BMI | bit_BMI2;
    uint32_t a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & leaf1) == leaf1 && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (b & leaf7) == leaf7 && __get_cpuid(0x80000001, &a, &b, &c, &d) && (c & bit_LZCNT) &&
           os_saves(BIT_XMM | BIT_YMM);
}

/* All of x86-64-v4, the level that the avx512 kernels are compiled for. */
static bool has_avx512(void) {
    const uint32_t leaf7 = bit_AVX512F | bit_AVX512BW | bit_AVX512CD | bit_AVX512DQ | bit_AVX512VL;
    uint32_t a, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & leaf7) == leaf7 &&
           os_saves(BIT_XMM | BIT_YMM | BIT_OPMASK | BIT_ZMM_HIGH | BIT_ZMM_16_31);
}

static bool has_avx512bf16(void) {
    uint32_t a, b, c, d;
    return has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && a >= 1 &&
           __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bit_AVX512BF16);
}

#elif defined(__aarch64__)
static bool has_neon(void) { return true; /* part of the architecture's baseline */ }
#endif

#define DECLARE(isa) extern const struct sdpa_kernels sdpa_##isa##_f32, sdpa_##isa##_f64
#define ROW(isa)                                                                                                       \
    { #isa, has_##isa, &sdpa_##isa##_f32, &sdpa_##isa##_f64, &sdpa_##isa##_f32, false }

DECLARE(generic);
#ifdef SDPA_WIDE
DECLARE(wide);
#endif
#if defined(__x86_64__)
DECLARE(avx2);
DECLARE(avx512);
extern const struct sdpa_kernels sdpa_avx512bf16_f32;
#elif defined(__aarch64__)
DECLARE(neon);
#endif

static sdpa_isa isas[] = {
    ROW(generic),
#ifdef SDPA_WIDE /* make test-c */
    {"wide", has_generic, &sdpa_wide_f32, &sdpa_wide_f64, &sdpa_wide_f32, false},
#endif
#if defined(__x86_64__)
    ROW(avx2),
    ROW(avx512),
    {"avx512bf16", has_avx512bf16, &sdpa_avx512_f32, &sdpa_avx512_f64, &sdpa_avx512bf16_f32, false},
#elif defined(__aarch64__)
    ROW(neon),
#endif
};

enum { N_ISAS = sizeof(isas) / sizeof(isas[0]) };

static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Atomic(const sdpa_isa *) chosen;

static void detect(void) {
    for (int i = 0; i < N_ISAS; i++) isas[i].available = isas[i].has();
    int i = N_ISAS - 1;
    while (!isas[i].available) {
        i--;
    }
    atomic_store_explicit(&chosen, &isas[i], memory_order_release);
}

const sdpa_isa *sdpa_isa_list(int *n) {
    pthread_once(&once, detect);
    *n = N_ISAS;
    return isas;
}

const sdpa_isa *sdpa_isa_get(void) {
    const sdpa_isa *isa = atomic_load_explicit(&chosen, memory_order_acquire);
    if (!isa) {
        pthread_once(&once, detect);
        isa = atomic_load_explicit(&chosen, memory_order_acquire);
    }
    return isa;
}

bool sdpa_isa_select(const char *name) {
    pthread_once(&once, detect);
    for (int i = 0; i < N_ISAS; i++) {
        if (isas[i].available && strcmp(isas[i].name, name) == 0) {
            atomic_store_explicit(&chosen, &isas[i], memory_order_release);
            return true;
        }
    }
    return false;
}
