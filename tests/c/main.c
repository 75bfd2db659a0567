/* Runs the tests of the Python-free core: all of them, or those named on the command line; of the kernels all that the
 * machine can run, or those that SDPA_ISA names. */
#include <stdlib.h>
#include <string.h>

#include "../../src/isa.h"
#include "check.h"

long n_checks, n_failures;
const char *only_isa;

bool select_isa(const char *name) { return (!only_isa || strcmp(name, only_isa) == 0) && sdpa_isa_select(name); }

static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
    {"machine", test_machine},     {"pool", test_pool},           {"fork", test_fork},
    {"attention", test_attention}, {"disturbed", test_disturbed}, {"additive", test_additive},
};

enum { N_TESTS = sizeof(tests) / sizeof(tests[0]) };

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
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
