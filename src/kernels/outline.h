/* The outline of a boolean mask, which src/outline.h keeps: finding it, and asking it. */
#ifndef SDPA_KERNEL_OUTLINE_H
#define SDPA_KERNEL_OUTLINE_H

#include "pack.h"

enum { OUTLINE_NO, OUTLINE_BEGUN, OUTLINE_FOUND };
enum { SHOWN = 1, HIDDEN = 2 }; /* bits: some pairs are shown, some are hidden */

/* For each of n keys from `first` on: the bits of all elements of n_i rows together, and the least element. */
INLINE void gather_columns(const sdpa_matrix *mask, int64_t i0, int64_t n_i, int64_t first, int64_t n,
                           unsigned char *bits, unsigned char *least) {
    memset(bits, 0, (size_t)round_up(n, SDPA_STRETCH));
    memset(least, 1, (size_t)round_up(n, SDPA_STRETCH));
    for (int64_t i = 0; i < n_i; i += 4) {
        const unsigned char *r[4];
        for (int x = 0; x < 4; x++) {
            const int64_t row = i0 + (i + x < n_i ? i + x : n_i - 1);
            r[x] = (const unsigned char *)mask->data + row * mask->row + first;
        }
        SIMD for (int64_t j = 0; j < n; j++) {
            const unsigned char a = r[0][j] < r[1][j] ? r[0][j] : r[1][j], b = r[2][j] < r[3][j] ? r[2][j] : r[3][j],
                                c = a < b ? a : b;
            least[j] = least[j] < c ? least[j] : c;
            bits[j] |= (unsigned char)(r[0][j] | r[1][j] | r[2][j] | r[3][j]);
        }
    }
}

/* Finds the outline of one strip of keys for all panels of the unit. */
#define find_outline OF_BASE(find_outline)
SHARED void find_outline(const sdpa_unit *u, const sdpa_matrix *mask, const sdpa_outline *outline, int64_t strip);

#if OWNS_SHARED
SHARED void find_outline(const sdpa_unit *u, const sdpa_matrix *mask, const sdpa_outline *outline, int64_t strip) {
    const int64_t first = strip * SDPA_STRIP, left = u->problem->n_k - first, n = left < SDPA_STRIP ? left : SDPA_STRIP;
    unsigned char bits[SDPA_STRIP], least[SDPA_STRIP];
    PANELS (q, outline->row ? u->n_i : 1) {
        gather_columns(mask, u->i0 + q.i, q.n_i, first, n, bits, least);
        unsigned char *to = outline->shown + q.i / (SCORE_WIDTH * VL) * outline->row + first / SDPA_STRETCH;
        for (int64_t j = 0; j < n; j += SDPA_STRETCH) {
            unsigned char any = 0, all = 1;
            SIMD for (int64_t x = j; x < j + SDPA_STRETCH; x++) {
                any |= bits[x];
                all = all < least[x] ? all : least[x];
            }
            to[j / SDPA_STRETCH] = (unsigned char)((any ? SHOWN : 0) | (all ? 0 : HIDDEN));
        }
    }
}
#endif

/* Whether the outline of a strip is there, which this call sees to. False only if the run was interrupted. */
INLINE bool has_outline(const sdpa_unit *u, const sdpa_matrix *mask, const sdpa_outline *outline, int64_t strip) {
    _Atomic int64_t *found = &outline->found[strip];
    int64_t state = OUTLINE_NO;
    if (atomic_load_explicit(found, memory_order_acquire) == OUTLINE_FOUND) return true;
    if (!atomic_compare_exchange_strong(found, &state, OUTLINE_BEGUN))
        return sdpa_run_wait(u->run, found, OUTLINE_FOUND);
    find_outline(u, mask, outline, strip);
    atomic_store_explicit(found, OUTLINE_FOUND, memory_order_release);
    return true;
}

/* What a mask is known to do with keys j0 .. j0+n-1 for the panel of queries from i0 on: SHOWN, it shows all pairs;
 * HIDDEN, it hides them; both, it does either, or there is no outline. */
INLINE unsigned shown_keys(const sdpa_unit *u, const sdpa_matrix *mask, const sdpa_outline *outline, int64_t i0,
                           int64_t j0, int64_t n) {
    if (!outline->found) return SHOWN | HIDDEN;
    unsigned shown = 0;
    const unsigned char *of_panel = outline->shown + (i0 - u->i0) / (SCORE_WIDTH * VL) * outline->row;
    for (int64_t strip = j0 / SDPA_STRIP; strip * SDPA_STRIP < j0 + n; strip++) {
        if (!has_outline(u, mask, outline, strip)) return SHOWN | HIDDEN;
    }
    for (int64_t x = j0 / SDPA_STRETCH; x * SDPA_STRETCH < j0 + n; x++) shown |= of_panel[x];
    return shown;
}

/* Whether boolean masks are known to hide keys j0 .. j0+n-1 from all queries of the unit. */
INLINE bool hides_keys(const sdpa_unit *u, int64_t j0, int64_t n) {
    if (!u->mask_outline.found && !u->where_outline.found) return false;
    PANELS (q, u->n_i) {
        if (shown_keys(u, &u->mask, &u->mask_outline, u->i0 + q.i, j0, n) != HIDDEN &&
            shown_keys(u, &u->where, &u->where_outline, u->i0 + q.i, j0, n) != HIDDEN) {
            return false;
        }
    }
    return true;
}

#endif
