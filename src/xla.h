/* Attention for XLA, through its foreign function interface: handlers that XLA calls on its own threads, without
 * Python.
 *
 * The structs repeat the part of XLA's that is read here: openxla/xla, xla/ffi/api/c_api.h, version 0.1. Later versions
 * only append members, and accept handlers that report 0.1. */
#ifndef SDPA_XLA_H
#define SDPA_XLA_H

#include <stddef.h>
#include <stdint.h>

#include "problem.h"

enum { SDPA_XLA_MAJOR = 0, SDPA_XLA_MINOR = 1 };

typedef struct sdpa_xla_extension {
    size_t struct_size;
    int type;
    struct sdpa_xla_extension *next;
} sdpa_xla_extension;

typedef struct sdpa_xla_version {
    size_t struct_size;
    sdpa_xla_extension *extensions;
    int major, minor;
} sdpa_xla_version;

/* A frame with an extension of this type asks for the version, and for nothing else. */
enum { SDPA_XLA_METADATA = 1 };
typedef struct sdpa_xla_metadata {
    sdpa_xla_extension base;
    struct {
        size_t struct_size;
        sdpa_xla_version version;
        uint32_t traits;
    } * reply;
} sdpa_xla_metadata;

/* Owned by XLA once it is returned. */
typedef struct sdpa_xla_error sdpa_xla_error;

enum sdpa_xla_code {
    SDPA_XLA_CANCELLED = 1,
    SDPA_XLA_INVALID_ARGUMENT = 3,
    SDPA_XLA_RESOURCE_EXHAUSTED = 8,
};

typedef struct sdpa_xla_message {
    size_t struct_size;
    sdpa_xla_extension *extensions;
    const char *text;
    int code;
} sdpa_xla_message;

typedef struct sdpa_xla_api {
    size_t struct_size;
    sdpa_xla_extension *extensions;
    sdpa_xla_version version;
    const void *internal;
    sdpa_xla_error *(*make_error)(sdpa_xla_message *message);
} sdpa_xla_api;

enum sdpa_xla_type {
    SDPA_XLA_PRED = 1,
    SDPA_XLA_S32 = 4,
    SDPA_XLA_S64 = 5,
    SDPA_XLA_U32 = 8,
    SDPA_XLA_F16 = 10,
    SDPA_XLA_F32 = 11,
    SDPA_XLA_F64 = 12,
    SDPA_XLA_BF16 = 16,
};

/* Row-major. */
typedef struct sdpa_xla_buffer {
    size_t struct_size;
    sdpa_xla_extension *extensions;
    int type;
    void *data;
    int64_t rank;
    int64_t *dims;
} sdpa_xla_buffer;

typedef struct sdpa_xla_buffers {
    size_t struct_size;
    sdpa_xla_extension *extensions;
    int64_t size;
    const int *kinds;
    void **items;
} sdpa_xla_buffers;

typedef struct sdpa_xla_text {
    const char *data;
    size_t size;
} sdpa_xla_text;

enum { SDPA_XLA_ARRAY = 1 }; /* kind of an attribute */
typedef struct sdpa_xla_array {
    int type;
    size_t size;
    void *data;
} sdpa_xla_array;

typedef struct sdpa_xla_attributes {
    size_t struct_size;
    sdpa_xla_extension *extensions;
    int64_t size;
    const int *kinds;
    sdpa_xla_text **names;
    void **items;
} sdpa_xla_attributes;

typedef struct sdpa_xla_frame {
    size_t struct_size;
    sdpa_xla_extension *extensions;
    const sdpa_xla_api *api;
    void *context;
    int stage;
    sdpa_xla_buffers operands, results;
    sdpa_xla_attributes attributes; /* sorted by name */
} sdpa_xla_frame;

