#include "xla.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "drivers.h"
#include "runtime/memory.h"
#include "runtime/parallel.h"
#include "runtime/rounding.h"

typedef struct xla_call {
    const sdpa_xla_frame *frame;
    const int64_t *integers, *lead;
    int64_t n_lead; /* batch axes and heads */
    sdpa_problem problem;
    int64_t axis[SDPA_MAX_AXES], batch[SDPA_XLA_N_OPERANDS + SDPA_XLA_N_RESULTS][SDPA_MAX_AXES]; /* the problem's */
    int n_tensors;                                                                               /* that are set */
    int64_t *copies[4]; /* lengths, offsets, cu_seqlens of queries and keys as I64, owned */
} xla_call;

/* The tensor that a buffer fills, and the number of the buffer's axes after the heads. */
typedef struct slot {
    size_t member;
    int n_inner;
} slot;

#define SLOT(name, tensor, n_inner) [SDPA_XLA_##name] = {offsetof(sdpa_problem, tensor), n_inner},
#define TANGENT(name, tensor, n_inner) [SDPA_XLA_##name##_t] = {offsetof(sdpa_problem, tensor##_t), n_inner},
static const slot operand_slots[SDPA_XLA_N_OPERANDS] = {SDPA_XLA_INPUTS(SLOT) SDPA_XLA_ROWS(SLOT)
                                                            SDPA_DIFFERENTIABLE(TANGENT)};
#undef TANGENT
#undef SLOT

#define OUTPUT(name, tensor, n_inner) [SDPA_XLA_RESULT_##name] = {offsetof(sdpa_problem, tensor), n_inner},
#define GRADIENT(name, tensor, n_inner) [SDPA_XLA_RESULT_##name] = {offsetof(sdpa_problem, d##tensor), n_inner},
static const slot result_slots[SDPA_XLA_N_RESULTS] = {SDPA_XLA_OUTPUTS(OUTPUT) SDPA_DIFFERENTIABLE(GRADIENT)};
#undef GRADIENT
#undef OUTPUT

static sdpa_tensor *tensor_at(sdpa_problem *p, const slot *s) { return (sdpa_tensor *)((char *)p + s->member); }

/* ------------------------------------------------------------------------------------ errors */

__attribute__((format(printf, 3, 4))) static sdpa_xla_error *fail(const xla_call *c, enum sdpa_xla_code code,
                                                                  const char *format, ...) {
    char text[200];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    sdpa_xla_message message = {sizeof message, NULL, text, (int)code};
    return c->frame->api->make_error(&message);
}

static sdpa_xla_error *malformed(const xla_call *c, const char *what) {
    return fail(c, SDPA_XLA_INVALID_ARGUMENT, "sdpa: unexpected %s; do sdpa.interop.jax and sdpa._core match?", what);
}

/* ------------------------------------------------------------------------------------ buffers */

static int64_t size_of(const sdpa_xla_buffer *b) {
    int64_t size = 1;
    for (int64_t i = 0; i < b->rank; i++) size *= b->dims[i];
    return size;
}

static bool read_type(int type, sdpa_dtype *dtype, int64_t *bytes) {
    switch (type) {
    case SDPA_XLA_PRED:
        return *dtype = SDPA_BOOL, *bytes = 1, true;
    case SDPA_XLA_F16:
        return *dtype = SDPA_F16, *bytes = 2, true;
    case SDPA_XLA_BF16:
        return *dtype = SDPA_BF16, *bytes = 2, true;
    case SDPA_XLA_F32:
        return *dtype = SDPA_F32, *bytes = 4, true;
    case SDPA_XLA_F64:
        return *dtype = SDPA_F64, *bytes = 8, true;
    default:
        return false;
    }
}

/* Rows and columns of a tensor of the problem. */
static void find_sizes(const sdpa_problem *p, const sdpa_tensor *t, int64_t sizes[2]) {
#define SIZES(name, rows, columns)                                                                                     \
    if (t == &p->name) sizes[0] = rows, sizes[1] = columns;
    SDPA_MATRICES(SIZES)
    SDPA_VECTORS(SIZES)
#undef SIZES
}

