/* One step of a program on n elements of its registers, and all steps of a section. Included once for each type of
 * integers: INTEGER_BITS, and NAME(x), which gives a function its own name. */

#if INTEGER_BITS == 32
typedef int32_t NAME(integer);
typedef uint32_t NAME(bits);
#else
typedef int64_t NAME(integer);
typedef uint64_t NAME(bits);
#endif

#if INTEGER_BITS == SDPA_REAL
typedef NAME(bits) NAME(words) __attribute__((vector_size(VEC_BYTES)));
typedef NAME(words) NAME(key);
#else
typedef NAME(bits) NAME(key);
#endif

/* Python's a // b, and a - a // b * b; both 0 where b is 0. Integers of 32 bits go by doubles, which vectors can divide: a
 * quotient that is no integer is at least 1 / |b| away from the next, and rounded by at most 2^-22 / |b|. */
NOINLINE void NAME(divide)(char *to, const char *from, const char *by, int64_t n, bool remainder) {
    SIMD for (int64_t x = 0; x < n; x++) {
        const NAME(integer) a = ((const NAME(integer) *)from)[x], b = ((const NAME(integer) *)by)[x];
        const NAME(integer) divisor = b == 0 || b == -1 ? 1 : b; /* the least integer has no negative */
        const NAME(integer) towards_zero =
            INTEGER_BITS == 32 ? (NAME(integer))((double)a / (double)divisor) : a / divisor;
        const NAME(integer) left = a - towards_zero * divisor;
        const bool above = left != 0 && (left < 0) != (divisor < 0);
        const NAME(integer) floored = towards_zero - above;
        const NAME(bits) quotient = b == -1 ? 0 - (NAME(bits))a : b == 0 ? 0 : (NAME(bits))floored;
        ((NAME(bits) *)to)[x] = remainder ? (NAME(bits))(left + (above ? divisor : 0)) : quotient;
    }
}

/* to = from times the stride of an axis; 0 where that is out of range, which is noted in `bad`. */
NOINLINE void NAME(index)(const sdpa_argument *a, int axis, char *to, const char *from, real *bad, int64_t n) {
    const NAME(bits) end = (NAME(bits))a->axis[axis], stride = (NAME(bits))a->stride[axis];
    const NAME(bits) *i = (const NAME(bits) *)from;
    NAME(bits) *scaled = (NAME(bits) *)to;
    real_bits *wrong = (real_bits *)bad;
    SIMD for (int64_t x = 0; x < n; x++) {
        const bool good = i[x] < end; /* a negative number is a large one */
        wrong[x] |= good ? 0 : -1;
        scaled[x] = good ? i[x] * stride : 0;
    }
}

NOINLINE void NAME(gather)(const sdpa_argument *a, enum sdpa_operation op, char *to, const char *at, int64_t n) {
    const NAME(integer) *i = (const NAME(integer) *)at;
    if (a->size == 0) {
        memset(to, 0, (size_t)n * (op == SDPA_OP_gather_i ? sizeof(NAME(integer)) : sizeof(real)));
    } else if (op == SDPA_OP_gather_i) {
        for (int64_t x = 0; x < n; x++) ((NAME(integer) *)to)[x] = (NAME(integer))((const int64_t *)a->data)[i[x]];
    } else if (op == SDPA_OP_gather_b) {
        for (int64_t x = 0; x < n; x++) ((real_bits *)to)[x] = -(real_bits)(((const char *)a->data)[i[x]] != 0);
    } else {
        const real *data = op == SDPA_OP_gather_r ? a->data : a->tangent;
        if (!data) memset(to, 0, (size_t)n * sizeof(real));
        for (int64_t x = 0; x < n && data; x++) ((real *)to)[x] = data[i[x]];
    }
}

