/* The templates of one compute type, in order of dependence. */
#include "vmath.inc.h"
#include "gemm.inc.h"
#include "scores.inc.h"
#include "pack.inc.h"
#include "additive.inc.h"
#include "dropout.inc.h"
#include "few.inc.h"
#include "forward.inc.h"
#include "backward.inc.h"
#include "small.inc.h"
#include "weights.inc.h"
#include "statistics.inc.h"
#include "tangent.inc.h"
#include "double.inc.h"
#include "softmax.inc.h"
#include "staging.inc.h"

#ifndef KERNELS
#define KERNELS(T, FORWARD)                                                                                            \
    {                                                                                                                  \
        .lanes = VL_##T, .load = load_##T, .store = store_##T, .forward_bytes = forward_bytes_##T, .forward = FORWARD, \
        .forward_part_bytes = forward_part_bytes_##T, .forward_part = forward_part_##T,                                \
        .forward_join = forward_join_##T, .weights = weights_##T, .statistics = statistics_##T,                        \
        .backward_bytes = backward_bytes_##T, .backward = backward_##T, .tangent_bytes = tangent_bytes_##T,            \
        .tangent = tangent_##T, .double_backward_bytes = double_backward_bytes_##T,                                    \
        .double_backward = double_backward_##T, .softmax_rows = softmax_rows_##T, .softmax_lanes = softmax_lanes_##T,  \
        .load_lanes = load_lanes_##T, .store_lanes = store_lanes_##T, .leave_out = leave_out_##T,                      \
    }
#endif
