#include "isa.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "kernels/kernels.h"

bool sdpa_half_vectors;

static bool has_generic(void) { return true; }

#if defined(__x86_64__)
#include <cpuid.h>

enum { BIT_XMM = 1 << 1, BIT_YMM = 1 << 2, BIT_OPMASK = 1 << 5, BIT_ZMM_HIGH = 1 << 6, BIT_ZMM_16_31 = 1 << 7 };

/* The register states that the operating system saves at a context switch: a CPU may have instructions whose registers
 * the system would lose. */
static bool os_saves(uint32_t states) {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) {
        return false;
    }
    uint32_t low, high;
    /* The instruction itself, since its intrinsic would need a -m flag. */
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & states) == states;
}

/* All of x86-64-v3, which the file is compiled for. */
static bool has_avx2(void) {
    const uint32_t leaf1 = bit_AVX | bit_FMA | bit_F16C | bit_MOVBE;
    const uint32_t leaf7 = bit_AVX2 | bit_BMI | bit_BMI2;
    uint32_t a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & leaf1) == leaf1 && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (b & leaf7) == leaf7 && __get_cpuid(0x80000001, &a, &b, &c, &d) && (c & bit_LZCNT) &&
           os_saves(BIT_XMM | BIT_YMM);
}

/* All of x86-64-v4. */
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

/* AMD's family 25: Zen 4, and Zen 3, which has no such vectors. */
static bool computes_halves(void) {
    uint32_t a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && __get_cpuid(1, &a, &b, &c, &d) &&
           (a >> 8 & 0xf) + (a >> 20 & 0xff) == 25;
}
#elif defined(__aarch64__)
static bool has_neon(void) { return true; /* part of the architecture's baseline */ }
#endif

#define ROW(isa) {#isa, &sdpa_isa_##isa, false},
static sdpa_isa isas[] = {SDPA_FOR_EACH_ISA(ROW)};
#undef ROW

enum { N_ISAS = sizeof(isas) / sizeof(isas[0]) };

static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Atomic(const sdpa_isa *) chosen;

static void detect(void) {
#if defined(__x86_64__)
    sdpa_half_vectors = computes_halves();
#endif
    int i = 0;
#define DETECT(isa) isas[i++].available = has_##isa();
    SDPA_FOR_EACH_ISA(DETECT)
#undef DETECT
    i = N_ISAS - 1;
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

static const sdpa_isa *current(void) {
    const sdpa_isa *isa = atomic_load_explicit(&chosen, memory_order_acquire);
    if (!isa) {
        pthread_once(&once, detect);
        isa = atomic_load_explicit(&chosen, memory_order_acquire);
    }
    return isa;
}

const struct sdpa_ops *sdpa_ops_get(void) { return current()->ops; }

const char *sdpa_isa_name(void) { return current()->name; }

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
