/* Bringing blocks of the operands into the form the tiles read: in place where memory already has it, else a copy. */

#define is_direct FN(is_direct)
#define pack_rows FN(pack_rows)
#define packed_row FN(packed_row)
#define pack_transposed FN(pack_transposed)
#define pack_panels FN(pack_panels)
#define panel_at FN(panel_at)
#define all_finite FN(all_finite)
#define mask_block FN(mask_block)
#define boolean_block FN(boolean_block)
#define bias_block FN(bias_block)
#define rows FN(rows)

/* Elements between packed rows of d: whole vectors, and no multiple of 256 bytes, which would crowd the rows of a block
 * into a few sets of L1. */
INLINE int64_t packed_row(int64_t d) {
    const int64_t row = round_up(d, VL), line = 64 / (int64_t)sizeof(real);
    return row % (4 * line) ? row : row + line;
}

INLINE bool is_direct(const sdpa_matrix *m) {
    return m->dtype == (SDPA_REAL == 32 ? SDPA_F32 : SDPA_F64) && !m->swapped && m->col == (int64_t)sizeof(real) &&
           m->row % (int64_t)sizeof(real) == 0 && (uintptr_t)m->data % sizeof(real) == 0;
}

/* A block of rows of K, V, Q or dO. The rows after the last multiple of SCORE_ROWS also stand, padded with zero rows to
 * SCORE_ROWS, at `tail`: a tile reads whole rows but never beyond the array. */
typedef struct rows {
    const real *p, *tail;
    int64_t row, tail_row;  /* elements */
    int64_t j0, n;          /* rows */
    bool looked_at, finite; /* see rows_finite */
} rows;

/* Rows j0 .. j0+n-1 of m, d columns. `packed`: (n, packed_row(d)), n rounded up to SCORE_ROWS where there is a tail; used
 * if the rows cannot be read in place: wrong type or stride, or read in whole vectors, which d does not fill, or so often
 * that vectors across two cache lines (NumPy aligns to 16 bytes) cost more than the copy. `n_reads`: how many rows they
 * are multiplied with in whole vectors. `tail`: (SCORE_ROWS, d), or NULL where no tail is read. */
NOINLINE rows pack_rows(const sdpa_matrix *m, int64_t j0, int64_t n, int64_t d, int64_t n_reads, real *packed,
                        real *tail) {
    rows r = {.j0 = j0, .n = n};
    int64_t full = n / SCORE_ROWS * SCORE_ROWS;
    const char *first = m->data + j0 * m->row;
    const bool direct = is_direct(m),
               often = direct && n_reads >= OFTEN && ((uintptr_t)first | (uintptr_t)m->row) % VEC_BYTES != 0;
    if (direct && !often && (n_reads == 0 || d % VL == 0)) {
        r.p = (const real *)first;
        r.row = m->row / (int64_t)sizeof(real);
        r.tail = tail;
        r.tail_row = d;
        if (tail && full < n) {
            for (int64_t j = full; j < n; j++) memcpy(tail + (j - full) * d, r.p + j * r.row, sizeof(real) * (size_t)d);
            memset(tail + (n - full) * d, 0, sizeof(real) * (size_t)((SCORE_ROWS - n + full) * d));
        }
        return r;
    }
    int64_t padded = packed_row(d);
    for (int64_t j = 0; j < n; j++) {
        real *to = packed + j * padded;
        if (often && d % VL == 0) {
            const real *from = (const real *)(first + j * m->row);
            for (int64_t c = 0; c < d; c += VL) vstore(to + c, vload(from + c));
        } else {
            FN(load)(to, first + j * m->row, d, m->col, m->dtype, m->swapped);
        }
        for (int64_t c = d; c < padded; c++) to[c] = 0;
    }
    for (int64_t j = n * padded; tail && j < round_up(n, SCORE_ROWS) * padded; j++) packed[j] = 0;
    r.p = packed;
    r.row = r.tail_row = padded;
    r.tail = packed + full * padded;
    return r;
}