/* XLA may pass NULL for a buffer without elements, which would mean an absent tensor. */
static char *data_of(const sdpa_xla_buffer *b) {
    static double nothing;
    return b->data ? b->data : (char *)&nothing;
}

static bool is_mask(const sdpa_problem *p, const sdpa_tensor *t) {
    return t == &p->mask || t == &p->where || t == &p->mask_t || t == &p->dmask;
}

/* Sets the strides of the batch axes. False unless every size of the buffer is the call's or 1. strides[i] belongs to
 * axis i. */
static bool set_batch(xla_call *c, sdpa_tensor *t, const sdpa_xla_buffer *b, const int64_t *strides) {
    int64_t *batch = c->batch[c->n_tensors++];
    int n = 0;
    t->batch = batch;
    for (int64_t i = 0; i < c->n_lead - 1; i++) {
        if (b->dims[i] != 1 && b->dims[i] != c->lead[i]) return false;
        if (c->lead[i] != 1) batch[n++] = b->dims[i] == 1 ? 0 : strides[i];
    }
    return true;
}

/* Points t at a buffer whose batch axes are followed by heads and s->n_inner axes. */
static bool set_tensor(xla_call *c, sdpa_tensor *t, const sdpa_xla_buffer *b, const slot *s) {
    const sdpa_problem *p = &c->problem;
    const bool broadcasts = is_mask(p, t);
    int64_t strides[SDPA_MAX_AXES + 3], bytes, sizes[2] = {1, 1}, head = c->n_lead - 1, row = c->n_lead;
    if (b->rank != c->n_lead + s->n_inner || !read_type(b->type, &t->dtype, &bytes)) return false;
    for (int64_t i = b->rank; i-- > 0; bytes *= b->dims[i]) strides[i] = bytes;
    if (c->integers[SDPA_XLA_rows_first] && s->n_inner == 2 && !broadcasts) row = head++;

    t->data = data_of(b);
    t->group = 1;
    find_sizes(p, t, sizes);
    for (int i = 0; i < s->n_inner; i++) {
        const int64_t axis = i ? c->n_lead + 1 : row, n = b->dims[axis];
        if (n != sizes[i] && !(broadcasts && n == 1)) return false;
        *(i ? &t->col : &t->row) = broadcasts && n == 1 ? 0 : strides[axis];
    }
    const int64_t n_heads = b->dims[head];
    if (n_heads != p->n_head && (n_heads == 0 || p->n_head % n_heads)) return false;
    if (n_heads == p->n_head || n_heads > 1) t->head = strides[head];
    if (n_heads != p->n_head && n_heads > 1) t->group = p->n_head / n_heads;
    return set_batch(c, t, b, strides);
}

/* Sets *copy to the integers of a buffer, converted to I64. The call owns the copy. */
static sdpa_xla_error *copy_integers(const xla_call *c, const sdpa_xla_buffer *b, int64_t **copy) {
    const int64_t n = size_of(b);
    if (b->type != SDPA_XLA_S32 && b->type != SDPA_XLA_S64) return malformed(c, "type of integers");
    *copy = sdpa_alloc((size_t)n * sizeof **copy);
    if (!*copy) return fail(c, SDPA_XLA_RESOURCE_EXHAUSTED, "sdpa: no memory");
    for (int64_t i = 0; i < n; i++) {
        (*copy)[i] = b->type == SDPA_XLA_S64 ? ((const int64_t *)b->data)[i] : ((const int32_t *)b->data)[i];
    }
    return NULL;
}

