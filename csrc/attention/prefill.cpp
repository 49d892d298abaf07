// Prefill: many rows. Tiles of up to 128 tokens are converted to F32 once per task and meet a block of query rows in
// register-blocked products, under a running softmax. Tasks are (KV head, block of rows, part of the pages). Where
// every page is resident they are done in one go; else in chunks of pages, those that have to be read copied into
// memory of ours, so that no thread ever holds more than one page of the store while it waits for another.
//
// As in decode, the order of all sums follows from the list of visible pages alone: tiles never cross a multiple of
// CHUNK pages, parts begin at one, and their number does not depend on the threads.

#include "summary-impl.h"

enum { GROUPS_PER_BLOCK = 8, MANY_GROUPS = 256, CHUNK = 32, MAX_SPLITS = 64 };

// page: within the stream; lost: by sub, bits of lost cells, or NULL
struct chunk_page {
    const uint8_t * data;
    const struct kvt_page_layout * layout;
    size_t page;
    const uint32_t * lost;
};

struct prefill {
    struct kvt_job * j;
    size_t n_groups, n_blocks; // row groups per KV head; blocks of groups
    size_t groups_per_block;   // a tile is converted once per block: larger where there are rows enough
    int n_splits;
    float * q_pack;   // [n_head_kv][n_groups][d_k][KVT_ROW_GROUP]
    float *m, *l, *o; // [n_splits][n_head_kv][n_groups*KVT_ROW_GROUP]([d_v_pad])
    float * tiles;
    size_t tile_floats;            // per thread
    size_t split_pages;            // pages of a part, a multiple of CHUNK
    struct chunk_page * chunk;     // [j->n_pages], by position in j->pages
    size_t chunk_first, chunk_end; // positions at hand
    uint8_t * slots;
    size_t slot_bytes; // [CHUNK], for pages that had to be read
    struct kvt_page_layout * slot_layout;
    uint32_t * slot_lost; // [CHUNK][subs_per_page]
    std::atomic<uint64_t> k_bytes, v_bytes;
};

struct tile {
    int n_subs;
    size_t sub[KVT_TILE_SUBS];
    uint8_t cls[KVT_TILE_SUBS];
    uint32_t lost[KVT_TILE_SUBS];
    bool any_mixed;
    float *k, *v, *s; // [n_subs][d_k][32], [n_subs*32][d_v_pad], [KVT_ROW_GROUP][KVT_TILE_TOKENS]
};

static size_t state_row(const struct prefill * p, int split, int h, size_t row) {
    return ((size_t) split * p->j->op->geo.n_head_kv + h) * p->n_groups * KVT_ROW_GROUP + row;
}

// ---- queries ----

static void pack_q(void * arg, int ith, int nth) {
    (void) ith;
    (void) nth;
    struct prefill * p = (struct prefill *) arg;
    struct kvt_job * j = p->j;
    const int32_t d_k = j->op->geo.d_k;
    const float scale = kvt_job_q_scale(j->op);
    for (;;) {
        const size_t task = j->next.fetch_add(1, std::memory_order_relaxed);
        if (task >= p->n_groups * j->op->geo.n_head_kv) return;
        const int h = (int) (task / p->n_groups);
        const size_t g = task % p->n_groups;
        float * out = p->q_pack + task * (size_t) d_k * KVT_ROW_GROUP;
        for (int i = 0; i < KVT_ROW_GROUP; i++) {
            const int64_t row = (int64_t) g * KVT_ROW_GROUP + i;
            const float * q = row < j->n_rows
                ? kvt_job_q(j->op, row / j->n_group, h * j->n_group + (int) (row % j->n_group))
                : NULL;
            for (int c = 0; c < d_k; c++) out[(size_t) c * KVT_ROW_GROUP + i] = q ? q[c] * scale : 0.0f;
        }
    }
}

// ---- tiles ----

static uint32_t lost_cells(const struct chunk_page * pg, int i_sub) { return pg->lost ? pg->lost[i_sub] : 0; }

