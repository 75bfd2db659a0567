/* ISA table, allocation with injected faults, arena, number of CPUs and threads. */
#include <stdlib.h>
#include <string.h>
#ifndef PORTABLE
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "../../src/runtime/isa.h"
#include "../../src/kernels/kernels.h"
#include "../../src/runtime/memory.h"
#include "../../src/runtime/parallel.h"
#include "check.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

static bool available(const char *name) {
    int n;
    const sdpa_isa *list = sdpa_isa_list(&n);
    for (int i = 0; i < n; i++) {
        if (strcmp(list[i].name, name) == 0) return list[i].available;
    }
    return false;
}

#if defined(__x86_64__)
/* What a CPU that is made up says of itself: the registers of CPUID that isa.c looks at, and XGETBV. */
typedef struct made_up {
    const char *vendor;
    uint32_t leaf1_c, extended_c, leaf7_b, leaf7_d, leaf7_1_a, saved;
    uint32_t last_leaf, last_subleaf;
} made_up;

static made_up now;

static bool leaf_made_up(uint32_t leaf, uint32_t subleaf, uint32_t registers[4]) {
    memset(registers, 0, 4 * sizeof *registers);
    if ((leaf & 0x7fffffff) > now.last_leaf || (leaf >> 31 && !now.extended_c)) return false;
    if (leaf == 0) {
        memcpy(&registers[1], now.vendor, 4);
        memcpy(&registers[3], now.vendor + 4, 4);
        memcpy(&registers[2], now.vendor + 8, 4);
    }
    if (leaf == 1) registers[2] = now.leaf1_c;
    if (leaf == 0x80000001) registers[2] = now.extended_c;
    if (leaf == 7 && subleaf == 0) {
        registers[0] = now.last_subleaf;
        registers[1] = now.leaf7_b;
        registers[3] = now.leaf7_d;
    }
    if (leaf == 7 && subleaf == 1) registers[0] = now.leaf7_1_a;
    return true;
}

static uint32_t saved_made_up(void) { return now.saved; }

/* Checks which instruction set `now` runs unless told otherwise, and that it has this one and all up to `most`. */
static void check_choice(const char *what, const char *expected, const char *most) {
#ifdef SDPA_WIDE /* which every machine has */
    if (strcmp(expected, "generic") == 0) expected = "wide", most = "amx_model";
#endif
    const sdpa_cpu cpu = {leaf_made_up, saved_made_up};
    const char *found = sdpa_isa_best(&cpu)->name;
    CHECK(strcmp(found, expected) == 0, "%s: %s, expected %s", what, found, expected);
    int n;
    const sdpa_isa *list = sdpa_isa_list(&n);
    bool beyond = false;
    for (int i = 0; i < n; i++) {
        CHECK(list[i].has(&cpu) == !beyond, "%s: %s", what, list[i].name);
        beyond |= strcmp(list[i].name, most) == 0;
    }
}

