/* The parts of POSIX that Windows and WebAssembly lack. Both have pthreads: winpthreads, and stubs that start no
 * thread. */
#ifndef SDPA_SYSTEM_H
#define SDPA_SYSTEM_H

#include <pthread.h>
#include <stdlib.h>

#ifdef _WIN32
#include <malloc.h>

static inline void *sdpa_aligned_alloc(size_t alignment, size_t bytes) { return _aligned_malloc(bytes, alignment); }
static inline void sdpa_aligned_free(void *pointer) { _aligned_free(pointer); }
static inline long sdpa_online_cpus(void) { return pthread_num_processors_np(); }
#else
#include <unistd.h>

static inline void *sdpa_aligned_alloc(size_t alignment, size_t bytes) {
    void *pointer = NULL;
    return posix_memalign(&pointer, alignment, bytes) == 0 ? pointer : NULL;
}
static inline void sdpa_aligned_free(void *pointer) { free(pointer); }
static inline long sdpa_online_cpus(void) { return sysconf(_SC_NPROCESSORS_ONLN); }
#endif

/* Says that a user waits for this thread's work. macOS chooses between its fast and its slow cores by such classes, which
 * threads of a pool do not inherit. */
#ifdef __APPLE__
#include <pthread/qos.h>

static inline void sdpa_thread_urgent(void) { pthread_set_qos_class_self_np(QOS_CLASS_USER_INITIATED, 0); }
#else
static inline void sdpa_thread_urgent(void) {}
#endif

/* Blocks signals in the threads that this thread starts until the old set is restored. Signals are for the program's
 * own threads, except those that a fault raises in the thread that caused it. */
#if defined(_WIN32) || defined(__wasi__)
typedef int sdpa_signals; /* there is no fork either */
static inline void sdpa_signals_block(sdpa_signals *old) { (void)old; }
static inline void sdpa_signals_restore(const sdpa_signals *old) { (void)old; }

static inline int sdpa_at_fork(void (*before)(void), void (*in_parent)(void), void (*in_child)(void)) {
    return (void)before, (void)in_parent, (void)in_child, 0;
}
#else
#include <signal.h>

typedef sigset_t sdpa_signals;
static inline void sdpa_signals_block(sdpa_signals *old) {
    sigset_t mask;
    sigfillset(&mask);
    sigdelset(&mask, SIGSEGV);
    sigdelset(&mask, SIGBUS);
    sigdelset(&mask, SIGFPE);
    sigdelset(&mask, SIGILL);
    pthread_sigmask(SIG_SETMASK, &mask, old);
}
static inline void sdpa_signals_restore(const sdpa_signals *old) { pthread_sigmask(SIG_SETMASK, old, NULL); }

static inline int sdpa_at_fork(void (*before)(void), void (*in_parent)(void), void (*in_child)(void)) {
    return pthread_atfork(before, in_parent, in_child);
}
#endif

#endif