static void load_sub(const struct prefill * p, struct tile * t, int h, const struct chunk_page * pg, int i_sub,
    size_t sub, uint8_t cls) {
    const struct kvt_job * j = p->j;
    const int32_t d_k = j->op->geo.d_k;
    float *k = t->k + (size_t) t->n_subs * d_k * KVT_SUB, *v = t->v + (size_t) t->n_subs * KVT_SUB * j->d_v_pad;
    if (pg->data) {
        const struct kvt_keys * keys = j->op->keys;
        const uint8_t * k_sub = keys ? kvt_job_keys(j, h, sub) : pg->data + kvt_k_sub_off(pg->layout, h, i_sub);
        j->k->load_k[keys ? keys->layout.fmt_k : pg->layout->fmt_k](k_sub, d_k, k);
        if (j->op->geo.d_v) {
            j->k->load_v[pg->layout->fmt_v](pg->data + kvt_v_sub_off(pg->layout, h, i_sub), j->d_v_pad, v);
        } else {
            j->k->transpose(k, j->op->d_v_out, j->d_v_pad, v);
        }
    } else {
        memset(k, 0, (size_t) d_k * KVT_SUB * sizeof(float));
        memset(v, 0, (size_t) j->d_v_pad * KVT_SUB * sizeof(float));
    }
    t->sub[t->n_subs] = sub;
    t->cls[t->n_subs] = cls;
    t->lost[t->n_subs] = lost_cells(pg, i_sub);
    t->any_mixed |= cls == KVT_VIS_MIXED || t->lost[t->n_subs];
    t->n_subs++;
}

static void mask_group(const struct kvt_job * j, const struct tile * t, int h, int64_t row0, int n_valid_rows) {
    for (int i = 0; i < t->n_subs; i++) {
        for (int r = 0; t->lost[i] && r < n_valid_rows; r++)
            kvt_hide_lost(t->s + (size_t) r * KVT_TILE_TOKENS + i * KVT_SUB, t->lost[i]);
        if (t->cls[i] != KVT_VIS_MIXED) continue;
        const int n_valid = kvt_job_n_valid(j->op, t->sub[i]);
        for (int r = 0; r < n_valid_rows; r++) {
            const int head = h * j->n_group + (int) ((row0 + r) % j->n_group);
            const uint16_t * mask = kvt_job_mask(j->op, (row0 + r) / j->n_group, head);
            j->k->mask_add(t->s + (size_t) r * KVT_TILE_TOKENS + i * KVT_SUB, mask ? mask + t->sub[i] * KVT_SUB : NULL,
                kvt_job_slope(j->op, head), n_valid);
        }
    }
}

// keeps the weights of the last query's rows
static void keep_probs(
    const struct kvt_job * j, const struct tile * t, int h, int64_t row0, int n_valid_rows, const float * m) {
    const int64_t first = j->n_rows - j->n_group;
    for (int r = 0; r < n_valid_rows; r++) {
        if (row0 + r < first) continue;
        const size_t out = (size_t) h * j->n_group + (size_t) (row0 + r - first);
        for (int i = 0; i < t->n_subs; i++) {
            memcpy(j->probs + out * j->ld_probs + t->sub[i] * KVT_SUB,
                t->s + (size_t) r * KVT_TILE_TOKENS + i * KVT_SUB, KVT_SUB * sizeof(float));
            j->probs_m[out * j->ld_probs_m + t->sub[i]] = m[r];
        }
    }
}

// what the queries of visibility blocks b0..b1 see of a sub, all together
static uint8_t block_class(const struct kvt_job * j, size_t b0, size_t b1, size_t sub) {
    const uint8_t first = kvt_vis_row(j->vis, b0)[sub];
    for (size_t b = b0 + 1; b <= b1; b++) {
        if (kvt_vis_row(j->vis, b)[sub] != first) return KVT_VIS_MIXED;
    }
    return first;
}

static bool group_sees(const struct kvt_job * j, const struct tile * t, int64_t row0, int n_valid_rows) {
    const size_t b0 = (size_t) (row0 / j->n_group) / KVT_VIS_BLOCK,
                 b1 = (size_t) ((row0 + n_valid_rows - 1) / j->n_group) / KVT_VIS_BLOCK;
    for (int i = 0; i < t->n_subs; i++) {
        if (block_class(j, b0, b1, t->sub[i]) != KVT_VIS_NONE) return true;
    }
    return false;
}

