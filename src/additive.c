/* Additive attention (Bahdanau et al. 2015): the drivers of attention, run on other scores.
 *
 * First each token is projected once, q w_query + bias and k w_key, and the exponentials of its projection are taken
 * (kernels/additive.h); after the backward, the gradients of the projections are turned into those of q, k and the
 * weights. These maps cost O(L d h), little beside the O(L^2 h) of the pairs, and run in float64 for every dtype, so
 * that only the scores add rounding errors. Extra memory: 2 h numbers of the compute type per token, as many for their
 * gradients, and a float64 copy of the weights. A unit is a block of tokens, or a block of rows of a weight's gradient,
 * which runs over all tokens: every sum has the same order for any number of workers. */
#include <math.h>
#include <string.h>

#include "drivers.h"
#include "groups.h"
#include "runtime/memory.h"
#include "runtime/parallel.h"
#include "unit.h"

/* Tokens or features per unit, a multiple of every tile's height. Rows of float64 are padded to the widest vectors. */
enum { BLOCK = 48, WIDEST = 8 };

/* Queries or keys. */
typedef struct side {
    sdpa_tensor x, dx; /* (n, d) per matrix; dx may be absent */
    sdpa_matrix w, dw; /* (d, n_hidden); dw may be absent */
    sdpa_tensor z, dz; /* (n, 2 channels): projections and exponentials, and the kernel's sums; dz may be absent */
    int64_t z_batch[SDPA_MAX_AXES], dz_batch[SDPA_MAX_AXES]; /* strides of z and dz */
    sdpa_grid own, down; /* the matrices of z and dz, which lie one after the other */
    const sdpa_matrix *bias;
    double *weights; /* (d, w_row) */
    int64_t n, d, d_row;
    size_t z_bytes, dz_bytes;
} side;

typedef struct additive_call {
    const sdpa_problem *problem;
    const sdpa_additive *additive;
    const sdpa_isa *isa;
    side sides[2];
    int64_t channels; /* n_hidden rounded up to an even number */
    int64_t w_row;
    int64_t z_row; /* bytes */
    sdpa_dtype type;
    int64_t size;    /* bytes of an element */
    char *score;     /* w_score, of the compute type, with the sign of the scale */
    double *factors; /* per channel: factor of the kernel's sums of -dS r (1 - r) */
    char *scratch;
    size_t scratch_bytes; /* per worker */
    void *memory;
} additive_call;

static int64_t round_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/* Elements between rows of n float64, in whole vectors. Rows a multiple of 512 bytes apart would crowd into a few sets
 * of the cache. */
static int64_t padded_row(int64_t n) {
    n = round_to(n, WIDEST);
    return n % 64 ? n : n + WIDEST;
}

static int64_t blocks_of(int64_t n) { return (n + BLOCK - 1) / BLOCK; }

/* Loads n rows of d elements as float64. */
static void load_rows(const additive_call *c, double *dst, int64_t dst_row, const sdpa_matrix *m, int64_t first,
                      int64_t n, int64_t column, int64_t d) {
    for (int64_t r = 0; r < n; r++) {
        c->isa->f64->load(dst + r * dst_row, m->data + (first + r) * m->row + column * m->col, d, m->col, m->dtype,
                          m->swapped);
    }
}

/* A worker's scratch: two blocks of BLOCK rows of any width, and one for BLOCK x BLOCK numbers or for a line. */
typedef struct scratch {
    double *in, *out, *line;
} scratch;

static scratch scratch_layout(const additive_call *c, sdpa_arena *a) {
    int64_t row = c->w_row;
    for (int s = 0; s < 2; s++) row = c->sides[s].d_row > row ? c->sides[s].d_row : row;
    if (row < BLOCK) row = BLOCK;
    scratch w;
    w.in = sdpa_take(a, sizeof(double) * (size_t)(BLOCK * row));
    w.out = sdpa_take(a, sizeof(double) * (size_t)(BLOCK * row));
    w.line = sdpa_take(a, sizeof(double) * (size_t)(2 * c->w_row > BLOCK * BLOCK ? 2 * c->w_row : BLOCK * BLOCK));
    return w;
}