static void choice_of_made_up_cpus(void) {
    const made_up zen5 = {
        .vendor = "AuthenticAMD",
        .leaf1_c = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C | bit_MOVBE,
        .extended_c = bit_LZCNT,
        .leaf7_b =
            bit_AVX2 | bit_BMI | bit_BMI2 | bit_AVX512F | bit_AVX512BW | bit_AVX512CD | bit_AVX512DQ | bit_AVX512VL,
        .leaf7_1_a = bit_AVX512BF16,
        .saved = 1 << 1 | 1 << 2 | 1 << 5 | 1 << 6 | 1 << 7,
        .last_leaf = 7,
        .last_subleaf = 1,
    };
    now = zen5;
    check_choice("all of it", "avx512bf16", "avx512bf16");

    /* It has the pairs, which a caller may force, but is faster without. */
    now.vendor = "GenuineIntel";
    check_choice("Intel", "avx512", "avx512bf16");
    now.vendor = "AuthenticInt"; /* each of the three registers must be AMD's */
    check_choice("a wrong end", "avx512", "avx512bf16");
    now.vendor = "AuthIntecAMD";
    check_choice("a wrong middle", "avx512", "avx512bf16");

    /* The last set needs two instructions and two states of registers, and pays wherever it is. */
    made_up amx = zen5;
    amx.vendor = "GenuineIntel", amx.leaf7_d = 1 << 22 | 1 << 24, amx.saved |= 1 << 17 | 1 << 18;
    now = amx;
    check_choice("AMX", "amx", "amx");
    for (int bit = 22; bit < 25; bit += 2) {
        now = amx, now.leaf7_d &= ~(1u << bit);
        check_choice("an instruction of AMX", "avx512", "avx512bf16");
    }
    for (int state = 17; state < 19; state++) {
        now = amx, now.saved &= ~(1u << state);
        check_choice("a register of AMX", "avx512", "avx512bf16");
    }

    now = zen5, now.leaf7_1_a = 0;
    check_choice("no bfloat16", "avx512", "avx512");
    now = zen5, now.last_subleaf = 0;
    check_choice("no leaf 7.1", "avx512", "avx512");
    const uint32_t of_avx512[] = {bit_AVX512F, bit_AVX512BW, bit_AVX512CD, bit_AVX512DQ, bit_AVX512VL};
    for (size_t i = 0; i < sizeof of_avx512 / sizeof *of_avx512; i++) {
        now = zen5, now.leaf7_b &= ~of_avx512[i];
        check_choice("a bit of AVX-512", "avx2", "avx2");
    }
    for (int state = 5; state < 8; state++) {
        now = zen5, now.saved &= ~(1u << state);
        check_choice("a register of AVX-512", "avx2", "avx2");
    }

    const uint32_t of_leaf7[] = {bit_AVX2, bit_BMI, bit_BMI2};
    for (size_t i = 0; i < sizeof of_leaf7 / sizeof *of_leaf7; i++) {
        now = zen5, now.leaf7_b &= ~of_leaf7[i];
        check_choice("a bit of leaf 7", "generic", "generic");
    }
    const uint32_t of_leaf1[] = {bit_OSXSAVE, bit_AVX, bit_FMA, bit_F16C, bit_MOVBE};
    for (size_t i = 0; i < sizeof of_leaf1 / sizeof *of_leaf1; i++) {
        now = zen5, now.leaf1_c &= ~of_leaf1[i];
        check_choice("a bit of leaf 1", "generic", "generic");
    }
    now = zen5, now.extended_c = ~bit_LZCNT;
    check_choice("no LZCNT", "generic", "generic");
    now = zen5, now.extended_c = 0;
    check_choice("no extended leaf", "generic", "generic");
    for (uint32_t last = 0; last < 7; last += 6) {
        now = zen5, now.last_leaf = last;
        check_choice("an old CPU", "generic", "generic");
    }
    for (int state = 1; state < 3; state++) {
        now = zen5, now.saved &= ~(1u << state);
        check_choice("a register of AVX", "generic", "generic");
    }
}
#elif defined(__aarch64__)
static bool yes(void) { return true; }
static bool no(void) { return false; }

static void choice_of_made_up_cpus(void) {
    const sdpa_cpu with = {yes}, without = {no};
    int n;
    const sdpa_isa *list = sdpa_isa_list(&n), *last = &list[n - 1];
    CHECK(strcmp(last->name, "neonbf16") == 0 && last->has(&with) && !last->has(&without), "%s", last->name);
    CHECK(strcmp(sdpa_isa_best(&without)->name, "neon") == 0, "%s", sdpa_isa_best(&without)->name);
#ifdef __linux__
    CHECK(strcmp(sdpa_isa_best(&with)->name, "neonbf16") == 0, "%s", sdpa_isa_best(&with)->name);
#endif
}
#endif

