/* How many threads to use: environment, affinity, cgroup quota. */
#ifdef __linux__
#define _GNU_SOURCE
#include <sched.h>
#endif
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "parallel.h"
#include "system.h"

enum { PATH_SIZE = 4096 };

/* CPUs that the quota of `directory` grants, rounded up; 0 if it sets none. v2: "<quota or max> <period>" in cpu.max;
 * v1: two files, where a quota of -1 means none. */
static int64_t directory_quota(const char *directory, bool v2) {
    char path[PATH_SIZE + 32];
    double quota = 0, period = 0;
    const char *const names[2] = {v2 ? "cpu.max" : "cpu.cfs_quota_us", "cpu.cfs_period_us"};
    snprintf(path, sizeof path, "%s/%s", directory, names[0]);
    FILE *file = fopen(path, "re");
    if (!file) {
        return 0;
    }
    int n = v2 ? fscanf(file, "%lf %lf", &quota, &period) : fscanf(file, "%lf", &quota);
    fclose(file);
    if (!v2) {
        snprintf(path, sizeof path, "%s/%s", directory, names[1]);
        file = fopen(path, "re");
        if (!file) {
            return 0;
        }
        n += fscanf(file, "%lf", &period);
        fclose(file);
    }
    if (n != 2 || !(quota > 0) || !(period > 0) || quota / period > SDPA_MAX_THREADS) {
        return 0;
    }
    int64_t cpus = (int64_t)(quota / period);
    return (double)cpus * period < quota ? cpus + 1 : cpus;
}

/* The smallest quota of the group at mount + path and of its ancestors, all of which apply; 0: none. Inside a container
 * the path may name a directory that exists only on the host: it is skipped. */
static int64_t group_quota(const char *mount, const char *path, bool v2) {
    char directory[PATH_SIZE]; /* both parts are shorter than half of it */
    snprintf(directory, sizeof directory, "%s%s", mount, path);
    int64_t smallest = 0;
    for (;;) {
        int64_t quota = directory_quota(directory, v2);
        if (quota && (!smallest || quota < smallest)) {
            smallest = quota;
        }
        char *slash = strrchr(directory, '/');
        if (slash < directory + strlen(mount)) { /* never NULL: the mount has slashes, too */
            return smallest;
        }
        *slash = '\0';
    }
}

int sdpa_quota_cpus(const char *root) {
    char mount[PATH_SIZE / 2], line[PATH_SIZE / 2];
    snprintf(mount, sizeof mount, "%s/proc/self/cgroup", root);
    FILE *file = fopen(mount, "re");
    if (!file) {
        return 0;
    }
    int64_t smallest = 0;
    while (fgets(line, sizeof line, file)) {
        /* id:controllers:path; the list of controllers is empty for v2 */
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path) {
            continue;
        }
        *path++ = '\0';
        controllers++;
        bool v2 = *controllers == '\0', has_cpu = v2;
        for (char *rest = NULL, *name = strtok_r(controllers, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
            has_cpu |= strcmp(name, "cpu") == 0;
        }
        if (!has_cpu) {
            continue;
        }
        snprintf(mount, sizeof mount, "%s/sys/fs/cgroup%s", root, v2 ? "" : "/cpu");
        int64_t quota = group_quota(mount, path, v2);
        if (quota && (!smallest || quota < smallest)) {
            smallest = quota;
        }
    }
    fclose(file);
    return (int)smallest;
}

int sdpa_usable_cpus(long cpus, long quota) {
    if (quota > 0 && quota < cpus) {
        cpus = quota;
    }
    return cpus < 1 ? 1 : cpus > SDPA_MAX_THREADS ? SDPA_MAX_THREADS : (int)cpus;
}

int sdpa_available_cpus(void) {
    long cpus = sdpa_online_cpus();
#ifdef __linux__
    /* If there are more CPUs than the set holds, the call fails: double the set until it fits. */
    for (size_t n = CPU_SETSIZE; n <= 1 << 20; n *= 2) {
        cpu_set_t *set = CPU_ALLOC(n);
        if (!set) {
            break;
        }
        int failed = sched_getaffinity(0, CPU_ALLOC_SIZE(n), set);
        if (!failed) {
            cpus = CPU_COUNT_S(CPU_ALLOC_SIZE(n), set);
        }
        CPU_FREE(set);
        if (!failed) {
            break;
        }
    }
#endif
    return sdpa_usable_cpus(cpus, sdpa_quota_cpus(""));
}

int sdpa_threads_by(const char *variable) {
    const char *text = getenv(variable);
    if (!text) {
        return 0;
    }
    char *end;
    long n = strtol(text, &end, 10);
    end += strspn(end, " \t");
    if (end == text || (*end != '\0' && *end != ',') || n < 1) {
        return 0;
    }
    return n > SDPA_MAX_THREADS ? SDPA_MAX_THREADS : (int)n;
}

static _Atomic int num_threads; /* 0: not known yet */

int sdpa_get_num_threads(void) {
    int n = atomic_load_explicit(&num_threads, memory_order_relaxed);
    if (n) {
        return n;
    }
    n = sdpa_threads_by("SDPA_NUM_THREADS");
    if (!n) {
        n = sdpa_threads_by("OMP_NUM_THREADS");
    }
    if (!n) {
        n = sdpa_available_cpus();
    }
    int unknown = 0;
    /* A number that was set in the meantime stays. */
    return atomic_compare_exchange_strong(&num_threads, &unknown, n) ? n : unknown;
}

void sdpa_set_num_threads(int n) {
    atomic_store(&num_threads, n < 1 ? 1 : n > SDPA_MAX_THREADS ? SDPA_MAX_THREADS : n);
}
