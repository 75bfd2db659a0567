#include "outline.h"

#include <string.h>

#include "drivers.h"

/* A mask of one block of keys is read once anyway. Under a window a unit needs little of a strip. */
static bool pays(const sdpa_problem *p, const sdpa_tensor *mask) {
    enum { FEWEST_QUERIES = 16 };
    return mask->data && mask->dtype == SDPA_BOOL && mask->col == 1 && p->n_q >= FEWEST_QUERIES &&
           p->n_k > sdpa_key_block(p) && !p->has_lower;
}

static void plan(sdpa_outlines *o, const sdpa_problem *p, const sdpa_tensor *mask, int64_t block) {
    o->bytes = 0;
    if (!pays(p, mask)) return;
    const int64_t panel = sdpa_attention_tile(p).rows, n_panels = mask->row ? (block + panel - 1) / panel : 1,
                  n_units = mask->row ? (p->n_q + block - 1) / block : 1;
    o->block = block;
    o->n_strips = (p->n_k + SDPA_STRIP - 1) / SDPA_STRIP;
    o->n_stretches = (p->n_k + SDPA_STRETCH - 1) / SDPA_STRETCH;
    o->rows = *mask;
    const int64_t row = 8 * o->n_strips + (n_panels * o->n_stretches + 7) / 8 * 8;
    sdpa_grid matrices;
    o->bytes = (size_t)sdpa_tensor_compact(p, &o->rows, o->batch, n_units, row, 1, &matrices);
}

sdpa_all_outlines *sdpa_outlines_plan(sdpa_all_outlines *all, const sdpa_problem *p, int64_t block) {
    if (!p->mask.data) return NULL; /* there is no `where` either */
    plan(&all->mask, p, &p->mask, block);
    plan(&all->where, p, &p->where, block);
    return all->mask.bytes || all->where.bytes ? all : NULL;
}

static void take(sdpa_outlines *o, sdpa_arena *arena) {
    if (!o->bytes) return;
    o->rows.data = sdpa_take(arena, o->bytes);
    if (o->rows.data) memset(o->rows.data, 0, o->bytes);
}

void sdpa_outlines_take(sdpa_all_outlines *all, sdpa_arena *arena) {
    take(&all->mask, arena);
    take(&all->where, arena);
}

static sdpa_outline outline_of(const sdpa_outlines *o, const sdpa_unit *u) {
    if (!o->bytes) return (sdpa_outline){.found = NULL};
    const sdpa_problem *p = u->problem;
    char *row =
        o->rows.data + sdpa_offset(p, &o->rows, u->batch - p->first_batch, u->head) + u->i0 / o->block * o->rows.row;
    return (sdpa_outline){.found = (_Atomic int64_t *)row,
                          .shown = (unsigned char *)row + 8 * o->n_strips,
                          .row = o->rows.row ? o->n_stretches : 0};
}

void sdpa_outlines_set(const sdpa_all_outlines *all, sdpa_unit *u) {
    u->mask_outline = outline_of(&all->mask, u);
    u->where_outline = outline_of(&all->where, u);
}
