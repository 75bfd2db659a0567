/* Handlers for XLA: the driver computes what the frame describes, and a malformed frame is an error. */
#include <fenv.h>
#include <string.h>

#include "../../src/drivers.h"
#include "../../src/runtime/memory.h"
#include "../../src/xla.h"
#include "check.h"
#include "naive.h"

enum { N_BATCH = 2, N_HEAD = 2, N_Q = 3, N_K = 5, D = 4, MOST = 14 };
enum { Q_SIZE = N_BATCH * N_HEAD * N_Q * D, K_SIZE = N_K * D, LSE_SIZE = N_BATCH * N_HEAD * N_Q };

/* Queries (batch, rows, heads, columns), keys and values (1, rows, 1, columns): shared by batch and heads. */
static float q[Q_SIZE], k[K_SIZE], v[K_SIZE], o[Q_SIZE], lse[LSE_SIZE], dout[Q_SIZE], dq[Q_SIZE], dk[K_SIZE],
    dv[K_SIZE];
static int32_t lengths[N_BATCH];

/* Our side of XLA: one call with everything that its frame points at. */
typedef struct call {
    sdpa_xla_frame frame;
    sdpa_xla_buffer buffers[2 * MOST];
    int64_t dims[2 * MOST][4];
    void *operands[MOST], *results[MOST];
    int64_t integers[SDPA_XLA_LEAD + 2];
    double numbers[SDPA_XLA_N_NUMBERS];
    sdpa_xla_array arrays[2];
    sdpa_xla_text texts[2], *names[2];
    void *attributes[2];
    int kinds[2];
} call;

static char last_error[200];
static int last_code;

static sdpa_xla_error *make_error(sdpa_xla_message *message) {
    last_code = message->code;
    snprintf(last_error, sizeof last_error, "%s", message->text);
    return (sdpa_xla_error *)last_error;
}

static const sdpa_xla_api api = {.struct_size = sizeof api, .make_error = make_error};

static void add(call *c, bool result, int bit, int type, void *data, int64_t rank, const int64_t *dims) {
    sdpa_xla_buffers *all = result ? &c->frame.results : &c->frame.operands;
    const int at = (int)all->size + (result ? MOST : 0);
    memcpy(c->dims[at], dims, sizeof *dims * (size_t)rank);
    c->buffers[at] = (sdpa_xla_buffer){sizeof(sdpa_xla_buffer), NULL, type, data, rank, c->dims[at]};
    all->items[all->size++] = &c->buffers[at];
    c->integers[result ? SDPA_XLA_RESULT_BITS : SDPA_XLA_OPERAND_BITS] |= 1 << bit;
}

static void begin(call *c) {
    static const int64_t of_q[] = {N_BATCH, N_Q, N_HEAD, D}, of_k[] = {1, N_K, 1, D}, batch[] = {N_BATCH};
    memset(c, 0, sizeof *c);
    c->frame.api = &api;
    c->frame.operands.items = c->operands;
    c->frame.results.items = c->results;
    c->integers[SDPA_XLA_rows_first] = 1;
    c->integers[SDPA_XLA_workers] = 1;
    c->integers[SDPA_XLA_LEAD] = N_BATCH;
    c->integers[SDPA_XLA_LEAD + 1] = N_HEAD;
    c->numbers[SDPA_XLA_NUMBER_scale] = 0.5;
    c->arrays[0] = (sdpa_xla_array){SDPA_XLA_S64, SDPA_XLA_LEAD + 2, c->integers};
    c->arrays[1] = (sdpa_xla_array){SDPA_XLA_F64, SDPA_XLA_N_NUMBERS, c->numbers};
    c->texts[0] = (sdpa_xla_text){"integers", 8};
    c->texts[1] = (sdpa_xla_text){"numbers", 7};
    for (int i = 0; i < 2; i++) {
        c->kinds[i] = SDPA_XLA_ARRAY;
        c->names[i] = &c->texts[i];
        c->attributes[i] = &c->arrays[i];
    }
    c->frame.attributes = (sdpa_xla_attributes){0, NULL, 2, c->kinds, c->names, c->attributes};
    add(c, false, SDPA_XLA_query, SDPA_XLA_F32, q, 4, of_q);
    add(c, false, SDPA_XLA_key, SDPA_XLA_F32, k, 4, of_k);
    add(c, false, SDPA_XLA_value, SDPA_XLA_F32, v, 4, of_k);
    add(c, false, SDPA_XLA_key_lengths, SDPA_XLA_S32, lengths, 1, batch);
}

