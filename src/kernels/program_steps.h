/* One step of a program on n elements of its registers, and all steps of a section. Included once for each type of
 * integers: INTEGER_BITS, and NAME(x), which gives a function its own name. */

#if INTEGER_BITS == 32
typedef int32_t NAME(integer);
typedef uint32_t NAME(bits);
#else
typedef int64_t NAME(integer);
typedef uint64_t NAME(bits);
#endif

/* Python's a // b, and a - a // b * b; both 0 where b is 0. */
NOINLINE void NAME(divide)(char *to, const char *from, const char *by, int64_t n, bool remainder) {
    for (int64_t x = 0; x < n; x++) {
        const NAME(integer) a = ((const NAME(integer) *)from)[x], b = ((const NAME(integer) *)by)[x];
        NAME(integer) quotient = 0, rest = 0;
        if (b == -1) {
            quotient = (NAME(integer))(0 - (uint64_t)a);
        } else if (b != 0) {
            quotient = a / b;
            rest = a % b;
            if (rest != 0 && (rest < 0) != (b < 0)) {
                quotient--;
                rest += b;
            }
        }
        ((NAME(integer) *)to)[x] = remainder ? rest : quotient;
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

/* Adds values to the sums of an array's gradient, but those of masked pairs. */
NOINLINE void NAME(scatter)(const program_run *r, int array, const char *at, const real *values, int64_t n) {
    const sdpa_argument *a = &r->program->arrays[array];
    const program_input *upstream = &r->in[2];
    double *sums = r->sums + a->first;
    int64_t *range = (int64_t *)(r->sums + r->program->n_gradients) + 2 * array, least = range[0], most = range[1];
    if (!a->gradient) return;
    for (int64_t x = 0; x < n; x++) {
        const int64_t row = x / (r->nv * VL), lane = x % (r->nv * VL);
        real_bits mark;
        memcpy(&mark, upstream->p + row * upstream->row + lane, sizeof mark);
        if (mark == SIGN_BIT || lane >= r->n_i || row >= r->rows) continue;
        const int64_t i = ((const NAME(integer) *)at)[x];
        sums[i] += values[x];
        least = i < least ? i : least;
        most = i > most ? i : most;
    }
    range[0] = least;
    range[1] = most;
}

#define A (r->registers + i->a * r->slot)
#define B (r->registers + i->b * r->slot)
#define C (r->registers + i->c * r->slot)
#define D (r->registers + i->dst * r->slot)
#define REAL(p, x) vload((const real *)(p) + (x))
#define BITS(p, x) ((ivec)REAL(p, x))
#define INT(p) ((const NAME(integer) *)(p))[x]
#define WORD(p) ((const NAME(bits) *)(p))[x] /* wraps around */
#define TRUTH(p) ((const real_bits *)(p))[x]
#define EACH_VECTOR for (int64_t x = 0; x < n; x += VL)
#define EACH_ELEMENT SIMD for (int64_t x = 0; x < n; x++)
#define TO_REAL(name, value)                                                                                           \
    case SDPA_OP_##name:                                                                                               \
        EACH_VECTOR vstore((real *)D + x, value);                                                                      \
        break;
#define TO_BITS(name, value) TO_REAL(name, (vec)(value))
#define TO_INT(name, value)                                                                                            \
    case SDPA_OP_##name:                                                                                               \
        EACH_ELEMENT((NAME(integer) *)D)[x] = (NAME(integer))(value);                                                  \
        break;
#define TO_TRUTH(name, value)                                                                                          \
    case SDPA_OP_##name:                                                                                               \
        EACH_ELEMENT((real_bits *)D)[x] = (value) ? -1 : 0;                                                            \
        break;

/* Numbers of pairs, and what a code reads and writes. */
INLINE bool NAME(exchange)(program_run *r, const sdpa_instruction *i, int64_t n) {
    switch (i->op) {
        TO_INT(batch, r->batch)
        TO_INT(head, r->head)
        TO_INT(key, r->window + (x < r->window_keys ? x : r->window_keys - 1))
        TO_INT(constant_i, r->program->integers[i->a])
        TO_REAL(constant_r, vset1((real)r->program->reals[i->a]))
        TO_BITS(constant_b, (ivec){0} - (real_bits)i->a)
    case SDPA_OP_query:
        for (int64_t x = 0; x < n; x++) {
            const int64_t lane = x % (r->nv * VL), own = lane < r->n_i ? lane : r->n_i - 1;
            ((NAME(integer) *)D)[x] = (NAME(integer))(r->first_query + own);
        }
        break;
    case SDPA_OP_score:
    case SDPA_OP_tangent:
    case SDPA_OP_upstream:
    case SDPA_OP_second:
        read_strip(r, &r->in[i->op - SDPA_OP_score], (real *)D);
        break;
    case SDPA_OP_output:
        write_strip(r, &r->out[i->dst], (const real *)A);
        break;
    case SDPA_OP_spread_r:
    case SDPA_OP_spread_b:
        for (int64_t row = 0, x = 0; x < n; row++) {
            const vec value = vset1(((const real *)A)[r->row + row]);
            for (int v = 0; v < r->nv; v++, x += VL) vstore((real *)D + x, value);
        }
        break;
    case SDPA_OP_spread_i:
        for (int64_t row = 0; row < r->rows; row++) {
            const NAME(integer) value = ((const NAME(integer) *)A)[r->row + row];
            NAME(integer) *to = (NAME(integer) *)D + row * r->nv * VL;
            SIMD for (int64_t x = 0; x < r->nv * VL; x++) to[x] = value;
        }
        break;
    case SDPA_OP_index:
        NAME(index)(&r->program->arrays[i->a], i->b, D, C, r->bad, n);
        break;
    case SDPA_OP_gather_r:
    case SDPA_OP_gather_i:
    case SDPA_OP_gather_b:
    case SDPA_OP_gather_tangent:
        NAME(gather)(&r->program->arrays[i->a], i->op, D, B, n);
        break;
    case SDPA_OP_scatter:
        NAME(scatter)(r, i->a, B, (const real *)C, n);
        break;
    default:
        return false;
    }
    return true;
}

INLINE bool NAME(calculate)(program_run *r, const sdpa_instruction *i, int64_t n) {
    const NAME(bits) most = INTEGER_BITS - 1;
    switch (i->op) {
        TO_INT(negative_i, 0 - WORD(A))
        TO_INT(absolute_i, INT(A) < 0 ? 0 - WORD(A) : WORD(A))
        TO_INT(add_i, WORD(A) + WORD(B))
        TO_INT(subtract_i, WORD(A) - WORD(B))
        TO_INT(multiply_i, WORD(A) * WORD(B))
        TO_INT(minimum_i, INT(A) < INT(B) ? INT(A) : INT(B))
        TO_INT(maximum_i, INT(A) > INT(B) ? INT(A) : INT(B))
        TO_INT(bitwise_and, WORD(A) & WORD(B))
        TO_INT(bitwise_or, WORD(A) | WORD(B))
        TO_INT(bitwise_xor, WORD(A) ^ WORD(B))
        TO_INT(left_shift, WORD(B) > most ? 0 : WORD(A) << (WORD(B) & most))
        TO_INT(right_shift, INT(A) >> (WORD(B) > most ? most : WORD(B)))
        TO_INT(select_i, TRUTH(A) ? INT(B) : INT(C))
        TO_INT(integer_of_b, TRUTH(A) ? 1 : 0)
        TO_INT(integer_of_r, truncated(((const real *)A)[x], (double)INTEGER_BITS))
        TO_TRUTH(less_i, INT(A) < INT(B))
        TO_TRUTH(less_equal_i, INT(A) <= INT(B))
        TO_TRUTH(equal_i, INT(A) == INT(B))
        TO_TRUTH(not_equal_i, INT(A) != INT(B))
    case SDPA_OP_real_of_i:
        EACH_ELEMENT((real *)D)[x] = (real)INT(A);
        break;
    case SDPA_OP_floor_divide:
    case SDPA_OP_remainder:
        NAME(divide)(D, A, B, n, i->op == SDPA_OP_remainder);
        break;
    default:
        return false;
    }
    return true;
}

INLINE bool NAME(compute)(program_run *r, const sdpa_instruction *i, int64_t n) {
    switch (i->op) {
        TO_REAL(negative_r, -REAL(A, x))
        TO_BITS(absolute_r, BITS(A, x) & ~SIGN_BIT)
        TO_REAL(add_r, REAL(A, x) + REAL(B, x))
        TO_REAL(subtract_r, REAL(A, x) - REAL(B, x))
        TO_REAL(multiply_r, REAL(A, x) * REAL(B, x))
        TO_REAL(divide, REAL(A, x) / REAL(B, x))
        TO_REAL(minimum_r, lesser(REAL(A, x), REAL(B, x)))
        TO_REAL(maximum_r, -lesser(-REAL(A, x), -REAL(B, x)))
        TO_REAL(exp, exponential_of(REAL(A, x)))
        TO_REAL(tanh, vtanh(REAL(A, x)))
        TO_BITS(less_r, REAL(A, x) < REAL(B, x))
        TO_BITS(less_equal_r, REAL(A, x) <= REAL(B, x))
        TO_BITS(equal_r, REAL(A, x) == REAL(B, x))
        TO_BITS(not_equal_r, REAL(A, x) != REAL(B, x))
        TO_BITS(logical_and, BITS(A, x) & BITS(B, x))
        TO_BITS(logical_or, BITS(A, x) | BITS(B, x))
        TO_BITS(logical_xor, BITS(A, x) ^ BITS(B, x))
        TO_BITS(logical_not, ~BITS(A, x))
        TO_REAL(select_r, vselect(BITS(A, x), REAL(B, x), REAL(C, x)))
        TO_REAL(real_of_b, (vec)(BITS(A, x) & (ivec)vset1(1)))
    case SDPA_OP_sqrt:
        for (int64_t x = 0; x < n; x++) ((real *)D)[x] = SQUARE_ROOT(((const real *)A)[x]);
        break;
    case SDPA_OP_log:
        logarithms((real *)D, (const real *)A, n);
        break;
    default:
        return false;
    }
    return true;
}

/* Runs a section on n elements, a multiple of VL. */
NOINLINE void NAME(run_section)(program_run *r, const sdpa_instruction *first, int n_steps, int64_t n) {
    for (const sdpa_instruction *i = first; i < first + n_steps; i++) {
        if (!NAME(compute)(r, i, n) && !NAME(calculate)(r, i, n)) NAME(exchange)(r, i, n);
    }
}

#undef A
#undef B
#undef C
#undef D
#undef REAL
#undef BITS
#undef INT
#undef WORD
#undef TRUTH
#undef EACH_VECTOR
#undef EACH_ELEMENT
#undef TO_REAL
#undef TO_BITS
#undef TO_INT
#undef TO_TRUTH
#undef INTEGER_BITS
#undef NAME