/* False if any of n rows of d elements is NaN or infinite. */
NOINLINE bool all_finite(const real *p, int64_t row, int64_t n, int64_t d) {
    ivec bad = {0};
    for (int64_t j = 0; j < n; j++) {
        for (int64_t c = 0; c < d; c += VL) {
            vec x = d - c < VL ? vload_partial(p + j * row + c, (int)(d - c)) : vload(p + j * row + c);
            bad |= (x - x) != (vec){0};
        }
    }
    return !vany(bad);
}

/* all_finite of d columns, found out once. */
INLINE bool FN(rows_finite)(rows *r, int64_t d) {
    if (!r->looked_at) r->finite = all_finite(r->p, r->row, r->n, d);
    r->looked_at = true;
    return r->finite;
}

#if PAIRS
/* Rows 2 j and 2 j + 1 of p (n, row), `width` wide, become row j: pairs of bfloat16. A row without a second is paired with 0.
 * sum: what is in the columns after rounding; or NULL. */
NOINLINE void FN(pair_rows)(real *p, int64_t row, int64_t n, int64_t width, vec *sum) {
    for (int64_t j = 0; j < n; j += 2) {
        for (int64_t c = 0; c < width; c += VL) {
            const vec odd = j + 1 < n ? vload(p + (j + 1) * row + c) : (vec){0},
                      pair = vpair(vload(p + j * row + c), odd);
            vstore(p + j / 2 * row + c, pair);
            if (sum) sum[c / VL] = vdot(sum[c / VL], 0x3f803f80, pair); /* twice 1 */
        }
    }
}

/* Rows j0 .. j0+n-1 of a bfloat16 matrix, d columns, as pair_rows leaves them at `packed`. `look`: whether rows_finite will
 * be asked. */
NOINLINE rows FN(pack_row_pairs)(const sdpa_matrix *m, int64_t j0, int64_t n, int64_t d, real *packed, bool look) {
    typedef uint16_t halves __attribute__((vector_size(VEC_BYTES / 2), aligned(2), may_alias));
    if (look || m->swapped || m->col != 2 || m->row % 2 != 0 || (uintptr_t)m->data % 2 != 0 || d % VL != 0) {
        rows r = pack_rows(m, j0, n, d, 1, packed, NULL);
        FN(rows_finite)(&r, d);
        FN(pair_rows)(packed, r.row, n, round_up(d, VL), NULL);
        return r;
    }
    const rows r = {.p = packed, .row = packed_row(d), .j0 = j0, .n = n};
    for (int64_t j = 0; j < n; j += 2) {
        const char *even = m->data + (j0 + j) * m->row;
        for (int64_t c = 0; c < d; c += VL) {
            const halves *low = (const halves *)(even + 2 * c), *high = (const halves *)(even + m->row + 2 * c);
            ivec pair = __builtin_convertvector(*low, ivec);
            if (j + 1 < n) pair |= __builtin_convertvector(*high, ivec) << 16;
            vstore(packed + j / 2 * r.row + c, (vec)pair);
        }
    }
    return r;
}

/* pack_rows of a bfloat16 matrix whose rows are read as pairs of adjacent elements. `line`: (d) of scratch. */
NOINLINE rows FN(pack_pairs)(const sdpa_matrix *m, int64_t j0, int64_t n, int64_t d, real *packed, real *tail,
                             real *line) {
    sdpa_matrix pairs = *m;
    pairs.dtype = SDPA_F32;
    pairs.col = sizeof(real);
    if (m->col == 2 && d % 2 == 0 && is_direct(&pairs)) return pack_rows(&pairs, j0, n, d / 2, 0, packed, tail);
    const int64_t row = packed_row((d + 1) / 2), full = n / SCORE_ROWS * SCORE_ROWS;
    memset(packed, 0, sizeof(real) * (size_t)(round_up(n, SCORE_ROWS) * row));
    for (int64_t j = 0; j < n; j++) {
        FN(load)(line, m->data + (j0 + j) * m->row, d, m->col, m->dtype, m->swapped);
        FN(store)((char *)(packed + j * row), line, d, 2, SDPA_BF16);
    }
    return (rows){.p = packed, .tail = packed + full * row, .row = row, .tail_row = row, .j0 = j0, .n = n};
}
#endif

