/* Forward: each block of queries of each head is a unit. */
#include "drivers.h"
#include "outline.h"
#include "runtime/memory.h"
#include "runtime/parallel.h"
#include "sequences.h"
#include "unit.h"

typedef struct forward_call {
    const sdpa_problem *problem;
    const struct sdpa_kernels *kernels;
    int n_workers;
    char *scratch;
    size_t scratch_bytes; /* per worker */
    sdpa_pass pass;
    int64_t block; /* queries of a unit */
    int64_t n_units;
    int64_t n_parts; /* into which a unit's keys are cut; 1: not cut */
    char *parts;     /* (units, n_parts) */
    size_t part_bytes;
    sdpa_all_outlines *outlines; /* or NULL, as for packed sequences, which have no mask */
} forward_call;

static void set_unit(const forward_call *call, int64_t index, sdpa_run *run, sdpa_unit *u) {
    sdpa_unit_set_of(u, call->problem, index, call->block, run);
    if (call->outlines) sdpa_outlines_set(call->outlines, u);
}

static void forward_unit(void *context, int64_t index, int worker, sdpa_run *run) {
    const forward_call *call = context;
    sdpa_unit u;
    set_unit(call, index, run, &u);
    call->kernels->pass[call->pass].run(&u, call->scratch + (size_t)worker * call->scratch_bytes);
}

/* Few queries of few heads make too few units for all threads, so their keys are cut into parts of at least PART_PAIRS
 * pairs and PART_KEYS keys. How many depends on the shape only. */
#define PART_PAIRS 4096
#define PART_KEYS 1024
#define ENOUGH_UNITS 16
#define MOST_QUERIES 256

enum {
    PARTS_CAN = SDPA_FEATURES_OF_UNITS | SDPA_FEATURE_SOFTCAP | SDPA_FEATURE_DROPOUT | SDPA_FEATURE_SINKS |
                SDPA_FEATURE_ALIBI | SDPA_FEATURE_ADDITIVE | SDPA_FEATURE_SCORE_MOD
};

static int64_t parts_of_keys(const sdpa_problem *p, int64_t n_units) {
    if (p->features & ~PARTS_CAN || p->n_q > MOST_QUERIES || n_units >= ENOUGH_UNITS) return 1;
    const int64_t most = (ENOUGH_UNITS + n_units - 1) / n_units;
    const int64_t keys = p->n_q * PART_KEYS < PART_PAIRS ? PART_PAIRS / p->n_q : PART_KEYS, parts = p->n_k / keys;
    return parts < 1 ? 1 : parts < most ? parts : most;
}

static void forward_part(void *context, int64_t index, int worker, sdpa_run *run) {
    const forward_call *call = context;
    const sdpa_problem *p = call->problem;
    sdpa_unit u;
    SDPA_TAKE(PARTS);
    set_unit(call, index / call->n_parts, run, &u);
    const int64_t block = sdpa_key_block(p), blocks = (p->n_k + block - 1) / block, part = index % call->n_parts;
    const int64_t end = blocks * (part + 1) / call->n_parts * block;
    u.first_key = blocks * part / call->n_parts * block;
    if (end < u.key_length) u.key_length = end;
    call->kernels->forward_part(&u, call->scratch + (size_t)worker * call->scratch_bytes,
                                call->parts + (size_t)index * call->part_bytes);
}

/* Turns every n_heads heads of t into the rows of one head. */
static void fold_heads(sdpa_tensor *t, int64_t n_heads) {
    t->row = t->head;
    t->head *= n_heads;
}

static int64_t heads_per_head(const sdpa_problem *p, const sdpa_tensor *t) { return t->head ? t->group : p->n_head; }

static int64_t integer_at(const sdpa_problem *p, const sdpa_tensor *t, int64_t batch, int64_t absent) {
    if (t->data) memcpy(&absent, t->data + sdpa_offset(p, t, batch, 0), sizeof absent);
    return absent;
}

/* Whether the band lets query 0 see all keys, in every batch entry. */
static bool band_is_open(const sdpa_problem *p) {
    for (int64_t b = 0; b < p->n_batch && (p->has_lower || p->has_upper); b++) {
        const int64_t offset = integer_at(p, &p->offset, b, 0), n_keys = integer_at(p, &p->key_length, b, p->n_k);
        if (p->has_lower && p->lower + offset > 0) return false;
        if (p->has_upper && p->upper + offset < n_keys - 1) return false;
    }
    return true;
}

/* Features that neither distinguish heads nor depend on a query's position. A band does, and may only be one that hides
 * nothing. */
enum { FOLD_CAN = SDPA_FEATURES_OF_PAIRS | SDPA_FEATURE_SOFTCAP | SDPA_FEATURE_INVARIANT };

