#include "deal.h"

#include <string.h>

#include "unit.h"

static void clear_rows(const sdpa_matrix *m, int64_t j0, int64_t j1, int64_t n_columns) {
    for (int64_t j = j0; j < j1 && m->data; j++) {
        memset(m->data + j * m->row, 0, (size_t)(n_columns * sdpa_size_of(m->dtype)));
    }
}

void sdpa_turn_clear(const sdpa_unit *u, int64_t block) {
    const sdpa_problem *p = u->problem;
    if (!u->begun || u->begun[block]) return;
    const int64_t size = sdpa_key_block(p), j0 = block * size, j1 = j0 + size < p->n_k ? j0 + size : p->n_k;
    clear_rows(&u->dk, j0, j1, p->d_k);
    clear_rows(&u->dv, j0, j1, p->d_v);
    u->begun[block] = true;
}

void sdpa_turn_blocks(const sdpa_unit *u, int64_t *first, int64_t *last) {
    if (!u->turns) return;
    *first = u->turns[u->turn].first;
    *last = u->turns[u->turn].last;
}

/* Every unit passes each block of its turn in order, so that the one before speaks for all earlier ones. */
static bool wait_for_earlier(const sdpa_unit *u, int64_t block) {
    if (sdpa_run_stopped(u->run)) return false;
    for (int64_t t = u->turns ? u->turn - 1 : -1; t >= 0; t--) {
        const sdpa_turn *turn = &u->turns[t];
        if (turn->first <= block && block < turn->last) return sdpa_run_wait(u->run, &turn->next, block + 1);
    }
    return true;
}

bool sdpa_turn_wait(const sdpa_unit *u, int64_t block) {
    if (!wait_for_earlier(u, block)) return false;
    sdpa_turn_clear(u, block);
    return true;
}

void sdpa_turn_pass(const sdpa_unit *u, int64_t block) {
    if (u->turns) atomic_store_explicit(&u->turns[u->turn].next, block + 1, memory_order_release);
}

bool sdpa_turn_skip(const sdpa_unit *u, int64_t block) {
    if (u->turns && !wait_for_earlier(u, block)) return false;
    sdpa_turn_pass(u, block);
    return true;
}

bool sdpa_turn_wait_last(const sdpa_unit *u) {
    return !u->turns || !u->ordered || u->turn == 0 || sdpa_run_wait(u->run, &u->turns[u->turn - 1].next, INT64_MAX);
}

void sdpa_turn_end(const sdpa_unit *u) {
    if (u->turns) atomic_store_explicit(&u->turns[u->turn].next, INT64_MAX, memory_order_release);
}

static int64_t left_in(sdpa_slot *slot) { return atomic_load_explicit(&slot->left, memory_order_acquire); }

/* How many units to take of so many: fewer where threads may soon wait for the last ones. */
static int64_t portion(sdpa_deal *d, int64_t left) {
    int64_t n = left, n_busy = 0;
    if (d->n_workers > 1 && atomic_load_explicit(&d->next_group, memory_order_relaxed) >= d->n_groups) {
        for (int64_t i = 0; i < sdpa_deal_slots(d->n_groups, d->n_workers); i++) n_busy += left_in(&d->slots[i]) > 0;
        const int64_t threads = n_busy ? (d->n_workers + n_busy - 1) / n_busy : d->n_workers;
        n = left / (2 * threads);
    }
    return n < 1 ? 1 : n < d->most ? n : d->most;
}

/* Takes units of an open group and runs them. False if there are none left. */
static bool work_on(sdpa_deal *d, sdpa_slot *slot, int worker, sdpa_run *run) {
    int64_t n, left = left_in(slot);
    do {
        if (left <= 0) return false;
        n = portion(d, left);
    } while (!atomic_compare_exchange_weak_explicit(&slot->left, &left, left - n, memory_order_acquire,
                                                    memory_order_acquire));
    d->run(d->context, slot, slot->n_units - left, n, worker, run);
    if (sdpa_run_stopped(run)) return false;
    if (atomic_fetch_sub_explicit(&slot->unfinished, n, memory_order_acq_rel) == n) d->close(d->context, slot);
    return true;
}

/* The slot where most units are left; NULL if none are. */
static sdpa_slot *fullest(sdpa_deal *d) {
    sdpa_slot *best = NULL;
    int64_t most = 0;
    for (int64_t i = 0; i < sdpa_deal_slots(d->n_groups, d->n_workers); i++) {
        const int64_t left = left_in(&d->slots[i]);
        if (left <= most) continue;
        most = left;
        best = &d->slots[i];
    }
    return best;
}

/* What a thread does from the first group to the last. A thread opens no group while others may still work on its last
 * one: they help only when no group is left to open. */
static void deal_work(void *context, int64_t index, int worker, sdpa_run *run) {
    (void)index;
    sdpa_deal *d = context;
    for (int64_t group; (group = atomic_fetch_add(&d->next_group, 1)) < d->n_groups;) {
        sdpa_slot *slot = &d->slots[d->n_groups <= d->n_workers ? group : worker];
        slot->group = group;
        slot->n_units = d->open(d->context, group, slot->index);
        atomic_store_explicit(&slot->unfinished, slot->n_units, memory_order_relaxed);
        atomic_store_explicit(&slot->left, slot->n_units, memory_order_release);
        atomic_fetch_add_explicit(&d->n_open, 1, memory_order_release);
        while (work_on(d, slot, worker, run)) {
        }
        if (sdpa_run_stopped(run)) return;
    }
    if (d->n_workers == 1 || !sdpa_run_wait(run, &d->n_open, d->n_groups)) return;
    for (sdpa_slot *slot; (slot = fullest(d));) {
        if (!work_on(d, slot, worker, run) && sdpa_run_stopped(run)) return;
    }
}

sdpa_status sdpa_deal_run(sdpa_deal *d, int (*interrupted)(void)) {
    atomic_init(&d->next_group, 0);
    atomic_init(&d->n_open, 0);
    for (int64_t i = 0; i < sdpa_deal_slots(d->n_groups, d->n_workers); i++) {
        atomic_init(&d->slots[i].left, 0);
        d->slots[i].index = i;
    }
    return sdpa_parallel_for(d->n_workers, d->n_workers, deal_work, d, interrupted);
}
