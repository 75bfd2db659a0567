/* The bias that masks, band, lengths and ALiBi add to a block of scores. */
#ifndef SDPA_KERNEL_MASKS_H
#define SDPA_KERNEL_MASKS_H

#include "outline.h"
#include "program.h"

/* to = from, n bytes of which are `stride` apart. */
INLINE void gather_bytes(char *restrict to, const char *restrict from, int64_t n, int64_t stride) {
    if (stride == -1) {
        SIMD for (int64_t j = 0; j < n; j++) to[j] = from[-j];
        return;
    }
    for (int64_t j = 0; j < n; j++) to[j] = from[j * stride];
}

typedef signed char bools __attribute__((vector_size(VL)));

/* The elements of a mask for the lanes from i on, of n, which lie next to each other; the last one is repeated. */
INLINE bools load_bools(const char *shown, int64_t i, int64_t n) {
    bools x = {0}; /* at -O1 GCC does not see that the loop sets all lanes */
    if (i + VL <= n) {
        memcpy(&x, shown + i, sizeof x);
    } else {
        for (int l = 0; l < VL; l++) x[l] = shown[i + l < n ? i + l : n - 1];
    }
    return x;
}

/* -1 where an element is 0. To clang a comparison of bytes holds `char`, which on aarch64 has no sign. */
INLINE bools are_zero(bools x) { return (bools)(x == 0); }

INLINE bool any_of(bools x) {
    const bools none = {0};
    return memcmp(&x, &none, sizeof x) != 0;
}

/* boolean_block of a mask whose queries lie next to each other in memory. `more`: see there. */
NOINLINE enum bias_kind boolean_columns(const sdpa_matrix *mask, const block *b, real *s, int64_t s_row, bool more) {
    const char *first = mask->data + b->i0 + b->j0 * mask->col;
    bools visible = {0}, hidden = {0};
    for (int64_t i = 0; i < b->n_i; i += VL) {
        for (int64_t j = 0; j < b->n_j; j++) {
            const bools x = load_bools(first + j * mask->col, i, b->n_i);
            visible |= x;
            hidden |= are_zero(x);
        }
    }
    if (!any_of(visible)) return BIAS_ALL_MASKED;
    if (!any_of(hidden)) return BIAS_NONE;
    for (int64_t j = 0; j < b->n_j; j++) {
        for (int64_t i = 0; i < b->n_i; i += VL) {
            const bools x = load_bools(first + j * mask->col, i, b->n_i);
            const ivec masked = __builtin_convertvector(are_zero(x), ivec);
            real *to = s + j * s_row + i;
            vstore(to, more ? vselect(masked, vset1(-INFINITY), vload(to)) : (vec)(masked & (ivec)vset1(-INFINITY)));
        }
    }
    return BIAS_SOME_MASKED;
}

/* mask_block for a boolean mask. First gathers a word of bits for each query and 32 keys; these words show what the block
 * holds. `words`: (n_j / 32 rounded up, n_i rounded up to VL) of scratch. `more`: s holds a bias already, which stays
 * where pairs are visible. */
NOINLINE enum bias_kind boolean_block(const sdpa_matrix *mask, const block *b, real *s, int64_t s_row, uint32_t *words,
                                      bool more) {
    const int64_t lanes = round_up(b->n_i, VL), n_j = b->n_j;
    uint32_t any_visible = 0, any_hidden = 0;
    char together[RUN_KEYS];
    if (mask->row == 1 && mask->col != 1) return boolean_columns(mask, b, s, s_row, more);
    for (int64_t i = 0; i < lanes; i++) {
        const char *row = mask->data + (b->i0 + (i < b->n_i ? i : b->n_i - 1)) * mask->row + b->j0 * mask->col;
        if (mask->col != 1) {
            if (i < b->n_i) gather_bytes(together, row, n_j, mask->col);
            row = together;
        }
        for (int64_t j = 0; j < n_j; j += 32) {
            char last[32] = {0};
            const int64_t n = n_j - j < 32 ? n_j - j : 32;
            if (n < 32) memcpy(last, row + j, (size_t)n);
            const uint32_t word = vbits(n < 32 ? last : row + j);
            any_visible |= word;
            any_hidden |= ~word << (32 - n);
            words[j / 32 * lanes + i] = word;
        }
    }
    if (!any_visible || !any_hidden) return any_visible ? BIAS_NONE : BIAS_ALL_MASKED;
    for (int64_t j = 0; j < n_j; j++) {
        for (int64_t i = 0; i < lanes; i += VL) {
            ivec bits = {0}; /* GCC 16 does not see that all lanes are set */
            const uint32_t *from = words + j / 32 * lanes + i;
            if (SDPA_REAL == 32) {
                memcpy(&bits, from, sizeof bits);
            } else {
                for (int l = 0; l < VL; l++) bits[l] = from[l];
            }
            const ivec hidden = (bits >> j % 32 & 1) == 0;
            real *to = s + j * s_row + i;
            vstore(to, more ? vselect(hidden, vset1(-INFINITY), vload(to)) : (vec)(hidden & (ivec)vset1(-INFINITY)));
        }
    }
    return BIAS_SOME_MASKED;
}