static scratch scratch_of(const additive_call *c, int worker) {
    sdpa_arena arena = {c->scratch + (size_t)worker * c->scratch_bytes, 0};
    return scratch_layout(c, &arena);
}

/* ------------------------------------------------------------------------------------ memory */

/* Gives t the layout of z or dz, with as many matrices as `like` has; returns the number of bytes it needs. */
static size_t own_rows(additive_call *c, sdpa_tensor *t, int64_t *batch, const sdpa_tensor *like, int64_t n,
                       sdpa_grid *own) {
    *t = *like;
    t->row = t->col = 1;
    t->dtype = c->type;
    t->swapped = false;
    return (size_t)sdpa_tensor_compact(c->problem, t, batch, n, 2 * c->channels, c->size, own);
}

static bool is_present(const sdpa_tensor *t, int64_t elements) { return t->data && elements > 0; }

static void take_pieces(void *owner, sdpa_arena *arena) {
    additive_call *c = owner;
    c->score = sdpa_take(arena, sizeof(double) * (size_t)(c->w_row + WIDEST));
    c->factors = sdpa_take(arena, sizeof(double) * (size_t)c->w_row);
    c->scratch = sdpa_take(arena, c->scratch_bytes * (size_t)c->problem->n_workers);
    for (int i = 0; i < 2; i++) {
        side *s = &c->sides[i];
        s->z.data = sdpa_take(arena, s->z_bytes);
        s->dz.data = s->dz_bytes ? sdpa_take(arena, s->dz_bytes) : NULL;
        s->weights = sdpa_take(arena, sizeof(double) * (size_t)(round_to(s->d, BLOCK) * c->w_row));
    }
}

/* Loads the weights in float64, and computes what depends on w_score and the scale. */
static void load_weights(additive_call *c) {
    const sdpa_problem *p = c->problem;
    const sdpa_additive *a = c->additive;
    memset(c->factors, 0, sizeof(double) * (size_t)c->w_row);
    load_rows(c, c->factors, 0, &a->w_score, 0, 1, 0, a->n_hidden);
    for (int64_t h = 0; h < c->channels && p->scale < 0; h++) c->factors[h] *= -1;
    c->isa->f64->store(c->score, c->factors, c->channels, c->size, c->type);
    for (int64_t h = 0; h < c->channels; h++) c->factors[h] *= -4 * fabs(p->scale);
    for (int i = 0; i < 2; i++) {
        side *s = &c->sides[i];
        memset(s->weights, 0, sizeof(double) * (size_t)(s->d * c->w_row));
        load_rows(c, s->weights, c->w_row, &s->w, 0, s->d, 0, a->n_hidden);
    }
}

/* Sets sizes, takes memory and loads the weights. `backward`: whether gradients are wanted. */
static sdpa_status begin(additive_call *c, const sdpa_problem *p, const sdpa_additive *a, bool backward) {
    *c = (additive_call){.problem = p, .additive = a, .isa = sdpa_isa_get()};
    c->channels = round_to(a->n_hidden, 2);
    c->w_row = padded_row(c->channels);
    c->type = p->dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32;
    c->size = sdpa_size_of(c->type);
    c->z_row = 2 * c->channels * c->size;
    c->sides[0] = (side){.x = p->q, .dx = p->dq, .w = a->w_query, .dw = a->dw_query, .n = p->n_q, .d = a->d_q};
    c->sides[1] = (side){.x = p->k, .dx = p->dk, .w = a->w_key, .dw = a->dw_key, .n = p->n_k, .d = p->d_k};
    if (a->bias.data) c->sides[0].bias = &a->bias;
    for (int i = 0; i < 2; i++) c->sides[i].d_row = padded_row(c->sides[i].d);

    sdpa_arena none = {NULL, 0};
    scratch_layout(c, &none);
    c->scratch_bytes = none.used;
    for (int i = 0; i < 2; i++) {
        side *s = &c->sides[i];
        const bool sums = i == 0 && (a->dbias.data || a->dw_score.data);
        if (!is_present(&s->dx, s->n * s->d)) s->dx.data = NULL;
        s->z_bytes = own_rows(c, &s->z, s->z_batch, &s->x, s->n, &s->own);
        s->dz_bytes = own_rows(c, &s->dz, s->dz_batch, s->dx.data ? &s->dx : &s->x, s->n, &s->down);
        if (!backward || !(s->dx.data || s->dw.data || sums)) s->dz_bytes = 0;
    }
    c->memory = sdpa_alloc_pieces(take_pieces, c);
    if (!c->memory) return SDPA_NO_MEMORY;
    load_weights(c);
    sdpa_status status = SDPA_OK;
    for (int i = 0; i < 2 && status == SDPA_OK; i++) {
        const side *s = &c->sides[i];
        if (s->dz.data) status = sdpa_parallel_zero(s->dz.data, s->dz_bytes, p->n_workers, p->interrupted);
    }
    return status;
}

