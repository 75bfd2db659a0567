/* Backward: heads that share a gradient form a group, and the query blocks of all its heads are one sequence of units.
 *
 * Units of a group add to the same dK and dV. If there are many groups, each is one thread's work; if there are few,
 * units run concurrently as a wavefront: unit t works on key block j only after every earlier unit of the group that
 * sees j has done so. Each sum therefore has the serial order for any number of threads, and no second copy of dK and
 * dV is needed. (An alternative, one pass for dQ and another for dK and dV, needs seven products per pair of blocks
 * instead of five.)
 *
 * dK and dV of 16-bit types accumulate in float32, one head per group in flight. A gradient that is shared in another
 * way (a sum over a broadcast batch axis, dMask) accumulates in a float32 copy of its full size and is narrowed at the
 * end. */
#include "drivers.h"
#include "groups.h"
#include "runtime/memory.h"
#include "runtime/parallel.h"
#include "sequences.h"
#include "unit.h"

struct sdpa_turn {
    _Alignas(64) _Atomic int64_t next; /* the unit has finished its key blocks below `next`; INT64_MAX: it has ended */
    int64_t first, last;               /* the unit sees key blocks first .. last-1 */
};

bool sdpa_turn_wait(const sdpa_unit *u, int64_t block) {
    for (int64_t t = u->turns ? u->turn - 1 : -1; t >= 0; t--) {
        if (u->turns[t].first <= block && block < u->turns[t].last) {
            return sdpa_run_wait(u->run, &u->turns[t].next, block + 1);
        }
    }
    return !sdpa_run_stopped(u->run);
}

void sdpa_turn_pass(const sdpa_unit *u, int64_t block) {
    if (u->turns) atomic_store_explicit(&u->turns[u->turn].next, block + 1, memory_order_release);
}

bool sdpa_turn_wait_last(const sdpa_unit *u) {
    return !u->turns || !u->ordered || u->turn == 0 || sdpa_run_wait(u->run, &u->turns[u->turn - 1].next, INT64_MAX);
}

void sdpa_turn_end(const sdpa_unit *u) {
    if (u->turns) atomic_store_explicit(&u->turns[u->turn].next, INT64_MAX, memory_order_release);
}

#define ADDRESS(name, rows, columns) &p->name,

/* Splits (batch, head) into groups and members: axes along which any gradient is summed belong to the members. */
static void find_groups(const sdpa_problem *p, sdpa_grid *groups, sdpa_grid *members) {
    const sdpa_tensor *gradients[] = {SDPA_GRADIENTS(ADDRESS)};
    const int n_gradients = sizeof gradients / sizeof *gradients;
    groups->n_axes = members->n_axes = 0;
    groups->size = members->size = 1;
    int64_t step = p->n_batch;
    for (int a = 0; a < p->n_axes; a++) {
        step /= p->axis[a];
        bool shared = false;
        for (int i = 0; i < n_gradients; i++) shared |= gradients[i]->data && gradients[i]->batch[a] == 0;
        sdpa_grid_add_axis(shared ? members : groups, p->axis[a], step, 0);
    }
    int64_t queries_per_key = 1;
    bool heads_shared = false;
    for (int i = 0; i < n_gradients; i++) {
        if (!gradients[i]->data) continue;
        if (gradients[i]->group > queries_per_key) queries_per_key = gradients[i]->group;
        heads_shared |= gradients[i]->head == 0;
    }
    sdpa_grid_add_axis(heads_shared ? members : groups, p->n_head / queries_per_key, 0, queries_per_key);
    sdpa_grid_add_axis(members, queries_per_key, 0, 1);
}

static sdpa_dtype compute_type(const sdpa_problem *p) { return p->dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32; }