static void begin_forward(call *c) {
    static const int64_t of_o[] = {N_BATCH, N_Q, N_HEAD, D}, of_lse[] = {N_BATCH, N_HEAD, N_Q};
    begin(c);
    add(c, true, SDPA_XLA_RESULT_out, SDPA_XLA_F32, o, 4, of_o);
    add(c, true, SDPA_XLA_RESULT_lse, SDPA_XLA_F32, lse, 3, of_lse);
}

static const int64_t batch_length = 8; /* bytes */

/* The problem of the frame as a descriptor. */
static sdpa_problem written(int64_t copies[N_BATCH]) {
    static const int64_t n_batch = N_BATCH, batch_q = 4 * N_Q * N_HEAD * D, batch_k = 0, batch_lse = 4 * N_HEAD * N_Q;
    sdpa_problem p = {.n_batch = N_BATCH,
                      .n_head = N_HEAD,
                      .n_q = N_Q,
                      .n_k = N_K,
                      .d_k = D,
                      .d_v = D,
                      .dtype = SDPA_F32,
                      .scale = 0.5,
                      .n_workers = 1,
                      .n_axes = 1,
                      .axis = &n_batch};
    const sdpa_tensor of_q = {
        .row = 4 * N_HEAD * D, .col = 4, .head = 4 * D, .group = 1, .dtype = SDPA_F32, .batch = &batch_q};
    const sdpa_tensor of_k = {.row = 4 * D, .col = 4, .group = 1, .dtype = SDPA_F32, .batch = &batch_k};
    const sdpa_tensor of_lse = {
        .row = 4, .col = 4, .head = 4 * N_Q, .group = 1, .dtype = SDPA_F32, .batch = &batch_lse};
    p.q = p.o = p.dout = p.dq = of_q;
    p.k = p.v = p.dk = p.dv = of_k;
    p.lse = of_lse;
    p.key_length = (sdpa_tensor){.data = (char *)copies, .group = 1, .dtype = SDPA_I64, .batch = &batch_length};
    p.q.data = (char *)q, p.k.data = (char *)k, p.v.data = (char *)v;
    p.dout.data = p.dq.data = p.dk.data = p.dv.data = NULL;
    for (int i = 0; i < N_BATCH; i++) copies[i] = lengths[i];
    return p;
}

static void fill(float *x, int n) {
    for (int i = 0; i < n; i++) x[i] = (float)naive_normal();
}

