/* Programs: functions of the user that change scores or hide pairs, as codes of a machine whose registers hold a value
 * for each pair of a tile of keys by queries. sdpa/_programs traces, differentiates and compiles them; the kernels run
 * them on tiles (kernels/program.h), and intervals of positions on them tell what a whole tile sees (program.c). */
#ifndef SDPA_PROGRAM_H
#define SDPA_PROGRAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The operations. _r: real, _i: integer, _b: boolean. Python names them by _core._operations(). */
/* clang-format off */
#define SDPA_OPERATIONS(X)                                                                                             \
    X(batch) X(head) X(query) X(key) X(score) X(tangent) X(upstream) X(second)                                         \
    X(constant_r) X(constant_i) X(constant_b)                                                                          \
    X(negative_r) X(absolute_r) X(sqrt) X(exp) X(log) X(tanh)                                                          \
    X(add_r) X(subtract_r) X(multiply_r) X(divide) X(minimum_r) X(maximum_r)                                           \
    X(negative_i) X(absolute_i)                                                                                        \
    X(add_i) X(subtract_i) X(multiply_i) X(floor_divide) X(remainder) X(minimum_i) X(maximum_i)                        \
    X(bitwise_and) X(bitwise_or) X(bitwise_xor) X(left_shift) X(right_shift)                                           \
    X(less_r) X(less_equal_r) X(equal_r) X(not_equal_r)                                                                \
    X(less_i) X(less_equal_i) X(equal_i) X(not_equal_i)                                                                \
    X(logical_and) X(logical_or) X(logical_xor) X(logical_not)                                                         \
    X(select_r) X(select_i) X(real_of_i) X(real_of_b) X(integer_of_b) X(integer_of_r)                                  \
    X(index) X(gather_r) X(gather_i) X(gather_b) X(gather_tangent) X(scatter) X(output)                                \
    X(spread_r) X(spread_i) X(spread_b) X(add_product) X(subtract_product)                                             \
    X(difference_i) X(difference_r) X(less_key) X(less_equal_key) X(equal_key) X(within)
/* clang-format on */

enum sdpa_operation {
#define SDPA_OPERATION(name) SDPA_OP_##name,
    SDPA_OPERATIONS(SDPA_OPERATION)
#undef SDPA_OPERATION
        SDPA_N_OPERATIONS
};

/* dst = op(a, b, c), of a + b c and a - b c with one rounding: registers, but for constants (a: index), index (a:
 * array, b: axis), gathers and scatter (a: array) and output (dst: its number). Those from difference_i on are of a and
 * of b, a register of keys; where c is 1, b comes first. within: |a - b| <= c, of the unit. */
typedef struct sdpa_instruction {
    uint16_t op, dst, a, b, c;
} sdpa_instruction;

/* What a section's values depend on: besides batch and head nothing; the query; the key; anything. Registers that a
 * section sets are not set by later ones. Those of the key section hold a value per key; `spread` brings them to a
 * tile. */
enum sdpa_section { SDPA_OF_UNIT, SDPA_OF_QUERY, SDPA_OF_KEY, SDPA_OF_TILE, SDPA_N_SECTIONS };

typedef struct sdpa_code {
    const sdpa_instruction *first; /* NULL: there is no such code */
    int n[SDPA_N_SECTIONS], n_registers;
    bool checks, checks_pairs; /* there is an index, also in the last section */
} sdpa_code;

/* The codes of a function f of scores; a mask has the first alone. Outputs: VALUE and, in brackets, inputs beside the
 * score. With T = f' tangent + sum of df/dt times the tangents of gathered elements t. */
enum sdpa_variant {
    SDPA_CODE_VALUE,          /* f */
    SDPA_CODE_SLOPE,          /* f, f' */
    SDPA_CODE_TANGENT,        /* T (tangent) */
    SDPA_CODE_SECOND,         /* f', T, dT/dscore (tangent) */
    SDPA_CODE_SCATTER,        /* adds upstream df/dt (upstream) */
    SDPA_CODE_SCATTER_SECOND, /* adds second df/dt + upstream dT/dt (tangent, upstream, second) */
    SDPA_N_VARIANTS
};
enum sdpa_output { SDPA_OUT_VALUE, SDPA_OUT_SLOPE, SDPA_OUT_TANGENT, SDPA_OUT_BEND, SDPA_N_OUTPUTS };