static int workers_for(const additive_call *c, int64_t n_units) {
    double work = 0;
    for (int i = 0; i < 2; i++) {
        const side *s = &c->sides[i];
        work += (double)s->own.size * (double)s->n * (double)s->d * (double)c->channels / SDPA_PORTION;
    }
    return sdpa_workers(c->problem->n_workers, n_units, work);
}

/* ------------------------------------------------------------------------------------ projections */

/* Computes z of a block of tokens. */
static void project(void *context, int64_t index, int worker, sdpa_run *run) {
    (void)run;
    const additive_call *c = context;
    const scratch w = scratch_of(c, worker);
    const side *s = &c->sides[0];
    const int64_t first = s->own.size * blocks_of(s->n);
    if (index >= first) {
        s++;
        index -= first;
    }
    int64_t batch = 0, head = 0, matrix = index / blocks_of(s->n), i0 = index % blocks_of(s->n) * BLOCK;
    const int64_t n = s->n - i0 < BLOCK ? s->n - i0 : BLOCK, hidden = c->additive->n_hidden;
    sdpa_grid_locate(&s->own, matrix, &batch, &head);
    const sdpa_matrix x = sdpa_matrix_at(c->problem, &s->x, batch, head);
    load_rows(c, w.in, s->d_row, &x, i0, n, 0, s->d);
    memset(w.out, 0, sizeof(double) * (size_t)(n * c->w_row));
    if (s->bias) {
        const sdpa_matrix row = {s->bias->data, 0, s->bias->col, s->bias->dtype, s->bias->swapped};
        load_rows(c, w.out, c->w_row, &row, 0, n, 0, hidden);
    }
    c->isa->f64->product(w.out, c->w_row, w.in, s->d_row, false, s->weights, c->w_row, n, c->channels, s->d);
    for (int64_t i = 0; i < n; i++) {
        char *z = s->z.data + (matrix * s->n + i0 + i) * c->z_row;
        c->isa->f64->exponentials(w.line, w.out + i * c->w_row, c->channels, c->type == SDPA_F64 ? 1020 : 125);
        c->isa->f64->store(z, w.out + i * c->w_row, c->channels, c->size, c->type);
        c->isa->f64->store(z + c->channels * c->size, w.line, c->channels, c->size, c->type);
    }
}

/* Projects all tokens; *pairs is p with projections in place of q and k. */
static sdpa_status project_all(additive_call *c, sdpa_problem *pairs) {
    const sdpa_problem *p = c->problem;
    int64_t n_units = 0;
    for (int i = 0; i < 2; i++) n_units += c->sides[i].own.size * blocks_of(c->sides[i].n);
    *pairs = *p;
    pairs->q = c->sides[0].z;
    pairs->k = c->sides[1].z;
    pairs->dq = c->sides[0].dz;
    pairs->dk = c->sides[1].dz;
    pairs->scores = SDPA_ADDITIVE;
    pairs->channels = c->channels;
    pairs->d_k = 2 * c->channels;
    pairs->w_score = c->score;
    pairs->scale = fabs(p->scale);
    pairs->features = sdpa_problem_features(pairs);
    return sdpa_parallel_for(n_units, workers_for(c, n_units), project, c, p->interrupted);
}

