#include "reach.h"

#include "unit.h"

int64_t sdpa_reach_set(const sdpa_unit *u, sdpa_sums *sums) {
    int64_t j0, j1, query = u->i0 + u->offset;
    sdpa_visible_keys(u, u->i0, u->n_i, &j0, &j1);
    if (j0 >= j1) return 0;
    const sdpa_box box = {{u->batch, u->batch}, {u->head, u->head}, {query, query + u->n_i - 1}, {j0, j1 - 1}};
    return sdpa_program_set_reaches(u->problem->score_mod, &box, sums);
}

int64_t sdpa_reach_most(const sdpa_problem *p) {
    if (!sdpa_program_has_reaches(p->score_mod)) return p->score_mod->n_shared;
    sdpa_sums *sums = sdpa_alloc(sdpa_program_sums_bytes(p->score_mod, 0));
    if (!sums) return -1;
    int64_t most = 0;
    sdpa_program_clear_sums(p->score_mod, sums, 0);
    for (int64_t i = 0; i < p->n_batch * p->n_head * sdpa_units(p); i++) {
        sdpa_unit u;
        sdpa_unit_set(&u, p, i, NULL);
        const int64_t n = sdpa_reach_set(&u, sums);
        if (n > most) most = n;
    }
    sdpa_free(sums);
    return most;
}