/* vtranspose where a call costs nothing beside the memory that is read and written. */
NOINLINE void FN(transpose)(vec *r) { vtranspose(r); }

/* t (d, t_row) = sign * transpose of rows i0 .. i0+n-1 of m; lanes n .. round_up(n, VL)-1 are 0. `line`: (VL, d rounded
 * up to VL) of scratch. */
NOINLINE void pack_transposed(real *t, int64_t t_row, const sdpa_matrix *m, int64_t i0, int64_t n, int64_t d, real sign,
                              real *line) {
    const vec zero = {0};
    bool direct = is_direct(m);
    int64_t line_row = round_up(d, VL);
    for (int64_t i = 0; i < n; i += VL) {
        int64_t lanes = n - i < VL ? n - i : VL;
        const char *first = m->data + (i0 + i) * m->row;
        if (!direct) {
            for (int64_t l = 0; l < lanes; l++) {
                FN(load)(line + l * line_row, first + l * m->row, d, m->col, m->dtype, m->swapped);
            }
        }
        const real *source = direct ? (const real *)first : line;
        int64_t source_row = direct ? m->row / (int64_t)sizeof(real) : line_row;
        for (int64_t c = 0; c < d; c += VL) {
            int columns = d - c < VL ? (int)(d - c) : VL;
            vec r[VL];
            const real *first_row = source + c;
            if (columns == VL) {
                UNROLL for (int l = 0; l < VL; l++) {
                    r[l] = sign * vload(l < lanes ? first_row + l * source_row : (const real *)&zero);
                }
                vtranspose(r);
                UNROLL for (int l = 0; l < VL; l++) vstore(t + (c + l) * t_row + i, r[l]);
                continue;
            }
            for (int l = 0; l < VL; l++) {
                r[l] = l < lanes ? sign * vload_partial(first_row + l * source_row, columns) : (vec){0};
            }
            FN(transpose)(r);
            for (int l = 0; l < columns; l++) vstore(t + (c + l) * t_row + i, r[l]);
        }
    }
}

/* All queries of a unit, panel after panel, each (d, its lanes): what a tile reads again and again lies together. */
static void pack_panels(real *t, const sdpa_matrix *m, int64_t i0, int64_t n, int64_t d, real sign, real *line) {
    for (int64_t i = 0, n_i; i < n; i += n_i) {
        n_i = panel_of(n - i);
        pack_transposed(t + i * d, round_up(n_i, VL), m, i0 + i, n_i, d, sign, line);
    }
}

/* The first of VL lanes of pack_panels, a multiple i of VL queries on; *row: what is between its d elements. */
INLINE real *panel_at(real *t, int64_t n, int64_t d, int64_t i, int64_t *row) {
    int64_t first = 0, n_i = panel_of(n);
    while (i >= first + n_i) {
        first += n_i;
        n_i = panel_of(n - first);
    }
    *row = round_up(n_i, VL);
    return t + first * d + (i - first);
}

/* mask_block of a boolean mask with unit stride: as bits first, a word of 32 keys for each query, which tell what the block
 * holds. `words`: (n_j / 32 rounded up, n_i rounded up to VL) of scratch. In place of transposed numbers, (8, 1024, 64) and
 * random entries: 1.05 times as fast. */
