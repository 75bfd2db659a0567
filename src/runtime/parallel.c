/* One job at a time. The caller publishes it in `pool`, threads enter while it is open, every participant claims units
 * from one counter, and the caller closes the job and waits for those who entered. A thread that wakes too late finds
 * the job closed, so nobody ever waits for a thread to wake up. */
#include "parallel.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "rounding.h"
#include "system.h"

enum { POLL_NS = 20 * 1000 * 1000, SPIN_NS = 40 * 1000, STACK_BYTES = 2 << 20 };

/* One participant's view of the run. */
struct sdpa_run {
    _Atomic bool *stopped;
    int (*interrupted)(void); /* NULL on all threads but the caller's */
    bool shared;              /* with other threads, */
    bool forked;              /* which this process lacks, since `interrupted` forked it */
};

/* pool.entry: in the low 16 bits the participants still inside, then those that ever entered, then how many may enter
 * (0: closed). All in one word, so that entering and closing cannot overlap. */
#define INSIDE(entry) ((entry)&0xffff)
#define ENTERED(entry) ((entry) >> 16 & 0xffff)
#define PLACES(entry) ((entry) >> 32)
#define ONE_ENTERS ((uint64_t)0x10001)

static struct {
    _Alignas(64) _Atomic int64_t next; /* first unit not yet claimed */
    _Alignas(64) _Atomic uint64_t entry;
    _Alignas(64) _Atomic uint32_t epoch; /* changes, under the lock, whenever idle threads should look */
    _Atomic bool stopped;                /* the job was interrupted */
    _Atomic bool quit;                   /* the threads must end */
    _Atomic bool closed;                 /* and must not start again */
    _Atomic bool busy;                   /* a caller owns the pool */
    _Atomic uint64_t forks;              /* generations between this process and the one that loaded the library */

    /* The job; written by the owner while closed. */
    int64_t n_units;
    sdpa_unit_fn *fn;
    void *context;
    sdpa_modes modes; /* the owner's */

    /* Under the lock. */
    pthread_cond_t wake, done;
    int n_threads, n_asleep;
    pthread_t threads[SDPA_MAX_THREADS];
} pool;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic bool always_polls; /* for tests */

static int64_t clock_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline void cpu_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

bool sdpa_poll(int (*interrupted)(void)) {
    static _Thread_local int64_t next; /* 0: before the first look at the clock */
    if (!interrupted) return false;
#ifdef CLOCK_MONOTONIC_COARSE
    int64_t now = clock_ns(CLOCK_MONOTONIC_COARSE); /* a few ns to read; 4 ms of resolution are enough here */
#else
    int64_t now = clock_ns(CLOCK_MONOTONIC);
#endif
    if (now < next && !atomic_load_explicit(&always_polls, memory_order_relaxed)) return false;
    const bool first = next == 0;
    next = now + POLL_NS;
    return !first && interrupted();
}

void sdpa_poll_always(bool yes) { atomic_store(&always_polls, yes); }

bool sdpa_run_stopped(sdpa_run *run) {
    if (run->forked || atomic_load_explicit(run->stopped, memory_order_relaxed)) return true;
    if (!run->interrupted) return false;
    const uint64_t forks = atomic_load(&pool.forks);
    const bool interrupted = sdpa_poll(run->interrupted);
    /* A child must not touch the pool again, which its own calls may use. */
    run->forked = run->shared && atomic_load(&pool.forks) != forks;
    if (interrupted && !run->forked) atomic_store_explicit(run->stopped, true, memory_order_relaxed);
    return interrupted || run->forked;
}

bool sdpa_run_wait(sdpa_run *run, const _Atomic int64_t *counter, int64_t value) {
    /* This is asked even if there is nothing to wait for. Otherwise a unit that always finds the others ahead could not
     * be stopped. */
    if (sdpa_run_stopped(run)) return false;
    for (unsigned i = 1; atomic_load_explicit(counter, memory_order_acquire) < value; i++) {
        if (i < 1024) {
            cpu_pause();
        } else {
            sched_yield(); /* the thread waited for may need this CPU */
        }
        if (i % 64 == 0 && sdpa_run_stopped(run)) return false;
    }
    return true;
}

static sdpa_status run_serial(int64_t n_units, sdpa_unit_fn *fn, void *context, int (*interrupted)(void)) {
    _Atomic bool stopped = false;
    sdpa_run run = {&stopped, interrupted, false, false};
    for (int64_t unit = 0; unit < n_units; unit++) {
        if (unit > 0 && sdpa_run_stopped(&run)) {
            break;
        }
        fn(context, unit, 0, &run);
    }
    return atomic_load_explicit(&stopped, memory_order_relaxed) ? SDPA_INTERRUPTED : SDPA_OK;
}