/* Whether all members of a group add to the same matrix of `t`. */
static bool is_one_per_group(const sdpa_problem *p, const sdpa_grid *members, const sdpa_tensor *t) {
    for (int64_t m = 1; m < members->size; m++) {
        int64_t batch = 0, head = 0;
        sdpa_grid_locate(members, m, &batch, &head);
        if (sdpa_offset(p, t, batch, head) != 0) return false;
    }
    return true;
}

/* Whether every (batch, head) has its own matrix of `t` and only one unit adds to each of its elements. */
static bool is_own(const sdpa_problem *p, const sdpa_tensor *t) {
    bool own = t->row != 0 && t->col != 0 && t->group == 1 && (t->head != 0 || p->n_head == 1);
    for (int a = 0; a < p->n_axes; a++) own &= t->batch[a] != 0 || p->axis[a] == 1;
    return own;
}

/* A gradient that accumulates in a full-size copy of the compute type, because its own type is narrower. */
typedef struct wide_gradient {
    const sdpa_problem *problem;
    sdpa_tensor narrow, wide;
    int64_t batch[SDPA_MAX_AXES]; /* strides of `wide` */
    int64_t n_rows, n_cols;
    sdpa_grid matrices;
} wide_gradient;

/* One without memory yet; NULL if there is none for it. */
static wide_gradient *new_wide_gradient(void) {
    wide_gradient *g = sdpa_alloc(sizeof *g);
    if (g) g->wide.data = NULL;
    return g;
}

/* Points *t at memory of the compute type with the same broadcast axes. `t` has n_rows x n_cols matrices. */
static sdpa_status widen(const sdpa_problem *p, sdpa_tensor *t, int64_t n_rows, int64_t n_cols, wide_gradient *g) {
    g->problem = p;
    g->narrow = *t;
    g->n_rows = t->row ? n_rows : 1;
    g->n_cols = t->col ? n_cols : 1;
    t->dtype = compute_type(p);
    const int64_t size = sdpa_size_of(t->dtype),
                  bytes = sdpa_tensor_compact(p, t, g->batch, g->n_rows, g->n_cols, size, &g->matrices);
    t->data = sdpa_alloc((size_t)bytes);
    g->wide = *t;
    if (!t->data) return SDPA_NO_MEMORY;
    if (sdpa_clears(p, t)) return SDPA_OK;
    return sdpa_parallel_zero(t->data, (size_t)bytes, p->n_workers, p->interrupted);
}

static void narrow_rows(const sdpa_problem *p, sdpa_matrix to, const char *from, int64_t from_row, int64_t n_rows,
                        int64_t n_cols) {
    const struct sdpa_kernels *kernels = sdpa_kernels_for(p->dtype);
    for (int64_t r = 0; r < n_rows; r++) {
        kernels->store(to.data + r * to.row, from + r * from_row, n_cols, to.col, to.dtype);
    }
}

/* A unit of `narrow`: one row of one matrix. */
static void narrow_row(void *context, int64_t index, int worker, sdpa_run *run) {
    (void)worker, (void)run;
    const wide_gradient *g = context;
    const sdpa_problem *p = g->problem;
    const int64_t row = index % g->n_rows;
    int64_t batch = 0, head = 0;
    sdpa_grid_locate(&g->matrices, index / g->n_rows, &batch, &head);
    sdpa_matrix to = sdpa_matrix_at(p, &g->narrow, batch, head);
    to.data += row * to.row;
    narrow_rows(p, to, sdpa_matrix_at(p, &g->wide, batch, head).data + row * g->wide.row, g->wide.row, 1, g->n_cols);
}

static sdpa_status narrow(wide_gradient *g) {
    const sdpa_problem *p = g->problem;
    const int64_t n_rows = g->matrices.size * g->n_rows;
    const int workers = sdpa_workers(p->n_workers, n_rows, (double)n_rows * (double)g->n_cols / 1e5);
    return sdpa_parallel_for(n_rows, workers, narrow_row, g, p->interrupted);
}