NOINLINE enum bias_kind boolean_block(const sdpa_matrix *mask, int64_t i0, int64_t n_i, int64_t j0, int64_t n_j,
                                      real *s, int64_t s_row, uint32_t *words) {
    const int64_t lanes = round_up(n_i, VL);
    uint32_t seen = 0, hidden = 0;
    for (int64_t i = 0; i < lanes; i++) {
        const char *row = mask->data + (i0 + (i < n_i ? i : n_i - 1)) * mask->row + j0;
        for (int64_t j = 0; j < n_j; j += 32) {
            char last[32] = {0};
            const int64_t n = n_j - j < 32 ? n_j - j : 32;
            if (n < 32) memcpy(last, row + j, (size_t)n);
            const uint32_t word = vbits(n < 32 ? last : row + j);
            seen |= word;
            hidden |= ~word << (32 - n);
            words[j / 32 * lanes + i] = word;
        }
    }
    if (!seen || !hidden) return seen ? BIAS_NONE : BIAS_ALL_MASKED;
    for (int64_t j = 0; j < n_j; j++) {
        for (int64_t i = 0; i < lanes; i += VL) {
            ivec bits;
            const uint32_t *from = words + j / 32 * lanes + i;
            if (SDPA_REAL == 32) {
                memcpy(&bits, from, sizeof bits);
            } else {
                for (int l = 0; l < VL; l++) bits[l] = from[l];
            }
            vstore(s + j * s_row + i, (vec)(((bits >> j % 32 & 1) == 0) & (ivec)vset1(-INFINITY)));
        }
    }
    return BIAS_SOME_MASKED;
}

/* s[j, i] (n_j, s_row) = factor * mask[i0 + i, j0 + j] for i < n_i; the lanes after n_i repeat a query. Returns what the
 * block holds; s need not be written if that tells all. `lines`: (VL, n_j rounded up to VL) of scratch. */
NOINLINE enum bias_kind mask_block(const sdpa_matrix *mask, int64_t i0, int64_t n_i, int64_t j0, int64_t n_j,
                                   real factor, real *s, int64_t s_row, real *lines) {
    const int64_t line_row = round_up(n_j, VL);
    if (mask->dtype == SDPA_BOOL && mask->col == 1) {
        return boolean_block(mask, i0, n_i, j0, n_j, s, s_row, (uint32_t *)lines);
    }
    ivec visible = {0}, nonzero = {0}; /* bits in which an element differs from -inf, and from 0 */
    vec least = {0};
    for (int64_t i = 0; i < n_i; i += VL) {
        const bool in_place = is_direct(mask) && n_j % VL == 0 && i + VL <= n_i;
        const char *first = mask->data + (i0 + i) * mask->row + j0 * mask->col;
        const real *from = in_place ? (const real *)first : lines;
        const int64_t from_row = in_place ? mask->row / (int64_t)sizeof(real) : line_row;
        for (int64_t l = 0; l < VL && !in_place; l++) {
            if (i + l < n_i) {
                FN(load)
                (lines + l * line_row, first + l * mask->row, n_j, mask->col, mask->dtype, mask->swapped);
            } else {
                memcpy(lines + l * line_row, lines, (size_t)n_j * sizeof(real));
            }
        }
        /* In place, all but the first and the last columns in whole cache lines: rows of 4096 bytes share a set of L1, which
         * forgets a line that two vectors share between them (Zen 4, (8, 1024, 64): 1.02 times as fast). */
        const int64_t lead = in_place && n_j > VL ? (int64_t)(-(uintptr_t)from % VEC_BYTES / sizeof(real)) : 0;
        for (int64_t j = 0, next; j < n_j; j = next) {
            next = j == 0 && lead > 0 ? lead : j + VL;
            if (in_place && next < n_j && next + VL > n_j) next = n_j - VL;
            vec r[VL];
            UNROLL for (int l = 0; l < VL; l++) r[l] = vload(from + l * from_row + j);
            vtranspose(r);
            UNROLL for (int l = 0; l < VL; l++) {
                if (j + l >= n_j) break;
                const vec x = r[l];
                visible |= (ivec)x ^ (ivec)vset1(-INFINITY);
                nonzero |= (ivec)x & ~SIGN_BIT;
                least = vmin2(x, least);
                /* The lowest finite number, which some write for -inf, is not to become -inf. */
                vstore(s + (j + l) * s_row + i, vmul_finite(factor, x));
            }
        }
    }
    if (!vany(visible != 0)) return BIAS_ALL_MASKED;
    if (!vany(nonzero != 0)) return BIAS_NONE;
    return vany(least == -(real)INFINITY) ? BIAS_SOME_MASKED : BIAS_FINITE;
}