/* sdpa_problem_check assumes that q and k have the same width: here it is given the smaller of the two. */
static void check(const sdpa_problem *p, const sdpa_additive *a, sdpa_pass pass) {
#ifdef SDPA_ASSERT
    sdpa_problem narrow = *p;
    if (a->d_q < p->d_k) narrow.d_k = a->d_q;
    sdpa_problem_check(&narrow, pass);
#else
    (void)p, (void)a, (void)pass;
#endif
}

sdpa_status sdpa_additive_forward(const sdpa_problem *p, const sdpa_additive *a) {
    check(p, a, SDPA_PASS_FORWARD);
    if (!sdpa_has_queries(p)) return SDPA_OK;
    additive_call call;
    sdpa_problem pairs;
    sdpa_status status = begin(&call, p, a, false);
    if (status == SDPA_OK) status = project_all(&call, &pairs);
    if (status == SDPA_OK) status = sdpa_attention_forward(&pairs);
    sdpa_free(call.memory);
    return status;
}

/* ------------------------------------------------------------------------------------ gradients */

static sdpa_matrix sums_of(const additive_call *c, const side *s) {
    return (sdpa_matrix){s->dz.data, c->z_row, c->size, c->type, false};
}

/* Clears the tokens whose gradients dz are 0: nobody sees them, and they may hold NaN. */
static void clear_unseen(double *tokens, int64_t d, const double *z, int64_t z_row, int64_t channels, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        bool seen = false;
        for (int64_t h = 0; h < channels && !seen; h++) seen = z[i * z_row + h] != 0;
        if (!seen) memset(tokens + i * BLOCK, 0, sizeof(double) * (size_t)d);
    }
}

/* BLOCK rows of dW = factors * x^T dz over all tokens. */
static void weight_gradient(const additive_call *c, const side *s, int64_t d0, const scratch *w, sdpa_run *run) {
    const int64_t d = s->d - d0 < BLOCK ? s->d - d0 : BLOCK;
    const sdpa_matrix sums = sums_of(c, s);
    double *tokens = w->line, *total = w->out, *z = w->in;
    memset(total, 0, sizeof(double) * (size_t)(d * c->w_row));
    for (int64_t m = 0; m < s->down.size; m++) {
        int64_t batch = 0, head = 0;
        sdpa_grid_locate(&s->down, m, &batch, &head);
        const sdpa_matrix x = sdpa_matrix_at(c->problem, &s->x, batch, head);
        for (int64_t i0 = 0; i0 < s->n && !sdpa_run_stopped(run); i0 += BLOCK) {
            const int64_t n = s->n - i0 < BLOCK ? s->n - i0 : BLOCK;
            load_rows(c, tokens, BLOCK, &x, i0, n, d0, d);
            load_rows(c, z, c->w_row, &sums, m * s->n + i0, n, 0, c->channels);
            clear_unseen(tokens, d, z, c->w_row, c->channels, n);
            c->isa->f64->product(total, c->w_row, tokens, BLOCK, true, z, c->w_row, d, c->channels, n);
        }
    }
    for (int64_t i = 0; i < d; i++) {
        for (int64_t h = 0; h < c->channels; h++) total[i * c->w_row + h] *= c->factors[h];
        c->isa->f64->store(s->dw.data + (d0 + i) * s->dw.row, total + i * c->w_row, c->additive->n_hidden, s->dw.col,
                           s->dw.dtype);
    }
}