static void isa_table(void) {
    int n;
    const sdpa_isa *list = sdpa_isa_list(&n);
    CHECK(strcmp(list[0].name, "generic") == 0 && available("generic"), "n=%d first=%s", n, list[0].name);
    const char *chosen = only_isa ? only_isa : sdpa_isa_best(&sdpa_this_cpu)->name;
    CHECK(strcmp(sdpa_isa_get()->name, chosen) == 0, "chosen %s, expected %s", sdpa_isa_get()->name, chosen);
    for (int i = 0; i < n; i++) {
        bool selected = sdpa_isa_select(list[i].name);
        CHECK(selected == list[i].available, "%s", list[i].name);
        if (selected) {
            CHECK(sdpa_isa_get() == &list[i], "%s", list[i].name);
        }
    }
    sdpa_isa_select(chosen);
    const char *const unknown[] = {"", "sse2", "AVX2", "avx", "generic "};
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        CHECK(!sdpa_isa_select(unknown[i]), "'%s'", unknown[i]);
        CHECK(strcmp(sdpa_isa_get()->name, chosen) == 0, "'%s' changed the choice", unknown[i]);
    }
#if defined(__x86_64__)
    /* The compiler's run-time library detects the same instruction sets independently; zig's denies all of them. */
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("sse2")) return;
    bool expected = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    CHECK(available("avx2") == expected, "avx2: %d", !expected);
    expected = expected && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl");
    CHECK(available("avx512") == expected, "avx512: %d", !expected);
#elif defined(__aarch64__)
    CHECK(available("neon"), "n=%d", n);
#ifdef __linux__
    CHECK(available("neonbf16") == ((getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0), "%d", available("neonbf16"));
#endif
#endif
}

static void allocation(void) {
    const size_t sizes[] = {0, 1, 63, 64, 65, 4096, 1 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        char *p = sdpa_alloc(sizes[i]);
        CHECK(p && (uintptr_t)p % SDPA_ALIGNMENT == 0, "%zu bytes: %p", sizes[i], (void *)p);
        memset(p, 1, sizes[i]);
        sdpa_free(p);
    }
    sdpa_free(NULL);
    /* Several blocks at once, released in another order, then again: a block that a thread keeps must not be handed out
     * twice. */
    for (int round = 0; round < 2; round++) {
        char *first = sdpa_alloc(1000), *second = sdpa_alloc(1000), *third = sdpa_alloc(1000);
        memset(first, 1, 1000);
        memset(second, 2, 1000);
        sdpa_free(first);
        memset(third, 3, 1000);
        first = sdpa_alloc(1000);
        memset(first, 1, 1000);
        CHECK(first[999] == 1 && second[0] == 2 && second[999] == 2 && third[0] == 3 && third[999] == 3, "round %d",
              round);
        sdpa_free(second);
        second = sdpa_alloc(1000);
        CHECK(second != first, "round %d", round);
        sdpa_free(second);
        sdpa_free(third);
        sdpa_free(first);
    }
    char *kept = sdpa_alloc(10), *none = sdpa_alloc(0);
    CHECK(kept && none && none != kept, "%p and nothing at %p", (void *)kept, (void *)none);
    sdpa_free(none);
    sdpa_free(kept);
    CHECK(!sdpa_alloc(SIZE_MAX) && !sdpa_alloc(SIZE_MAX - 64) && !sdpa_alloc(SIZE_MAX / 2), "impossible sizes");

    for (int n = 0; n < 4; n++) {
        sdpa_alloc_fail_after(n);
        for (int i = 0; i < 8; i++) {
            void *p = sdpa_alloc(10);
            CHECK((p == NULL) == (i == n), "fail after %d: allocation %d", n, i);
            sdpa_free(p);
        }
    }
    sdpa_alloc_fail_after(0);
    sdpa_alloc_fail_after(-1);
    void *p = sdpa_alloc(10);
    CHECK(p, "switched off");
    sdpa_free(p);

    sdpa_arena plan = {NULL, 0};
    CHECK(!sdpa_take(&plan, 100) && !sdpa_take(&plan, 1) && !sdpa_take(&plan, 0), "measuring");
    sdpa_arena real = {sdpa_alloc(plan.used), 0};
    char *a = sdpa_take(&real, 100), *b = sdpa_take(&real, 1), *c = sdpa_take(&real, 0);
    CHECK(a == real.base && b >= a + 100 && c >= b + 1 && (b - a) % SDPA_ALIGNMENT == 0, "%td %td", b - a, c - a);
    CHECK(real.used == plan.used, "%zu, planned %zu", real.used, plan.used);
    memset(a, 1, 100);
    memset(b, 1, 1);
    sdpa_free(real.base);
}

