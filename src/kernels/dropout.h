/* Dropout: a counter-based generator, Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
 * 3"), so that the pattern is a function of (seed, batch, head, i, j) and the backward draws it again. The counter of
 * pair (i, j) is (i, j / 4, head, batch), each modulo 2^32, the key the two halves of the seed; the pair takes word j %
 * 4. */
#ifndef SDPA_KERNEL_DROPOUT_H
#define SDPA_KERNEL_DROPOUT_H

#include "pack.h"

#define WORDS (VEC_BYTES / 4)

typedef uint32_t word_vec __attribute__((vector_size(VEC_BYTES)));

/* *high, *low = the halves of the products x * factor. */
INLINE void multiply_words(word_vec x, uint32_t factor, word_vec *high, word_vec *low) {
    const uint64_t half = 0xffffffff;
    wide_vec even = vmultiply_even((wide_vec)x, factor), odd = vmultiply_even((wide_vec)x >> 32, factor);
    *low = (word_vec)((even & half) | odd << 32);
    *high = (word_vec)(even >> 32 | (odd & ~half));
}

INLINE void philox(word_vec c[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; round++) {
        word_vec high0, low0, high1, low1;
        multiply_words(c[0], 0xD2511F53, &high0, &low0);
        multiply_words(c[2], 0xCD9E8D57, &high1, &low1);
        c[0] = high1 ^ c[1] ^ key0;
        c[1] = low1;
        c[2] = high0 ^ c[3] ^ key1;
        c[3] = low0;
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
}

/* r[j, i] (n_j, r_row) = 0 with probability dropout_p, else 1 / (1 - dropout_p), for the block's queries rounded up to
 * whole vectors. */
#define dropout_block OF_BASE(dropout_block)
SHARED void dropout_block(const sdpa_unit *u, const block *b, real *r, int64_t r_row);

#if OWNS_SHARED
SHARED void dropout_block(const sdpa_unit *u, const block *b, real *r, int64_t r_row) {
    const sdpa_problem *p = u->problem;
    const int64_t i0 = b->i0, n_i = round_up(b->n_i, VL), j0 = b->j0, n_j = b->n_j;
    const uint64_t threshold = (uint64_t)llrint(p->dropout_p * 0x1p32);
    const real keep = p->dropout_p < 1 ? (real)(1 / (1 - p->dropout_p)) : 0;
    for (int64_t i = 0; i < n_i; i += WORDS) {
        for (int64_t group = j0 / 4; group * 4 < j0 + n_j; group++) {
            uint32_t words[4][WORDS];
            word_vec c[4];
            for (int l = 0; l < WORDS; l++) c[0][l] = (uint32_t)(i0 + i + l);
            c[1] = (word_vec){0} + (uint32_t)group;
            c[2] = (word_vec){0} + (uint32_t)u->head;
            c[3] = (word_vec){0} + (uint32_t)u->batch;
            philox(c, (uint32_t)p->seed, (uint32_t)(p->seed >> 32));
            memcpy(words, c, sizeof words);
            for (int64_t j = group * 4; j < group * 4 + 4; j++) {
                if (j < j0 || j >= j0 + n_j) continue;
                for (int64_t l = 0; l < WORDS && i + l < n_i; l++) {
                    r[(j - j0) * r_row + i + l] = words[j % 4][l] < threshold ? 0 : keep;
                }
            }
        }
    }
}
#endif

/* If the problem has dropout, runs dropout_block and returns true. */
INLINE bool draw_factors(const sdpa_unit *u, const block *b, real *r, int64_t r_row) {
    if (!(u->problem->dropout_p > 0)) return false;
    dropout_block(u, b, r, r_row);
    return true;
}

/* A vector of dropout's factors, from r, which is NULL without dropout. */
INLINE vec factor_at(const real *r, int64_t at) { return r ? vload(r + at) : vset1(1); }

#endif
