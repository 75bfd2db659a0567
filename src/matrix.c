/* The matrix of weights for chosen heads and queries, and the sums and maxima of its columns. */
#include "drivers.h"
#include "runtime/memory.h"
#include "runtime/parallel.h"
#include "sequences.h"
#include "unit.h"

typedef struct matrix_call {
    const sdpa_problem *problem;
    const struct sdpa_kernels *kernels;
    int n_workers;
    int64_t n_heads;      /* chosen heads of a batch entry */
    int64_t n_spans;      /* units of a head */
    int64_t n_lanes;      /* of these units together */
    int64_t n_blocks;     /* of keys */
    int64_t first, n;     /* the heads in flight, of those of all batch entries */
    size_t scratch_bytes; /* per worker */
    sdpa_span *spans;
    char *scratch;
    char *sums; /* (n, n_lanes, 3) */
} matrix_call;

/* Cuts the chosen queries into runs of consecutive ones, and these into blocks. Sets *n_spans and, in *n_lanes, the lanes
 * of all together; writes the spans unless `spans` is NULL. */
static sdpa_status cut_spans(const sdpa_problem *p, int64_t lanes, sdpa_span *spans, int64_t *n_spans,
                             int64_t *n_lanes) {
    const int64_t *index = p->queries.index, n = index ? p->queries.n : p->n_q, most = sdpa_query_block(p);
    *n_spans = *n_lanes = 0;
    for (int64_t row = 0, n_i; row < n; row += n_i) {
        const int64_t i0 = index ? index[row] : row, left = n - row < most ? n - row : most;
        if (sdpa_poll(p->interrupted)) return SDPA_INTERRUPTED;
        for (n_i = index ? 1 : left; n_i < left && index[row + n_i] == i0 + n_i;) n_i++;
        if (spans) spans[*n_spans] = (sdpa_span){i0, n_i, row, *n_lanes};
        *n_spans += 1;
        *n_lanes += (n_i + lanes - 1) / lanes * lanes;
    }
    return SDPA_OK;
}

/* The unit of the index-th chosen head of all batch entries. */
static void set_head(sdpa_unit *u, const matrix_call *c, int64_t index, sdpa_run *run) {
    const sdpa_problem *p = c->problem;
    const int64_t batch = index / c->n_heads, place = index % c->n_heads;
    sdpa_unit_set_head(u, p, batch, p->heads.index ? p->heads.index[place] : place);
    u->o = sdpa_matrix_at(p, &p->o, batch, place);
    u->run = run;
}

static void *scratch_of(const matrix_call *c, int worker) { return c->scratch + (size_t)worker * c->scratch_bytes; }

static void weights_span(void *context, int64_t index, int worker, sdpa_run *run) {
    const matrix_call *c = context;
    const sdpa_span *span = &c->spans[index % c->n_spans];
    sdpa_unit u;
    set_head(&u, c, index / c->n_spans, run);
    u.i0 = span->i0;
    u.n_i = span->n_i;
    u.o.data += (span->row - span->i0) * u.o.row;
    c->kernels->pass[SDPA_PASS_WEIGHTS].run(&u, scratch_of(c, worker));
}

/* Offset of lane `lane` of head `head`, counted among the heads in flight, in `sums`. */
static size_t sums_bytes(const matrix_call *c, int64_t head, int64_t lane) {
    const size_t real = c->problem->dtype == SDPA_F64 ? sizeof(double) : sizeof(float);
    return 3 * real * (size_t)(head * c->n_lanes + lane);
}

static void sums_span(void *context, int64_t index, int worker, sdpa_run *run) {
    const matrix_call *c = context;
    const sdpa_span *span = &c->spans[index % c->n_spans];
    sdpa_unit u;
    set_head(&u, c, c->first + index / c->n_spans, run);
    u.i0 = span->i0;
    u.n_i = span->n_i;
    c->kernels->received_sums(&u, c->sums + sums_bytes(c, index / c->n_spans, span->lane), scratch_of(c, worker));
}

static void received_block(void *context, int64_t index, int worker, sdpa_run *run) {
    const matrix_call *c = context;
    const sdpa_problem *p = c->problem;
    const int64_t head = index / c->n_blocks, size = sdpa_key_block(p);
    sdpa_unit u;
    set_head(&u, c, c->first + head, run);
    u.first_key = index % c->n_blocks * size;
    c->kernels->received(&u, p->n_k - u.first_key < size ? p->n_k - u.first_key : size, c->spans, c->n_spans,
                         c->sums + sums_bytes(c, head, 0), scratch_of(c, worker));
}

