/* The thread pool: lazily started, fork-safe, joined at exit. No OpenMP (it hangs after fork). */
#ifndef SDPA_PARALLEL_H
#define SDPA_PARALLEL_H

#include <stdatomic.h>

#include "../problem.h"

#ifdef _WIN32
#define SDPA_PUBLIC __declspec(dllexport)
#else
#define SDPA_PUBLIC __attribute__((visibility("default")))
#endif

typedef struct sdpa_run sdpa_run; /* one parallel call in progress */

/* Work on one unit. `worker` is in 0 .. n_workers-1 and selects scratch memory; never the order of a sum. */
typedef void sdpa_unit_fn(void *context, int64_t unit, int worker, sdpa_run *run);

/* Calls fn once for every unit 0 .. n_units-1 on at most n_workers threads, the caller being worker 0. Units are
 * claimed in increasing order, so a unit may wait (sdpa_run_wait) for any earlier one. A caller that finds the pool
 * busy runs all units itself. `interrupted` (may be NULL) is polled on the calling thread at most every 20 ms, between
 * units and inside sdpa_run_stopped and sdpa_run_wait; once it returns non-zero no further unit starts and the result
 * is SDPA_INTERRUPTED. In a child that it forked, the result is SDPA_FORKED if other threads had part of the work. */
sdpa_status sdpa_parallel_for(int64_t n_units, int n_workers, sdpa_unit_fn *fn, void *context,
                              int (*interrupted)(void));

/* Zeros `bytes` of `data` on several threads, and can be interrupted: the system takes most of a second for a gigabyte
 * of fresh memory. */
sdpa_status sdpa_parallel_zero(void *data, size_t bytes, int n_workers, int (*interrupted)(void));

/* True once the run has been interrupted; long units ask between blocks and return early. Cheap, and any worker may
 * call it. */
bool sdpa_run_stopped(sdpa_run *run);

/* For loops between runs: polls `interrupted` (may be NULL), at most as often as runs do. True if it returned non-zero. */
bool sdpa_poll(int (*interrupted)(void));

/* For tests: whether every question polls, however little time has passed, so that each step of a call can be interrupted
 * in turn. */
void sdpa_poll_always(bool yes);

/* Waits until *counter >= value (acquire). False, immediately, once the run is interrupted. */
bool sdpa_run_wait(sdpa_run *run, const _Atomic int64_t *counter, int64_t value);

/* No more threads than this are ever started. */
#define SDPA_MAX_THREADS 1024

/* The number of threads: SDPA_NUM_THREADS, else OMP_NUM_THREADS, else the CPUs this process may use (affinity, cgroup
 * quota rounded up), found at the first call. A variable that is not a positive number counts as absent; the binding
 * warns of it. set takes n >= 1, clamped to SDPA_MAX_THREADS; threads beyond a smaller number stay asleep. Both are
 * exported for threadpoolctl. */
SDPA_PUBLIC int sdpa_get_num_threads(void);
SDPA_PUBLIC void sdpa_set_num_threads(int n);
int sdpa_available_cpus(void);

/* The positive number that a variable of the environment starts with (OMP_NUM_THREADS may be a list), cut to
 * SDPA_MAX_THREADS, or 0. */
int sdpa_threads_by(const char *variable);

/* CPUs that the cgroup quotas (v1 and v2) of this process grant, rounded up; 0: no limit. `root` is prepended to the
 * paths that are read: "", or in tests a directory. */
int sdpa_quota_cpus(const char *root);

/* How many of these CPUs to use under a quota (0: none): from 1 to SDPA_MAX_THREADS. */
int sdpa_usable_cpus(long cpus, long quota);

/* Joins the threads; the next parallel call starts them again. Also runs automatically at the end of the process, where
 * a run in progress on another thread ends as interrupted, since that thread may never get to run again. */
void sdpa_pool_stop(void);

/* Joins the threads for good: every later call runs serially. For the end of an interpreter, which kills threads that
 * ask for its lock, even callers in the middle of a run; none of them may then have workers that use its stack. */
void sdpa_pool_close(void);

#endif