static void test_passes(void) {
    static const int64_t of_q[] = {N_BATCH, N_Q, N_HEAD, D}, of_k[] = {1, N_K, 1, D}, of_lse[] = {N_BATCH, N_HEAD, N_Q};
    static float o2[Q_SIZE], lse2[LSE_SIZE], dq2[Q_SIZE], dk2[K_SIZE], dv2[K_SIZE];
    int64_t copies[N_BATCH];
    call c;
    begin_forward(&c);
    CHECK(!sdpa_xla_forward(&c.frame), "%s", last_error);
    sdpa_problem p = written(copies);
    p.o.data = (char *)o2, p.lse.data = (char *)lse2;
    p.features = sdpa_problem_features(&p);
    CHECK(sdpa_attention_forward(&p) == SDPA_OK, "forward");
    CHECK(!memcmp(o, o2, sizeof o) && !memcmp(lse, lse2, sizeof lse), "forward");
    /* lse alone, by a fast path and by the general way. */
    for (int softcap = 0; softcap < 2; softcap++) {
        float expected[LSE_SIZE];
        begin_forward(&c);
        c.numbers[SDPA_XLA_NUMBER_softcap] = softcap;
        CHECK(!sdpa_xla_forward(&c.frame), "%s", last_error);
        memcpy(expected, lse, sizeof lse);
        begin(&c);
        c.numbers[SDPA_XLA_NUMBER_softcap] = softcap;
        add(&c, true, SDPA_XLA_RESULT_lse, SDPA_XLA_F32, lse, 3, of_lse);
        memset(lse, 0xff, sizeof lse);
        CHECK(!sdpa_xla_forward(&c.frame) && !memcmp(lse, expected, sizeof lse), "lse alone, softcap %d", softcap);
    }
    begin_forward(&c);
    c.integers[SDPA_XLA_workers] = -1;
    CHECK(!sdpa_xla_forward(&c.frame) && !memcmp(o, o2, sizeof o), "as many threads as CPUs");

    begin(&c);
    add(&c, false, SDPA_XLA_grad_out, SDPA_XLA_F32, dout, 4, of_q);
    add(&c, false, SDPA_XLA_out, SDPA_XLA_F32, o, 4, of_q);
    add(&c, false, SDPA_XLA_lse, SDPA_XLA_F32, lse, 3, of_lse);
    add(&c, true, SDPA_XLA_RESULT_query, SDPA_XLA_F32, dq, 4, of_q);
    add(&c, true, SDPA_XLA_RESULT_key, SDPA_XLA_F32, dk, 4, of_k);
    add(&c, true, SDPA_XLA_RESULT_value, SDPA_XLA_F32, dv, 4, of_k);
    memset(dk, 0xff, sizeof dk); /* XLA's memory is not cleared */
    CHECK(!sdpa_xla_backward(&c.frame), "%s", last_error);
    p.dout.data = (char *)dout, p.dq.data = (char *)dq2, p.dk.data = (char *)dk2, p.dv.data = (char *)dv2;
    CHECK(sdpa_attention_backward(&p) == SDPA_OK, "backward");
    CHECK(!memcmp(dq, dq2, sizeof dq) && !memcmp(dk, dk2, sizeof dk) && !memcmp(dv, dv2, sizeof dv), "backward");

    /* Forward mode leaves O and lse, which are operands, alone. */
    begin(&c);
    fill(o2, Q_SIZE);
    fill(lse2, LSE_SIZE);
    memcpy(o, o2, sizeof o);
    memcpy(lse, lse2, sizeof lse);
    add(&c, false, SDPA_XLA_out, SDPA_XLA_F32, o, 4, of_q);
    add(&c, false, SDPA_XLA_lse, SDPA_XLA_F32, lse, 3, of_lse);
    add(&c, false, SDPA_XLA_query_t, SDPA_XLA_F32, dout, 4, of_q);
    add(&c, true, SDPA_XLA_RESULT_out_t, SDPA_XLA_F32, dq, 4, of_q);
    CHECK(!sdpa_xla_tangent(&c.frame), "%s", last_error);
    CHECK(!memcmp(o, o2, sizeof o) && !memcmp(lse, lse2, sizeof lse), "operands of forward mode");
    sdpa_problem tangent = written(copies);
    tangent.q_t = p.dout;
    tangent.o_t = p.dq;
    tangent.features = sdpa_problem_features(&tangent);
    CHECK(sdpa_attention_tangent(&tangent) == SDPA_OK && !memcmp(dq, dq2, sizeof dq), "forward mode");
}

/* Every option that a frame carries, forward and backward: a mask and slopes of one head for all, sinks of one batch entry for
 * all, offsets, a band, softcap, dropout. */
enum { MASK_SIZE = N_BATCH * N_Q * N_K };
static float mask[MASK_SIZE], sinks[N_HEAD], slopes[N_BATCH];
static int64_t offsets[N_BATCH] = {1, 0};
static uint32_t seed[2] = {3, 5};

static void add_options(call *c) {
    static const int64_t of_mask[] = {N_BATCH, 1, N_Q, N_K}, of_sinks[] = {1, N_HEAD}, of_slopes[] = {N_BATCH, 1};
    static const int64_t batch[] = {N_BATCH}, of_q[] = {N_BATCH, N_Q, N_HEAD, D}, of_k[] = {1, N_K, 1, D}, two[] = {2};
    c->frame.operands.size = c->integers[SDPA_XLA_OPERAND_BITS] = 0;
    add(c, false, SDPA_XLA_query, SDPA_XLA_F32, q, 4, of_q);
    add(c, false, SDPA_XLA_key, SDPA_XLA_F32, k, 4, of_k);
    add(c, false, SDPA_XLA_value, SDPA_XLA_F32, v, 4, of_k);
    add(c, false, SDPA_XLA_attn_mask, SDPA_XLA_F32, mask, 4, of_mask);
    add(c, false, SDPA_XLA_sinks, SDPA_XLA_F32, sinks, 2, of_sinks);
    add(c, false, SDPA_XLA_alibi_slopes, SDPA_XLA_F32, slopes, 2, of_slopes);
    add(c, false, SDPA_XLA_key_lengths, SDPA_XLA_S32, lengths, 1, batch);
    add(c, false, SDPA_XLA_query_offset, SDPA_XLA_S64, offsets, 1, batch);
    add(c, false, SDPA_XLA_seed, SDPA_XLA_U32, seed, 1, two);
    c->integers[SDPA_XLA_has_lower] = c->integers[SDPA_XLA_has_upper] = 1;
    c->integers[SDPA_XLA_lower] = -2;
    c->integers[SDPA_XLA_upper] = 1;
    c->numbers[SDPA_XLA_NUMBER_softcap] = 3;
    c->numbers[SDPA_XLA_NUMBER_dropout_p] = 0.25;
}

