/* Forward: every block of queries of every head is a unit of its own. */
#include "drivers.h"
#include "memory.h"
#include "parallel.h"
#include "unit.h"

typedef enum forward_kind { FORWARD, WEIGHTS, STATISTICS, TANGENT } forward_kind;

typedef struct forward_call {
    const sdpa_problem *problem;
    const struct sdpa_kernels *kernels;
    int64_t query_block; /* queries of a unit */
    char *scratch;
    size_t scratch_bytes; /* per worker */
    forward_kind kind;
    sdpa_stage stage; /* of WEIGHTS */
    int64_t n_parts;  /* of the keys of a unit; 1: whole */
    char *parts;      /* (units, n_parts) */
    size_t part_bytes;
} forward_call;

static void set_unit(sdpa_unit *u, const forward_call *call, int64_t index, sdpa_run *run) {
    const sdpa_problem *p = call->problem;
    const int64_t blocks = sdpa_units(p, call->query_block), bh = index / blocks;
    sdpa_unit_set_head(u, p, bh / p->n_head, bh % p->n_head);
    sdpa_unit_set_queries(u, index % blocks, call->query_block);
    u->run = run;
}

static void forward_unit(void *context, int64_t index, int worker, sdpa_run *run) {
    const forward_call *call = context;
    sdpa_unit u;
    set_unit(&u, call, index, run);
    void *scratch = call->scratch + (size_t)worker * call->scratch_bytes;
    switch (call->kind) {
    case FORWARD:
        call->kernels->forward(&u, scratch);
        break;
    case WEIGHTS:
        call->kernels->weights(&u, call->stage, scratch);
        break;
    case STATISTICS:
        call->kernels->statistics(&u, scratch);
        break;
    case TANGENT:
        call->kernels->tangent(&u, scratch);
        break;
    }
}

/* Few queries of few heads are too few units for all threads: their keys are cut into parts, which depend on the shape
 * only. */
#define PART_KEYS 4096
#define ENOUGH_UNITS 16
#define MOST_QUERIES 32

static int64_t parts_of_keys(const sdpa_problem *p, int64_t n_units) {
    if (p->n_q > MOST_QUERIES || n_units >= ENOUGH_UNITS) return 1;
    int64_t most = (ENOUGH_UNITS + n_units - 1) / n_units, parts = p->n_k / PART_KEYS;
    return parts < 1 ? 1 : parts < most ? parts : most;
}

static void forward_part(void *context, int64_t index, int worker, sdpa_run *run) {
    const forward_call *call = context;
    const sdpa_problem *p = call->problem;
    sdpa_unit u;
    set_unit(&u, call, index / call->n_parts, run);
    const int64_t block = sdpa_key_block(p), blocks = (p->n_k + block - 1) / block, part = index % call->n_parts;
    const int64_t end = blocks * (part + 1) / call->n_parts * block;
    u.first_key = blocks * part / call->n_parts * block;
    if (end < u.key_length) u.key_length = end;
    call->kernels->forward_part(&u, call->scratch + (size_t)worker * call->scratch_bytes,
                                call->parts + (size_t)index * call->part_bytes);
}

/* Makes the heads of `t` its rows, n_heads of them to a new head. */
static void fold_heads(sdpa_tensor *t, int64_t n_heads) {
    t->row = t->head;
    t->head *= n_heads;
}

static int64_t heads_per_head(const sdpa_problem *p, const sdpa_tensor *t) { return t->head ? t->group : p->n_head; }

/* One query per head, several heads to a key head (decoding with GQA): as many queries of one head, so that a unit reads
 * its keys and values once. Returns `folded`, or p where that is not so or an option tells heads apart or counts queries. */
static const sdpa_problem *fold_group(const sdpa_problem *p, sdpa_problem *folded) {
    const int64_t n_heads = heads_per_head(p, &p->k);
    const bool all_below = !p->has_upper || (!p->offset.data && p->upper >= p->n_k - 1);
    const bool all_above = !p->has_lower || (!p->offset.data && p->lower <= 0);
    if (p->n_q != 1 || n_heads == 1 || heads_per_head(p, &p->v) != n_heads) return p;
    if (!all_below || !all_above || (p->mask.data && p->mask.group > 1)) return p;
    if (p->alibi_slopes.data || p->sinks.data || p->dropout_p > 0 || p->w_score) return p;
    *folded = *p;
    folded->n_q = n_heads;
    folded->n_head /= n_heads;
    folded->k.group = folded->v.group = 1;
    folded->has_lower = folded->has_upper = false;
    fold_heads(&folded->q, n_heads);
    fold_heads(&folded->o, n_heads);
    fold_heads(&folded->lse, n_heads);
    fold_heads(&folded->mask, n_heads);
    return folded;
}

static sdpa_status run_forward(const sdpa_problem *p, forward_kind kind, sdpa_stage stage) {
    forward_call call = {.problem = p, .kernels = sdpa_kernels_for(p->dtype), .kind = kind, .stage = stage};
    call.query_block = kind == TANGENT ? sdpa_query_block(p) : sdpa_forward_block(p);
    const int64_t n_units = p->n_batch * p->n_head * sdpa_units(p, call.query_block);
    if (n_units == 0) return SDPA_OK;
    call.n_parts = kind == FORWARD ? parts_of_keys(p, n_units) : 1;
    int workers = sdpa_workers_for(p, n_units * call.n_parts);
    call.scratch_bytes = kind == TANGENT ? call.kernels->tangent_bytes(p) : call.kernels->forward_bytes(p);
    call.part_bytes = call.n_parts > 1 ? call.kernels->forward_part_bytes(p) : 0;

    sdpa_arena need = {NULL, 0}, arena = {NULL, 0};
    for (sdpa_arena *a = &need;; a = &arena) {
        call.scratch = sdpa_take(a, (size_t)workers * call.scratch_bytes);
        call.parts = sdpa_take(a, (size_t)(n_units * call.n_parts) * call.part_bytes);
        if (a == &arena) break;
        arena.base = sdpa_alloc(need.used);
        if (!arena.base) return SDPA_NO_MEMORY;
    }
    sdpa_status status = sdpa_parallel_for(n_units * call.n_parts, workers,
                                           call.n_parts > 1 ? forward_part : forward_unit, &call, p->interrupted);
    for (int64_t i = 0; i < n_units && call.n_parts > 1 && status == SDPA_OK; i++) {
        sdpa_unit u;
        set_unit(&u, &call, i, NULL);
        call.kernels->forward_join(&u, call.scratch, call.parts + (size_t)(i * call.n_parts) * call.part_bytes,
                                   call.n_parts);
    }
    sdpa_free(arena.base);
    return status;
}

sdpa_status sdpa_attention_forward(const sdpa_problem *p) {
    sdpa_problem folded;
    return run_forward(fold_group(p, &folded), FORWARD, SDPA_WEIGHTS);
}

sdpa_status sdpa_attention_weights(const sdpa_problem *p, sdpa_stage stage) { return run_forward(p, WEIGHTS, stage); }

sdpa_status sdpa_attention_tangent(const sdpa_problem *p) { return run_forward(p, TANGENT, SDPA_WEIGHTS); }

sdpa_status sdpa_attention_statistics(const sdpa_problem *p) { return run_forward(p, STATISTICS, SDPA_WEIGHTS); }