/* If each head has one query and several query heads share a key head (decoding with GQA), turns these heads into
 * queries of one head, so that a unit reads keys and values once. Returns `folded`, or p if this does not apply. */
static const sdpa_problem *fold_group(const sdpa_problem *p, sdpa_problem *folded) {
    if (p->features & ~FOLD_CAN) return p;
    const int64_t n_heads = heads_per_head(p, &p->k);
    if (p->n_q != 1 || n_heads <= 1) return p;
    if (p->d_v > 0 && heads_per_head(p, &p->v) != n_heads) return p; /* strides of empty values mean nothing */
    if (!band_is_open(p) || (p->mask.data && p->mask.group > 1)) return p;
    SDPA_TAKE(FOLD);
    *folded = *p;
    folded->n_q = n_heads;
    folded->n_head /= n_heads;
    folded->k.group = folded->v.group = 1;
    folded->has_lower = folded->has_upper = false;
    folded->offset.data = NULL;
    fold_heads(&folded->q, n_heads);
    fold_heads(&folded->o, n_heads);
    fold_heads(&folded->lse, n_heads);
    fold_heads(&folded->mask, n_heads);
    folded->features = sdpa_problem_features(folded);
    return folded;
}

static void take_pieces(void *owner, sdpa_arena *arena) {
    forward_call *c = owner;
    c->scratch = sdpa_take(arena, (size_t)c->n_workers * c->scratch_bytes);
    c->parts = sdpa_take(arena, (size_t)(c->n_units * c->n_parts) * c->part_bytes);
    if (c->outlines) sdpa_outlines_take(c->outlines, arena);
}

/* Sets the number of units, their parts and the size of their scratch from the call's problem. */
static void plan(forward_call *call) {
    const sdpa_problem *p = call->problem;
    call->block = call->pass == SDPA_PASS_TANGENT ? sdpa_query_block(p) : call->kernels->queries(p);
    call->n_units = p->n_batch * p->n_head * sdpa_units_of(p, call->block);
    if (call->n_units == 0) return;
    call->n_parts = call->pass == SDPA_PASS_FORWARD ? parts_of_keys(p, call->n_units) : 1;
    call->scratch_bytes = call->kernels->pass[call->pass].bytes(p);
    call->part_bytes = call->n_parts > 1 ? call->kernels->forward_part_bytes(p) : 0;
}

static void join_parts(const forward_call *call) {
    for (int64_t i = 0; i < call->n_units; i++) {
        sdpa_unit u;
        sdpa_unit_set_of(&u, call->problem, i, call->block, NULL);
        call->kernels->forward_join(&u, call->scratch, call->parts + (size_t)(i * call->n_parts) * call->part_bytes,
                                    call->n_parts);
    }
}

static sdpa_status run_forward(const sdpa_problem *p, sdpa_pass pass) {
    forward_call call = {.problem = p, .kernels = sdpa_pass_kernels_for(p, pass), .pass = pass};
    plan(&call);
    if (call.n_units == 0) return SDPA_OK;
    sdpa_all_outlines outlines;
    call.outlines = sdpa_outlines_plan(&outlines, p, call.block);
    const bool parts = call.n_parts > 1;
    call.n_workers = sdpa_workers_for(p, pass, sdpa_pairs(p), call.n_units * call.n_parts);
    void *memory = sdpa_alloc_pieces(take_pieces, &call);
    if (!memory) return SDPA_NO_MEMORY;
    sdpa_status status = sdpa_parallel_for(call.n_units * call.n_parts, call.n_workers,
                                           parts ? forward_part : forward_unit, &call, p->interrupted);
    if (parts && status == SDPA_OK) join_parts(&call);
    sdpa_free(memory);
    return status;
}

/* ------------------------------------------------------------------------------------ packed sequences */

/* The sequence that a worker is computing. */
typedef struct forward_view {
    const sdpa_share *share;
    sdpa_problem one, folded;
    forward_call call; /* computes this sequence alone, in the memory of the run */
} forward_view;

typedef struct packed_forward {
    const sdpa_problem *problem;
    forward_call call; /* common to all sequences; scratch_bytes: the largest */
    sdpa_share *shares;
    int64_t n_shares;
    forward_view *views; /* per worker */
    size_t parts_bytes;
} packed_forward;

/* Plans the call of one sequence. Its pointers into memory stay unset. */
static void view_sequence(const packed_forward *c, int64_t sequence, forward_view *view) {
    sdpa_sequence_set(c->problem, sequence, &view->one);
    view->call = c->call;
    view->call.problem = &view->one;
    if (c->call.pass == SDPA_PASS_FORWARD) view->call.problem = fold_group(&view->one, &view->folded);
    plan(&view->call);
}