static void run_units(int worker, sdpa_run *run) {
    while (!sdpa_run_stopped(run)) {
        int64_t unit = atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed);
        if (unit >= pool.n_units) {
            break;
        }
        pool.fn(pool.context, unit, worker, run);
    }
}

/* This thread's worker number in the open job, or 0 if it is closed or full. */
static int enter(void) {
    uint64_t entry = atomic_load_explicit(&pool.entry, memory_order_relaxed);
    while (ENTERED(entry) < PLACES(entry)) {
        if (atomic_compare_exchange_weak_explicit(&pool.entry, &entry, entry + ONE_ENTERS, memory_order_acquire,
                                                  memory_order_relaxed)) {
            return (int)ENTERED(entry) + 1;
        }
    }
    return 0;
}

static void leave(void) {
    uint64_t entry = atomic_fetch_sub_explicit(&pool.entry, 1, memory_order_release);
    if (INSIDE(entry) == 1 && PLACES(entry) == 0) {
        pthread_mutex_lock(&lock);
        pthread_cond_signal(&pool.done);
        pthread_mutex_unlock(&lock);
    }
}

/* Returns the epoch once it differs from `seen`. Calls often come in quick succession, and waking takes as long as a
 * small problem: spin a little before sleeping. */
static uint32_t await_epoch(uint32_t seen) {
    uint32_t epoch;
    int64_t end = clock_ns(CLOCK_MONOTONIC) + SPIN_NS;
    do {
        for (int i = 0; i < 16; i++) {
            epoch = atomic_load_explicit(&pool.epoch, memory_order_acquire);
            if (epoch != seen) {
                return epoch;
            }
            cpu_pause();
        }
    } while (clock_ns(CLOCK_MONOTONIC) < end);

    pthread_mutex_lock(&lock);
    pool.n_asleep++;
    while ((epoch = atomic_load_explicit(&pool.epoch, memory_order_relaxed)) == seen) {
        pthread_cond_wait(&pool.wake, &lock);
    }
    pool.n_asleep--;
    pthread_mutex_unlock(&lock);
    return epoch;
}

static void *thread_main(void *first_epoch) {
    uint32_t seen = (uint32_t)(uintptr_t)first_epoch;
    sdpa_thread_urgent();
    while (!atomic_load_explicit(&pool.quit, memory_order_acquire)) {
        int worker = enter();
        if (worker > 0) {
            sdpa_modes_set(&pool.modes);
            sdpa_run run = {&pool.stopped, NULL, true, false};
            run_units(worker, &run);
            leave();
        }
        seen = await_epoch(seen);
    }
    return NULL;
}

/* Also called in a forked child, where the old locks may have waiters that no longer exist. */
static void init_locks(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
#ifndef __APPLE__
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
#endif
    pthread_cond_init(&pool.done, &attributes);
    pthread_condattr_destroy(&attributes);
}

static void before_fork(void) { pthread_mutex_lock(&lock); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }

/* The child has only the thread that forked: no pool threads, and no caller that owned the pool. */
static void after_fork_in_child(void) {
    init_locks();
    pool.n_threads = pool.n_asleep = 0;
    atomic_store(&pool.entry, 0);
    atomic_store(&pool.quit, false);
    atomic_store(&pool.busy, false);
    atomic_fetch_add(&pool.forks, 1);
}

static void init_once(void) {
    init_locks();
    /* Without these handlers a forked child would find locks held and threads gone, so no threads are started. */
    if (sdpa_at_fork(before_fork, after_fork_in_parent, after_fork_in_child) != 0) atomic_store(&pool.closed, true);
    atexit(sdpa_pool_stop);
}

/* Raises the number of threads to n, or as far as the system allows. Under the lock. */
static void start_threads(int n) {
    sdpa_signals signals;
    sdpa_signals_block(&signals);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES); /* musl's default would be 128 KiB */
    void *epoch = (void *)(uintptr_t)atomic_load(&pool.epoch);
    while (pool.n_threads < n && pthread_create(&pool.threads[pool.n_threads], &attributes, thread_main, epoch) == 0) {
        pool.n_threads++;
    }
    pthread_attr_destroy(&attributes);
    sdpa_signals_restore(&signals);
}

/* Opens the job to at most n other threads. False if there are none. Only the owner of the pool calls this. */
static bool open_job(int n, int64_t n_units, sdpa_unit_fn *fn, void *context) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, init_once);
    pthread_mutex_lock(&lock);
    if (atomic_load(&pool.closed)) {
        pthread_mutex_unlock(&lock);
        return false;
    }
    if (pool.n_threads < n && !atomic_load(&pool.quit)) {
        start_threads(n);
    }
    n = atomic_load(&pool.quit) ? 0 : n < pool.n_threads ? n : pool.n_threads;
    int n_wake = n < pool.n_asleep ? n : pool.n_asleep;
    if (n > 0) {
        pool.n_units = n_units;
        pool.fn = fn;
        pool.context = context;
        pool.modes = sdpa_modes_get();
        atomic_store_explicit(&pool.stopped, false, memory_order_relaxed);
        atomic_store_explicit(&pool.next, 0, memory_order_relaxed);
        atomic_store_explicit(&pool.entry, (uint64_t)n << 32, memory_order_release);
        atomic_fetch_add_explicit(&pool.epoch, 1, memory_order_release);
    }
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < n_wake; i++) {
        pthread_cond_signal(&pool.wake);
    }
    return n > 0;
}

