/* Runs the tests of the Python-free core: all of them, or those named on the command line. */
#include <string.h>

#include "check.h"

long n_checks, n_failures;

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