/* What a block of a mask holds. */
typedef struct mask_contents {
    ivec visible, nonzero; /* the bits in which any element differs from -inf and from 0 */
    vec least;
} mask_contents;

/* Stores factor * x, elements of a mask. Some programs write the lowest finite number for -inf; it must not become
 * -inf. */
INLINE void store_mask(mask_contents *c, real *to, real factor, vec x) {
    c->visible |= (ivec)x ^ (ivec)vset1(-INFINITY);
    c->nonzero |= (ivec)x & ~SIGN_BIT;
    c->least = vmin2(x, c->least);
    vstore(to, vmul_finite(factor, x));
}

INLINE enum bias_kind kind_of_mask(const mask_contents *c) {
    if (!vany(c->visible != 0)) return BIAS_ALL_MASKED;
    if (!vany(c->nonzero != 0)) return BIAS_NONE;
    return vany(c->least == -(real)INFINITY) ? BIAS_SOME_MASKED : BIAS_FINITE;
}

/* mask_block of a mask whose queries are closer in memory than its keys. `line`: n_i in whole vectors. */
NOINLINE enum bias_kind mask_columns(const sdpa_matrix *mask, const block *b, real factor, real *s, int64_t s_row,
                                     real *line) {
    mask_contents contents = {{0}, {0}, {0}};
    const sdpa_matrix columns = {mask->data, mask->col, mask->row, mask->dtype, mask->swapped};
    const int64_t n_i = b->n_i, lanes = round_up(n_i, VL);
    const bool in_place = is_direct(&columns) && n_i == lanes;
    for (int64_t j = 0; j < b->n_j; j++) {
        const char *column = mask->data + b->i0 * mask->row + (b->j0 + j) * mask->col;
        const real *from = in_place ? (const real *)column : line;
        if (!in_place) load(line, column, n_i, mask->row, mask->dtype, mask->swapped);
        for (int64_t i = n_i; i < lanes; i++) line[i] = line[n_i - 1];
        for (int64_t i = 0; i < lanes; i += VL) store_mask(&contents, s + j * s_row + i, factor, vload(from + i));
    }
    return kind_of_mask(&contents);
}

/* line (b->n_j, rounded up to VL) = factor * mask[0, j0 + j], of a mask that is the same for all queries. */
NOINLINE enum bias_kind load_keys(const sdpa_matrix *mask, const block *b, real factor, real *line) {
    mask_contents contents = {{0}, {0}, {0}};
    load(line, mask->data + b->j0 * mask->col, b->n_j, mask->col, mask->dtype, mask->swapped);
    for (int64_t j = b->n_j; j % VL != 0; j++) line[j] = line[0];
    for (int64_t j = 0; j < b->n_j; j += VL) {
        store_mask(&contents, line + j, factor, vload(line + j));
    }
    return kind_of_mask(&contents);
}

/* mask_block for such a mask. */
NOINLINE enum bias_kind key_block(const sdpa_matrix *mask, const block *b, real factor, real *s, int64_t s_row,
                                  real *line) {
    const enum bias_kind kind = load_keys(mask, b, factor, line);
    for (int64_t j = 0; j < b->n_j && (kind == BIAS_FINITE || kind == BIAS_SOME_MASKED); j++) {
        for (int64_t i = 0; i < b->n_i; i += VL) vstore(s + j * s_row + i, vset1(line[j]));
    }
    return kind;
}