enum { SDPA_MOST_REGISTERS = 256, SDPA_MOST_ARRAY_AXES = 8, SDPA_SUMMARY = 32 };

/* An array that a program reads, contiguous. real: float of the compute type; integer: int64; boolean: bytes. */
typedef struct sdpa_argument {
    char kind; /* 'f', 'i' or 'b' */
    int n_axes;
    int64_t axis[SDPA_MOST_ARRAY_AXES], stride[SDPA_MOST_ARRAY_AXES]; /* in elements */
    int64_t size;
    const void *data;
    const void *tangent;  /* like data; NULL: zeros */
    double *gradient;     /* NULL: not wanted */
    double low, high;     /* the least and the largest of a floating array, without NaN */
    bool own;             /* every element of the gradient belongs to one unit, which adds to it */
    const int64_t *least; /* of every SDPA_SUMMARY elements of an integer or boolean array, */
    const int64_t *most;
} sdpa_argument;

/* The first index that was found out of range at a pair that is visible; of one made of real numbers the place alone. */
#define SDPA_UNKNOWN_INDEX INT64_MIN
typedef struct sdpa_fault {
    _Atomic int found;
    int array, axis;
    int64_t index, batch, head, query, key;
} sdpa_fault;

typedef struct sdpa_program {
    sdpa_code code[SDPA_N_VARIANTS];
    const double *reals;
    const int64_t *integers;
    const sdpa_argument *arrays;
    int n_arrays;
    bool has_gradients;
    int64_t n_shared; /* elements of gradients to which several units may add */
    bool masks;       /* a score may become -inf */
    bool wide;        /* some integer may leave int32 */
    sdpa_fault *fault;
} sdpa_program;

/* The pairs of a box: all inclusive. */
typedef struct sdpa_box {
    int64_t batch[2], head[2], query[2], key[2];
} sdpa_box;

/* Whether a mask lets no pair of the box through, whatever lies at an index out of range, some, or all, whose indices are
 * in range; `some` if it is not known. Never wrong. */
typedef enum sdpa_seen { SDPA_NONE_SEEN, SDPA_SOME_SEEN, SDPA_ALL_SEEN } sdpa_seen;
sdpa_seen sdpa_program_seen(const sdpa_program *mask, const sdpa_box *box);

/* Whether every integer of all codes stays within int32 in the box. */
bool sdpa_program_is_narrow(const sdpa_program *p, const sdpa_box *box);

/* Whether a function of scores may make one of them -inf, in arithmetic up to `largest`, whatever the positions: one
 * sequence is then computed like several. Scores beyond 1e12 are not thought of. */
bool sdpa_program_may_mask(const sdpa_program *p, double largest);

/* Registers that any code needs. */
int sdpa_program_registers(const sdpa_program *p);

/* Where a unit adds to the gradient of an array: element i lies at values[i - low]. least, most: indices that were added
 * to, so far. */
typedef struct sdpa_reach {
    double *values;
    int64_t low, least, most;
} sdpa_reach;

/* The sums of a worker: a reach for each array, and room for the elements that a unit can reach. They are zero between
 * units. */
typedef struct sdpa_sums {
    double *values;
    sdpa_reach reach[];
} sdpa_sums;

/* Finds the gradients whose elements belong to one unit each, and counts those of the others: after gradients are set. */
void sdpa_program_share(sdpa_program *p, sdpa_argument *arrays, const sdpa_box *box);

/* Bytes of sums with room for so many elements. */
size_t sdpa_program_sums_bytes(const sdpa_program *p, int64_t n_elements);
void sdpa_program_clear_sums(const sdpa_program *p, sdpa_sums *sums, int64_t n_elements);

/* Whether sums have room for what a unit can reach; else, where all gradients are small, for everything. */
bool sdpa_program_has_reaches(const sdpa_program *p);

/* Sets what a unit reaches whose pairs are in the box; returns the elements that this needs. The codes that scatter, of
 * the first and of the second derivative, add to the same elements. */
int64_t sdpa_program_set_reaches(const sdpa_program *p, const sdpa_box *box, sdpa_sums *sums);

/* Adds the sums to the gradients, and makes them ready for the next unit. */
void sdpa_program_add_sums(const sdpa_program *p, sdpa_sums *sums);

/* Records which index of a code is out of range at the pair `place`, batch, head, query and key, unless a fault is
 * recorded already. */
void sdpa_program_fail(const sdpa_program *p, enum sdpa_variant variant, const int64_t place[4]);

#endif