typedef struct backward_call {
    const sdpa_problem *problem;
    const struct sdpa_kernels *kernels;
    int n_workers;
    char *scratch;
    size_t scratch_bytes;      /* per worker */
    sdpa_grid groups, members; /* members are relative to their group */
    int64_t first_group;       /* the first of those in flight */
    int64_t n_flight;          /* groups in flight */
    int64_t most_in_flight;
    bool wavefront;   /* if not, each group is one thread's work */
    sdpa_turn *turns; /* (most_in_flight, units of a group), of the wavefront */
    sdpa_pass pass;   /* the backward or the second one: the same sums, another kernel */
    bool ordered;     /* units end in order, since they add to the same dQ */
    bool fetches;     /* asks for a head's rows while the one before is computed */
    bool fresh;       /* a group is one unit, which writes the gradients instead of adding to them */
    bool summed;      /* dK, dV in float32: `sums` holds a pair per worker or per group in flight */
    char *sums;
    size_t dk_bytes;   /* of a sum of dK */
    size_t sums_bytes; /* of the sums of dK and of dV together */
    size_t slot_bytes; /* from one such pair to the next */
} backward_call;

static int64_t units_per_group(const backward_call *c) { return c->members.size * sdpa_units(c->problem); }

static sdpa_matrix sum_matrix(const backward_call *c, const sdpa_tensor *t, int64_t slot, size_t offset, int64_t d) {
    sdpa_matrix m = {NULL, d * 4, 4, SDPA_F32, false};
    if (t->data) m.data = c->sums + (size_t)slot * c->slot_bytes + offset;
    return m;
}

/* The key blocks that a unit sees. */
static void set_turn(sdpa_turn *turn, const sdpa_unit *u) {
    int64_t j0, j1, block = sdpa_key_block(u->problem);
    sdpa_visible_keys(u, u->i0, u->n_i, &j0, &j1);
    turn->first = j0 / block;
    turn->last = j0 < j1 ? (j1 + block - 1) / block : turn->first;
}

/* Unit `t` of a group. `slot`: where the group's sums are. */
static void backward_unit(const backward_call *c, int64_t group, int64_t t, sdpa_turn *turns, int64_t slot,
                          void *scratch, sdpa_run *run) {
    const sdpa_problem *p = c->problem;
    int64_t batch = 0, head = 0, blocks = sdpa_units(p);
    sdpa_grid_locate(&c->groups, group, &batch, &head);
    sdpa_grid_locate(&c->members, t / blocks, &batch, &head);
    sdpa_unit u;
    sdpa_unit_set_head(&u, p, batch, head);
    /* The last block comes first: under causality the longest units then start first, and small terms are added before
     * large ones. */
    sdpa_unit_set_queries(&u, blocks - 1 - t % blocks);
    if (c->summed) {
        u.dk = sum_matrix(c, &p->dk, slot, 0, p->d_k);
        u.dv = sum_matrix(c, &p->dv, slot, c->dk_bytes, p->d_v);
    }
    u.turns = turns;
    u.turn = t;
    u.ordered = c->ordered;
    u.fresh = c->fresh;
    u.fetches = c->fetches && group + 1 < c->groups.size;
    u.run = run;
    if (turns && turns[t].last < 0) { /* before the run: only find the unit's key blocks */
        set_turn(&turns[t], &u);
    } else {
        c->kernels->pass[c->pass].run(&u, scratch);
    }
}

static void store_sums(const backward_call *c, int64_t group, int64_t slot) {
    const sdpa_problem *p = c->problem;
    int64_t batch = 0, head = 0;
    sdpa_grid_locate(&c->groups, group, &batch, &head);
    const char *sums = c->sums + (size_t)slot * c->slot_bytes;
    if (p->dk.data) narrow_rows(p, sdpa_matrix_at(p, &p->dk, batch, head), sums, p->d_k * 4, p->n_k, p->d_k);
    if (p->dv.data) {
        narrow_rows(p, sdpa_matrix_at(p, &p->dv, batch, head), sums + c->dk_bytes, p->d_v * 4, p->n_k, p->d_v);
    }
}