/* Whether any pair of the unit's may be masked. */
INLINE bool FN(may_mask)(const sdpa_unit *u) {
    const sdpa_problem *p = u->problem;
    return u->mask.data || p->has_lower || p->has_upper || u->key_length < p->n_k;
}

/* gemm.seen of queries from i0 on and keys from j0 on. */
INLINE int64_t FN(keys_seen)(const sdpa_unit *u, int64_t i0, int64_t j0) {
    const int64_t seen = i0 + u->upper + 1 - j0;
    return u->problem->has_upper && seen > 0 ? seen : 0;
}

/* How many of n keys from j0 on, in whole tiles, causality hides from no query from i0 on, where it hides later ones: these
 * come first and need no mask; else 0. */
INLINE int64_t FN(open_keys)(const sdpa_unit *u, int64_t i0, int64_t j0, int64_t n) {
    const int64_t open = FN(keys_seen)(u, i0, j0) / SCORE_ROWS * SCORE_ROWS;
    return open < n ? open : 0;
}

/* The same with ALiBi added, and -inf outside band and key_length. Returns what the block holds; s is filled unless that
 * tells all. */
NOINLINE enum bias_kind bias_block(const sdpa_unit *u, int64_t i0, int64_t n_i, int64_t j0, int64_t n_j, real factor,
                                   real *s, int64_t s_row, real *lines) {
    const sdpa_problem *p = u->problem;
    const sdpa_matrix *mask = &u->mask;
    /* The band cuts the block if its first query's last key, or its last query's first key, lies inside. */
    bool cut_above = p->has_upper && i0 + u->upper < j0 + n_j - 1;
    bool cut_below = p->has_lower && i0 + n_i - 1 + u->lower > j0;
    bool cut_end = u->key_length < j0 + n_j;
    int64_t first_key, last_key;
    sdpa_visible_keys(u, i0, n_i, &first_key, &last_key);
    if (last_key <= j0 || first_key >= j0 + n_j) return BIAS_ALL_MASKED;
    bool cut = cut_above || cut_below || cut_end;
    real slope = 0;
    if (u->alibi_slopes.data) {
        FN(load)(&slope, u->alibi_slopes.data, 1, 0, u->alibi_slopes.dtype, u->alibi_slopes.swapped);
    }
    if (!mask->data && !cut && slope == 0) return BIAS_NONE;

    const int64_t lanes = round_up(n_i, VL);
    const enum bias_kind kind = mask->data ? mask_block(mask, i0, n_i, j0, n_j, factor, s, s_row, lines) : BIAS_NONE;
    if (kind == BIAS_ALL_MASKED || (!cut && slope == 0)) return kind;
    if (kind == BIAS_NONE) {
        for (int64_t j = 0; j < n_j; j++) {
            for (int64_t i = 0; i < lanes; i += VL) vstore(s + j * s_row + i, (vec){0});
        }
    }
    if (slope != 0) {
        vec lane;
        for (int l = 0; l < VL; l++) lane[l] = l;
        for (int64_t j = 0; j < n_j; j++) {
            for (int64_t i = 0; i < lanes; i += VL) {
                vec distance = lane + (real)(i0 + i + u->offset - j0 - j);
                distance = (vec)((ivec)distance & ~SIGN_BIT);
                vstore(s + j * s_row + i, vload(s + j * s_row + i) - factor * slope * distance);
            }
        }
    }
    if (cut) {
        for (int64_t j = 0; j < n_j; j++) {
            /* Key j0 + j is visible to queries first .. last, counted from i0; padding lanes follow the last query. */
            int64_t first = p->has_upper ? j0 + j - u->upper - i0 : 0;
            int64_t last = p->has_lower ? j0 + j - u->lower - i0 : lanes;
            if (j0 + j >= u->key_length) last = -1;
            SIMD for (int64_t i = 0; i < lanes; i++) {
                if (i < first || i > last) s[j * s_row + i] = -(real)INFINITY;
            }
        }
    }
    return cut ? BIAS_SOME_MASKED : kind == BIAS_NONE ? BIAS_FINITE : kind;
}
