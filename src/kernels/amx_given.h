/* Products in the matrix unit for passes that take scores as given (scores.h) and otherwise are those of any set. Without
 * the unit there are stubs. */
#ifndef SDPA_KERNEL_AMX_GIVEN_H
#define SDPA_KERNEL_AMX_GIVEN_H

#include "forward.h"

/* The operands of products: a unit's queries, and a block of keys. Those of one pair may meet those of another. */
enum { AMX_SCORES, AMX_TANGENTS, AMX_VALUES, AMX_VALUE_TANGENTS, AMX_PAIRS };

#ifdef HAVE_AMX
typedef struct amx_sides {
    amx_scratch x;       /* queries, and registers of keys */
    const real *queries; /* pack_panels */
    amx_keys *keys;
    int64_t d;
} amx_sides;

typedef struct amx_given {
    bool can;
    real *s, *ordinary; /* (block rounded up to whole registers, s_row) */
    int64_t s_row;
    amx_sides of[AMX_PAIRS];
} amx_given;

INLINE bool amx_gives(const amx_given *w) { return w->can; }

/* The scratch of the first n_pairs. */
NOINLINE amx_given amx_given_layout(const sdpa_problem *p, int n_pairs, int64_t n_lanes, int64_t block, int64_t s_row,
                                    sdpa_arena *a) {
    amx_given w = {.can = amx_can(p), .s_row = s_row};
    const int64_t pairs = w.can ? round_up(block, AMX_DEPTH) * s_row : ABSENT;
    const array arrays[] = {ARRAY(w.s, pairs), ARRAY(w.ordinary, pairs)};
    take_arrays(arrays, COUNT(arrays), a);
    for (int i = 0; i < n_pairs; i++) {
        amx_sides *of = &w.of[i];
        of->d = i < AMX_VALUES ? p->d_k : p->d_v;
        of->x = amx_score_layout(p, of->d, n_lanes, block, a);
        const array keys = ARRAY(of->keys, w.can ? 1 : ABSENT);
        take_array(&keys, a);
    }
    return w;
}

/* Begins a unit of n_i queries. */
INLINE void amx_give_queries(amx_given *w, int pair, const real *queries, int64_t n_i) {
    w->of[pair].queries = queries;
    amx_pack_queries(&w->of[pair].x, queries, n_i, w->of[pair].d);
}

/* Begins a block of rows k of m, from pack_rows with their tail. */
INLINE void amx_give_keys(const amx_given *w, int pair, const sdpa_matrix *m, const rows *k, real *line) {
    const amx_sides *of = &w->of[pair];
    amx_take_keys(&of->x, m, k, of->d, line, of->keys);
}

/* s = the products of a panel of the queries of pair x and the first n keys of pair y. */
NOINLINE void amx_product(const amx_given *w, int x, int y, panel q, int64_t n, real *s) {
    const amx_sides *left = &w->of[x], *right = &w->of[y];
    rows k = right->keys->y;
    k.n = n;
    const keys b = {k.j0, n};
    amx_multiply_keys(&left->x, right->keys, q, b, s, w->s_row);
    if (!right->keys->any_odd && !left->x.any_odd) return;
    amx_ordinary(left->queries, q, &k, right->d, w->ordinary, w->s_row);
    amx_replace_odd_scores(&left->x, right->keys, q, b, s, w->ordinary, w->s_row);
}

/* How many of a block's keys are computed for a panel. */
INLINE int64_t amx_given_keys(const sdpa_unit *u, panel q, keys b) { return amx_visible(u, q, b); }

/* The room for a product, from a lane on. */
INLINE real *amx_room(const amx_given *w, int64_t lane) { return w->s + lane; }

/* Gives t, whose row begins at `lane`, the scores of a panel; `plain`: as its result, to which nothing else comes. */
INLINE void amx_give(const amx_given *w, int64_t lane, panel q, bool plain, scores *t) {
    real *s = amx_room(w, lane);
    amx_product(w, AMX_SCORES, AMX_SCORES, q, t->n, s);
    t->given = s;
    if (plain) t->s = s;
}
#else
typedef char amx_given;
INLINE bool amx_gives(const amx_given *w) { return (void)w, false; }
INLINE amx_given amx_given_layout(const sdpa_problem *p, int n_pairs, int64_t n_lanes, int64_t block, int64_t s_row,
                                  sdpa_arena *a) {
    return (void)p, (void)n_pairs, (void)n_lanes, (void)block, (void)s_row, (void)a, 0;
}
INLINE void amx_give_queries(amx_given *w, int pair, const real *queries, int64_t n_i) {
    (void)w, (void)pair, (void)queries, (void)n_i;
}
INLINE void amx_give_keys(const amx_given *w, int pair, const sdpa_matrix *m, const rows *k, real *line) {
    (void)w, (void)pair, (void)m, (void)k, (void)line;
}
INLINE void amx_give(const amx_given *w, int64_t lane, panel q, bool plain, scores *t) {
    (void)w, (void)lane, (void)q, (void)plain, (void)t;
}
INLINE void amx_product(const amx_given *w, int x, int y, panel q, int64_t n, real *s) {
    (void)w, (void)x, (void)y, (void)q, (void)n, (void)s;
}
INLINE real *amx_room(const amx_given *w, int64_t lane) { return (void)w, (void)lane, NULL; }
INLINE int64_t amx_given_keys(const sdpa_unit *u, panel q, keys b) { return (void)u, (void)q, b.n; }
#endif

#endif