// the tile against the row groups g0 .. g1-1 of KV head h
static void do_tile(const struct prefill * p, struct tile * t, int h, int split, size_t g0, size_t g1) {
    const struct kvt_job * j = p->j;
    const int32_t d_k = j->op->geo.d_k;
    for (size_t g = g0; g < g1; g++) {
        const int64_t row0 = (int64_t) g * KVT_ROW_GROUP;
        const int n_valid_rows = j->n_rows - row0 < KVT_ROW_GROUP ? (int) (j->n_rows - row0) : KVT_ROW_GROUP;
        if (t->any_mixed && !group_sees(j, t, row0, n_valid_rows)) continue;
        const float * q = p->q_pack + ((size_t) h * p->n_groups + g) * d_k * KVT_ROW_GROUP;
        for (int i = 0; i < t->n_subs; i++) {
            j->k->gemm_scores(q, t->k + (size_t) i * d_k * KVT_SUB, d_k, t->s + i * KVT_SUB, KVT_TILE_TOKENS);
        }
        const int n_tokens = t->n_subs * KVT_SUB;
        if (j->op->softcap != 0.0f)
            j->k->softcap(t->s, KVT_TILE_TOKENS, n_valid_rows, n_tokens, j->op->softcap * KVT_LOG2E);
        if (t->any_mixed) mask_group(j, t, h, row0, n_valid_rows);
        const size_t row = state_row(p, split, h, (size_t) row0);
        const struct kvt_row_state st = { p->m + row, p->l + row * KVT_SUM_LANES, p->o + row * j->d_v_pad, j->d_v_pad };
        j->k->softmax(t->s, KVT_TILE_TOKENS, n_valid_rows, n_tokens, &st);
        if (j->op->mass) keep_probs(j, t, h, row0, n_valid_rows, st.m);
        j->k->gemm_accumulate(t->s, KVT_TILE_TOKENS, n_tokens, t->v, j->d_v_pad, st.o);
    }
    t->n_subs = 0;
    t->any_mixed = false;
}

static void do_task(struct prefill * p, struct tile * t, int h, size_t block, int split) {
    const struct kvt_job * j = p->j;
    const size_t g0 = block * p->groups_per_block,
                 g1 = g0 + p->groups_per_block < p->n_groups ? g0 + p->groups_per_block : p->n_groups;
    const int64_t row_last = (int64_t) g1 * KVT_ROW_GROUP < j->n_rows ? (int64_t) g1 * KVT_ROW_GROUP - 1
                                                                      : j->n_rows - 1;
    const size_t b0 = (size_t) ((int64_t) g0 * KVT_ROW_GROUP / j->n_group) / KVT_VIS_BLOCK,
                 b1 = (size_t) (row_last / j->n_group) / KVT_VIS_BLOCK;
    size_t c0 = p->split_pages * split, c1 = c0 + p->split_pages;
    if (c0 < p->chunk_first) c0 = p->chunk_first;
    if (c1 > p->chunk_end) c1 = p->chunk_end;
    for (size_t c = c0; c < c1; c++) {
        const struct chunk_page * pg = &p->chunk[c];
        if (c % CHUNK == 0 && t->n_subs) do_tile(p, t, h, split, g0, g1);
        for (int i = 0; i < j->subs_per_page; i++) {
            const size_t sub = pg->page * j->subs_per_page + i;
            if (sub >= j->n_sub) break;
            const uint8_t cls = block_class(j, b0, b1, sub);
            if (cls == KVT_VIS_NONE || lost_cells(pg, i) == UINT32_MAX) continue;
            load_sub(p, t, h, pg, i, sub, cls);
            if (t->n_subs == KVT_TILE_SUBS) do_tile(p, t, h, split, g0, g1);
        }
    }
    if (t->n_subs) do_tile(p, t, h, split, g0, g1);
}

static void do_chunk(void * arg, int ith, int nth) {
    (void) nth;
    struct prefill * p = (struct prefill *) arg;
    struct kvt_job * j = p->j;
    struct tile t;
    t.n_subs = 0;
    t.any_mixed = false;
    t.k = p->tiles + (size_t) ith * p->tile_floats;
    t.v = t.k + (size_t) KVT_TILE_TOKENS * j->op->geo.d_k;
    t.s = t.v + (size_t) KVT_TILE_TOKENS * j->d_v_pad;
    const size_t n_heads = (size_t) j->op->geo.n_head_kv, n_tasks = n_heads * p->n_blocks * p->n_splits;
    for (;;) {
        const size_t task = j->next.fetch_add(1, std::memory_order_relaxed);
        if (task >= n_tasks) return;
        // the last rows see most under a causal mask: longest first
        const size_t block = p->n_blocks - 1 - task / (n_heads * p->n_splits), rest = task % (n_heads * p->n_splits);
        do_task(p, &t, (int) (rest / p->n_splits), block, (int) (rest % p->n_splits));
    }
}

// ---- pages that have to be read ----