/* Buffers, as X(name, tensor, n_inner): the tensor of the problem that a buffer fills, and the number of its axes
 * behind the heads. All have the same number of batch axes, then their own axes: (heads, rows, columns), or (heads)
 * alone. Each axis has the size of the problem or 1. out and lse have the layout of the forward's results. */
#define SDPA_XLA_INPUTS(X) SDPA_DIFFERENTIABLE(X) X(where, where, 2) X(alibi_slopes, alibi_slopes, 0)
#define SDPA_XLA_ROWS(X) X(grad_out, dout, 2) X(out, o, 2) X(lse, lse, 1)
/* As X(name, n_inner); -1: batch axes alone. The seed is U32[2], low half first, without batch axes, the others S32 or
 * S64. With cu_seqlens (sequences + 1 elements) the rows are those of packed sequences: there are no batch axes and no
 * mask, and lengths and offsets have one element per sequence. */
#define SDPA_XLA_INTEGERS(X) X(cu_seqlens_q, 0) X(cu_seqlens_k, 0) X(key_lengths, -1) X(query_offset, -1) X(seed, 0)

/* Operands, in the order of their bits. */
enum sdpa_xla_operand {
#define SDPA_XLA_BIT(name, ...) SDPA_XLA_##name,
#define SDPA_XLA_TANGENT_BIT(name, ...) SDPA_XLA_##name##_t,
    SDPA_XLA_INPUTS(SDPA_XLA_BIT) SDPA_XLA_INTEGERS(SDPA_XLA_BIT) SDPA_XLA_ROWS(SDPA_XLA_BIT)
        SDPA_DIFFERENTIABLE(SDPA_XLA_TANGENT_BIT) SDPA_XLA_N_OPERANDS
#undef SDPA_XLA_TANGENT_BIT
#undef SDPA_XLA_BIT
};

/* Results, in the order of their bits: these, then the gradients, which are summed over axes of size 1. */
#define SDPA_XLA_OUTPUTS(X) X(out, o, 2) X(lse, lse, 1) X(out_t, o_t, 2)
enum sdpa_xla_result {
#define SDPA_XLA_BIT(name, ...) SDPA_XLA_RESULT_##name,
    SDPA_XLA_OUTPUTS(SDPA_XLA_BIT) SDPA_DIFFERENTIABLE(SDPA_XLA_BIT) SDPA_XLA_N_RESULTS
#undef SDPA_XLA_BIT
};

/* The attribute `integers`, S64: operand_bits, result_bits, these and then, from SDPA_XLA_LEAD, the sizes of the batch
 * axes and of the query heads. rows_first: tensors with columns, except masks, have axes (rows, heads, columns).
 * workers: 0 for the default, -1 for all CPUs. */
#define SDPA_XLA_ATTRIBUTES(X) X(rows_first) X(invariant) X(workers) X(has_lower) X(lower) X(has_upper) X(upper)
enum sdpa_xla_integer {
    SDPA_XLA_OPERAND_BITS,
    SDPA_XLA_RESULT_BITS,
#define SDPA_XLA_INTEGER(name) SDPA_XLA_##name,
    SDPA_XLA_ATTRIBUTES(SDPA_XLA_INTEGER) SDPA_XLA_LEAD
#undef SDPA_XLA_INTEGER
};

/* The attribute `numbers`, F64. */
enum sdpa_xla_number {
#define SDPA_XLA_NUMBER(name) SDPA_XLA_NUMBER_##name,
    SDPA_NUMBERS(SDPA_XLA_NUMBER) SDPA_XLA_N_NUMBERS
#undef SDPA_XLA_NUMBER
};

/* forward: out and lse. tangent: the tangent of out along the given tangents. backward: gradients, from grad_out, out
 * and lse. second: the derivatives of <tangents, backward>. */
typedef sdpa_xla_error *sdpa_xla_handler(sdpa_xla_frame *frame);
sdpa_xla_handler sdpa_xla_forward, sdpa_xla_tangent, sdpa_xla_backward, sdpa_xla_second;

#endif
