/* Attention for XLA, through its foreign function interface: handlers that XLA calls on its own threads, without
 * Python.
 *
 * The structs repeat the part of XLA's that is read here: openxla/xla, xla/ffi/api/c_api.h, version 0.1. Later versions
 * only append members, and accept handlers that report 0.1. */
#ifndef SDPA_XLA_H
#define SDPA_XLA_H

#include <stddef.h>
#include <stdint.h>

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

/* Operands, in the order of their bits. All have the same number of batch axes, then their own axes: (heads, rows,
 * columns); sinks and slopes (heads); lengths and offsets (S32 or S64) none. Each axis has the size of the problem or
 * 1. out and lse have the layout of the forward's results. The seed is U32[2], low half first, without batch axes. With
 * CU_Q and CU_K (S32 or S64, sequences + 1 elements) the rows are those of packed sequences: there are no batch axes
 * and no mask, and lengths and offsets have one element per sequence. */
enum sdpa_xla_operand {
    SDPA_XLA_QUERY,
    SDPA_XLA_KEY,
    SDPA_XLA_VALUE,
    SDPA_XLA_MASK,
    SDPA_XLA_SINKS,
    SDPA_XLA_SLOPES,
    SDPA_XLA_CU_Q,
    SDPA_XLA_CU_K,
    SDPA_XLA_LENGTHS,
    SDPA_XLA_OFFSET,
    SDPA_XLA_SEED,
    SDPA_XLA_GRAD_OUT,
    SDPA_XLA_OUT,
    SDPA_XLA_LSE,
    SDPA_XLA_TANGENTS, /* of query, key, value, mask, sinks */
    SDPA_XLA_N_OPERANDS = SDPA_XLA_TANGENTS + 5
};

/* Results, in the order of their bits. Gradients are summed over axes of size 1. */
enum sdpa_xla_result {
    SDPA_XLA_OUT_RESULT,
    SDPA_XLA_LSE_RESULT,
    SDPA_XLA_TANGENT_RESULT,
    SDPA_XLA_GRADIENTS, /* of query, key, value, mask, sinks */
    SDPA_XLA_N_RESULTS = SDPA_XLA_GRADIENTS + 5
};

/* The attribute `integers`, S64. */
enum sdpa_xla_integer {
    SDPA_XLA_OPERAND_BITS,
    SDPA_XLA_RESULT_BITS,
    SDPA_XLA_ROWS_FIRST, /* tensors with columns, except the mask, have axes (rows, heads, columns) */
    SDPA_XLA_INVARIANT,
    SDPA_XLA_WORKERS, /* 0: the default; -1: all CPUs */
    SDPA_XLA_HAS_LOWER,
    SDPA_XLA_LOWER,
    SDPA_XLA_HAS_UPPER,
    SDPA_XLA_UPPER,
    SDPA_XLA_LEAD /* the sizes of the batch axes and, last, of the query heads */
};

/* The attribute `numbers`, F64. */
enum sdpa_xla_number { SDPA_XLA_SCALE, SDPA_XLA_SOFTCAP, SDPA_XLA_DROPOUT_P, SDPA_XLA_N_NUMBERS };

/* forward: out and lse. tangent: the tangent of out along the given tangents. backward: gradients, from grad_out, out
 * and lse. second: the derivatives of <tangents, backward>. */
typedef sdpa_xla_error *sdpa_xla_handler(sdpa_xla_frame *frame);
sdpa_xla_handler sdpa_xla_forward, sdpa_xla_tangent, sdpa_xla_backward, sdpa_xla_second;

#endif