// Copies a page from the store into its slot, and which of its cells are lost: it may have been dropped since pages
// were pinned, and may be dropped while the copy is in use.
static int read_page(struct prefill * p, size_t c) {
    struct kvt_job * j = p->j;
    const struct kvt_page_source * src = j->op->source;
    const size_t slot = c - p->chunk_first;
    struct kvt_page_ref ref;
    const int err = src->acquire(src->ctx, j->pages[c], &ref);
    if (err) return err;
    const bool fits = !ref.data || ref.layout->page_bytes <= p->slot_bytes;
    uint32_t * lost = p->slot_lost + slot * j->subs_per_page;
    if (ref.lost) memcpy(lost, ref.lost, j->subs_per_page * sizeof(*lost));
    p->chunk[c].lost = ref.lost ? lost : NULL;
    if (ref.data && fits) {
        p->chunk[c].data = p->slots + slot * p->slot_bytes;
        p->chunk[c].layout = &p->slot_layout[slot];
        p->slot_layout[slot] = *ref.layout;
        memcpy(p->slots + slot * p->slot_bytes, ref.data, ref.layout->page_bytes);
    }
    if (ref.data) src->release_many(src->ctx, &ref, 1);
    return fits ? 0 : KVT_ERR_INVALID;
}

static void read_pages(void * arg, int ith, int nth) {
    (void) ith;
    (void) nth;
    struct prefill * p = (struct prefill *) arg;
    struct kvt_job * j = p->j;
    while (j->error.load(std::memory_order_relaxed) == 0) {
        const size_t c = p->chunk_first + j->next.fetch_add(1, std::memory_order_relaxed);
        if (c >= p->chunk_end) return;
        const int err = j->is_missing[c] ? read_page(p, c) : 0;
        if (err) kvt_job_fail(j, err);
    }
}

static void hint_missing(const struct prefill * p, size_t first) {
    const struct kvt_job * j = p->j;
    const struct kvt_page_source * src = j->op->source;
    uint32_t list[CHUNK];
    size_t n = 0;
    for (size_t c = first; c < j->n_pages && n < CHUNK; c++) {
        if (j->is_missing[c]) list[n++] = j->pages[c];
    }
    if (src->prefetch && n) src->prefetch(src->ctx, list, n);
}

static int take_slots(struct prefill * p) {
    struct kvt_job * j = p->j;
    const struct kvt_geometry * geo = &j->op->geo;
    const size_t v_row = geo->d_v ? kvt_round_up((size_t) geo->d_v, 16) : 0;
    p->slot_bytes = (size_t) geo->n_head_kv *
        kvt_round_up((size_t) geo->page_tokens * (geo->d_k + v_row) * sizeof(float), 64); // F32: the largest format
    p->slots = (uint8_t *) kvt_buf_need(
        &j->a->slots, CHUNK * (p->slot_bytes + sizeof(struct kvt_page_layout) + j->subs_per_page * sizeof(uint32_t)));
    if (!p->slots) return KVT_ERR_NOMEM;
    p->slot_layout = (struct kvt_page_layout *) (p->slots + CHUNK * p->slot_bytes);
    p->slot_lost = (uint32_t *) (p->slot_layout + CHUNK);
    return 0;
}

// bytes are counted once per page, however many blocks of rows read it
static void count_bytes(const struct prefill * p) {
    struct kvt_job * j = p->j;
    for (size_t c = p->chunk_first; c < p->chunk_end; c++) {
        if (!p->chunk[c].data) continue;
        const size_t n = (size_t) j->op->geo.n_head_kv * j->subs_per_page;
        j->a->stats.k_bytes += n * (j->op->keys ? j->op->keys->layout.k_sub_bytes : p->chunk[c].layout->k_sub_bytes);
        j->a->stats.v_bytes += n * p->chunk[c].layout->v_sub_bytes;
    }
}

static int do_chunks(struct prefill * p) {
    struct kvt_job * j = p->j;
    int err = j->n_missing ? take_slots(p) : 0;
    const size_t step = j->n_missing ? (size_t) CHUNK : j->n_pages;
    for (p->chunk_first = 0; !err && p->chunk_first < j->n_pages; p->chunk_first = p->chunk_end) {
        p->chunk_end = p->chunk_first + step < j->n_pages ? p->chunk_first + step : j->n_pages;
        if (j->n_missing) {
            j->next = 0;
            kvt_team_run(j->n_threads, read_pages, p);
            err = j->error.load();
            if (err) return err;
            hint_missing(p, p->chunk_end);
        }
        count_bytes(p);
        j->next = 0;
        kvt_team_run(j->n_threads, do_chunk, p);
    }
    return err;
}

// ---- the whole ----