#ifndef PORTABLE
static void write_file(const char *root, const char *path, const char *text) {
    char whole[4096];
    snprintf(whole, sizeof whole, "%s/%s", root, path);
    for (char *slash = strchr(whole + strlen(root) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(whole, 0700);
        *slash = '/';
    }
    FILE *file = fopen(whole, "w");
    if (file) {
        fputs(text, file);
        fclose(file);
    }
    CHECK(file, "cannot write %s", whole);
}

typedef struct quota_case {
    int expected;
    const char *groups;   /* /proc/self/cgroup */
    const char *files[8]; /* path, text, path, text, ... */
} quota_case;

static void quota(void) {
    const quota_case cases[] = {
        {0, "0::/\n", {0}},
        {0, "0::/\n", {"cpu.max", "max 100000\n"}},
        {2, "0::/\n", {"cpu.max", "200000 100000\n"}},
        {3, "0::/\n", {"cpu.max", "200001 100000\n"}}, /* rounded up */
        {1, "0::/\n", {"cpu.max", "1000 100000\n"}},
        {4, "0::/a/b\n", {"a/b/cpu.max", "400000 100000\n"}},
        {2, "0::/a/b\n", {"a/b/cpu.max", "max 100000\n", "a/cpu.max", "150000 100000\n"}}, /* the parent binds */
        {3, "0::/a/b\n", {"a/b/cpu.max", "300000 100000\n", "a/cpu.max", "800000 100000\n"}},
        {5, "0::/only/on/the/host\n", {"cpu.max", "500000 100000\n"}},
        {0, "0::/\n", {"cpu.max", "garbage\n"}},
        {0, "0::/\n", {"cpu.max", "0 100000\n"}},
        {0, "0::/\n", {"cpu.max", "100000 0\n"}},
        {0, "0::/\n", {"cpu.max", "100000\n"}},
        {2,
         "3:cpuset:/x\n2:cpu,cpuacct:/a\n",
         {"cpu/a/cpu.cfs_quota_us", "150000\n", "cpu/a/cpu.cfs_period_us", "100000\n"}},
        {0, "2:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us", "-1\n", "cpu/a/cpu.cfs_period_us", "100000\n"}},
        {6, "1:cpu:/host/only\n", {"cpu/cpu.cfs_quota_us", "60000\n", "cpu/cpu.cfs_period_us", "10000\n"}},
        {0, "1:cpuset:/a\n", {"cpu/a/cpu.cfs_quota_us", "150000\n", "cpu/a/cpu.cfs_period_us", "100000\n"}},
        {1,
         "1:cpu:/a\n0::/a\n", /* both versions: the smaller */
         {"cpu/a/cpu.cfs_quota_us", "300000\n", "cpu/a/cpu.cfs_period_us", "100000\n", "a/cpu.max", "50000 100000\n"}},
        {1,
         "1:cpu:/a\n0::/a\n",
         {"cpu/a/cpu.cfs_quota_us", "100000\n", "cpu/a/cpu.cfs_period_us", "100000\n", "a/cpu.max", "300000 100000\n"}},
        {2, "0::/a/b\n", {"a/b/cpu.max", "400000 100000\n", "a/cpu.max", "200000 100000\n"}},
        {0, "0::/\n", {"cpu.max", "100000000 100\n"}}, /* more than there may be threads */
        {0, "2:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us", "150000\n"}},
        {0, "not a line of cgroup\n\n:\n", {"cpu.max", "200000 100000\n"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char root[] = "/tmp/sdpa-test-XXXXXX", command[64];
        CHECK(mkdtemp(root), "case %zu", i);
        write_file(root, "proc/self/cgroup", cases[i].groups);
        for (int f = 0; f < 8 && cases[i].files[f]; f += 2) {
            char path[256];
            snprintf(path, sizeof path, "sys/fs/cgroup/%s", cases[i].files[f]);
            write_file(root, path, cases[i].files[f + 1]);
        }
        int cpus = sdpa_quota_cpus(root);
        CHECK(cpus == cases[i].expected, "case %zu: %d, expected %d", i, cpus, cases[i].expected);
        snprintf(command, sizeof command, "rm -r %s", root);
        CHECK(system(command) == 0, "%s", command);
    }
    CHECK(sdpa_quota_cpus("/nowhere") == 0, "no files at all");
    const struct {
        long cpus, quota;
        int expected;
    } usable[] = {{4, 0, 4}, {4, 3, 3}, {4, 4, 4}, {4, 5, 4}, {0, 0, 1}, {-1, 2, 1}, {5000, 0, SDPA_MAX_THREADS}};
    for (size_t i = 0; i < sizeof usable / sizeof usable[0]; i++) {
        const int cpus = sdpa_usable_cpus(usable[i].cpus, usable[i].quota);
        CHECK(cpus == usable[i].expected, "usable %zu: %d, expected %d", i, cpus, usable[i].expected);
    }
}

typedef struct threads_case {
    const char *own, *omp;
    int expected; /* 0: as many as there are CPUs */
} threads_case;

static void number_of_threads(void) {
    CHECK(sdpa_available_cpus() >= 1 && sdpa_available_cpus() <= sysconf(_SC_NPROCESSORS_ONLN), "%d",
          sdpa_available_cpus());
    const threads_case cases[] = {
        {"3", NULL, 3},     {"3", "5", 3},    {NULL, "5", 5},
        {NULL, "5,2,1", 5}, {" 7 ", NULL, 7}, {"", "5", 5},
        {"many", "5", 5},   {"0", "5", 5},    {"-2", "5", 5},
        {"3.5", "5", 5},    {"3x", "5", 5},   {"x", "y", 0},
        {NULL, NULL, 0},    {"0", NULL, 0},   {"99999999999999999999", NULL, SDPA_MAX_THREADS},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        /* The number is found once per process, so ask in a child. */
        pid_t pid = fork();
        if (pid == 0) {
            unsetenv("SDPA_NUM_THREADS");
            unsetenv("OMP_NUM_THREADS");
            if (cases[i].own) {
                setenv("SDPA_NUM_THREADS", cases[i].own, 1);
            }
            if (cases[i].omp) {
                setenv("OMP_NUM_THREADS", cases[i].omp, 1);
            }
            int expected = cases[i].expected ? cases[i].expected : sdpa_available_cpus();
            _exit(sdpa_get_num_threads() != expected);
        }
        int status = -1;
        waitpid(pid, &status, 0);
        CHECK(status == 0, "SDPA_NUM_THREADS=%s OMP_NUM_THREADS=%s: not %d", cases[i].own ? cases[i].own : "(none)",
              cases[i].omp ? cases[i].omp : "(none)", cases[i].expected);
    }
    int before = sdpa_get_num_threads();
    sdpa_set_num_threads(5);
    CHECK(sdpa_get_num_threads() == 5, "%d", sdpa_get_num_threads());
    sdpa_set_num_threads(0);
    CHECK(sdpa_get_num_threads() == 1, "%d", sdpa_get_num_threads());
    sdpa_set_num_threads(1 << 30);
    CHECK(sdpa_get_num_threads() == SDPA_MAX_THREADS, "%d", sdpa_get_num_threads());
    sdpa_set_num_threads(before);
}

#endif

void test_machine(void) {
    isa_table();
#if defined(__x86_64__) || defined(__aarch64__)
    choice_of_made_up_cpus();
#endif
    allocation();
#ifndef PORTABLE
    quota();
    number_of_threads();
#endif
}
