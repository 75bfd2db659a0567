/* Backward: heads that share a gradient form a group, and the query blocks of all its heads are one sequence of units,
 * which add to the same dK and dV in that order (deal.h). (An alternative, one pass for dQ and another for dK and dV,
 * needs seven products per pair of blocks instead of five.)
 *
 * dK and dV of 16-bit types accumulate in float32, one head per open group. A gradient that is shared in another way (a
 * sum over a broadcast batch axis, dMask) accumulates in a float32 copy of its full size and is narrowed at the end. */
#include "deal.h"
#include "drivers.h"
#include "groups.h"
#include "outline.h"
#include "program.h"
#include "runtime/memory.h"
#include "runtime/parallel.h"
#include "reach.h"
#include "sequences.h"
#include "unit.h"

#define ADDRESS(name, rows, columns) &p->name,

/* Whether gradients of score_mod's arrays are wanted; and whether several units may add to one of their elements. */
static bool wants_arrays(const sdpa_problem *p) { return p->score_mod && p->score_mod->has_gradients; }
static bool shares_arrays(const sdpa_problem *p) { return p->score_mod && p->score_mod->n_shared > 0; }

/* Splits (batch, head) into groups and members: axes along which any gradient is summed belong to the members. */
static void find_groups(const sdpa_problem *p, sdpa_grid *groups, sdpa_grid *members) {
    const sdpa_tensor *gradients[] = {SDPA_GRADIENTS(ADDRESS)};
    const int n_gradients = sizeof gradients / sizeof *gradients;
    groups->n_axes = members->n_axes = 0;
    groups->size = members->size = 1;
    int64_t step = p->n_batch;
    for (int a = 0; a < p->n_axes; a++) {
        step /= p->axis[a];
        bool shared = shares_arrays(p);
        for (int i = 0; i < n_gradients; i++) shared |= gradients[i]->data && gradients[i]->batch[a] == 0;
        sdpa_grid_add_axis(shared ? members : groups, p->axis[a], step, 0);
    }
    int64_t queries_per_key = 1;
    bool heads_shared = shares_arrays(p);
    for (int i = 0; i < n_gradients; i++) {
        if (!gradients[i]->data) continue;
        if (gradients[i]->group > queries_per_key) queries_per_key = gradients[i]->group;
        heads_shared |= gradients[i]->head == 0;
    }
    sdpa_grid_add_axis(heads_shared ? members : groups, p->n_head / queries_per_key, 0, queries_per_key);
    sdpa_grid_add_axis(members, queries_per_key, 0, 1);
}

static sdpa_dtype compute_type(const sdpa_problem *p) { return p->dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32; }