static void clear_matrix(const sdpa_matrix *m, int64_t n_rows, int64_t n_cols) {
    const int64_t size = sdpa_size_of(m->dtype);
    if (m->col == size && m->row == n_cols * size) {
        n_cols *= n_rows;
        n_rows = 1;
    }
    for (int64_t r = 0; r < n_rows; r++) {
        char *row = m->data + r * m->row;
        if (m->col == size) memset(row, 0, (size_t)(n_cols * size));
        for (int64_t c = 0; c < n_cols && m->col != size; c++) memset(row + c * m->col, 0, (size_t)size);
    }
}

/* Clears the gradients that the group's units add to. Just before the first unit, this leaves them in the caches, and
 * the threads share the work. */
static void clear_group(const backward_call *c, int64_t group) {
    const sdpa_problem *p = c->problem;
    const struct {
        const sdpa_tensor *t;
        int64_t n_rows, n_cols;
    } gradients[] = {{&p->dq, p->n_q, p->d_k}, {&p->dk, p->n_k, p->d_k}, {&p->dv, p->n_k, p->d_v}};
    const char *last[3] = {NULL};
    for (int64_t m = 0; m < c->members.size; m++) {
        int64_t batch = 0, head = 0;
        sdpa_grid_locate(&c->groups, group, &batch, &head);
        sdpa_grid_locate(&c->members, m, &batch, &head);
        for (int i = 0; i < (c->summed ? 1 : 3); i++) {
            const sdpa_matrix matrix = sdpa_matrix_at(p, gradients[i].t, batch, head);
            if (matrix.data && matrix.data != last[i]) clear_matrix(&matrix, gradients[i].n_rows, gradients[i].n_cols);
            last[i] = matrix.data;
        }
    }
}

/* The rows of a short head end before the hardware prefetchers detect them. Asking for the next head's pays if all heads
 * together exceed the caches, and costs time otherwise. */
#define SHORT_HEAD 32
#define CACHED_BYTES (16 << 20)
static bool fetches_heads(const backward_call *c) {
    const sdpa_problem *p = c->problem;
    const int64_t head = 2 * 4 * (p->n_q + p->n_k) * (p->d_k + p->d_v); /* operands and gradients */
    return c->pass == SDPA_PASS_BACKWARD && c->members.size == 1 && p->n_q <= SHORT_HEAD && p->n_k <= SHORT_HEAD &&
           head * p->n_batch * p->n_head > CACHED_BYTES;
}

/* A whole group on one thread. */
static void group_work(void *context, int64_t group, int worker, sdpa_run *run) {
    const backward_call *c = context;
    if (!c->fresh) clear_group(c, group);
    if (c->summed && !c->fresh) memset(c->sums + (size_t)worker * c->slot_bytes, 0, c->sums_bytes);
    for (int64_t t = 0; t < units_per_group(c); t++) {
        if (sdpa_run_stopped(run)) return;
        backward_unit(c, group, t, NULL, worker, c->scratch + (size_t)worker * c->scratch_bytes, run);
    }
    if (c->summed) store_sums(c, group, worker);
}

/* One unit of the groups in flight. Consecutive indices belong to different groups, so that units seldom wait. */
static void wavefront_work(void *context, int64_t index, int worker, sdpa_run *run) {
    const backward_call *c = context;
    int64_t slot = index % c->n_flight, t = index / c->n_flight;
    backward_unit(c, c->first_group + slot, t, c->turns + slot * units_per_group(c), slot,
                  c->scratch + (size_t)worker * c->scratch_bytes, run);
}