/* Adds values to the sums of an array's gradient, but those of masked pairs. `same`: all have one index. */
NOINLINE void NAME(scatter)(const program_run *r, sdpa_reach *reach, const char *at, bool same, const real *values) {
    const program_input *upstream = &r->in[SDPA_OP_upstream - SDPA_OP_score];
    const NAME(integer) *index = (const NAME(integer) *)at;
    double *sums = reach->values, total = 0;
    int64_t least = reach->least, most = reach->most;
    for (int64_t j = 0; j < r->rows; j++, index += r->nv * VL, values += r->nv * VL) {
        const real_bits *mark = (const real_bits *)(upstream->p + j * upstream->row);
        for (int64_t l = 0; l < r->n_i; l++) {
            if (mark[l] == SIGN_BIT) continue;
            if (same) {
                total += values[l];
                continue;
            }
            const int64_t i = index[l];
            sums[i - reach->low] += values[l];
            least = i < least ? i : least;
            most = i > most ? i : most;
        }
    }
    if (same) {
        const int64_t i = *(const NAME(integer) *)at;
        sums[i - reach->low] += total;
        least = i < least ? i : least;
        most = i > most ? i : most;
    }
    reach->least = least;
    reach->most = most;
}

#define REAL(p, x) vload((const real *)(p) + (x))
#define BITS(p, x) ((ivec)REAL(p, x))
#if INTEGER_BITS == SDPA_REAL /* integers go by vectors, else one by one; sums and products wrap around */
#define INTEGER_STEP VL
#define INT(p) ((ivec)REAL(p, x))
#define WORD(p) ((NAME(words))REAL(p, x))
#define TRUTH(p) INT(p)
#define SAME(value) ((NAME(bits))(value) + (NAME(words)){0}) /* a compound literal comes last, for cppcheck */
#define KEY_OF(value) SAME(value)
#define SIGNED(value) ((ivec)(value))
#define CHOOSE(mask, yes, no) (((mask) & (ivec)(yes)) | (~(mask) & (ivec)(no)))
#define PUT_INT(value) vstore((real *)at.dst + x, (vec)(value))
#define PUT_TRUTH(value) PUT_INT(value)
#define PUT_REAL(value) vstore((real *)at.dst + x, __builtin_convertvector(value, vec))
#else
#define INTEGER_STEP 1
#define INT(p) ((const NAME(integer) *)(p))[x]
#define WORD(p) ((const NAME(bits) *)(p))[x]
#define TRUTH(p) ((const real_bits *)(p))[x]
#define SAME(value) (NAME(integer))(value)
#define KEY_OF(value) (value)
#define SIGNED(value) ((NAME(integer))(value))
#define CHOOSE(mask, yes, no) ((mask) ? (yes) : (no))
#define PUT_INT(value) ((NAME(integer) *)at.dst)[x] = (NAME(integer))(value)
#define PUT_TRUTH(value) ((real_bits *)at.dst)[x] = (value) ? -1 : 0
#define PUT_REAL(value) ((real *)at.dst)[x] = (real)(value)
#endif
#define EACH_INTEGER _Pragma("GCC unroll 3") for (int64_t x = 0; x < n; x += INTEGER_STEP)
#define EACH_VECTOR _Pragma("GCC unroll 3") for (int64_t x = 0; x < n; x += VL)
/* For a tile whose second operand holds a number for each key. */
#define EACH_KEY(put)                                                                                                  \
    for (int64_t row = 0, x = 0; row < r->rows; row++) {                                                               \
        const NAME(key) key = KEY_OF(((const NAME(bits) *)at.b)[r->row + row]);                                        \
        for (const int64_t end = x + r->nv * VL; x < end; x += INTEGER_STEP) put;                                      \
    }
#define OF_KEYS(name, straight, turned)                                                                                \
    case SDPA_OP_##name:                                                                                               \
        if (i->c) {                                                                                                    \
            EACH_KEY(turned)                                                                                           \
        } else {                                                                                                       \
            EACH_KEY(straight)                                                                                         \
        }                                                                                                              \
        break;