static void take_pieces(void *owner, sdpa_arena *arena) {
    matrix_call *c = owner;
    c->spans = sdpa_take(arena, (size_t)c->n_spans * sizeof *c->spans);
    c->scratch = sdpa_take(arena, (size_t)c->n_workers * c->scratch_bytes);
    c->sums = sdpa_take(arena, sums_bytes(c, c->n, 0));
}

static int workers_for(const matrix_call *c, int64_t n_heads, int64_t n_units) {
    const sdpa_problem *p = c->problem;
    const double pairs = (double)n_heads * (double)c->n_lanes * (double)p->n_k;
    return sdpa_workers_for(p, SDPA_PASS_WEIGHTS, pairs, n_units);
}

static sdpa_status plan(matrix_call *c, const sdpa_problem *p) {
    *c = (matrix_call){.problem = p, .kernels = sdpa_kernels_for(p->dtype)};
    c->n_heads = p->heads.index ? p->heads.n : p->n_head;
    c->n_blocks = (p->n_k + sdpa_key_block(p) - 1) / sdpa_key_block(p);
    return cut_spans(p, c->kernels->lanes, NULL, &c->n_spans, &c->n_lanes);
}

static sdpa_status write_spans(matrix_call *c) {
    return cut_spans(c->problem, c->kernels->lanes, c->spans, &c->n_spans, &c->n_lanes);
}

sdpa_status sdpa_attention_weights(const sdpa_problem *p) {
    sdpa_problem_check(p, SDPA_PASS_WEIGHTS);
    matrix_call c;
    sdpa_status status = plan(&c, p);
    const int64_t n_heads = p->n_batch * c.n_heads, n_units = n_heads * c.n_spans;
    if (n_units == 0 || status != SDPA_OK) return status;
    c.n_workers = workers_for(&c, n_heads, n_units);
    c.scratch_bytes = c.kernels->pass[SDPA_PASS_WEIGHTS].bytes(p);
    void *memory = sdpa_alloc_pieces(take_pieces, &c);
    if (!memory) return SDPA_NO_MEMORY;
    status = write_spans(&c);
    if (status == SDPA_OK) status = sdpa_parallel_for(n_units, c.n_workers, weights_span, &c, p->interrupted);
    sdpa_free(memory);
    return status;
}

sdpa_tile sdpa_attention_tile(const sdpa_problem *p) { return sdpa_kernels_for(p->dtype)->tile(p); }

typedef struct pattern_call {
    const sdpa_problem *problem;
    const sdpa_unit_kernel *kernel;
    void *scratch;
} pattern_call;

static void pattern_unit(void *context, int64_t index, int worker, sdpa_run *run) {
    (void)worker;
    const pattern_call *c = context;
    sdpa_unit u;
    sdpa_unit_set(&u, c->problem, index, run);
    c->kernel->run(&u, c->scratch);
}

sdpa_status sdpa_attention_pattern(const sdpa_problem *p) {
    pattern_call c = {.problem = p, .kernel = &sdpa_kernels_for(p->dtype)->pattern};
    const int64_t n_units = p->n_batch * p->n_head * sdpa_units(p);
    if (n_units == 0 || p->n_k == 0) return SDPA_OK;
    c.scratch = sdpa_alloc(c.kernel->bytes(p));
    if (!c.scratch) return SDPA_NO_MEMORY;
    const sdpa_status status = sdpa_parallel_for(n_units, 1, pattern_unit, &c, p->interrupted);
    sdpa_free(c.scratch);
    return status;
}

/* Heads in flight: enough units to keep all threads busy in both steps, but at most this many lanes of sums. */
#define ENOUGH_UNITS 64
#define MOST_LANES (1 << 18)

static int64_t heads_in_flight(const matrix_call *c, int64_t n_heads) {
    const int64_t units = c->n_spans < c->n_blocks ? c->n_spans : c->n_blocks,
                  enough = units ? (ENOUGH_UNITS + units - 1) / units : ENOUGH_UNITS,
                  most = c->n_lanes ? MOST_LANES / c->n_lanes : enough, n = enough < most ? enough : most;
    return n < 1 ? 1 : n < n_heads ? n : n_heads;
}