/* s[j, i] (n_j, s_row) = factor * mask[i0 + i, j0 + j] for i < n_i; the lanes after n_i repeat a query. Returns the
 * kind of the block; for BIAS_NONE and BIAS_ALL_MASKED s may be left unwritten. `lines`: (VL, n_j rounded up to VL) of
 * scratch. */
#define mask_block OF_BASE(mask_block)
SHARED enum bias_kind mask_block(const sdpa_matrix *mask, const block *b, real factor, real *s, int64_t s_row,
                                 real *lines);

#if OWNS_SHARED
SHARED enum bias_kind mask_block(const sdpa_matrix *mask, const block *b, real factor, real *s, int64_t s_row,
                                 real *lines) {
    const int64_t n_i = b->n_i, n_j = b->n_j, line_row = round_up(n_j, VL);
    if (mask->row == 0) return key_block(mask, b, factor, s, s_row, lines);
    if (mask->dtype == SDPA_BOOL) return boolean_block(mask, b, s, s_row, (uint32_t *)lines, false);
    if (across_rows(mask->row, mask->col)) return mask_columns(mask, b, factor, s, s_row, lines);
    mask_contents contents = {{0}, {0}, {0}};
    for (int64_t i = 0; i < n_i; i += VL) {
        const bool in_place = is_direct(mask) && n_j % VL == 0 && i + VL <= n_i;
        const char *first = mask->data + (b->i0 + i) * mask->row + b->j0 * mask->col;
        const real *from = in_place ? (const real *)first : lines;
        const int64_t from_row = in_place ? mask->row / (int64_t)sizeof(real) : line_row;
        for (int64_t l = 0; l < VL && !in_place; l++) {
            if (i + l < n_i) {
                load(lines + l * line_row, first + l * mask->row, n_j, mask->col, mask->dtype, mask->swapped);
            } else {
                memcpy(lines + l * line_row, lines, (size_t)n_j * sizeof(real));
            }
        }
        for (int64_t j = 0; j < n_j; j = in_place ? next_columns((const char *)from, j, n_j, sizeof(real)) : j + VL) {
            vec r[VL];
            UNROLL for (int l = 0; l < VL; l++) r[l] = vload(from + l * from_row + j);
            vtranspose(r);
            UNROLL for (int l = 0; l < VL; l++) {
                if (j + l >= n_j) break;
                store_mask(&contents, s + (j + l) * s_row + i, factor, r[l]);
            }
        }
    }
    return kind_of_mask(&contents);
}
#endif

/* Adds -inf to the bias in s, of this kind, where a boolean mask is false. `lines` as in mask_block. */
NOINLINE enum bias_kind add_boolean(const sdpa_matrix *mask, const block *b, enum bias_kind kind, real *s,
                                    int64_t s_row, real *lines) {
    if (kind == BIAS_ALL_MASKED) return kind;
    if (kind == BIAS_NONE) return mask_block(mask, b, 1, s, s_row, lines);
    const enum bias_kind own = boolean_block(mask, b, s, s_row, (uint32_t *)lines, true);
    return own == BIAS_NONE ? kind : own;
}

/* Whether any pair of the unit may be masked. */
INLINE bool may_mask(const sdpa_unit *u) {
    const sdpa_problem *p = u->problem;
    return u->mask.data || p->has_lower || p->has_upper || u->key_length < p->n_k || p->mask_mod || p->score_mod;
}

/* Whether masks, boolean ones or mask_mod, are known to hide the keys among j0 .. j0+n-1 from all queries of the
 * unit. */
INLINE bool is_hidden(const sdpa_unit *u, int64_t j0, int64_t n) {
    if (j0 + n > u->key_length) n = u->key_length - j0;
    const block b = {u->i0, u->n_i, j0, n};
    return hides_keys(u, j0, n) || (u->problem->mask_mod && seen_by_program(u, &b) == SDPA_NONE_SEEN);
}

/* The keys that any query of the unit may see: sdpa_visible_keys without the blocks that mask_mod hides at either end. */
#define unit_keys OF_BASE(unit_keys)
SHARED void unit_keys(const sdpa_unit *u, int64_t *j0, int64_t *j1);