#define TO_REAL(name, value)                                                                                           \
    case SDPA_OP_##name:                                                                                               \
        EACH_VECTOR vstore((real *)at.dst + x, value);                                                                 \
        break;
#define TO_BITS(name, value) TO_REAL(name, (vec)(value))
#define TO_INT(name, value)                                                                                            \
    case SDPA_OP_##name:                                                                                               \
        EACH_INTEGER PUT_INT(value);                                                                                   \
        break;
#define TO_TRUTH(name, value)                                                                                          \
    case SDPA_OP_##name:                                                                                               \
        EACH_INTEGER PUT_TRUTH(value);                                                                                 \
        break;

/* |a - b| <= c. */
INLINE void NAME(within)(const program_run *r, operands at) {
    const NAME(bits) lowest = (NAME(bits))1 << (INTEGER_BITS - 1);
    if (INTEGER_BITS == 32 && *(const NAME(bits) *)at.c < lowest) {
        /* 0 <= a - b + c <= 2 c, where no distance is the lowest */
        const NAME(bits) most = *(const NAME(bits) *)at.c;
        EACH_KEY(PUT_TRUTH(SIGNED(WORD(at.a) - (key - SAME(most - lowest))) <= SIGNED(SAME(2 * most - lowest))))
    } else {
        EACH_KEY(
            PUT_TRUTH(SIGNED(CHOOSE(SIGNED(WORD(at.a) - key) < 0, key - WORD(at.a), WORD(at.a) - key)) <= INT(at.c)))
    }
}

/* Numbers of pairs, and what a code reads and writes. */
INLINE void NAME(exchange)(program_run *r, const sdpa_instruction *i, operands at, int64_t n) {
    switch (i->op) {
        TO_INT(batch, SAME(r->batch))
        TO_INT(head, SAME(r->head))
        TO_INT(constant_i, SAME(r->program->integers[i->a]))
    case SDPA_OP_key:
        for (int64_t x = 0; x < n; x++) {
            const int64_t own = x < r->window_keys ? x : r->window_keys - 1;
            ((NAME(integer) *)at.dst)[x] = (NAME(integer))(r->window + own);
        }
        break;
        TO_REAL(constant_r, vset1((real)r->program->reals[i->a]))
        TO_BITS(constant_b, -(real_bits)i->a + (ivec){0})
    case SDPA_OP_query:
        for (int64_t x = 0, lane = 0; x < n; x++) {
            const int64_t own = lane < r->n_i ? lane : r->n_i - 1;
            ((NAME(integer) *)at.dst)[x] = (NAME(integer))(r->first_query + own);
            lane = lane + 1 < r->nv * VL ? lane + 1 : 0;
        }
        break;
    case SDPA_OP_score:
        if (!r->in[0].p) break; /* it is there already */
        read_tile(r, &r->in[0], (real *)at.dst);
        break;
    case SDPA_OP_tangent:
    case SDPA_OP_upstream:
    case SDPA_OP_second:
        read_tile(r, &r->in[i->op - SDPA_OP_score], (real *)at.dst);
        break;
    case SDPA_OP_output:
        write_tile(r, &r->out[i->dst], (const real *)at.a);
        break;
    case SDPA_OP_spread_r:
    case SDPA_OP_spread_b:
        for (int64_t row = 0, x = 0; x < n; row++) {
            const vec value = vset1(((const real *)at.a)[r->row + row]);
            for (int v = 0; v < r->nv; v++, x += VL) vstore((real *)at.dst + x, value);
        }
        break;
    case SDPA_OP_spread_i:
        for (int64_t row = 0, x = 0; x < n; row++) {
            const NAME(integer) value = ((const NAME(integer) *)at.a)[r->row + row];
            for (const int64_t end = x + r->nv * VL; x < end; x += INTEGER_STEP) PUT_INT(SAME(value));
        }
        break;
        OF_KEYS(difference_i, PUT_INT(WORD(at.a) - key), PUT_INT(key - WORD(at.a)))
        OF_KEYS(difference_r, PUT_REAL(SIGNED(WORD(at.a) - key)), PUT_REAL(SIGNED(key - WORD(at.a))))
        OF_KEYS(less_key, PUT_TRUTH(INT(at.a) < SIGNED(key)), PUT_TRUTH(SIGNED(key) < INT(at.a)))
        OF_KEYS(less_equal_key, PUT_TRUTH(INT(at.a) <= SIGNED(key)), PUT_TRUTH(SIGNED(key) <= INT(at.a)))
        OF_KEYS(equal_key, PUT_TRUTH(INT(at.a) == SIGNED(key)), PUT_TRUTH(INT(at.a) == SIGNED(key)))
    case SDPA_OP_within:
        NAME(within)(r, at);
        break;
    case SDPA_OP_index:
        NAME(index)(&r->program->arrays[i->a], i->b, at.dst, at.c, r->bad, n);
        break;
    case SDPA_OP_gather_r:
    case SDPA_OP_gather_i:
    case SDPA_OP_gather_b:
    case SDPA_OP_gather_tangent:
        NAME(gather)(&r->program->arrays[i->a], i->op, at.dst, at.b, n);
        break;
    case SDPA_OP_scatter:
        if (r->program->arrays[i->a].gradient && r->program->arrays[i->a].size) {
            const bool same = i->b < r->code->n[SDPA_OF_UNIT];
            NAME(scatter)(r, &r->sums->reach[i->a], at.b, same, (const real *)at.c);
        }
        break;
    }
}