/* dx of a block of tokens, computed as its transpose, W (factors * dz)^T. */
static void token_gradient(const additive_call *c, const side *s, int64_t index, const scratch *w) {
    int64_t batch = 0, head = 0, matrix = index / blocks_of(s->n), i0 = index % blocks_of(s->n) * BLOCK;
    const int64_t n = s->n - i0 < BLOCK ? s->n - i0 : BLOCK;
    const sdpa_matrix sums = sums_of(c, s);
    sdpa_grid_locate(&s->down, matrix, &batch, &head);
    const sdpa_matrix dx = sdpa_matrix_at(c->problem, &s->dx, batch, head);
    memset(w->in, 0, sizeof(double) * (size_t)(c->channels * BLOCK));
    for (int64_t i = 0; i < n; i++) {
        load_rows(c, w->line, 0, &sums, matrix * s->n + i0 + i, 1, 0, c->channels);
        for (int64_t h = 0; h < c->channels; h++) w->in[h * BLOCK + i] = c->factors[h] * w->line[h];
    }
    memset(w->out, 0, sizeof(double) * (size_t)(s->d * BLOCK));
    c->isa->f64->product(w->out, BLOCK, s->weights, c->w_row, false, w->in, BLOCK, s->d, n, c->channels);
    for (int64_t x = 0; x < s->d; x++) {
        c->isa->f64->store(dx.data + i0 * dx.row + x * dx.col, w->out + x * BLOCK, n, dx.row, dx.dtype);
    }
}

/* dbias and dw_score: column sums over the queries. */
static void vector_gradients(const additive_call *c, const scratch *w, sdpa_run *run) {
    const side *s = &c->sides[0];
    const sdpa_additive *a = c->additive;
    const sdpa_matrix sums = sums_of(c, s);
    double *total = w->out, *line = w->line;
    memset(total, 0, sizeof(double) * (size_t)(2 * c->channels));
    for (int64_t i = 0; i < s->down.size * s->n; i++) {
        if (i % BLOCK == 0 && sdpa_run_stopped(run)) return;
        load_rows(c, line, 0, &sums, i, 1, 0, 2 * c->channels);
        for (int64_t h = 0; h < 2 * c->channels; h++) total[h] += line[h];
    }
    for (int64_t h = 0; h < c->channels; h++) {
        total[h] *= c->factors[h];
        total[c->channels + h] *= c->problem->scale;
    }
    if (a->dbias.data) c->isa->f64->store(a->dbias.data, total, a->n_hidden, a->dbias.col, a->dbias.dtype);
    if (a->dw_score.data) {
        c->isa->f64->store(a->dw_score.data, total + c->channels, a->n_hidden, a->dw_score.col, a->dw_score.dtype);
    }
}

/* The number of units of `finish` by kind: blocks of rows of dW (0: w_query, 1: w_key), blocks of tokens (2: queries,
 * 3: keys), and 4, the vectors. */
static int64_t units_of(const additive_call *c, int kind) {
    const side *s = &c->sides[kind % 2];
    if (kind == 4) return c->additive->dbias.data || c->additive->dw_score.data;
    if (kind < 2) return s->dw.data ? blocks_of(s->d) : 0;
    return s->dx.data ? s->down.size * blocks_of(s->n) : 0;
}

static void finish(void *context, int64_t index, int worker, sdpa_run *run) {
    const additive_call *c = context;
    const scratch w = scratch_of(c, worker);
    int kind = 0;
    for (; index >= units_of(c, kind); kind++) index -= units_of(c, kind);
    const side *s = &c->sides[kind % 2];
    if (kind == 4) {
        vector_gradients(c, &w, run);
    } else if (kind < 2) {
        weight_gradient(c, s, index * BLOCK, &w, run);
    } else {
        token_gradient(c, s, index, &w);
    }
}

sdpa_status sdpa_additive_backward(const sdpa_problem *p, const sdpa_additive *a) {
    check(p, a, SDPA_PASS_BACKWARD);
    if (!sdpa_has_queries(p)) return SDPA_OK;
    additive_call call;
    sdpa_problem pairs;
    sdpa_status status = begin(&call, p, a, true);
    if (status == SDPA_OK) status = project_all(&call, &pairs);
    if (status == SDPA_OK) status = sdpa_attention_backward(&pairs);
    if (status == SDPA_OK) {
        int64_t n_units = 0;
        for (int kind = 0; kind < 5; kind++) n_units += units_of(&call, kind);
        status = sdpa_parallel_for(n_units, workers_for(&call, n_units), finish, &call, p->interrupted);
    }
    sdpa_free(call.memory);
    return status;
}