/* The turns of the groups in flight, whose gradients are cleared. */
static void set_turns(backward_call *c) {
    const int64_t units = units_per_group(c);
    for (int64_t i = 0; i < c->n_flight * units; i++) {
        atomic_init(&c->turns[i].next, 0);
        c->turns[i].last = -1;
    }
    for (int64_t slot = 0; slot < c->n_flight; slot++) {
        clear_group(c, c->first_group + slot);
        for (int64_t t = 0; t < units; t++) {
            backward_unit(c, c->first_group + slot, t, c->turns + slot * units, slot, NULL, NULL);
        }
    }
}

static sdpa_status run_wavefront(backward_call *c) {
    const int64_t most = c->most_in_flight;
    sdpa_status status = SDPA_OK;
    for (c->first_group = 0; c->first_group < c->groups.size && status == SDPA_OK; c->first_group += most) {
        int64_t left = c->groups.size - c->first_group, units = units_per_group(c);
        c->n_flight = left < most ? left : most;
        set_turns(c);
        if (c->summed) {
            status =
                sdpa_parallel_zero(c->sums, (size_t)c->n_flight * c->sums_bytes, c->n_workers, c->problem->interrupted);
        }
        if (status == SDPA_OK) {
            status = sdpa_parallel_for(c->n_flight * units, c->n_workers, wavefront_work, c, c->problem->interrupted);
        }
        for (int64_t slot = 0; slot < c->n_flight && c->summed && status == SDPA_OK; slot++) {
            store_sums(c, c->first_group + slot, slot);
        }
    }
    return status;
}

static void take_pieces(void *owner, sdpa_arena *arena) {
    backward_call *c = owner;
    c->scratch = sdpa_take(arena, (size_t)c->n_workers * c->scratch_bytes);
    c->sums = sdpa_take(arena, (size_t)c->most_in_flight * c->sums_bytes);
    c->turns =
        c->wavefront ? sdpa_take(arena, (size_t)(c->most_in_flight * units_per_group(c)) * sizeof(sdpa_turn)) : NULL;
}

/* Scratch and sums of the call's problem. */
static void plan(backward_call *c) {
    const sdpa_problem *p = c->problem;
    c->scratch_bytes = c->kernels->pass[c->pass].bytes(p);
    c->dk_bytes = p->dk.data ? (size_t)(p->n_k * p->d_k) * 4 : 0;
    c->sums_bytes = c->summed ? c->dk_bytes + (p->dv.data ? (size_t)(p->n_k * p->d_v) * 4 : 0) : 0;
    c->slot_bytes = c->sums_bytes;
    c->fetches = fetches_heads(c);
    c->fresh = c->pass == SDPA_PASS_BACKWARD && units_per_group(c) == 1;
}

static sdpa_status run_backward(const sdpa_problem *p, backward_call *c) {
    const int64_t n_groups = c->groups.size, units = units_per_group(c);
    plan(c);
    c->n_workers = sdpa_workers_for(p, c->pass, sdpa_pairs(p), n_groups * units);
    c->wavefront = c->n_workers > 1 && units > 1 && n_groups < 4 * (int64_t)c->n_workers;
    c->most_in_flight = !c->wavefront || (c->summed && n_groups > c->n_workers) ? c->n_workers : n_groups;
    void *memory = sdpa_alloc_pieces(take_pieces, c);
    if (!memory) return SDPA_NO_MEMORY;
    const sdpa_status status =
        c->wavefront ? run_wavefront(c) : sdpa_parallel_for(n_groups, c->n_workers, group_work, c, p->interrupted);
    sdpa_free(memory);
    return status;
}

/* ------------------------------------------------------------------------------------ packed sequences */

/* The sequence that a worker is computing. */
typedef struct backward_view {
    const sdpa_share *share;
    sdpa_problem one;
    backward_call call; /* computes this sequence alone, in the memory of the run */
} backward_view;

typedef struct packed_backward {
    backward_call *call; /* common to all sequences; scratch_bytes, slot_bytes: the largest */
    sdpa_share *shares;
    int64_t n_shares, n_turns;
    size_t flight_bytes; /* sums of all groups in wavefronts */
    char *flight;
    backward_view *views; /* per worker */
} packed_backward;