INLINE bool NAME(calculate)(const sdpa_instruction *i, operands at, int64_t n) {
    const NAME(bits) most = INTEGER_BITS - 1;
    switch (i->op) {
        TO_INT(negative_i, 0 - WORD(at.a))
        TO_INT(absolute_i, CHOOSE(INT(at.a) < 0, 0 - WORD(at.a), WORD(at.a)))
        TO_INT(add_i, WORD(at.a) + WORD(at.b))
        TO_INT(subtract_i, WORD(at.a) - WORD(at.b))
        TO_INT(multiply_i, WORD(at.a) * WORD(at.b))
        TO_INT(minimum_i, CHOOSE(INT(at.a) < INT(at.b), INT(at.a), INT(at.b)))
        TO_INT(maximum_i, CHOOSE(INT(at.a) > INT(at.b), INT(at.a), INT(at.b)))
        TO_INT(bitwise_and, INT(at.a) & INT(at.b))
        TO_INT(bitwise_or, INT(at.a) | INT(at.b))
        TO_INT(bitwise_xor, INT(at.a) ^ INT(at.b))
        TO_INT(left_shift, CHOOSE(WORD(at.b) > most, SAME(0), WORD(at.a) << (WORD(at.b) & most)))
        TO_INT(right_shift, INT(at.a) >> CHOOSE(WORD(at.b) > most, SAME(most), WORD(at.b)))
        TO_INT(select_i, CHOOSE(TRUTH(at.a), INT(at.b), INT(at.c)))
        TO_INT(integer_of_b, CHOOSE(TRUTH(at.a), SAME(1), SAME(0)))
        TO_TRUTH(less_i, INT(at.a) < INT(at.b))
        TO_TRUTH(less_equal_i, INT(at.a) <= INT(at.b))
        TO_TRUTH(equal_i, INT(at.a) == INT(at.b))
        TO_TRUTH(not_equal_i, INT(at.a) != INT(at.b))
    case SDPA_OP_real_of_i:
        EACH_INTEGER PUT_REAL(INT(at.a));
        break;
    case SDPA_OP_integer_of_r:
        for (int64_t x = 0; x < n; x++) {
            ((NAME(integer) *)at.dst)[x] = (NAME(integer))truncated(((const real *)at.a)[x]);
        }
        break;
    case SDPA_OP_floor_divide:
    case SDPA_OP_remainder:
        NAME(divide)(at.dst, at.a, at.b, n, i->op == SDPA_OP_remainder);
        break;
    default:
        return false;
    }
    return true;
}

