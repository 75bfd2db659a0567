/* Forward: every block of queries of every head is a unit of its own. */
#include "drivers.h"
#include "memory.h"
#include "parallel.h"
#include "unit.h"

typedef enum forward_kind { FORWARD, WEIGHTS, STATISTICS, TANGENT } forward_kind;

typedef struct forward_call {
    const sdpa_problem *problem;
    const struct sdpa_kernels *kernels;
    char *scratch;
    size_t scratch_bytes; /* per worker */
    forward_kind kind;
    sdpa_stage stage; /* of WEIGHTS */
} forward_call;

static void forward_unit(void *context, int64_t index, int worker, sdpa_run *run) {
    const forward_call *call = context;
    const sdpa_problem *p = call->problem;
    int64_t blocks = sdpa_query_blocks(p), bh = index / blocks;
    sdpa_unit u = sdpa_unit_of_head(p, bh / p->n_head, bh % p->n_head);
    sdpa_unit_set_queries(&u, index % blocks);
    u.run = run;
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

static sdpa_status run_forward(const sdpa_problem *p, forward_kind kind, sdpa_stage stage) {
    int64_t n_units = p->n_batch * p->n_head * sdpa_query_blocks(p);
    if (n_units == 0) return SDPA_OK;
    forward_call call = {.problem = p, .kernels = sdpa_kernels_for(p->dtype), .kind = kind, .stage = stage};
    int workers = sdpa_workers_for(p, n_units);
    call.scratch_bytes = kind == TANGENT ? call.kernels->tangent_bytes(p) : call.kernels->forward_bytes(p);
    call.scratch = sdpa_alloc((size_t)workers * call.scratch_bytes);
    if (!call.scratch) return SDPA_NO_MEMORY;
    sdpa_status status = sdpa_parallel_for(n_units, workers, forward_unit, &call, p->interrupted);
    sdpa_free(call.scratch);
    return status;
}

sdpa_status sdpa_attention_forward(const sdpa_problem *p) { return run_forward(p, FORWARD, SDPA_WEIGHTS); }

sdpa_status sdpa_attention_weights(const sdpa_problem *p, sdpa_stage stage) { return run_forward(p, WEIGHTS, stage); }

sdpa_status sdpa_attention_tangent(const sdpa_problem *p) { return run_forward(p, TANGENT, SDPA_WEIGHTS); }

sdpa_status sdpa_attention_statistics(const sdpa_problem *p) { return run_forward(p, STATISTICS, SDPA_WEIGHTS); }