static void write_options(sdpa_problem *p) {
    static const int64_t batch_mask = 4 * N_Q * N_K, batch_sinks = 0, batch_slopes = 4;
    p->mask = (sdpa_tensor){
        .data = (char *)mask, .row = 4 * N_K, .col = 4, .group = 1, .dtype = SDPA_F32, .batch = &batch_mask};
    p->sinks = (sdpa_tensor){.data = (char *)sinks, .head = 4, .group = 1, .dtype = SDPA_F32, .batch = &batch_sinks};
    p->alibi_slopes = (sdpa_tensor){.data = (char *)slopes, .group = 1, .dtype = SDPA_F32, .batch = &batch_slopes};
    p->offset = (sdpa_tensor){.data = (char *)offsets, .group = 1, .dtype = SDPA_I64, .batch = &batch_length};
    p->has_lower = p->has_upper = true;
    p->lower = -2, p->upper = 1;
    p->softcap = 3, p->dropout_p = 0.25;
    p->seed = (uint64_t)5 << 32 | 3;
}

static void test_options(void) {
    static const int64_t of_q[] = {N_BATCH, N_Q, N_HEAD, D}, of_lse[] = {N_BATCH, N_HEAD, N_Q};
    static const int64_t of_mask[] = {N_BATCH, 1, N_Q, N_K}, of_sinks[] = {1, N_HEAD};
    static float o2[Q_SIZE], lse2[LSE_SIZE], dmask[MASK_SIZE], dmask2[MASK_SIZE], dsinks[N_HEAD], dsinks2[N_HEAD];
    int64_t copies[N_BATCH];
    call c;
    fill(mask, MASK_SIZE);
    fill(sinks, N_HEAD);
    fill(slopes, N_BATCH);
    begin_forward(&c);
    add_options(&c);
    CHECK(!sdpa_xla_forward(&c.frame), "%s", last_error);
    sdpa_problem p = written(copies);
    write_options(&p);
    p.o.data = (char *)o2, p.lse.data = (char *)lse2;
    p.features = sdpa_problem_features(&p);
    CHECK(sdpa_attention_forward(&p) == SDPA_OK, "forward");
    CHECK(!memcmp(o, o2, sizeof o) && !memcmp(lse, lse2, sizeof lse), "forward");

    begin(&c);
    add_options(&c);
    add(&c, false, SDPA_XLA_grad_out, SDPA_XLA_F32, dout, 4, of_q);
    add(&c, false, SDPA_XLA_out, SDPA_XLA_F32, o, 4, of_q);
    add(&c, false, SDPA_XLA_lse, SDPA_XLA_F32, lse, 3, of_lse);
    add(&c, true, SDPA_XLA_RESULT_attn_mask, SDPA_XLA_F32, dmask, 4, of_mask);
    add(&c, true, SDPA_XLA_RESULT_sinks, SDPA_XLA_F32, dsinks, 2, of_sinks);
    memset(dmask, 0xff, sizeof dmask);
    memset(dsinks, 0xff, sizeof dsinks);
    CHECK(!sdpa_xla_backward(&c.frame), "%s", last_error);
    p.dout.data = (char *)dout;
    p.dmask = p.mask, p.dsinks = p.sinks;
    p.dmask.data = (char *)dmask2, p.dsinks.data = (char *)dsinks2;
    CHECK(sdpa_attention_backward(&p) == SDPA_OK, "backward");
    CHECK(!memcmp(dmask, dmask2, sizeof dmask) && !memcmp(dsinks, dsinks2, sizeof dsinks), "backward");
}