/* Plans the call of one sequence. Its pointers into memory stay unset. */
static void view_sequence(const packed_backward *c, int64_t sequence, backward_view *view) {
    sdpa_sequence_set(c->call->problem, sequence, &view->one);
    view->call = *c->call;
    view->call.problem = &view->one;
    view->call.n_flight = view->call.groups.size;
    plan(&view->call);
}

/* The call for a share, from the worker's view, which is renewed if it was at another share. */
static backward_call *view_share(const packed_backward *c, const sdpa_share *share, int worker) {
    backward_view *view = &c->views[worker];
    if (view->share == share) return &view->call;
    view_sequence(c, share->sequence, view);
    view->share = share;
    view->call.scratch_bytes = c->call->scratch_bytes;
    if (share->wavefront) {
        view->call.turns = c->call->turns + share->turns;
        view->call.sums = c->flight + share->memory;
    } else {
        view->call.slot_bytes = c->call->slot_bytes;
    }
    return &view->call;
}

static void packed_work(void *context, int64_t index, int worker, sdpa_run *run) {
    const packed_backward *c = context;
    const sdpa_share *share = sdpa_share_of(c->shares, c->n_shares, index);
    (share->wavefront ? wavefront_work : group_work)(view_share(c, share, worker), index - share->first, worker, run);
}

static void take_packed_pieces(void *owner, sdpa_arena *arena) {
    packed_backward *c = owner;
    backward_call *call = c->call;
    call->scratch = sdpa_take(arena, (size_t)call->n_workers * call->scratch_bytes);
    call->sums = sdpa_take(arena, (size_t)call->n_workers * call->slot_bytes);
    call->turns = sdpa_take(arena, (size_t)c->n_turns * sizeof(sdpa_turn));
    c->flight = sdpa_take(arena, c->flight_bytes);
    c->views = sdpa_take(arena, (size_t)call->n_workers * sizeof *c->views);
}

/* Fills in the shares of all sequences that have queries, and the memory that they need. A group goes to one thread,
 * unless it is so large a part of the work that the others might wait for it at the end. */
static sdpa_status plan_shares(packed_backward *c) {
    backward_call *call = c->call;
    const double all_pairs = sdpa_sequences_pairs(call->problem);
    call->n_workers = sdpa_workers_for(call->problem, call->pass, all_pairs, INT64_MAX);
    backward_view view;
    for (int64_t s = 0; s < call->problem->n_sequences; s++) {
        if (sdpa_poll(call->problem->interrupted)) return SDPA_INTERRUPTED;
        view_sequence(c, s, &view);
        const sdpa_problem *p = view.call.problem;
        const int64_t n_groups = call->groups.size, units = units_per_group(&view.call);
        if (units == 0) {
            view.call.summed = false; /* no sums will be stored */
            for (int64_t g = 0; g < n_groups; g++) clear_group(&view.call, g);
            continue;
        }
        const double pairs = (double)p->n_head * (double)p->n_q * (double)p->n_k;
        sdpa_share share = {.sequence = s, .n_units = n_groups, .cost = pairs / (double)n_groups};
        if (call->n_workers > 1 && units > 1 && share.cost * 4 * call->n_workers > all_pairs) {
            share.wavefront = true;
            share.n_units *= units;
            share.turns = c->n_turns;
            share.memory = c->flight_bytes;
            c->n_turns += n_groups * units;
            c->flight_bytes += (size_t)n_groups * view.call.sums_bytes;
        } else if (view.call.sums_bytes > call->slot_bytes) {
            call->slot_bytes = view.call.sums_bytes;
        }
        if (view.call.scratch_bytes > call->scratch_bytes) call->scratch_bytes = view.call.scratch_bytes;
        c->shares[c->n_shares++] = share;
    }
    return SDPA_OK;
}