/* The call for a share, from the worker's view, which is renewed if it was at another share. */
static forward_call *view_share(const packed_forward *c, const sdpa_share *share, int worker) {
    forward_view *view = &c->views[worker];
    if (view->share == share) return &view->call;
    view_sequence(c, share->sequence, view);
    view->share = share;
    view->call.scratch_bytes = c->call.scratch_bytes;
    view->call.parts = c->call.parts + share->memory;
    return &view->call;
}

static void packed_unit(void *context, int64_t index, int worker, sdpa_run *run) {
    const packed_forward *c = context;
    const sdpa_share *share = sdpa_share_of(c->shares, c->n_shares, index);
    forward_call *call = view_share(c, share, worker);
    (call->n_parts > 1 ? forward_part : forward_unit)(call, index - share->first, worker, run);
}

static void take_packed_pieces(void *owner, sdpa_arena *arena) {
    packed_forward *c = owner;
    c->call.scratch = sdpa_take(arena, (size_t)c->call.n_workers * c->call.scratch_bytes);
    c->call.parts = sdpa_take(arena, c->parts_bytes);
    c->views = sdpa_take(arena, (size_t)c->call.n_workers * sizeof *c->views);
}

/* Fills in the shares of all sequences that have units, and the memory that they need. */
static sdpa_status plan_shares(packed_forward *c) {
    forward_view view;
    for (int64_t s = 0; s < c->problem->n_sequences; s++) {
        if (sdpa_poll(c->problem->interrupted)) return SDPA_INTERRUPTED;
        view_sequence(c, s, &view);
        const forward_call *call = &view.call;
        if (call->n_units == 0) continue;
        const sdpa_problem *p = call->problem;
        const int64_t n_rows = p->n_q < call->block ? p->n_q : call->block;
        c->shares[c->n_shares++] = (sdpa_share){.sequence = s,
                                                .n_units = call->n_units * call->n_parts,
                                                .cost = (double)n_rows * (double)(p->n_k / call->n_parts),
                                                .memory = c->parts_bytes};
        if (call->n_parts > 1) c->parts_bytes += (size_t)(call->n_units * call->n_parts) * call->part_bytes;
        if (call->scratch_bytes > c->call.scratch_bytes) c->call.scratch_bytes = call->scratch_bytes;
    }
    return SDPA_OK;
}

static sdpa_status run_shares(packed_forward *c) {
    const sdpa_problem *p = c->problem;
    const sdpa_status planned = plan_shares(c);
    if (planned != SDPA_OK) return planned;
    const int64_t n_units = sdpa_shares_deal(c->shares, c->n_shares);
    if (n_units == 0) return SDPA_OK;
    c->call.n_workers = sdpa_workers_for(p, c->call.pass, sdpa_sequences_pairs(p), n_units);
    void *memory = sdpa_alloc_pieces(take_packed_pieces, c);
    if (!memory) return SDPA_NO_MEMORY;
    for (int i = 0; i < c->call.n_workers; i++) c->views[i].share = NULL;
    sdpa_status status = sdpa_parallel_for(n_units, c->call.n_workers, packed_unit, c, p->interrupted);
    for (int64_t i = 0; i < c->n_shares && c->parts_bytes > 0 && status == SDPA_OK; i++) {
        const forward_call *call = view_share(c, &c->shares[i], 0);
        if (call->n_parts > 1) join_parts(call);
    }
    sdpa_free(memory);
    return status;
}

static sdpa_status run_packed(const sdpa_problem *p, sdpa_pass pass) {
    packed_forward c = {.problem = p, .call = {.kernels = sdpa_pass_kernels_for(p, pass), .pass = pass}};
    sdpa_sequences_pad(p, pass);
    c.shares = sdpa_alloc((size_t)p->n_sequences * sizeof *c.shares);
    if (!c.shares) return SDPA_NO_MEMORY;
    const sdpa_status status = run_shares(&c);
    sdpa_free(c.shares);
    return status;
}

/* ------------------------------------------------------------------------------------ entry points */

sdpa_status sdpa_attention_forward(const sdpa_problem *p) {
    sdpa_problem folded;
    sdpa_problem_check(p, SDPA_PASS_FORWARD);
    if (p->cu_q) return run_packed(p, SDPA_PASS_FORWARD);
    return run_forward(fold_group(p, &folded), SDPA_PASS_FORWARD);
}

sdpa_status sdpa_attention_tangent(const sdpa_problem *p) {
    sdpa_problem_check(p, SDPA_PASS_TANGENT);
    return p->cu_q ? run_packed(p, SDPA_PASS_TANGENT) : run_forward(p, SDPA_PASS_TANGENT);
}

sdpa_status sdpa_attention_statistics(const sdpa_problem *p) {
    sdpa_problem_check(p, SDPA_PASS_STATISTICS);
    return p->cu_q ? run_packed(p, SDPA_PASS_STATISTICS) : run_forward(p, SDPA_PASS_STATISTICS);
}