/* The derivative of <tangent of the queries, gradients> with respect to the keys, which the handlers do not clear. */
static void test_second(void) {
    static const int64_t of_q[] = {N_BATCH, N_Q, N_HEAD, D}, of_k[] = {1, N_K, 1, D}, of_lse[] = {N_BATCH, N_HEAD, N_Q};
    static float tangent[Q_SIZE], dk2[K_SIZE];
    int64_t copies[N_BATCH];
    call c;
    fill(tangent, Q_SIZE);
    begin_forward(&c);
    CHECK(!sdpa_xla_forward(&c.frame), "%s", last_error);
    begin(&c);
    add(&c, false, SDPA_XLA_grad_out, SDPA_XLA_F32, dout, 4, of_q);
    add(&c, false, SDPA_XLA_out, SDPA_XLA_F32, o, 4, of_q);
    add(&c, false, SDPA_XLA_lse, SDPA_XLA_F32, lse, 3, of_lse);
    add(&c, false, SDPA_XLA_query_t, SDPA_XLA_F32, tangent, 4, of_q);
    add(&c, true, SDPA_XLA_RESULT_key, SDPA_XLA_F32, dk, 4, of_k);
    memset(dk, 0xff, sizeof dk);
    CHECK(!sdpa_xla_second(&c.frame), "%s", last_error);
    sdpa_problem p = written(copies);
    p.q_t = p.q;
    p.q_t.data = (char *)tangent;
    p.o.data = (char *)o, p.lse.data = (char *)lse, p.dout.data = (char *)dout, p.dk.data = (char *)dk2;
    p.features = sdpa_problem_features(&p);
    CHECK(sdpa_attention_second(&p) == SDPA_OK && !memcmp(dk, dk2, sizeof dk), "second");
}

/* Every type of elements: one key with value 1 gives 1, and two bytes of a mask hide it. */
static void test_types(void) {
    static const struct {
        int type, bytes;
        const char *one;
    } types[] = {{SDPA_XLA_F16, 2, "\x00\x3c"},
                 {SDPA_XLA_BF16, 2, "\x80\x3f"},
                 {SDPA_XLA_F32, 4, "\x00\x00\x80\x3f"},
                 {SDPA_XLA_F64, 8, "\x00\x00\x00\x00\x00\x00\xf0\x3f"}};
    static const int64_t one[] = {1, 1, 1, 1}, rows[] = {1, 2, 1, 1}, of_mask[] = {1, 1, 2, 1}, of_lse[] = {1, 1, 2};
    bool keep[2] = {true, false};
    for (int t = 0; t < 4; t++) {
        _Alignas(16) char x[16], pair[16] = {0}, out[16], lses[16], zero[16] = {0};
        memcpy(x, types[t].one, (size_t)types[t].bytes);
        call c;
        begin(&c);
        c.frame.operands.size = c.integers[SDPA_XLA_OPERAND_BITS] = 0;
        c.integers[SDPA_XLA_LEAD] = c.integers[SDPA_XLA_LEAD + 1] = 1;
        add(&c, false, SDPA_XLA_query, types[t].type, pair, 4, rows);
        add(&c, false, SDPA_XLA_key, types[t].type, x, 4, one);
        add(&c, false, SDPA_XLA_value, types[t].type, x, 4, one);
        add(&c, false, SDPA_XLA_attn_mask, SDPA_XLA_PRED, keep, 4, of_mask);
        add(&c, true, SDPA_XLA_RESULT_out, types[t].type, out, 4, rows);
        add(&c, true, SDPA_XLA_RESULT_lse, types[t].bytes == 8 ? SDPA_XLA_F64 : SDPA_XLA_F32, lses, 3, of_lse);
        CHECK(!sdpa_xla_forward(&c.frame), "%s", last_error);
        const size_t size = (size_t)types[t].bytes;
        CHECK(!memcmp(out, x, size) && !memcmp(out + size, zero, size), "type %d", types[t].type);
    }
}

/* Two heads of keys for four of queries; then no keys at all, for which XLA may pass no memory. */
static void test_groups(void) {
    enum { HEADS = N_BATCH * N_HEAD, KEY_HEADS = 2, KEYS = 2 };
    static const int64_t of_q[] = {1, N_Q, HEADS, D}, of_k[] = {1, KEYS, KEY_HEADS, D}, of_lse[] = {1, HEADS, N_Q};
    static float o2[Q_SIZE], lse2[LSE_SIZE];
    int64_t unused[N_BATCH];
    call c;
    for (int n_k = KEYS; n_k >= 0; n_k -= KEYS) {
        begin(&c);
        c.frame.operands.size = c.integers[SDPA_XLA_OPERAND_BITS] = 0;
        c.integers[SDPA_XLA_LEAD] = 1;
        c.integers[SDPA_XLA_LEAD + 1] = HEADS;
        add(&c, false, SDPA_XLA_query, SDPA_XLA_F32, q, 4, of_q);
        add(&c, false, SDPA_XLA_key, SDPA_XLA_F32, n_k ? k : NULL, 4, of_k);
        add(&c, false, SDPA_XLA_value, SDPA_XLA_F32, n_k ? v : NULL, 4, of_k);
        add(&c, true, SDPA_XLA_RESULT_out, SDPA_XLA_F32, o, 4, of_q);
        add(&c, true, SDPA_XLA_RESULT_lse, SDPA_XLA_F32, lse, 3, of_lse);
        c.dims[1][1] = c.dims[2][1] = n_k;
        CHECK(!sdpa_xla_forward(&c.frame), "%s", last_error);
        sdpa_problem p = written(unused);
        p.n_batch = 1, p.n_axes = 0, p.n_head = HEADS, p.n_k = n_k, p.key_length.data = NULL;
        p.q.row = 4 * HEADS * D, p.k.row = p.v.row = 4 * KEY_HEADS * D;
        p.k.head = p.v.head = 4 * D, p.k.group = p.v.group = HEADS / KEY_HEADS;
        p.o = p.q;
        p.o.data = (char *)o2, p.lse.data = (char *)lse2;
        p.features = sdpa_problem_features(&p);
        CHECK(sdpa_attention_forward(&p) == SDPA_OK, "%d keys", n_k);
        CHECK(!memcmp(o, o2, sizeof o) && !memcmp(lse, lse2, sizeof lse), "%d keys", n_k);
    }
}

