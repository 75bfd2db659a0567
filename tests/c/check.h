/* The driver's own assertions: every failure is printed with its parameters, and the run goes on. */
#ifndef SDPA_CHECK_H
#define SDPA_CHECK_H

#include <stdbool.h>
#include <stdio.h>

/* Seconds within which an interrupted call must end; an emulated machine gets more. */
#ifndef TIME_LIMIT
#define TIME_LIMIT 1
#endif

/* One of this many problems is tried: fewer on emulated machines and in CI. */
#ifndef SAMPLE
#define SAMPLE 1
#endif

extern long n_checks, n_failures;

/* The name in SDPA_ISA, or NULL. */
extern const char *only_isa;

/* False (and no change) if the machine lacks them or SDPA_ISA asks for others. */
bool select_isa(const char *name);

/* CHECK(condition, "n=%d", n): the rest describes the case. */
#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        n_checks++;                                                                                                    \
        if (!(condition)) {                                                                                            \
            n_failures++;                                                                                              \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition);                                                     \
            printf(__VA_ARGS__);                                                                                       \
            putchar('\n');                                                                                             \
        }                                                                                                              \
    } while (0)

void test_amx(void);
void test_pool(void);
void test_fork(void);
void test_machine(void);
void test_problem(void);
void test_attention(void), test_outline(void);      /* the latter is part of the former */
void test_disturbed(void), test_interruption(void); /* the latter is part of the former */
void test_packed(void);
void test_additive(void);
void test_xla(void);

#endif
