/* Runs the tests of the Python-free core: all tests, or those named on the command line, on all kernels that the
 * machine can run, or on those that SDPA_ISA names. */
#include <stdlib.h>
#include <string.h>
#ifndef PORTABLE
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "../../src/runtime/isa.h"
#include "check.h"

long n_checks, n_failures;
const char *only_isa;

bool select_isa(const char *name) { return (!only_isa || strcmp(name, only_isa) == 0) && sdpa_isa_select(name); }

/* The tests of vectors are compiled once per instruction set and type. UNITS, from the Makefile, lists UNIT(isa, bits)
 * for each. */
#define UNIT(isa, bits)                                                                                                \
    void test_vec_##isa##_f##bits(void), test_convert_##isa##_f##bits(void), test_vmath_##isa##_f##bits(void);
UNITS
#undef UNIT

static const struct unit {
    const char *isa;
    void (*vec)(void), (*convert)(void), (*vmath)(void);
} units[] = {
#define UNIT(isa, bits) {#isa, test_vec_##isa##_f##bits, test_convert_##isa##_f##bits, test_vmath_##isa##_f##bits},
    UNITS
#undef UNIT
    {NULL, NULL, NULL, NULL}};

static void test_vec(void) {
    for (const struct unit *u = units; u->isa; u++) {
        if (select_isa(u->isa)) u->vec();
    }
}

static void test_convert(void) {
    for (const struct unit *u = units; u->isa; u++) {
        if (select_isa(u->isa)) u->convert();
    }
}

#ifdef PORTABLE
static void test_vmath(void) {
    for (const struct unit *u = units; u->isa; u++) {
        if (select_isa(u->isa)) u->vmath();
    }
}
#else
/* These run side by side, one process each, because they take minutes of one core. */
static void test_vmath(void) {
    int n = 0;
    for (const struct unit *u = units; u->isa; u++) {
        if (!select_isa(u->isa)) continue;
        n++;
        fflush(stdout);
        const pid_t pid = fork();
        CHECK(pid >= 0, "%s: no process", u->isa);
        if (pid == 0) {
            u->vmath();
            fflush(stdout);
            _exit(n_failures > 0);
        }
    }
    for (int i = 0, status; i < n; i++)
        CHECK(wait(&status) > 0 && status == 0, "failures above, or a signal: %d", status);
}
#endif

static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
#ifndef PORTABLE
    {"amx", test_amx}, /* first: later the process has the permission that this one looks at */
#endif
    {"vec", test_vec},
    {"convert", test_convert},
    {"vmath", test_vmath},
    {"machine", test_machine},
    {"pool", test_pool},
#ifndef PORTABLE /* without processes and signals */
    {"problem", test_problem},
    {"fork", test_fork},
#endif
    {"attention", test_attention},
    {"disturbed", test_disturbed},
    {"packed", test_packed},
    {"additive", test_additive},
    {"xla", test_xla},
};

enum { N_TESTS = sizeof(tests) / sizeof(tests[0]) };

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    CHECK(sdpa_isa_get(), "no kernels unless some are chosen");
    const char *forced = getenv("SDPA_ISA");
    only_isa = forced && *forced ? forced : NULL;
    if (only_isa && !sdpa_isa_select(only_isa)) {
        printf("SDPA_ISA=%s: no kernels of this name run on this machine\n", only_isa);
        return 1;
    }
    int n_run = 0;
    for (int t = 0; t < N_TESTS; t++) {
        int wanted = argc == 1;
        for (int a = 1; a < argc; a++) {
            wanted |= strcmp(argv[a], tests[t].name) == 0;
        }
        if (!wanted) {
            continue;
        }
        long before = n_checks;
        n_run++;
        tests[t].run();
        printf("%-10s %ld checks\n", tests[t].name, n_checks - before);
    }
    printf("%ld checks, %ld failed\n", n_checks, n_failures);
    return n_failures > 0 || n_run == 0;
}