#if OWNS_SHARED
SHARED void unit_keys(const sdpa_unit *u, int64_t *j0, int64_t *j1) {
    const int64_t size = sdpa_key_block(u->problem);
    sdpa_visible_keys(u, u->i0, u->n_i, j0, j1);
    if (!u->problem->mask_mod) return;
    for (int64_t n = size;
         *j0 < *j1 && n >= size;) { /* n grows while blocks are hidden, and shrinks at the first seen */
        const int64_t next = (*j0 / size + n / size) * size, end = next < *j1 ? next : *j1;
        const bool hidden = is_hidden(u, *j0, end - *j0);
        if (hidden) *j0 = end;
        n = hidden ? 2 * n : n / 2;
    }
    for (int64_t n = size; *j0 < *j1 && n >= size;) {
        const int64_t before = ((*j1 - 1) / size + 1 - n / size) * size, first = before > *j0 ? before : *j0;
        const bool hidden = is_hidden(u, first, *j1 - first);
        if (hidden) *j1 = first;
        n = hidden ? 2 * n : n / 2;
    }
}
#endif

/* The value of gemm.diagonal for queries from i0 on and keys from j0 on. */
INLINE int64_t diagonal_at(const sdpa_unit *u, int64_t i0, int64_t j0) {
    const int64_t diagonal = i0 + u->upper + 1 - j0;
    return u->problem->has_upper && diagonal > 0 ? diagonal : 0;
}

/* The number of keys at the front of a block of n from j0 on, in whole tiles, that every query from i0 on sees although
 * causality hides later ones. They need no mask. 0 if the answer is all or none, or if blocks must not be split. */
INLINE int64_t open_keys(const sdpa_unit *u, int64_t i0, int64_t j0, int64_t n) {
    if (u->problem->invariant) return 0;
    const int64_t open = diagonal_at(u, i0, j0) / SCORE_ROWS * SCORE_ROWS;
    return open < n ? open : 0;
}

/* s (n_j, s_row) -= factor * slope * |i + offset - j|. */
INLINE void add_alibi(const sdpa_unit *u, const block *b, real factor, real slope, real *s, int64_t s_row) {
    vec lane;
    for (int l = 0; l < VL; l++) lane[l] = l;
    for (int64_t j = 0; j < b->n_j; j++) {
        for (int64_t i = 0; i < round_up(b->n_i, VL); i += VL) {
            vec distance = lane + (real)(b->i0 + i + u->offset - b->j0 - j);
            distance = (vec)((ivec)distance & ~SIGN_BIT);
            vstore(s + j * s_row + i, vmuladd(vset1(-factor * slope), distance, vload(s + j * s_row + i)));
        }
    }
}

/* s (n_j, s_row) = -inf outside the band and from key_length on. */
INLINE void cut_band(const sdpa_unit *u, const block *b, real *s, int64_t s_row) {
    const sdpa_problem *p = u->problem;
    const int64_t lanes = round_up(b->n_i, VL);
    for (int64_t j = 0; j < b->n_j; j++) {
        /* The key is visible to queries first .. last, counted from i0; padding lanes follow the last query. */
        const int64_t key = b->j0 + j, first = p->has_upper ? key - u->upper - b->i0 : 0;
        int64_t last = p->has_lower ? key - u->lower - b->i0 : lanes;
        if (key >= u->key_length) last = -1;
        SIMD for (int64_t i = 0; i < lanes; i++) {
            if (i < first || i > last) s[j * s_row + i] = -(real)INFINITY;
        }
    }
}

/* s (n_j, s_row) = 0 for the queries of a block. */
NOINLINE void clear_bias(const block *b, real *s, int64_t s_row) {
    for (int64_t j = 0; j < b->n_j; j++) {
        for (int64_t i = 0; i < b->n_i; i += VL) vstore(s + j * s_row + i, (vec){0});
    }
}

