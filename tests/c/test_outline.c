/* A part of test_attention: the memory of outlines, and which masks have one. What they say is tested by results. */
#include "../../src/outline.h"

#include "../../src/drivers.h"
#include "../../src/runtime/isa.h"
#include "check.h"

static const int64_t strides[2] = {0, 0};

/* 8 heads in each of 3 batch entries that share a mask. */
static sdpa_problem problem_of(sdpa_dtype dtype, int64_t n_q, int64_t n_k) {
    static const int64_t axes[2] = {3, 1};
    static char mask;
    return (sdpa_problem){
        .n_axes = 2,
        .axis = axes,
        .n_batch = 3,
        .n_head = 8,
        .n_q = n_q,
        .n_k = n_k,
        .d_k = 64,
        .d_v = 64,
        .dtype = dtype,
        .mask = {.data = &mask, .row = n_k, .col = 1, .group = 1, .dtype = SDPA_BOOL, .batch = strides}};
}

static sdpa_all_outlines planned(const sdpa_problem *p) {
    sdpa_all_outlines all;
    return sdpa_outlines_plan(&all, p, 96) ? all : (sdpa_all_outlines){0};
}

static void sizes(sdpa_dtype dtype) {
    const int64_t lengths[] = {129, 4096, 4097, 32768, 1 << 20};
    for (int i = 0; i < 5; i++) {
        for (int j = 0; j < 5; j++) {
            const int64_t n_q = lengths[i], n_k = lengths[j], n_units = (n_q + 95) / 96;
            sdpa_problem p = problem_of(dtype, n_q, n_k);
            const int64_t panel = sdpa_attention_tile(&p).rows, n_panels = (96 + panel - 1) / panel,
                          bytes = 8 * n_units * (n_k / SDPA_STRIP + 1) + n_units * n_panels * (n_k / SDPA_STRETCH + 8);
            CHECK(panel >= 4, "the bound in outline.h");
            const sdpa_all_outlines one = planned(&p);
            CHECK(one.mask.bytes > 0 && one.mask.bytes <= (size_t)bytes, "%ld x %ld: %zu", (long)n_q, (long)n_k,
                  one.mask.bytes);
            CHECK(one.where.bytes == 0, "there is no other mask");
            p.mask.head = n_q * n_k;
            CHECK(planned(&p).mask.bytes == 8 * one.mask.bytes, "one for each head of its own");
            p.mask.row = 0;
            CHECK(planned(&p).mask.bytes <= 8 * one.mask.bytes / (size_t)n_units, "one for all rows alike");
            p.where = p.mask;
            CHECK(planned(&p).where.bytes == planned(&p).mask.bytes, "of the other mask");
        }
    }
}

static void kinds(void) {
    const sdpa_problem p = problem_of(SDPA_F32, 500, 500);
    sdpa_problem none = p, bias = p, short_rows = p, few_rows = p, window = p, spaced = p;
    none.mask.data = NULL;
    bias.mask.dtype = SDPA_F32;
    short_rows.n_k = 128;
    few_rows.n_q = 15;
    window.has_lower = true;
    spaced.mask.col = 2;
    const sdpa_problem *without[] = {&none, &bias, &short_rows, &few_rows, &window, &spaced};
    for (int i = 0; i < 6; i++) CHECK(planned(without[i]).mask.bytes == 0, "case %d needs no outline", i);
    CHECK(planned(&p).mask.bytes > 0, "a mask has one");
}

void test_outline(void) {
    const char *before = sdpa_isa_get()->name;
    int n;
    const sdpa_isa *list = sdpa_isa_list(&n);
    for (int i = 0; i < n; i++) {
        if (!select_isa(list[i].name)) continue;
        sizes(SDPA_F32);
        sizes(SDPA_F64);
        kinds();
    }
    sdpa_isa_select(before);
}