/* Runs the shares in the call's memory. */
static sdpa_status run_shares(packed_backward *c, int64_t n_units) {
    const sdpa_problem *p = c->call->problem;
    for (int i = 0; i < c->call->n_workers; i++) c->views[i].share = NULL;
    for (int64_t i = 0; i < c->n_shares; i++) {
        if (c->shares[i].wavefront) set_turns(view_share(c, &c->shares[i], 0));
    }
    sdpa_status status = sdpa_parallel_zero(c->flight, c->flight_bytes, c->call->n_workers, p->interrupted);
    if (status != SDPA_OK) return status;
    status = sdpa_parallel_for(n_units, c->call->n_workers, packed_work, c, p->interrupted);
    for (int64_t i = 0; i < c->n_shares && c->flight_bytes > 0 && status == SDPA_OK; i++) {
        if (!c->shares[i].wavefront) continue;
        const backward_call *call = view_share(c, &c->shares[i], 0);
        for (int64_t slot = 0; slot < call->n_flight; slot++) store_sums(call, slot, slot);
    }
    return status;
}

static sdpa_status run_packed(const sdpa_problem *p, backward_call *call) {
    sdpa_sequences_pad(p, call->pass);
    packed_backward c = {.call = call, .shares = sdpa_alloc((size_t)p->n_sequences * sizeof(sdpa_share))};
    if (!c.shares) return SDPA_NO_MEMORY;
    sdpa_status status = plan_shares(&c);
    if (status == SDPA_OK) {
        const int64_t n_units = sdpa_shares_deal(c.shares, c.n_shares);
        void *memory = sdpa_alloc_pieces(take_packed_pieces, &c);
        status = memory ? run_shares(&c, n_units) : SDPA_NO_MEMORY;
        sdpa_free(memory);
    }
    sdpa_free(c.shares);
    return status;
}

/* A gradient per head of packed sequences, whose parts are added in their order. */
typedef struct sequence_sums {
    sdpa_tensor total, own; /* own: one sequence after the other, of the compute type */
    sdpa_grid heads;
} sequence_sums;

/* Points t, a gradient of p, at zeroed memory for all sequences. */
static sdpa_status part_sequences(const sdpa_problem *p, sdpa_tensor *t, sequence_sums *s) {
    s->total = *t;
    t->dtype = compute_type(p);
    t->row = sdpa_tensor_compact(p, t, NULL, 1, 1, sdpa_size_of(t->dtype), &s->heads); /* there are no batch axes */
    const size_t bytes = (size_t)(p->n_sequences * t->row);
    t->data = sdpa_alloc(bytes);
    s->own = *t;
    if (!t->data) return SDPA_NO_MEMORY;
    memset(t->data, 0, bytes);
    return SDPA_OK;
}

static void add_sequences(const sdpa_problem *p, const sequence_sums *s) {
    for (int64_t h = 0; h < s->heads.size; h++) {
        double wide = 0;
        float narrow = 0;
        int64_t batch = 0, head = 0;
        sdpa_grid_locate(&s->heads, h, &batch, &head);
        const char *own = s->own.data + sdpa_offset(p, &s->own, batch, head);
        for (int64_t i = 0; i < p->n_sequences; i++, own += s->own.row) {
            if (s->own.dtype == SDPA_F64) {
                wide += *(const double *)own;
            } else {
                narrow += *(const float *)own;
            }
        }
        const void *sum = s->own.dtype == SDPA_F64 ? (const void *)&wide : &narrow;
        narrow_rows(p, sdpa_matrix_at(p, &s->total, batch, head), sum, 0, 1, 1);
    }
}

/* ------------------------------------------------------------------------------------ entry points */

