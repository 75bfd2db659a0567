/* The kernels of one instruction set for one type: compiled once for each type on each line of runtime/isas.inc, with
 * -DSDPA_ISA=name, -DSDPA_ISA_NAME and -DSDPA_REAL=32 or 64. The object exports the table and, to sets of the same base,
 * what is SHARED (vec.h). */
#include "kernels.h"
#include "vec.h"

#ifdef FEW_PASSES /* the compiler drops functions that the table does not name */
#pragma GCC diagnostic ignored "-Wunused-function"
#endif

/* Without FMA columns are no faster; in float64 they are, but not by enough for what they add to the extension. */
#if defined(HAVE_FMA) && SDPA_REAL == 32
#define HAS_COLUMNS
#endif

#include "batch.h"
#include "fast/few_keys.h"
#include "forward.h"
#include "pattern.h"
#include "received.h"
#include "second.h"
#ifdef HAS_COLUMNS
#include "softmax_columns.h"
#endif
#include "softmax_lanes.h"
#include "staging.h"
#include "statistics.h"
#include "tangent.h"
#include "weights.h"

static void forward_unit(const sdpa_unit *u, void *scratch) {
    if (!forward_few_keys(u, scratch)) forward_any(u, scratch);
}

/* The passes and types that these kernels run where a set has them beside others. */
#ifdef HAVE_AMX
#define PASSES                                                                                                         \
    (1 << SDPA_PASS_FORWARD | 1 << SDPA_PASS_BACKWARD | 1 << SDPA_PASS_STATISTICS | 1 << SDPA_PASS_TANGENT |           \
     1 << SDPA_PASS_SECOND)
#define TYPES ~0
#elif defined(FEW_PASSES)
#define PASSES (1 << SDPA_PASS_FORWARD)
#define TYPES (1 << SDPA_BF16)
#else
#define PASSES ~0
#define TYPES ~0
#endif

#ifdef HAVE_AMX
#define ROUNDS true
#else
#define ROUNDS BF16_PAIRS
#endif
#ifdef SDPA_ISA_AMX
#define ASKS amx_can
#else
#define ASKS NULL
#endif

#define TABLE_(isa, bits) sdpa_##isa##_f##bits
#define TABLE(isa, bits) TABLE_(isa, bits)

const struct sdpa_kernels TABLE(SDPA_ISA, SDPA_REAL) = {
    .lanes = VL,
    .passes = PASSES,
    .types = TYPES,
    .rounds = ROUNDS,
    .asks = ASKS,
    .queries = queries_at_once,
    .pass[SDPA_PASS_FORWARD] = {forward_bytes, forward_unit},
    .forward_part_bytes = forward_part_bytes,
    .forward_part = forward_part,
    .forward_join = forward_join,
#if !defined(FEW_PASSES) || defined(HAVE_AMX)
    .pass[SDPA_PASS_STATISTICS] = {statistics_bytes, statistics_unit},
    .pass[SDPA_PASS_TANGENT] = {tangent_bytes, tangent_unit},
    .pass[SDPA_PASS_SECOND] = {second_bytes, second_unit},
    .pass[SDPA_PASS_BACKWARD] = {backward_bytes, NULL},
    .backward_most = backward_most,
    .backward = backward_units,
#endif
#ifndef FEW_PASSES
    .load = load,
    .store = store,
    .copy_bytes = copy_bytes,
    .copy_rows = copy_rows,
    .pass[SDPA_PASS_WEIGHTS] = {weights_bytes, weights_unit},
    .tile = tile_of,
    .pattern = {pattern_bytes, pattern_unit},
    .received_bytes = received_bytes,
    .received_sums = received_sums,
    .received = received_unit,
    .short_row = SHORT_ROW,
    .short_row_backward = SHORT_ROW_BACKWARD,
    .softmax_rows = softmax_rows,
    .softmax_lanes = softmax_lanes,
#ifdef HAS_COLUMNS
    .columns = COLUMNS,
    .most_in_columns = BLOCK,
    .softmax_columns = softmax_columns,
#endif
    .load_lanes = load_lanes,
    .store_lanes = store_lanes,
    .leave_out = leave_out,
    .log_sums = log_sums,
#endif
#if SDPA_REAL == 64
    .product = map_product,
    .exponentials = map_exponentials,
#endif
};