/* The rows of the first batch entry as two sequences; each has the result of a separate call. */
static void begin_packed(call *c, int32_t cu_q[3], int32_t cu_k[3]) {
    static const int64_t of_q[] = {N_Q, N_HEAD, D}, of_k[] = {N_K, 1, D}, of_lse[] = {N_HEAD, N_Q}, ends[] = {3};
    begin(c);
    c->frame.operands.size = c->integers[SDPA_XLA_OPERAND_BITS] = 0;
    c->integers[SDPA_XLA_LEAD] = N_HEAD;
    c->arrays[0].size = SDPA_XLA_LEAD + 1;
    add(c, false, SDPA_XLA_query, SDPA_XLA_F32, q, 3, of_q);
    add(c, false, SDPA_XLA_key, SDPA_XLA_F32, k, 3, of_k);
    add(c, false, SDPA_XLA_value, SDPA_XLA_F32, v, 3, of_k);
    add(c, false, SDPA_XLA_cu_seqlens_q, SDPA_XLA_S32, cu_q, 1, ends);
    add(c, false, SDPA_XLA_cu_seqlens_k, SDPA_XLA_S32, cu_k, 1, ends);
    add(c, true, SDPA_XLA_RESULT_out, SDPA_XLA_F32, o, 3, of_q);
    add(c, true, SDPA_XLA_RESULT_lse, SDPA_XLA_F32, lse, 2, of_lse);
}