/* Whether all members of a group add to the same matrix of `t`, if to any. */
static bool is_one_per_group(const sdpa_problem *p, const sdpa_grid *members, const sdpa_tensor *t) {
    for (int64_t m = 1; m < members->size && t->data; m++) {
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

/* What the groups of a problem have in common. */
typedef struct backward_call {
    const sdpa_problem *problem;
    const struct sdpa_kernels *kernels;
    sdpa_grid groups, members;   /* members are relative to their group */
    sdpa_pass pass;              /* the backward or the second one: the same sums, another kernel */
    bool ordered;                /* units end in order, since they add to the same gradient then */
    bool fetches;                /* asks for a head's rows while the one before is computed */
    bool fresh;                  /* a group is one unit, which writes the gradients instead of adding to them */
    bool own_dq;                 /* each row of dQ is one unit's, which writes it */
    bool clears_blocks;          /* dK and dV are cleared block by block, where a unit is first to add to them */
    bool summed;                 /* dK, dV in float32: each open group has a pair */
    size_t dk_bytes;             /* of a sum of dK */
    size_t sums_bytes;           /* of the sums of dK and of dV together */
    int64_t n_blocks;            /* of keys */
    int64_t most;                /* units in a batch */
    size_t scratch_bytes;        /* per worker */
    sdpa_all_outlines *outlines; /* or NULL, as for packed sequences, which have no mask */
} backward_call;

static int64_t units_per_group(const backward_call *c) { return c->members.size * sdpa_units(c->problem); }

/* Memory of an open group. */
typedef struct backward_slot {
    const backward_call *call; /* the run's or, of packed sequences, the own one */
    backward_call own;
    sdpa_problem one; /* the sequence that the group belongs to */
    const sdpa_share *share;
    char *sums;
    bool *begun;      /* (n_blocks): dK and dV of the key block are cleared */
    sdpa_turn *turns; /* (units of the group); NULL: one thread runs all */
} backward_slot;

typedef struct backward_run {
    const backward_call *call;
    sdpa_deal deal;
    const sdpa_share *shares; /* of packed sequences; NULL if there is one problem */
    int64_t n_shares;
    size_t scratch_bytes, sums_bytes; /* the most that any sequence needs: per worker, per slot */
    int64_t n_blocks, n_units, most;  /* per slot; per worker */
    int64_t n_elements;               /* of score_mod's arrays that a unit reaches */
    size_t arrays_bytes;              /* of the sums for them, per worker; 0: not wanted */
    char *scratch, *sums;
    bool *begun;
    char *arrays;
    sdpa_turn *turns;
    sdpa_unit *batches;
    backward_slot *slots;
} backward_run;

/* The rows of a short head end before the hardware prefetchers detect them. Asking for the next head's pays if all heads
 * together exceed the caches, and costs time otherwise. */
#define SHORT_HEAD 32
#define CACHED_BYTES (10 << 20)
static bool fetches_heads(const backward_call *c) {
    const sdpa_problem *p = c->problem;
    const int64_t head = 2 * 4 * (p->n_q + p->n_k) * (p->d_k + p->d_v); /* operands and gradients */
    return c->pass == SDPA_PASS_BACKWARD && c->members.size == 1 && p->n_q <= SHORT_HEAD && p->n_k <= SHORT_HEAD &&
           head * p->n_batch * p->n_head > CACHED_BYTES;
}

/* Sets what depends on the size of the problem. */
static void plan(backward_call *c) {
    const sdpa_problem *p = c->problem;
    c->scratch_bytes = c->kernels->pass[c->pass].bytes(p);
    c->most = c->pass == SDPA_PASS_BACKWARD && !wants_arrays(p) ? c->kernels->backward_most(p) : 1;
    c->dk_bytes = p->dk.data ? (size_t)(p->n_k * p->d_k) * 4 : 0;
    c->sums_bytes = c->summed ? c->dk_bytes + (p->dv.data ? (size_t)(p->n_k * p->d_v) * 4 : 0) : 0;
    c->n_blocks = (p->n_k + sdpa_key_block(p) - 1) / sdpa_key_block(p);
    c->fetches = fetches_heads(c);
    c->fresh = c->pass == SDPA_PASS_BACKWARD && units_per_group(c) == 1;
    c->own_dq = c->fresh || (p->dq.data && is_own(p, &p->dq));
    c->clears_blocks =
        !c->fresh &&
        (c->summed || (is_one_per_group(p, &c->members, &p->dk) && is_one_per_group(p, &c->members, &p->dv)));
}

static sdpa_matrix sum_matrix(const sdpa_tensor *t, char *sum, int64_t d) {
    return (sdpa_matrix){t->data ? sum : NULL, d * 4, 4, SDPA_F32, false};
}

/* Makes u unit `t` of a group. */
static void set_unit(const backward_slot *slot, int64_t group, int64_t t, sdpa_unit *u) {
    const backward_call *c = slot->call;
    const sdpa_problem *p = c->problem;
    int64_t batch = 0, head = 0, blocks = sdpa_units(p);
    sdpa_grid_locate(&c->groups, group, &batch, &head);
    sdpa_grid_locate(&c->members, t / blocks, &batch, &head);
    sdpa_unit_set_head(u, p, batch, head);
    /* The last block comes first: under causality the longest units then start first, and small terms are added before
     * large ones. */
    sdpa_unit_set_queries(u, blocks - 1 - t % blocks);
    if (c->summed) {
        u->dk = sum_matrix(&p->dk, slot->sums, p->d_k);
        u->dv = sum_matrix(&p->dv, slot->sums + c->dk_bytes, p->d_v);
    }
    u->turns = slot->turns;
    u->turn = t;
    u->begun = c->clears_blocks ? slot->begun : NULL;
    u->ordered = c->ordered;
    u->fresh = c->fresh;
    u->own_dq = c->own_dq;
    u->fetches = c->fetches && group + 1 < c->groups.size;
    if (c->outlines) sdpa_outlines_set(c->outlines, u);
}

static void store_sums(const backward_slot *slot, int64_t group) {
    const backward_call *c = slot->call;
    const sdpa_problem *p = c->problem;
    int64_t batch = 0, head = 0;
    sdpa_grid_locate(&c->groups, group, &batch, &head);
    if (p->dk.data) narrow_rows(p, sdpa_matrix_at(p, &p->dk, batch, head), slot->sums, p->d_k * 4, p->n_k, p->d_k);
    if (p->dv.data) {
        const char *sums = slot->sums + c->dk_bytes;
        narrow_rows(p, sdpa_matrix_at(p, &p->dv, batch, head), sums, p->d_v * 4, p->n_k, p->d_v);
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

/* Clears the gradients that a group's units add to; `all`: those that a unit would clear, too. */
static void clear_group(const backward_call *c, int64_t group, bool all) {
    const sdpa_problem *p = c->problem;
    const struct {
        const sdpa_tensor *t;
        int64_t n_rows, n_cols;
        bool later;
    } gradients[] = {{&p->dq, p->n_q, p->d_k, c->own_dq},
                     {&p->dk, p->n_k, p->d_k, c->clears_blocks},
                     {&p->dv, p->n_k, p->d_v, c->clears_blocks}};
    const char *last[3] = {NULL};
    for (int64_t m = 0; m < c->members.size; m++) {
        int64_t batch = 0, head = 0;
        sdpa_grid_locate(&c->groups, group, &batch, &head);
        sdpa_grid_locate(&c->members, m, &batch, &head);
        for (int i = 0; i < 3; i++) {
            if (gradients[i].later && !all) continue;
            const sdpa_matrix matrix = sdpa_matrix_at(p, gradients[i].t, batch, head);
            if (matrix.data && matrix.data != last[i]) clear_matrix(&matrix, gradients[i].n_rows, gradients[i].n_cols);
            last[i] = matrix.data;
        }
    }
}

/* ------------------------------------------------------------------------------------ running groups */

/* The key blocks that a unit sees. */
static void set_turn(sdpa_turn *turn, const sdpa_unit *u) {
    int64_t j0, j1, block = sdpa_key_block(u->problem);
    sdpa_visible_keys(u, u->i0, u->n_i, &j0, &j1);
    atomic_init(&turn->next, 0);
    turn->first = j0 / block;
    turn->last = j0 < j1 ? (j1 + block - 1) / block : turn->first;
}

/* Sets the call of a slot to that of one sequence. */
static void view_sequence(const backward_call *call, int64_t sequence, backward_slot *slot) {
    sdpa_sequence_set(call->problem, sequence, &slot->one);
    slot->own = *call;
    slot->own.problem = &slot->one;
    plan(&slot->own);
    slot->call = &slot->own;
}

/* The number of a group in its problem. */
static int64_t group_of(const backward_slot *slot, int64_t group) {
    return slot->share ? group - slot->share->first : group;
}

static int64_t open_group(void *context, int64_t group, int64_t index) {
    const backward_run *r = context;
    backward_slot *slot = &r->slots[index];
    if (r->shares) {
        const sdpa_share *share = sdpa_share_of(r->shares, r->n_shares, group);
        if (slot->share != share) view_sequence(r->call, share->sequence, slot);
        slot->share = share;
    }
    const backward_call *c = slot->call;
    const int64_t units = units_per_group(c);
    slot->turns = r->turns && units > 1 ? r->turns + index * r->n_units : NULL;
    if (c->fresh) return units;
    if (c->clears_blocks) memset(slot->begun, false, (size_t)c->n_blocks);
    clear_group(c, group_of(slot, group), false);
    for (int64_t t = 0; t < units && slot->turns; t++) {
        sdpa_unit u;
        set_unit(slot, group_of(slot, group), t, &u);
        set_turn(&slot->turns[t], &u);
    }
    return units;
}

/* A worker's sums for the arrays of score_mod, ready for a unit. */
static sdpa_sums *sums_of(const backward_run *r, int worker, const sdpa_unit *u) {
    sdpa_sums *sums = (sdpa_sums *)(r->arrays + (size_t)worker * r->arrays_bytes);
    if (sdpa_program_has_reaches(u->problem->score_mod)) sdpa_reach_set(u, sums);
    return sums;
}

static void run_units(void *context, const sdpa_slot *s, int64_t t, int64_t n, int worker, sdpa_run *run) {
    const backward_run *r = context;
    const backward_slot *slot = &r->slots[s->index];
    const backward_call *c = slot->call;
    sdpa_unit *units = r->batches + worker * r->most;
    void *scratch = r->scratch + (size_t)worker * r->scratch_bytes;
    for (int64_t done = 0, batch; done < n && !sdpa_run_stopped(run); done += batch) {
        batch = n - done < c->most ? n - done : c->most;
        for (int64_t i = 0; i < batch; i++) {
            set_unit(slot, group_of(slot, s->group), t + done + i, &units[i]);
            units[i].run = run;
            if (r->arrays_bytes) units[i].sums = sums_of(r, worker, &units[i]);
        }
        if (c->pass == SDPA_PASS_BACKWARD) {
            c->kernels->backward(units, batch, scratch);
        } else {
            c->kernels->pass[c->pass].run(units, scratch);
        }
    }
}

static void close_group(void *context, const sdpa_slot *s) {
    const backward_run *r = context;
    const backward_slot *slot = &r->slots[s->index];
    const backward_call *c = slot->call;
    sdpa_unit u;
    if (c->clears_blocks) {
        set_unit(slot, group_of(slot, s->group), 0, &u);
        for (int64_t b = 0; b < c->n_blocks; b++) sdpa_turn_clear(&u, b);
    }
    if (c->summed) store_sums(slot, group_of(slot, s->group));
}

static void take_pieces(void *owner, sdpa_arena *arena) {
    backward_run *r = owner;
    const int n_workers = r->deal.n_workers;
    const int64_t n_slots = sdpa_deal_slots(r->deal.n_groups, n_workers);
    r->scratch = sdpa_take(arena, (size_t)n_workers * r->scratch_bytes);
    r->arrays = r->arrays_bytes ? sdpa_take(arena, (size_t)n_workers * r->arrays_bytes) : NULL;
    r->batches = sdpa_take(arena, (size_t)(n_workers * r->most) * sizeof *r->batches);
    r->deal.slots = sdpa_take(arena, (size_t)n_slots * sizeof *r->deal.slots);
    r->slots = sdpa_take(arena, (size_t)n_slots * sizeof *r->slots);
    r->sums = sdpa_take(arena, (size_t)n_slots * r->sums_bytes);
    r->begun = sdpa_take(arena, (size_t)(n_slots * r->n_blocks) * sizeof *r->begun);
    r->turns = n_workers > 1 ? sdpa_take(arena, (size_t)(n_slots * r->n_units) * sizeof *r->turns) : NULL;
    if (r->call->outlines) sdpa_outlines_take(r->call->outlines, arena);
}

/* Makes room for the groups of a call; false: no memory. */
static bool make_room(backward_run *r, const backward_call *c) {
    const int64_t units = units_per_group(c);
    if (c->scratch_bytes > r->scratch_bytes) r->scratch_bytes = c->scratch_bytes;
    if (c->sums_bytes > r->sums_bytes) r->sums_bytes = c->sums_bytes;
    if (c->n_blocks > r->n_blocks) r->n_blocks = c->n_blocks;
    if (units > r->n_units) r->n_units = units;
    if (c->most > r->most) r->most = c->most;
    if (!wants_arrays(c->problem)) return true;
    const int64_t n = sdpa_reach_most(c->problem);
    if (n > r->n_elements) r->n_elements = n;
    r->arrays_bytes = sdpa_program_sums_bytes(c->problem->score_mod, r->n_elements);
    return n >= 0;
}

/* Runs all groups in memory of the run's sizes. */
static sdpa_status run_groups(backward_run *r) {
    sdpa_deal *d = &r->deal;
    d->context = r;
    d->open = open_group;
    d->run = run_units;
    d->close = close_group;
    d->most = r->most;
    void *memory = sdpa_alloc_pieces(take_pieces, r);
    if (!memory) return SDPA_NO_MEMORY;
    for (int i = 0; i < d->n_workers && r->arrays_bytes; i++) {
        sdpa_sums *sums = (sdpa_sums *)(r->arrays + (size_t)i * r->arrays_bytes);
        sdpa_program_clear_sums(r->call->problem->score_mod, sums, r->n_elements);
    }
    for (int64_t i = 0; i < sdpa_deal_slots(d->n_groups, d->n_workers); i++) {
        backward_slot *slot = &r->slots[i];
        slot->call = r->call;
        slot->share = NULL;
        slot->sums = r->sums + (size_t)i * r->sums_bytes;
        slot->begun = r->begun + i * r->n_blocks;
    }
    const sdpa_status status = sdpa_deal_run(d, r->call->problem->interrupted);
    sdpa_free(memory);
    return status;
}

static sdpa_status run_backward(const sdpa_problem *p, backward_call *c) {
    plan(c);
    sdpa_all_outlines outlines;
    c->outlines = sdpa_outlines_plan(&outlines, p, sdpa_query_block(p));
    backward_run r = {.call = c, .deal.n_groups = c->groups.size};
    if (!make_room(&r, c)) return SDPA_NO_MEMORY;
    r.deal.n_workers = sdpa_workers_for(p, c->pass, sdpa_pairs(p), c->groups.size * units_per_group(c));
    return run_groups(&r);
}

/* ------------------------------------------------------------------------------------ packed sequences */

/* Fills in the shares of all sequences that have queries, and the sizes that they need. */
static sdpa_status plan_shares(const backward_call *call, backward_run *r, sdpa_share *shares) {
    backward_slot view;
    for (int64_t s = 0; s < call->problem->n_sequences; s++) {
        if (sdpa_poll(call->problem->interrupted)) return SDPA_INTERRUPTED;
        view_sequence(call, s, &view);
        const backward_call *c = view.call;
        const int64_t n_groups = c->groups.size;
        if (units_per_group(c) == 0) {
            for (int64_t g = 0; g < n_groups; g++) clear_group(c, g, true);
            continue;
        }
        if (!make_room(r, c)) return SDPA_NO_MEMORY;
        shares[r->n_shares++] =
            (sdpa_share){.sequence = s,
                         .n_units = n_groups,
                         .cost = (double)c->members.size * (double)view.one.n_q * (double)view.one.n_k};
    }
    return SDPA_OK;
}

/* The sequences one after the other, since all add to the same arrays. */
static sdpa_status run_in_order(const sdpa_problem *p, const backward_call *call) {
    backward_slot view;
    sdpa_status status = SDPA_OK;
    for (int64_t s = 0; s < p->n_sequences && status == SDPA_OK; s++) {
        if (sdpa_poll(p->interrupted)) return SDPA_INTERRUPTED;
        view_sequence(call, s, &view);
        const int64_t n_groups = view.own.groups.size;
        if (units_per_group(&view.own) > 0) {
            status = run_backward(&view.one, &view.own);
        } else {
            for (int64_t g = 0; g < n_groups; g++) clear_group(&view.own, g, true);
        }
    }
    return status;
}

static sdpa_status run_packed(const sdpa_problem *p, backward_call *call) {
    sdpa_sequences_pad(p, call->pass);
    if (shares_arrays(p)) return run_in_order(p, call);
    sdpa_share *shares = sdpa_alloc((size_t)p->n_sequences * sizeof *shares);
    if (!shares) return SDPA_NO_MEMORY;
    backward_run r = {.call = call, .shares = shares};
    sdpa_status status = plan_shares(call, &r, shares);
    r.deal.n_groups = sdpa_shares_deal(shares, r.n_shares);
    r.deal.n_workers = sdpa_workers_for(p, call->pass, sdpa_sequences_pairs(p), r.deal.n_groups * r.n_units);
    if (status == SDPA_OK && r.deal.n_groups > 0) status = run_groups(&r);
    sdpa_free(shares);
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
    return narrow_type && is_one_per_group(p, &c->members, &p->dk) && is_one_per_group(p, &c->members, &p->dv);
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
    backward_call call = {.problem = p, .kernels = sdpa_pass_kernels_for(p, pass), .pass = pass};
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
    call.ordered = (p->dq.data && !is_own(p, &p->dq)) || (p->dmask.data && p->dmask.col == 0) || shares_arrays(p);
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