/* Sets *cu to the first rows of packed sequences, among `total` rows. */
static sdpa_xla_error *set_cu_seqlens(xla_call *c, const char *name, const sdpa_xla_buffer *b, int64_t total,
                                      const int64_t **cu, int64_t **copy) {
    if (b->rank != 1 || b->dims[0] == 0 || c->n_lead != 1) return malformed(c, "shape of cu_seqlens");
    sdpa_xla_error *error = copy_integers(c, b, copy);
    if (error) return error;
    const int64_t n = b->dims[0] - 1;
    if (c->problem.cu_q && n != c->problem.n_sequences) return malformed(c, "number of sequences");
    bool rises = (*copy)[0] == 0 && (*copy)[n] <= total;
    for (int64_t i = 0; i < n; i++) rises &= (*copy)[i] <= (*copy)[i + 1];
    if (!rises) {
        return fail(c, SDPA_XLA_INVALID_ARGUMENT,
                    "%s: expected elements from 0 to the number of rows, %lld, that do not decrease", name,
                    (long long)total);
    }
    *cu = *copy;
    c->problem.n_sequences = n;
    return NULL;
}

/* Sets the strides of a tensor with one integer per batch entry or, if sequences are packed, per sequence. */
static bool set_entries(xla_call *c, sdpa_tensor *t, const sdpa_xla_buffer *b) {
    int64_t strides[SDPA_MAX_AXES + 3], bytes = 8;
    if (c->problem.cu_q) {
        t->row = bytes;
        return b->rank == 1 && b->dims[0] == c->problem.n_sequences;
    }
    if (b->rank != c->n_lead - 1) return false;
    for (int64_t i = b->rank; i-- > 0; bytes *= b->dims[i]) strides[i] = bytes;
    return set_batch(c, t, b, strides);
}

static sdpa_xla_error *set_integers(xla_call *c, sdpa_tensor *t, const sdpa_xla_buffer *b, int64_t **copy) {
    const sdpa_problem *p = &c->problem;
    if (!set_entries(c, t, b)) return malformed(c, "shape of lengths or offsets");
    sdpa_xla_error *error = copy_integers(c, b, copy);
    if (error) return error;
    t->data = (char *)*copy;
    t->dtype = SDPA_I64;
    t->group = 1;
    for (int64_t i = 0, n = size_of(b); i < n; i++) {
        if (t == &p->offset) {
            if ((*copy)[i] >= -SDPA_LARGEST_OFFSET && (*copy)[i] <= SDPA_LARGEST_OFFSET) continue;
            return fail(c, SDPA_XLA_INVALID_ARGUMENT, "query_offset: expected integers from -2^60 to 2^60, got %lld",
                        (long long)(*copy)[i]);
        }
        const int64_t n_k = p->cu_k ? p->cu_k[i + 1] - p->cu_k[i] : p->n_k;
        if ((*copy)[i] >= 0 && (*copy)[i] <= n_k) continue;
        return fail(c, SDPA_XLA_INVALID_ARGUMENT, "key_lengths: expected integers from 0 to Lk = %lld, got %lld",
                    (long long)n_k, (long long)(*copy)[i]);
    }
    return NULL;
}

/* ------------------------------------------------------------------------------------ the call */

/* The data of an attribute, an array of at least n elements; *size is their number. */
static const void *attribute(const sdpa_xla_frame *frame, const char *name, int type, size_t n, size_t *size) {
    const sdpa_xla_attributes *a = &frame->attributes;
    for (int64_t i = 0; i < a->size; i++) {
        const sdpa_xla_text *found = a->names[i];
        const sdpa_xla_array *array = a->items[i];
        if (found->size != strlen(name) || memcmp(found->data, name, found->size) != 0) continue;
        if (a->kinds[i] != SDPA_XLA_ARRAY || array->type != type || array->size < n) return NULL;
        *size = array->size;
        return array->data;
    }
    return NULL;
}