/* Whether dK and dV accumulate in float32 per group before they are rounded: if each group has one matrix of each. */
static bool sums_in_groups(const backward_call *c) {
    const sdpa_problem *p = c->problem;
    const bool narrow_type = (p->dk.data && sdpa_is_narrow(p->dk.dtype)) || (p->dv.data && sdpa_is_narrow(p->dv.dtype));
    return narrow_type && (!p->dk.data || is_one_per_group(p, &c->members, &p->dk)) &&
           (!p->dv.data || is_one_per_group(p, &c->members, &p->dv));
}

/* Whether elements of the gradient `t`, in its own type, would be rounded more than once. */
static bool is_too_narrow(const backward_call *c, const sdpa_tensor *t) {
    const sdpa_problem *p = c->problem;
    if (!t->data || t->dtype == compute_type(p)) return false;
    return t == &p->dk || t == &p->dv ? !c->summed : !is_own(p, t);
}

static sdpa_status differentiate(const sdpa_problem *problem, sdpa_pass pass) {
    sdpa_problem_check(problem, pass);
    if (!sdpa_has_queries(problem)) return SDPA_OK;
    sdpa_problem copy = *problem, *p = &copy;
    backward_call call = {.problem = p, .kernels = sdpa_kernels_for(p->dtype), .pass = pass};
#define GRADIENT(name, rows, columns) {&p->name, rows, columns},
    const struct {
        sdpa_tensor *t;
        int64_t n_rows, n_cols;
    } gradients[] = {SDPA_GRADIENTS(GRADIENT)};
#undef GRADIENT
    enum { N = sizeof gradients / sizeof *gradients };
    for (int i = 0; i < N; i++) {
        /* NumPy gives empty arrays strides of 0, which here would mean that they are summed into. */
        if (gradients[i].n_rows * gradients[i].n_cols == 0) gradients[i].t->data = NULL;
    }
    find_groups(p, &call.groups, &call.members);
    call.summed = sums_in_groups(&call);
    call.ordered = (p->dq.data && !is_own(p, &p->dq)) || (p->dmask.data && p->dmask.col == 0);
    sdpa_tensor *per_head[] = {SDPA_HEAD_GRADIENTS(ADDRESS)};
#undef ADDRESS
    enum { N_PER_HEAD = sizeof per_head / sizeof *per_head };
    for (int i = 0; i < N_PER_HEAD; i++) call.ordered |= per_head[i]->data != NULL;

    wide_gradient *wide[N]; /* not on the stack, where they would take 10 kB */
    sequence_sums sums[N_PER_HEAD];
    int n_wide = 0, n_sums = 0;
    sdpa_status status = SDPA_OK;
    for (int i = 0; i < N_PER_HEAD && p->cu_q && status == SDPA_OK; i++) {
        if (per_head[i]->data) status = part_sequences(p, per_head[i], &sums[n_sums++]);
    }
    for (int i = 0; i < N && status == SDPA_OK; i++) {
        if (!is_too_narrow(&call, gradients[i].t)) continue;
        wide[n_wide] = new_wide_gradient();
        status = wide[n_wide] ? widen(p, gradients[i].t, gradients[i].n_rows, gradients[i].n_cols, wide[n_wide])
                              : SDPA_NO_MEMORY;
        n_wide++;
    }
    if (status == SDPA_OK) status = p->cu_q ? run_packed(p, &call) : run_backward(p, &call);
    for (int i = 0; i < n_sums; i++) {
        if (status == SDPA_OK) add_sequences(p, &sums[i]);
        sdpa_free(sums[i].own.data);
    }
    for (int i = 0; i < n_wide; i++) {
        if (status == SDPA_OK) status = narrow(wide[i]);
        if (wide[i]) sdpa_free(wide[i]->wide.data);
        sdpa_free(wide[i]);
    }
    return status;
}

sdpa_status sdpa_attention_backward(const sdpa_problem *p) { return differentiate(p, SDPA_PASS_BACKWARD); }

sdpa_status sdpa_attention_second(const sdpa_problem *p) { return differentiate(p, SDPA_PASS_SECOND); }
