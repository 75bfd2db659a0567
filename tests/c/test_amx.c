/* The registers of AMX: when the system is asked for them, what happens if it refuses, and that calls give them back. */
#include <string.h>

#include "../../src/runtime/isa.h"
#include "check.h"

#if defined(__x86_64__) && defined(__linux__)
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../src/drivers.h"
#include "case.h"

enum { GET_PERMISSION = 0x1022, TILE_CONFIG = 17, TILE_DATA = 18, FEW = 8, MANY = 40, SMALL_STACK = 8192 };

static bool permitted(void) {
    uint64_t states = 0;
    return syscall(SYS_arch_prctl, GET_PERMISSION, &states) == 0 && (states >> TILE_DATA & 1);
}

/* Whether this thread's tiles are configured: then they are in use, and every switch to it has to restore them. */
static bool holds_tiles(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
    return low >> TILE_CONFIG & 1;
}

static test_case a_case(sdpa_dtype dtype, int64_t n_q) {
    return (test_case){.n_batch = 1,
                       .n_head = 1,
                       .group = 1,
                       .n_q = n_q,
                       .n_k = 70,
                       .d_k = 40,
                       .d_v = 40,
                       .dtype = dtype,
                       .scale = 0.3};
}

static void call(sdpa_dtype dtype, int64_t n_q) {
    const test_case c = a_case(dtype, n_q);
    fixture *f = new_fixture(&c, 0);
    f->p.n_workers = 1;
    check_case(f);
    free_fixture(f);
}

/* Whether forward and backward have the bits of another set. */
static bool same_as(const char *other, sdpa_dtype dtype) {
    const test_case c = a_case(dtype, MANY);
    fixture *f = new_fixture(&c, 0);
    f->p.dq = new_tensor(f, dtype, c.n_head, c.n_q, c.d_k, NULL);
    const sdpa_tensor *results[] = {&f->p.o, &f->p.dq};
    const char *own = sdpa_isa_get()->name;
    char kept[2][MANY * 40 * sizeof(double)];
    f->p.n_workers = 1;
    bool same = true;
    for (int turn = 0; turn < 2; turn++) {
        if (turn == 1) sdpa_isa_select(other);
        same &= sdpa_attention_forward(&f->p) == SDPA_OK && sdpa_attention_backward(&f->p) == SDPA_OK;
        for (int i = 0; i < 2; i++) {
            const size_t bytes = MANY * 40 * (size_t)sdpa_size_of(results[i]->dtype);
            if (turn == 0) memcpy(kept[i], results[i]->data, bytes);
            same &= memcmp(kept[i], results[i]->data, bytes) == 0;
        }
    }
    sdpa_isa_select(own);
    free_fixture(f);
    return same;
}

static void asked_at_the_first_use(void) {
    call(SDPA_F64, MANY), call(SDPA_F32, FEW), call(SDPA_BF16, FEW);
    CHECK(!permitted(), "asked for what takes no tiles");
    CHECK(same_as("avx512", SDPA_F64) && !permitted(), "float64");
    call(SDPA_BF16, MANY);
    CHECK(permitted(), "not asked");
    CHECK(!same_as("avx512", SDPA_BF16), "no tiles though permitted");
}

static void released(void) {
    static const uint8_t config[64] = {[0] = 1, [16] = 64, [48] = 16};
    CHECK(sdpa_amx_permitted(), "refused");
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
    CHECK(holds_tiles(), "the register says nothing");
    __asm__ volatile("tilerelease");
    CHECK(!holds_tiles(), "tilerelease");
    const sdpa_dtype dtypes[] = {SDPA_F16, SDPA_BF16, SDPA_F32};
    for (int i = 0; i < 3; i++) {
        call(dtypes[i], MANY);
        CHECK(!holds_tiles(), "dtype %d: tiles are left in use", i);
    }
}

static volatile sig_atomic_t on_own_stack;
static char own_stack[SMALL_STACK];

static void handle(int number) {
    (void)number;
    char here;
    on_own_stack = &here >= own_stack && &here < own_stack + sizeof own_stack;
}

/* A frame with the tiles would not fit the stack, so the system refuses them, and goes on to deliver signals there. */
static void refused_for_a_small_stack(void) {
    const stack_t small = {.ss_sp = own_stack, .ss_size = sizeof own_stack}, none = {.ss_flags = SS_DISABLE};
    const struct sigaction action = {.sa_handler = handle, .sa_flags = SA_ONSTACK};
    CHECK(sigaltstack(&small, NULL) == 0 && sigaction(SIGUSR1, &action, NULL) == 0, "no stack for signals");
    CHECK(same_as("avx512", SDPA_F32) && !permitted(), "permitted");
    raise(SIGUSR1);
    CHECK(on_own_stack, "the handler did not run there");
    CHECK(sigaltstack(&none, NULL) == 0, "the stack stays");
    CHECK(same_as("avx512", SDPA_F32) && !permitted(), "asked again");
}

/* A process never loses the permission, and its children have it. */
static void in_a_child(const char *name, void (*test)(void)) {
    int status = -1;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        naive_seed();
        test();
        fflush(stdout);
        _exit(n_failures > 0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0, "%s: failures above, or a signal: %d", name, status);
}

void test_amx(void) {
    const char *before = sdpa_isa_get()->name;
    if (!sdpa_isa_select("amx")) {
        CHECK(!sdpa_amx_permitted() && !permitted(), "permitted but not there");
        return;
    }
    sdpa_isa_select(before);
    if (!select_isa("amx")) return;
    CHECK(!permitted(), "asked before any call");
    in_a_child("first use", asked_at_the_first_use);
    in_a_child("release", released);
    in_a_child("small stack", refused_for_a_small_stack);
    sdpa_isa_select(before);
}
#else
void test_amx(void) { CHECK(!sdpa_amx_permitted(), "tiles without AMX"); }
#endif