INLINE bool NAME(compute)(const sdpa_instruction *i, operands at, int64_t n) {
    switch (i->op) {
        TO_REAL(negative_r, -REAL(at.a, x))
        TO_BITS(absolute_r, BITS(at.a, x) & ~SIGN_BIT)
        TO_REAL(add_r, REAL(at.a, x) + REAL(at.b, x))
        TO_REAL(subtract_r, REAL(at.a, x) - REAL(at.b, x))
        TO_REAL(multiply_r, REAL(at.a, x) * REAL(at.b, x))
        TO_REAL(add_product, vmuladd(REAL(at.b, x), REAL(at.c, x), REAL(at.a, x)))
        TO_REAL(subtract_product, vmuladd(-REAL(at.b, x), REAL(at.c, x), REAL(at.a, x)))
        TO_REAL(divide, REAL(at.a, x) / REAL(at.b, x))
        TO_REAL(minimum_r, lesser(REAL(at.a, x), REAL(at.b, x)))
        TO_REAL(maximum_r, -lesser(-REAL(at.a, x), -REAL(at.b, x)))
        TO_REAL(exp, exponential_of(REAL(at.a, x)))
        TO_REAL(tanh, vtanh(REAL(at.a, x)))
        TO_BITS(less_r, REAL(at.a, x) < REAL(at.b, x))
        TO_BITS(less_equal_r, REAL(at.a, x) <= REAL(at.b, x))
        TO_BITS(equal_r, REAL(at.a, x) == REAL(at.b, x))
        TO_BITS(not_equal_r, REAL(at.a, x) != REAL(at.b, x))
        TO_BITS(logical_and, BITS(at.a, x) & BITS(at.b, x))
        TO_BITS(logical_or, BITS(at.a, x) | BITS(at.b, x))
        TO_BITS(logical_xor, BITS(at.a, x) ^ BITS(at.b, x))
        TO_BITS(logical_not, ~BITS(at.a, x))
        TO_REAL(select_r, vselect(BITS(at.a, x), REAL(at.b, x), REAL(at.c, x)))
        TO_REAL(real_of_b, (vec)(BITS(at.a, x) & (ivec)vset1(1)))
    case SDPA_OP_sqrt:
        for (int64_t x = 0; x < n; x++) ((real *)at.dst)[x] = SQUARE_ROOT(((const real *)at.a)[x]);
        break;
    case SDPA_OP_log:
        logarithms((real *)at.dst, (const real *)at.a, n);
        break;
    default:
        return false;
    }
    return true;
}

SHARED void NAME(run_section)(program_run *r, const sdpa_instruction *first, int n_steps, int64_t n) {
    for (const sdpa_instruction *i = first; i < first + n_steps; i++) {
        /* Copies, which no store of an element can change. */
        const operands at = {r->registers + i->dst * r->slot, r->registers + i->a * r->slot,
                             r->registers + i->b * r->slot, r->registers + i->c * r->slot};
        if (!NAME(compute)(i, at, n) && !NAME(calculate)(i, at, n)) NAME(exchange)(r, i, at, n);
    }
}

#undef REAL
#undef BITS
#undef INTEGER_STEP
#undef INT
#undef WORD
#undef TRUTH
#undef SAME
#undef KEY_OF
#undef SIGNED
#undef EACH_KEY
#undef OF_KEYS
#undef CHOOSE
#undef PUT_INT
#undef PUT_TRUTH
#undef PUT_REAL
#undef EACH_INTEGER
#undef EACH_VECTOR
#undef TO_REAL
#undef TO_BITS
#undef TO_INT
#undef TO_TRUTH
#undef INTEGER_BITS
#undef NAME