static bool read_attributes(xla_call *c) {
    sdpa_problem *p = &c->problem;
    size_t n_integers, n_numbers;
    c->integers = attribute(c->frame, "integers", SDPA_XLA_S64, SDPA_XLA_LEAD + 1, &n_integers);
    const double *numbers = attribute(c->frame, "numbers", SDPA_XLA_F64, SDPA_XLA_N_NUMBERS, &n_numbers);
    if (!c->integers || !numbers || n_integers - SDPA_XLA_LEAD > SDPA_MAX_AXES) return false;
    c->lead = c->integers + SDPA_XLA_LEAD;
    c->n_lead = (int64_t)n_integers - SDPA_XLA_LEAD;
    p->n_head = c->lead[c->n_lead - 1];
    p->n_batch = 1;
    p->axis = c->axis;
    for (int64_t i = 0; i < c->n_lead - 1; i++) {
        p->n_batch *= c->lead[i];
        if (c->lead[i] != 1) c->axis[p->n_axes++] = c->lead[i];
    }
#define READ(name) p->name = numbers[SDPA_XLA_NUMBER_##name];
    SDPA_NUMBERS(READ)
#undef READ
    p->has_lower = c->integers[SDPA_XLA_has_lower] != 0;
    p->lower = c->integers[SDPA_XLA_lower];
    p->has_upper = c->integers[SDPA_XLA_has_upper] != 0;
    p->upper = c->integers[SDPA_XLA_upper];
    p->invariant = c->integers[SDPA_XLA_invariant] != 0;
    const int64_t workers = c->integers[SDPA_XLA_workers];
    p->n_workers = workers > 0 ? (int)workers : workers < 0 ? sdpa_available_cpus() : sdpa_get_num_threads();
    return true;
}

/* The sizes and the type of the problem, from the operands that every call has. */
static bool read_sizes(xla_call *c) {
    sdpa_problem *p = &c->problem;
    const sdpa_xla_buffers *operands = &c->frame->operands;
    const int64_t all = (1 << SDPA_XLA_query) | (1 << SDPA_XLA_key) | (1 << SDPA_XLA_value);
    const int64_t row = c->n_lead - (c->integers[SDPA_XLA_rows_first] != 0), column = c->n_lead + 1;
    int64_t bytes;
    if ((c->integers[SDPA_XLA_OPERAND_BITS] & all) != all || operands->size < 3) return false;
    const sdpa_xla_buffer *q = operands->items[0], *k = operands->items[1], *v = operands->items[2];
    if (q->rank != c->n_lead + 2 || k->rank != q->rank || v->rank != q->rank) return false;
    p->n_q = q->dims[row];
    p->d_k = q->dims[column];
    p->n_k = k->dims[row];
    p->d_v = v->dims[column];
    if (!read_type(q->type, &p->dtype, &bytes)) return false;
    if (p->softcap > sdpa_largest(p->dtype)) p->softcap = 0;
    return true;
}

static sdpa_xla_error *read_operands(xla_call *c) {
    sdpa_problem *p = &c->problem;
    const sdpa_xla_buffers *operands = &c->frame->operands;
    int64_t next = 0;
    for (int i = 0; i < SDPA_XLA_N_OPERANDS; i++) {
        if (!(c->integers[SDPA_XLA_OPERAND_BITS] >> i & 1)) continue;
        if (next == operands->size) return malformed(c, "number of operands");
        const sdpa_xla_buffer *b = operands->items[next++];
        sdpa_xla_error *error = NULL;
        if (i == SDPA_XLA_seed) {
            if (b->type != SDPA_XLA_U32 || size_of(b) != 2) return malformed(c, "seed");
            const uint32_t *halves = b->data;
            p->seed = (uint64_t)halves[1] << 32 | halves[0];
        } else if (i == SDPA_XLA_cu_seqlens_q) {
            error = set_cu_seqlens(c, "cu_seqlens_q", b, p->n_q, &p->cu_q, &c->copies[2]);
        } else if (i == SDPA_XLA_cu_seqlens_k) {
            error = set_cu_seqlens(c, "cu_seqlens_k", b, p->n_k, &p->cu_k, &c->copies[3]);
        } else if (i == SDPA_XLA_key_lengths) {
            error = set_integers(c, &p->key_length, b, &c->copies[0]);
        } else if (i == SDPA_XLA_query_offset) {
            error = set_integers(c, &p->offset, b, &c->copies[1]);
        } else if (!set_tensor(c, tensor_at(p, &operand_slots[i]), b, &operand_slots[i])) {
            error = malformed(c, "type or shape of an operand");
        }
        if (error) return error;
    }
    if (p->where.data && !p->mask.data) { /* a lone one is a boolean mask */
        p->mask = p->where;
        p->where.data = NULL;
    }
    if (!p->cu_q != !p->cu_k || (p->cu_q && p->mask.data)) return malformed(c, "packed operands");
    return next == operands->size ? NULL : malformed(c, "number of operands");
}