static void test_packed_rows(void) {
    static float o2[Q_SIZE], lse2[LSE_SIZE];
    int64_t unused[N_BATCH];
    call c;
    begin_packed(&c, (int32_t[]){0, 1, N_Q}, (int32_t[]){0, 4, N_K});
    CHECK(!sdpa_xla_forward(&c.frame), "%s", last_error);
    for (int s = 0; s < 2; s++) {
        sdpa_problem p = written(unused);
        p.n_batch = 1, p.n_axes = 0, p.key_length.data = NULL;
        p.n_q = s ? N_Q - 1 : 1, p.n_k = s ? N_K - 4 : 4;
        p.q.data += s * p.q.row, p.k.data += 4 * s * p.k.row, p.v.data += 4 * s * p.v.row;
        p.o.data = (char *)o2 + s * p.o.row, p.lse.data = (char *)lse2 + s * p.lse.row;
        p.features = sdpa_problem_features(&p);
        CHECK(sdpa_attention_forward(&p) == SDPA_OK, "sequence %d", s);
    }
    const size_t n_o = sizeof o / N_BATCH, n_lse = sizeof lse / N_BATCH;
    CHECK(!memcmp(o, o2, n_o) && !memcmp(lse, lse2, n_lse), "packed");

    /* Lengths and offsets have one element per sequence. */
    static const int64_t two[] = {2}, three[] = {3};
    int32_t per_sequence[] = {4, 0, 0};
    begin_packed(&c, (int32_t[]){0, 1, N_Q}, (int32_t[]){0, 4, N_K});
    add(&c, false, SDPA_XLA_key_lengths, SDPA_XLA_S32, per_sequence, 1, two);
    CHECK(!sdpa_xla_forward(&c.frame), "%s", last_error);
    CHECK(!memcmp(o, o2, sizeof o / N_BATCH / N_Q), "a sequence of all its keys");
    for (int i = N_HEAD * D; i < (int)(n_o / sizeof *o); i++) CHECK(o[i] == 0, "a sequence without keys, %d", i);
    per_sequence[1] = 2;
    CHECK(sdpa_xla_forward(&c.frame) && strstr(last_error, "Lk = 1, got 2"), "%s", last_error);
    /* The second query of the second sequence sees its key at offset -1, the first sees none. */
    int32_t shifts[] = {0, -1, 0};
    begin_packed(&c, (int32_t[]){0, 1, N_Q}, (int32_t[]){0, 4, N_K});
    add(&c, false, SDPA_XLA_query_offset, SDPA_XLA_S32, shifts, 1, two);
    c.integers[SDPA_XLA_has_upper] = 1;
    CHECK(!sdpa_xla_forward(&c.frame), "%s", last_error);
    CHECK(!memcmp(o, v, sizeof *v * D), "the first query sees the first key alone");
    for (int i = 0; i < N_HEAD * D; i++) {
        const float hidden = o[N_HEAD * D + i], seen = o[2 * N_HEAD * D + i];
        CHECK(hidden == 0 && seen == v[4 * D + i % D], "offset of a sequence, %d: %g and %g", i, (double)hidden,
              (double)seen);
    }
    begin_packed(&c, (int32_t[]){0, 1, N_Q}, (int32_t[]){0, 4, N_K});
    add(&c, false, SDPA_XLA_query_offset, SDPA_XLA_S32, shifts, 1, three);
    CHECK(sdpa_xla_forward(&c.frame), "three offsets for two sequences");

    int32_t bad[][3] = {{0, 1, N_Q + 1}, {1, 1, N_Q}, {0, N_Q + 1, N_Q}};
    for (int i = 0; i < 3; i++) {
        begin_packed(&c, bad[i], (int32_t[]){0, 4, N_K});
        last_code = 0;
        CHECK(sdpa_xla_forward(&c.frame) && last_code == SDPA_XLA_INVALID_ARGUMENT, "cu_seqlens %d", i);
    }
    begin_packed(&c, (int32_t[]){0, 1, N_Q}, (int32_t[]){0, 4, N_K});
    c.dims[4][0] = 2;
    CHECK(sdpa_xla_forward(&c.frame), "another number of sequences");
    const int64_t pairs_of[] = {N_Q, N_K};
    float packed_mask[N_Q * N_K] = {0};
    int32_t cu_q[] = {0, 1, N_Q}, cu_k[] = {0, 4, N_K};
    for (int i = 0; i < 4; i++) {
        begin_packed(&c, (int32_t[]){0, 1, N_Q}, (int32_t[]){0, 4, N_K});
        if (i == 0) c.buffers[3].rank = 2;
        if (i == 1) c.dims[3][0] = 0;
        if (i == 2) add(&c, false, SDPA_XLA_key_lengths, SDPA_XLA_S32, per_sequence, 2, pairs_of);
        if (i == 3) {
            c.frame.operands.size -= 2, c.integers[SDPA_XLA_OPERAND_BITS] = 7;
            add(&c, false, SDPA_XLA_attn_mask, SDPA_XLA_F32, packed_mask, 3, (int64_t[]){1, N_Q, N_K});
            add(&c, false, SDPA_XLA_cu_seqlens_q, SDPA_XLA_S32, cu_q, 1, three);
            add(&c, false, SDPA_XLA_cu_seqlens_k, SDPA_XLA_S32, cu_k, 1, three);
        }
        last_code = 0;
        CHECK(sdpa_xla_forward(&c.frame) && last_code == SDPA_XLA_INVALID_ARGUMENT, "packed, %d", i);
    }
    begin_packed(&c, (int32_t[]){0, 1, N_Q}, (int32_t[]){0, 4, N_K});
    c.integers[SDPA_XLA_OPERAND_BITS] &= ~(1 << SDPA_XLA_cu_seqlens_k);
    c.frame.operands.size--;
    CHECK(sdpa_xla_forward(&c.frame), "cu_seqlens of the queries alone");
    for (int n = 0; n < 2; n++) {
        begin_packed(&c, (int32_t[]){0, 1, N_Q}, (int32_t[]){0, 4, N_K});
        sdpa_alloc_fail_after(n);
        CHECK(sdpa_xla_forward(&c.frame) && last_code == SDPA_XLA_RESOURCE_EXHAUSTED, "no memory, %d", n);
        sdpa_alloc_fail_after(-1);
    }
}