/* Waits until everyone who entered the closed job has left, or the process is a child without them, polling for
 * interruption. */
static void await_others(sdpa_run *run) {
    int64_t end = clock_ns(CLOCK_MONOTONIC) + SPIN_NS;
    do {
        for (int i = 0; i < 16; i++) {
            if (INSIDE(atomic_load_explicit(&pool.entry, memory_order_acquire)) == 0) {
                return;
            }
            cpu_pause();
        }
    } while (clock_ns(CLOCK_MONOTONIC) < end);

    pthread_mutex_lock(&lock);
    while (INSIDE(atomic_load_explicit(&pool.entry, memory_order_acquire)) > 0) {
#ifdef __APPLE__
        int64_t at = clock_ns(CLOCK_REALTIME) + POLL_NS;
#else
        int64_t at = clock_ns(CLOCK_MONOTONIC) + POLL_NS;
#endif
        struct timespec deadline = {at / 1000000000, at % 1000000000};
        if (pthread_cond_timedwait(&pool.done, &lock, &deadline) == ETIMEDOUT) {
            pthread_mutex_unlock(&lock); /* `interrupted` may run any code, even fork */
            sdpa_run_stopped(run);
            if (run->forked) return;
            pthread_mutex_lock(&lock);
        }
    }
    pthread_mutex_unlock(&lock);
}

sdpa_status sdpa_parallel_for(int64_t n_units, int n_workers, sdpa_unit_fn *fn, void *context,
                              int (*interrupted)(void)) {
    int64_t others = (n_units < n_workers ? n_units : n_workers) - 1;
    if (others > SDPA_MAX_THREADS) {
        others = SDPA_MAX_THREADS;
    }
    if (others < 1 || atomic_exchange_explicit(&pool.busy, true, memory_order_acquire)) {
        return run_serial(n_units, fn, context, interrupted);
    }
    if (!open_job((int)others, n_units, fn, context)) {
        atomic_store_explicit(&pool.busy, false, memory_order_release);
        return run_serial(n_units, fn, context, interrupted);
    }
    sdpa_run run = {&pool.stopped, interrupted, true, false};
    run_units(0, &run);
    if (run.forked) return SDPA_FORKED;
    atomic_fetch_and_explicit(&pool.entry, 0xffff, memory_order_relaxed);
    await_others(&run);
    if (run.forked) return SDPA_FORKED;
    bool stopped = atomic_load_explicit(&pool.stopped, memory_order_relaxed);
    atomic_store_explicit(&pool.busy, false, memory_order_release);
    return stopped ? SDPA_INTERRUPTED : SDPA_OK;
}

typedef struct zeroing {
    char *data;
    size_t bytes;
} zeroing;

enum { ZEROED_BYTES = 1 << 20 };

static void zero_piece(void *context, int64_t index, int worker, sdpa_run *run) {
    (void)worker, (void)run;
    const zeroing *z = context;
    const size_t first = (size_t)index * ZEROED_BYTES, left = z->bytes - first;
    memset(z->data + first, 0, left < ZEROED_BYTES ? left : ZEROED_BYTES);
}

sdpa_status sdpa_parallel_zero(void *data, size_t bytes, int n_workers, int (*interrupted)(void)) {
    zeroing z = {data, bytes};
    const int64_t n_pieces = (int64_t)((bytes + ZEROED_BYTES - 1) / ZEROED_BYTES);
    return sdpa_parallel_for(n_pieces, n_workers, zero_piece, &z, interrupted);
}

void sdpa_pool_stop(void) {
    pthread_mutex_lock(&lock);
    int n = atomic_load(&pool.quit) ? 0 : pool.n_threads;
    if (n > 0) {
        atomic_store(&pool.stopped, true);
        atomic_store(&pool.quit, true);
        atomic_fetch_add(&pool.epoch, 1);
        pthread_cond_broadcast(&pool.wake);
    }
    pthread_mutex_unlock(&lock);
    if (n == 0) {
        return;
    }
    for (int i = 0; i < n; i++) {
        pthread_join(pool.threads[i], NULL);
    }
    pthread_mutex_lock(&lock);
    pool.n_threads = 0;
    atomic_store(&pool.quit, false);
    pthread_mutex_unlock(&lock);
}

void sdpa_pool_close(void) {
    atomic_store(&pool.closed, true);
    sdpa_pool_stop();
}