static sdpa_xla_error *read_results(xla_call *c) {
    const sdpa_xla_buffers *results = &c->frame->results;
    int64_t next = 0;
    for (int i = 0; i < SDPA_XLA_N_RESULTS; i++) {
        if (!(c->integers[SDPA_XLA_RESULT_BITS] >> i & 1)) continue;
        if (next == results->size) return malformed(c, "number of results");
        const sdpa_xla_buffer *b = results->items[next++];
        sdpa_tensor *t = tensor_at(&c->problem, &result_slots[i]);
        if (!set_tensor(c, t, b, &result_slots[i])) return malformed(c, "type or shape of a result");
        const size_t bytes = (size_t)(sdpa_size_of(t->dtype) * size_of(b));
        if (i >= SDPA_XLA_RESULT_query && !sdpa_clears(&c->problem, t) &&
            sdpa_parallel_zero(t->data, bytes, c->problem.n_workers, NULL) != SDPA_OK) {
            return fail(c, SDPA_XLA_CANCELLED, "sdpa: cancelled");
        }
    }
    return next == results->size ? NULL : malformed(c, "number of results");
}

/* Answers a frame that asks for the version. */
static bool is_question(const sdpa_xla_frame *frame) {
    for (sdpa_xla_extension *e = frame->extensions; e; e = e->next) {
        if (e->type != SDPA_XLA_METADATA) continue;
        const sdpa_xla_metadata *metadata = (const sdpa_xla_metadata *)e;
        metadata->reply->version.major = SDPA_XLA_MAJOR;
        metadata->reply->version.minor = SDPA_XLA_MINOR;
        metadata->reply->traits = 0;
        return true;
    }
    return false;
}

static sdpa_xla_error *run(const sdpa_xla_frame *frame, sdpa_status (*driver)(const sdpa_problem *)) {
    if (is_question(frame)) return NULL;
    xla_call c;
    memset(&c, 0, sizeof c);
    c.frame = frame;
    if (!read_attributes(&c)) return malformed(&c, "attributes");
    if (!read_sizes(&c)) return malformed(&c, "query, key or value");
    sdpa_xla_error *error = read_operands(&c);
    /* Forward mode would write O and lse. Here they are operands, which only the transposed function needs. */
    if (driver == sdpa_attention_tangent) c.problem.o.data = c.problem.lse.data = NULL;
    if (!error) error = read_results(&c);
    if (!error) {
        c.problem.features = sdpa_problem_features(&c.problem);
        const sdpa_rounding mode = sdpa_round_to_nearest();
        const sdpa_status status = driver(&c.problem);
        sdpa_rounding_restore(mode);
        if (status == SDPA_NO_MEMORY) error = fail(&c, SDPA_XLA_RESOURCE_EXHAUSTED, "sdpa: no memory");
        if (status == SDPA_INTERRUPTED) error = fail(&c, SDPA_XLA_CANCELLED, "sdpa: cancelled");
    }
    for (int i = 0; i < 4; i++) sdpa_free(c.copies[i]);
    return error;
}

sdpa_xla_error *sdpa_xla_forward(sdpa_xla_frame *frame) { return run(frame, sdpa_attention_forward); }

sdpa_xla_error *sdpa_xla_tangent(sdpa_xla_frame *frame) { return run(frame, sdpa_attention_tangent); }

sdpa_xla_error *sdpa_xla_backward(sdpa_xla_frame *frame) { return run(frame, sdpa_attention_backward); }

sdpa_xla_error *sdpa_xla_second(sdpa_xla_frame *frame) { return run(frame, sdpa_attention_second); }