/* Checks that a changed frame ends the call with this code before anything is written. */
#define REFUSED(error_code, change)                                                                                    \
    do {                                                                                                               \
        begin_forward(&c);                                                                                             \
        change;                                                                                                        \
        memset(o, 1, sizeof o);                                                                                        \
        last_code = 0;                                                                                                 \
        CHECK(sdpa_xla_forward(&c.frame) && last_code == (error_code), "%s: %d", #change, last_code);                  \
        CHECK(((char *)o)[0] == 1 && !memcmp(o, o + 1, sizeof o - sizeof *o), "%s", #change);                          \
    } while (0)

static void test_refused(void) {
    call c;
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.frame.attributes.size = 1);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.arrays[0].size = SDPA_XLA_LEAD);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.arrays[1].type = SDPA_XLA_F32);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.kinds[0] = 3);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.frame.operands.size = 2);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.frame.operands.size = 3);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.integers[SDPA_XLA_OPERAND_BITS] = 3);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.integers[SDPA_XLA_OPERAND_BITS] = 7);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.frame.results.size = 1);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.buffers[0].rank = 3);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.buffers[1].type = SDPA_XLA_S32);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.dims[1][0] = 3);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.dims[1][2] = 3);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.dims[2][1] = N_K - 1);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.buffers[3].type = SDPA_XLA_F32);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.dims[3][0] = 3);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.dims[MOST + 1][2] = N_Q + 1);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.buffers[MOST].rank = 3);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.buffers[1].rank = 3);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.buffers[2].rank = 3);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.buffers[3].rank = 2);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.dims[1][2] = 0);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.texts[0].data = "integerz");
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.arrays[0].size = SDPA_XLA_LEAD + SDPA_MAX_AXES + 1);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, c.frame.results.items[c.frame.results.size++] = &c.buffers[MOST]);
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, (add_options(&c), c.buffers[8].type = SDPA_XLA_S32));
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, (add_options(&c), c.dims[8][0] = 1));
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, (add_options(&c), c.dims[3][3] = N_K - 1));
    REFUSED(SDPA_XLA_INVALID_ARGUMENT,
            add(&c, false, SDPA_XLA_cu_seqlens_q, SDPA_XLA_S32, lengths, 1, (int64_t[]){N_BATCH}));
    lengths[1] = N_K + 1;
    REFUSED(SDPA_XLA_INVALID_ARGUMENT, (void)0);
    CHECK(strcmp(last_error, "key_lengths: expected integers from 0 to Lk = 5, got 6") == 0, "%s", last_error);
    lengths[1] = 3;
    sdpa_alloc_fail_after(0);
    REFUSED(SDPA_XLA_RESOURCE_EXHAUSTED, (void)0);
    sdpa_alloc_fail_after(-1);
}

static void test_rounding(void) {
#ifdef FE_DOWNWARD
    call c;
    float expected[Q_SIZE];
    begin_forward(&c);
    CHECK(!sdpa_xla_forward(&c.frame), "%s", last_error);
    memcpy(expected, o, sizeof o);
    fesetround(FE_DOWNWARD);
    const sdpa_xla_error *error = sdpa_xla_forward(&c.frame);
    fesetround(FE_TONEAREST);
    CHECK(!error && memcmp(expected, o, sizeof o) == 0, "the caller's mode changes the result");
#endif
}

void test_xla(void) {
    sdpa_xla_frame question = {0};
    sdpa_xla_metadata metadata = {.base = {sizeof metadata.base, SDPA_XLA_METADATA, NULL}};
    struct {
        size_t struct_size;
        sdpa_xla_version version;
        uint32_t traits;
    } reply = {.version = {.major = -1, .minor = -1}, .traits = 7};
    memcpy(&metadata.reply, &(void *){&reply}, sizeof metadata.reply);
    sdpa_xla_extension other = {sizeof other, SDPA_XLA_METADATA + 1, &metadata.base};
    question.extensions = &other;
    CHECK(!sdpa_xla_forward(&question), "the version");
    CHECK(reply.version.major == 0 && reply.version.minor == 1 && reply.traits == 0, "%d.%d", reply.version.major,
          reply.version.minor);

    naive_seed();
    fill(q, Q_SIZE);
    fill(k, K_SIZE);
    fill(v, K_SIZE);
    fill(dout, Q_SIZE);
    lengths[0] = N_K;
    lengths[1] = 3;
    test_passes();
    test_options();
    test_second();
    test_types();
    test_groups();
    test_packed_rows();
    test_rounding();
    test_refused();
}
