#define _GNU_SOURCE
#include "isa.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#ifdef __linux__
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

static bool has_generic(const sdpa_cpu *cpu) {
    (void)cpu;
    return true;
}

#if defined(__x86_64__)
#include <cpuid.h>

enum { EAX, EBX, ECX, EDX };
enum { BIT_XMM = 1 << 1, BIT_YMM = 1 << 2, BIT_OPMASK = 1 << 5, BIT_ZMM_HIGH = 1 << 6, BIT_ZMM_16_31 = 1 << 7 };
enum { BIT_TILE_CONFIG = 1 << 17, BIT_TILE_DATA = 1 << 18, BIT_AMX_BF16 = 1 << 22, BIT_AMX_TILE = 1 << 24 };

static bool read_leaf(uint32_t leaf, uint32_t subleaf, uint32_t registers[4]) {
    return __get_cpuid_count(leaf, subleaf, &registers[EAX], &registers[EBX], &registers[ECX], &registers[EDX]);
}

static uint32_t read_saved(void) {
    uint32_t low, high;
    /* Inline assembly, because the intrinsic would need a -m flag. */
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

const sdpa_cpu sdpa_this_cpu = {read_leaf, read_saved};

/* Whether a register of a leaf has all of these bits. */
static bool has_bits(const sdpa_cpu *cpu, uint32_t leaf, uint32_t subleaf, int which, uint32_t bits) {
    uint32_t registers[4];
    return cpu->leaf(leaf, subleaf, registers) && (registers[which] & bits) == bits;
}

/* Whether the operating system saves these register states at a context switch. A CPU may have instructions whose
 * registers the system would lose. */
static bool os_saves(const sdpa_cpu *cpu, uint32_t states) {
    return has_bits(cpu, 1, 0, ECX, bit_OSXSAVE) && (cpu->saved() & states) == states;
}

/* All of x86-64-v3, the level that the avx2 kernels are compiled for. */
static bool has_avx2(const sdpa_cpu *cpu) {
    return has_bits(cpu, 1, 0, ECX, bit_AVX | bit_FMA | bit_F16C | bit_MOVBE) &&
           has_bits(cpu, 7, 0, EBX, bit_AVX2 | bit_BMI | bit_BMI2) && has_bits(cpu, 0x80000001, 0, ECX, bit_LZCNT) &&
           os_saves(cpu, BIT_XMM | BIT_YMM);
}

/* All of x86-64-v4, the level that the avx512 kernels are compiled for. */
static bool has_avx512(const sdpa_cpu *cpu) {
    const uint32_t leaf7 = bit_AVX512F | bit_AVX512BW | bit_AVX512CD | bit_AVX512DQ | bit_AVX512VL;
    return has_avx2(cpu) && has_bits(cpu, 7, 0, EBX, leaf7) &&
           os_saves(cpu, BIT_XMM | BIT_YMM | BIT_OPMASK | BIT_ZMM_HIGH | BIT_ZMM_16_31);
}

static bool has_avx512bf16(const sdpa_cpu *cpu) {
    uint32_t leaf7[4] = {0};
    (void)cpu->leaf(7, 0, leaf7); /* which is there if AVX-512 is */
    return has_avx512(cpu) && leaf7[EAX] >= 1 && has_bits(cpu, 7, 1, EAX, bit_AVX512BF16);
}

/* The vectors of avx512 beside the tiles, with bfloat16, which the system gives to a process that asks for them. */
static bool has_amx(const sdpa_cpu *cpu) {
    return has_avx512(cpu) && has_bits(cpu, 7, 0, EDX, BIT_AMX_TILE | BIT_AMX_BF16) &&
           os_saves(cpu, BIT_TILE_CONFIG | BIT_TILE_DATA);
}

/* vdpbf16ps has the products of two FMAs. AMD's CPUs start as many of it as of FMAs, Intel's a quarter of that, and no
 * leaf tells: docs/kernels.md, fast/bf16_pairs. */
static bool pays_avx512bf16(const sdpa_cpu *cpu) {
    uint32_t leaf0[4] = {0};
    (void)cpu->leaf(0, 0, leaf0); /* which every CPU has */
    return leaf0[EBX] == signature_AMD_ebx && leaf0[EDX] == signature_AMD_edx && leaf0[ECX] == signature_AMD_ecx;
}

#elif defined(__aarch64__)
static bool read_bf16(void) {
#if defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, NULL, 0) == 0 && has;
#elif defined(__linux__)
    enum { BIT_BF16 = 1 << 14 };
    return getauxval(AT_HWCAP2) & BIT_BF16;
#else
    return false;
#endif
}

const sdpa_cpu sdpa_this_cpu = {read_bf16};

static bool has_neon(const sdpa_cpu *cpu) { return has_generic(cpu); /* part of the architecture's baseline */ }
static bool has_neonbf16(const sdpa_cpu *cpu) { return cpu->bf16(); }

/* Arm's cores start as many products of bfloat16 as FMAs, by their tables (docs/performance/arm.md). Apple publishes
 * none. */
static bool pays_neonbf16(const sdpa_cpu *cpu) {
#ifdef __APPLE__
    return !has_generic(cpu);
#else
    return has_generic(cpu);
#endif
}

#else
const sdpa_cpu sdpa_this_cpu;
#endif

/* pays_NAME: whether it is faster than the sets before it, where the CPU has it. */
#define pays_generic has_generic
#define pays_wide has_generic
#define pays_avx2 has_generic
#define pays_avx512 has_generic
#define pays_amx has_generic
#define pays_neon has_generic

/* IF_NAME keeps what is for this architecture. */
#define IF_any(...) __VA_ARGS__
#define IF_x86_64(...)
#define IF_aarch64(...)
#define IF_test(...)
#if defined(__x86_64__)
#undef IF_x86_64
#define IF_x86_64(...) __VA_ARGS__
#elif defined(__aarch64__)
#undef IF_aarch64
#define IF_aarch64(...) __VA_ARGS__
#endif
#ifdef SDPA_WIDE
#undef IF_test
#define IF_test(...) __VA_ARGS__
#define has_wide has_generic
#define has_amx_model has_generic
static bool pays_amx_model(const sdpa_cpu *cpu) { return !has_generic(cpu); }
#endif

/* A type without kernels has no symbol, and no row names it. */
#define ISA(name, architecture, base, types, flags)                                                                    \
    IF_##architecture(extern const struct sdpa_kernels sdpa_##name##_f32, sdpa_##name##_f64;)
#include "isas.inc"
#undef ISA

static sdpa_isa isas[] = {
#define ISA(name, architecture, base, types, flags)                                                                    \
    IF_##architecture(                                                                                                 \
        {#name, has_##name, pays_##name, &sdpa_##base##_f32, &sdpa_##base##_f64, &sdpa_##name##_f32, false}, )
#include "isas.inc"
};

enum { N_ISAS = sizeof(isas) / sizeof(isas[0]) };

static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Atomic(const sdpa_isa *) chosen;

const sdpa_isa *sdpa_isa_best(const sdpa_cpu *cpu) {
    int i = N_ISAS - 1;
    while (!isas[i].has(cpu) || !isas[i].pays(cpu)) i--;
    return &isas[i];
}

static void detect(void) {
    for (int i = 0; i < N_ISAS; i++) isas[i].available = isas[i].has(&sdpa_this_cpu);
    atomic_store_explicit(&chosen, sdpa_isa_best(&sdpa_this_cpu), memory_order_release);
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

#if defined(__x86_64__) && defined(__linux__)
bool sdpa_amx_permitted(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18, YES = 1, NO = 2 };
    static _Atomic int answer; /* for the process: the same for all threads, and kept by a fork */
    int known = atomic_load_explicit(&answer, memory_order_relaxed);
    if (!known) {
        known = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 ? YES : NO;
        atomic_store_explicit(&answer, known, memory_order_relaxed);
    }
    return known == YES;
}
#else
bool sdpa_amx_permitted(void) { return false; }
#endif

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