static sdpa_status received(const sdpa_problem *p) {
    matrix_call c;
    sdpa_status status = plan(&c, p);
    const int64_t n_heads = p->n_batch * c.n_heads;
    if (n_heads * c.n_blocks == 0 || status != SDPA_OK) return status;
    c.n = heads_in_flight(&c, n_heads);
    const int64_t n_units = c.n * (c.n_spans > c.n_blocks ? c.n_spans : c.n_blocks);
    c.n_workers = workers_for(&c, c.n, n_units);
    c.scratch_bytes = c.kernels->received_bytes(p);
    void *memory = sdpa_alloc_pieces(take_pieces, &c);
    if (!memory) return SDPA_NO_MEMORY;
    status = write_spans(&c);
    for (; c.first < n_heads && status == SDPA_OK; c.first += c.n) {
        const int64_t n = n_heads - c.first < c.n ? n_heads - c.first : c.n;
        status = sdpa_parallel_for(n * c.n_spans, c.n_workers, sums_span, &c, p->interrupted);
        if (status != SDPA_OK) break;
        status = sdpa_parallel_for(n * c.n_blocks, c.n_workers, received_block, &c, p->interrupted);
    }
    sdpa_free(memory);
    return status;
}

/* The chosen queries by sequence, in the order in which they were chosen; those of padding are left out. */
typedef struct chosen_rows {
    const sdpa_problem *problem;
    int64_t *first; /* (n_sequences + 1): sequence s has index[first[s]] .. index[first[s+1]-1] */
    int64_t *index; /* (queries.n), counted from the first query of the sequence */
} chosen_rows;

static void take_rows(void *owner, sdpa_arena *arena) {
    chosen_rows *c = owner;
    c->first = sdpa_take(arena, (size_t)(c->problem->n_sequences + 1) * sizeof *c->first);
    c->index = sdpa_take(arena, (size_t)c->problem->queries.n * sizeof *c->index);
}

/* The sequence of a query. */
static int64_t sequence_of(const sdpa_problem *p, int64_t row) {
    int64_t low = 0, high = p->n_sequences; /* low starts at or before the row, high after it */
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        *(p->cu_q[middle] <= row ? &low : &high) = middle;
    }
    return low;
}

/* Sorts by counting: first[s + 1] is where the next row of s goes, until it is where those of s end. */
static sdpa_status sort_rows(const chosen_rows *c) {
    const sdpa_problem *p = c->problem;
    const int64_t *row = p->queries.index, n = p->queries.n, n_rows = p->cu_q[p->n_sequences];
    memset(c->first, 0, (size_t)(p->n_sequences + 1) * sizeof *c->first);
    for (int64_t i = 0; i < n; i++) {
        if (sdpa_poll(p->interrupted)) return SDPA_INTERRUPTED;
        const int64_t s = sequence_of(p, row[i]);
        if (s + 2 <= p->n_sequences && row[i] < n_rows) c->first[s + 2]++;
    }
    for (int64_t s = 1; s <= p->n_sequences; s++) c->first[s] += c->first[s - 1];
    for (int64_t i = 0; i < n; i++) {
        if (sdpa_poll(p->interrupted)) return SDPA_INTERRUPTED;
        const int64_t s = sequence_of(p, row[i]);
        if (row[i] < n_rows) c->index[c->first[s + 1]++] = row[i] - p->cu_q[s];
    }
    return SDPA_OK;
}

/* Computes one sequence after the other. `rows` may be NULL: all queries. */
static sdpa_status received_sequences(const sdpa_problem *p, const chosen_rows *rows) {
    sdpa_status status = SDPA_OK;
    for (int64_t s = 0; s < p->n_sequences && status == SDPA_OK; s++) {
        if (sdpa_poll(p->interrupted)) return SDPA_INTERRUPTED;
        sdpa_problem one;
        sdpa_sequence_set(p, s, &one);
        one.o.data = p->o.data + p->cu_k[s] * p->o.row; /* its rows are those of the keys */
        if (rows) {
            one.queries =
                (sdpa_choice){.index = rows->index + rows->first[s], .n = rows->first[s + 1] - rows->first[s]};
        }
        status = received(&one);
    }
    return status;
}

static sdpa_status received_packed(const sdpa_problem *p) {
    sdpa_sequences_pad(p, SDPA_PASS_RECEIVED);
    if (!p->queries.index) return received_sequences(p, NULL);
    chosen_rows rows = {.problem = p};
    void *memory = sdpa_alloc_pieces(take_rows, &rows);
    if (!memory) return SDPA_NO_MEMORY;
    sdpa_status status = sort_rows(&rows);
    if (status == SDPA_OK) status = received_sequences(p, &rows);
    sdpa_free(memory);
    return status;
}

sdpa_status sdpa_attention_received(const sdpa_problem *p) {
    sdpa_problem_check(p, SDPA_PASS_RECEIVED);
    return p->cu_q ? received_packed(p) : received(p);
}