/* Whether the band or key_length may hide some pairs of a block. */
INLINE bool is_cut(const sdpa_unit *u, const block *b) {
    const sdpa_problem *p = u->problem;
    const int64_t last_key = b->j0 + b->n_j - 1;
    /* The band cuts the block if its first query's last key, or its last query's first key, lies inside. */
    return (p->has_upper && b->i0 + u->upper < last_key) || (p->has_lower && b->i0 + b->n_i - 1 + u->lower > b->j0) ||
           u->key_length <= last_key;
}

/* bias_block for blocks that may stay without a bias. */
INLINE enum bias_kind fill_bias(const sdpa_unit *u, const block *b, real factor, real *s, int64_t s_row, real *lines) {
    int64_t first, end;
    sdpa_visible_keys(u, b->i0, b->n_i, &first, &end);
    if (end <= b->j0 || first >= b->j0 + b->n_j) return BIAS_ALL_MASKED;
    const bool cut = is_cut(u, b);
    const real slope = scalar_of(&u->alibi_slopes, 0);
    const sdpa_seen seen = u->problem->mask_mod ? seen_by_program(u, b) : SDPA_ALL_SEEN;
    if (seen == SDPA_NONE_SEEN) return BIAS_ALL_MASKED;
    if (!u->mask.data && !cut && slope == 0 && seen == SDPA_ALL_SEEN) return BIAS_NONE;
    const unsigned shown = shown_keys(u, &u->mask, &u->mask_outline, b->i0, b->j0, b->n_j),
                   where = shown_keys(u, &u->where, &u->where_outline, b->i0, b->j0, b->n_j);
    if (shown == HIDDEN || where == HIDDEN) return BIAS_ALL_MASKED;

    enum bias_kind kind = BIAS_NONE;
    if (u->mask.data && shown != SHOWN) kind = mask_block(&u->mask, b, factor, s, s_row, lines);
    if (u->where.data && where != SHOWN) kind = add_boolean(&u->where, b, kind, s, s_row, lines);
    if (kind == BIAS_ALL_MASKED || (!cut && slope == 0 && seen == SDPA_ALL_SEEN)) return kind;
    if (kind == BIAS_NONE && (cut || slope != 0)) {
        clear_bias(b, s, s_row);
        kind = BIAS_FINITE;
    }
    if (slope != 0) add_alibi(u, b, factor, slope, s, s_row);
    if (cut) cut_band(u, b, s, s_row);
    if (seen == SDPA_SOME_SEEN) mask_by_program(u, b, s, s_row, lines, kind != BIAS_NONE);
    return cut || seen == SDPA_SOME_SEEN ? BIAS_SOME_MASKED : kind;
}

/* mask_block plus ALiBi, with -inf outside the band, beyond key_length and where mask_mod is false. s is filled for
 * BIAS_FINITE and BIAS_SOME_MASKED only. Adding a bias rounds, so an invariant problem has one everywhere; and a score_mod
 * that masks writes -inf to it. */
#define bias_block OF_BASE(bias_block)
SHARED enum bias_kind bias_block(const sdpa_unit *u, const block *b, real factor, real *s, int64_t s_row, real *lines);

#if OWNS_SHARED
SHARED enum bias_kind bias_block(const sdpa_unit *u, const block *b, real factor, real *s, int64_t s_row, real *lines) {
    enum bias_kind kind = fill_bias(u, b, factor, s, s_row, lines);
    const sdpa_program *score_mod = u->problem->score_mod;
    const bool masks = score_mod && score_mod->masks;
    if (kind == BIAS_NONE && (u->problem->invariant || masks)) {
        clear_bias(b, s, s_row);
        kind = BIAS_FINITE;
    }
    return masks && kind == BIAS_FINITE ? BIAS_SOME_MASKED : kind;
}
#endif

/* Whether a finite number for each key is all that is added to a block. If so, writes them to line (n_j, rounded up to
 * VL), and bias_block need not be called. */
INLINE bool is_key_bias(const sdpa_unit *u, const block *b, real factor, real *line) {
    const sdpa_matrix *mask = &u->mask;
    const bool alone = !u->where.data && !u->alibi_slopes.data && !u->problem->mask_mod && !u->problem->score_mod;
    return alone && mask->data && mask->row == 0 && mask->dtype != SDPA_BOOL && !is_cut(u, b) &&
           load_keys(mask, b, factor, line) == BIAS_FINITE;
}

#endif