static void finish_rows(void * arg, int ith, int nth) {
    (void) nth;
    struct prefill * p = (struct prefill *) arg;
    struct kvt_job * j = p->j;
    float * tmp = p->tiles + (size_t) ith * p->tile_floats;
    const int64_t n_all = j->n_rows * j->op->geo.n_head_kv;
    for (;;) {
        const int64_t first = (int64_t) j->next.fetch_add(64, std::memory_order_relaxed);
        if (first >= n_all) return;
        for (int64_t x = first; x < first + 64 && x < n_all; x++) {
            const int h = (int) (x / j->n_rows);
            const int64_t row = x % j->n_rows, kept = row - (j->n_rows - j->n_group);
            struct kvt_partial parts[MAX_SPLITS + 1];
            int n_parts = p->n_splits;
            for (int s = 0; s < p->n_splits; s++) {
                const size_t at = state_row(p, s, h, (size_t) row);
                parts[s] = { p->m + at, p->l + at * KVT_SUM_LANES, p->o + at * j->d_v_pad };
            }
            if (j->sum_m) parts[n_parts++] = kvt_summary_partial(j, h, row);
            const size_t out = (size_t) h * j->n_group + (size_t) (kept < 0 ? 0 : kept);
            const bool mass = j->op->mass && kept >= 0;
            kvt_row_finish(j, parts, n_parts, h * j->n_group + (int) (row % j->n_group), row / j->n_group, tmp,
                mass ? &j->final_m[out] : NULL, mass ? &j->final_f[out] : NULL);
        }
    }
}

static int prepare(struct prefill * p) {
    struct kvt_job * j = p->j;
    const struct kvt_geometry * geo = &j->op->geo;
    p->n_groups = (size_t) (j->n_rows + KVT_ROW_GROUP - 1) / KVT_ROW_GROUP;
    p->groups_per_block = p->n_groups * geo->n_head_kv >= MANY_GROUPS ? 2 * GROUPS_PER_BLOCK : GROUPS_PER_BLOCK;
    p->n_blocks = (p->n_groups + p->groups_per_block - 1) / p->groups_per_block;
    // few tasks: let several threads share a block, each with a part of the pages
    const size_t n_tasks = p->n_blocks * geo->n_head_kv, n_chunks = (j->n_pages + CHUNK - 1) / CHUNK;
    size_t wanted = 1;
    while (n_tasks * wanted < MAX_SPLITS && wanted < n_chunks) wanted *= 2;
    p->split_pages = (n_chunks + wanted - 1) / wanted * CHUNK;
    p->n_splits = p->split_pages ? (int) ((j->n_pages + p->split_pages - 1) / p->split_pages) : 1;
    if (p->n_splits < 1) p->n_splits = 1;

    const size_t rows_pad = p->n_groups * KVT_ROW_GROUP, n_state = (size_t) p->n_splits * geo->n_head_kv * rows_pad;
    p->q_pack = (float *) kvt_buf_need(&j->a->q, (size_t) geo->n_head_kv * rows_pad * geo->d_k * sizeof(float));
    p->o = (float *) kvt_buf_need(&j->a->state, n_state * ((size_t) j->d_v_pad + KVT_SUM_LANES + 1) * sizeof(float));
    p->tile_floats = (size_t) KVT_TILE_TOKENS * (geo->d_k + j->d_v_pad + KVT_ROW_GROUP) + 16;
    p->tiles = (float *) kvt_buf_need(&j->a->tiles, (size_t) j->n_threads * p->tile_floats * sizeof(float));
    p->chunk = (struct chunk_page *) kvt_buf_need(&j->a->mass, (j->n_pages + 1) * sizeof(struct chunk_page));
    if (!p->q_pack || !p->o || !p->tiles || !p->chunk) return KVT_ERR_NOMEM;
    p->l = p->o + n_state * j->d_v_pad;
    p->m = p->l + n_state * KVT_SUM_LANES;
    for (size_t i = 0; i < n_state; i++) p->m[i] = -INFINITY;
    memset(p->l, 0, n_state * KVT_SUM_LANES * sizeof(float));
    memset(p->o, 0, n_state * j->d_v_pad * sizeof(float));
    return kvt_mass_prepare(j, 1);
}

int kvt_prefill_run(struct kvt_job * j) {
    struct prefill p;
    p.j = j;
    const int err = prepare(&p);
    if (err) return err;
    j->next = 0;
    kvt_team_run(j->n_threads, pack_q, &p);
    for (size_t i = 0; i < j->n_pages; i++) {
        p.chunk[i] = { j->refs[i].data, j->refs[i].layout, j->pages[i] - j->op->page_first, j->refs[i].lost };
    }
    const int e = do_chunks(&p);
    if (e) return e;
    j->next = 0;
    kvt_team_run(j->n_threads, finish_rows, &p);
    return 0;
}
