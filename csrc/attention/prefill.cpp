// Prefill: many rows. Tasks are (KV head, block of rows), and where those are few also (piece of the visible pages). A
// task goes through the pages in order, some subs at a time, which meet the block's groups of rows while they are in
// the processor's caches: with the kernels of decode, so that a row gets the same bits. Where every page is resident
// this is done in one go; else in chunks of pages, those that have to be read copied into memory of ours, so that no
// thread ever holds more than one page of the store while it waits for another.
//
// A row's running softmax begins anew with each segment (segments.h). A task that sees all pages joins the segment that
// has ended with those before it at once; tasks of pieces leave a state for each segment, joined at the end.

#include "summary-impl.h"

enum { GROUPS_PER_BLOCK = 8, MANY_GROUPS = 256, CHUNK = 32, TILE_SUBS = 4, TASKS_PER_THREAD = 4 };

// page: within the stream; lost: by sub, bits of lost cells, or NULL
struct chunk_page {
    const uint8_t * data;
    const struct kvt_page_layout * layout;
    size_t page;
    const uint32_t * lost;
};

struct prefill {
    struct kvt_job * j;
    struct kvt_q_rows * q;     // [n_head_kv]
    size_t n_groups, n_blocks; // row groups per KV head; blocks of groups
    size_t groups_per_block;   // more: a page is read less often; fewer: more tasks
    size_t rows_pad;           // n_groups*KVT_ROW_GROUP
    struct kvt_piece * pieces;
    size_t n_pieces; // 1 piece of all pages, or those of pieces.cpp
    bool by_piece;
    size_t n_states;      // of every row: its segments; or the running segment, and all before it
    float *m, *l, *o;     // [n_states][n_head_kv][rows_pad]([d_v_pad])
    size_t * segment_end; // [n_head_kv][n_blocks] of the running segment; 0: none yet
    float * tiles;
    size_t tile_floats;            // per thread
    struct chunk_page * chunk;     // [j->n_pages], by position in j->pages
    size_t chunk_first, chunk_end; // positions at hand
    uint8_t * slots;
    size_t slot_bytes; // [CHUNK], for pages that had to be read
    struct kvt_page_layout * slot_layout;
    uint32_t * slot_lost; // [CHUNK][subs_per_page]
};

// A block of rows of one KV head.
struct block {
    int h;
    size_t i, g0, g1;  // its number; its groups
    size_t vis0, vis1; // visibility blocks of its queries
};

struct tile_sub {
    size_t sub;
    const void *k, *v; // NULL: the page is absent, all zeros
    void (*scores)(
        const struct kvt_q_rows * q, int r0, int n_rows, const void * k, float * s, size_t ld, const char * next);
    void (*accumulate)(
        const float * p, size_t ld, int n_rows, int d_v_pad, const void * v, float * o, const char * next);
    uint32_t lost;
};

struct tile {
    int n_subs;
    struct tile_sub sub[TILE_SUBS];
    float *s, *row;  // [KVT_ROW_GROUP][32]; a row's output
    float *k, *v;    // [TILE_SUBS] tiles
    float * turning; // MLA: a sub's keys
};

static struct kvt_row_state state_rows(const struct prefill * p, size_t state, int h, size_t row) {
    const struct kvt_job * j = p->j;
    const size_t at = (state * j->op->geo.n_head_kv + h) * p->rows_pad + row;
    return { p->m + at, p->l + at * KVT_SUM_LANES, p->o + at * j->d_v_pad, j->d_v_pad };
}

static void clear_rows(const struct kvt_row_state * st, size_t n) {
    for (size_t i = 0; i < n; i++) st->m[i] = -INFINITY;
    memset(st->l, 0, n * KVT_SUM_LANES * sizeof(float));
    memset(st->o, 0, n * st->d_v_pad * sizeof(float));
}

// ---- segments ----

enum { RUNNING = 0, BEFORE = 1 };

// The running segment of the block's rows ends: what is before it takes it in.
static void end_segment(const struct prefill * p, const struct block * b) {
    const size_t row0 = b->g0 * KVT_ROW_GROUP, n = (b->g1 - b->g0) * KVT_ROW_GROUP;
    const struct kvt_row_state run = state_rows(p, RUNNING, b->h, row0), before = state_rows(p, BEFORE, b->h, row0);
    for (size_t r = 0; r < n; r++) {
        if (run.m[r] == -INFINITY) continue;
        float *l = run.l + r * KVT_SUM_LANES, *o = run.o + r * run.d_v_pad;
        const struct kvt_partial part = { &run.m[r], l, o };
        kvt_state_join(p->j, &part, &before.m[r], before.l + r * KVT_SUM_LANES, before.o + r * run.d_v_pad);
        const struct kvt_row_state one = { &run.m[r], l, o, run.d_v_pad };
        clear_rows(&one, 1);
    }
}

// the number of the state that the block's rows have in the segment of `sub`
static size_t enter_segment(
    const struct prefill * p, const struct block * b, const struct kvt_piece * piece, size_t sub) {
    if (p->by_piece) return kvt_piece_state(piece, sub);
    size_t * end = &p->segment_end[(size_t) b->h * p->n_blocks + b->i];
    if (sub >= *end) {
        if (*end) end_segment(p, b);
        *end = kvt_segment_end(sub);
    }
    return RUNNING;
}

// ---- tiles ----

static uint32_t lost_cells(const struct chunk_page * pg, int i_sub) { return pg->lost ? pg->lost[i_sub] : 0; }

// A sub that few rows meet is not worth a tile.
static void load_sub(const struct prefill * p, struct tile * t, const struct block * b, const struct chunk_page * pg,
    int i_sub, size_t sub) {
    const struct kvt_job * j = p->j;
    const struct kvt_kernels * kern = j->k;
    const size_t i = (size_t) t->n_subs++;
    struct tile_sub * x = &t->sub[i];
    *x = { sub, NULL, NULL, NULL, NULL, lost_cells(pg, i_sub) };
    if (!pg->data) return;
    const struct kvt_keys * keys = j->op->keys;
    const bool tiles = b->g1 - b->g0 > 1;
    const int fmt_k = keys ? keys->layout.fmt_k : pg->layout->fmt_k, fmt_v = pg->layout->fmt_v;
    x->k = keys ? kvt_job_keys(j, b->h, sub) : pg->data + kvt_k_sub_off(pg->layout, b->h, i_sub);
    x->scores = tiles ? kern->scores_tile[fmt_k] : kern->scores[fmt_k];
    float * v = t->v + i * kvt_tile_v_floats(j->d_v_pad);
    if (!j->op->geo.d_v) {
        kern->load_k[fmt_k](x->k, j->op->geo.d_k, t->turning);
        kern->transpose(t->turning, j->op->d_v_out, j->d_v_pad, v);
        x->v = v;
        x->accumulate = kern->accumulate_tile[KVT_FORMAT_F32];
    } else {
        x->v = pg->data + kvt_v_sub_off(pg->layout, b->h, i_sub);
        x->accumulate = tiles ? kern->accumulate_tile[fmt_v] : kern->accumulate[fmt_v];
        if (tiles) kern->tile_v[fmt_v](x->v, j->d_v_pad, v);
        if (tiles) x->v = v;
    }
    if (tiles) {
        float * k = t->k + i * kvt_tile_k_floats(j->op->geo.d_k);
        kern->tile_k[fmt_k](x->k, j->op->geo.d_k, k);
        x->k = k;
    }
}

// keeps the weights of the last query's rows
static void keep_probs(
    const struct kvt_job * j, const float * s, size_t sub, int h, int64_t row0, int n_rows, const float * m) {
    const int64_t first = j->n_rows - j->n_group;
    for (int r = 0; r < n_rows; r++) {
        if (row0 + r < first) continue;
        const size_t out = (size_t) h * j->n_group + (size_t) (row0 + r - first);
        memcpy(j->probs + out * j->ld_probs + sub * KVT_SUB, s + (size_t) r * KVT_SUB, KVT_SUB * sizeof(float));
        j->probs_m[out * j->ld_probs_m + sub] = m[r];
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

static size_t vis_block(const struct kvt_job * j, int64_t row) { return (size_t) (row / j->n_group) / KVT_VIS_BLOCK; }

// one sub against the rows row0 .. row0+n_rows-1; `next`: what is read after it
static void do_sub(const struct prefill * p, const struct tile * t, const struct tile_sub * x,
    const struct tile_sub * next, const struct block * b, size_t state, int64_t row0, int n_rows) {
    const struct kvt_job * j = p->j;
    const uint8_t cls = block_class(j, vis_block(j, row0), vis_block(j, row0 + n_rows - 1), x->sub);
    if (cls == KVT_VIS_NONE) return;
    if (x->k) {
        x->scores(&p->q[b->h], (int) row0, n_rows, x->k, t->s, KVT_SUB, (const char *) (next->k ? next->k : x->k));
    } else {
        memset(t->s, 0, (size_t) n_rows * KVT_SUB * sizeof(float));
    }
    const struct kvt_row_state st = state_rows(p, state, b->h, (size_t) row0);
    kvt_weigh_sub(j, t->s, KVT_SUB, b->h, row0, n_rows, x->sub, cls, x->lost, &st);
    if (j->op->mass) keep_probs(j, t->s, x->sub, b->h, row0, n_rows, st.m);
    if (x->v) {
        x->accumulate(t->s, KVT_SUB, n_rows, j->d_v_pad, x->v, st.o, (const char *) (next->v ? next->v : x->v));
    }
}

// the tile, all of one segment, against the block's groups
static void do_tile(const struct prefill * p, struct tile * t, const struct block * b, size_t state) {
    const struct kvt_job * j = p->j;
    for (size_t g = b->g0; g < b->g1; g++) {
        const int64_t row0 = (int64_t) g * KVT_ROW_GROUP;
        const int n_rows = j->n_rows - row0 < KVT_ROW_GROUP ? (int) (j->n_rows - row0) : KVT_ROW_GROUP;
        for (int i = 0; i < t->n_subs; i++)
            do_sub(p, t, &t->sub[i], &t->sub[(i + 1) % t->n_subs], b, state, row0, n_rows);
    }
    t->n_subs = 0;
}

static void do_task(const struct prefill * p, struct tile * t, const struct block * b, const struct kvt_piece * piece) {
    const struct kvt_job * j = p->j;
    const size_t c0 = piece->first > p->chunk_first ? piece->first : p->chunk_first;
    const size_t c1 = piece->end < p->chunk_end ? piece->end : p->chunk_end;
    size_t state = 0;
    for (size_t c = c0; c < c1; c++) {
        const struct chunk_page * pg = &p->chunk[c];
        for (int i = 0; i < j->subs_per_page; i++) {
            const size_t sub = pg->page * j->subs_per_page + i;
            if (sub >= j->n_sub) break;
            if (block_class(j, b->vis0, b->vis1, sub) == KVT_VIS_NONE || lost_cells(pg, i) == UINT32_MAX) continue;
            if (t->n_subs && sub >= kvt_segment_end(t->sub[0].sub)) do_tile(p, t, b, state);
            if (t->n_subs == 0) state = enter_segment(p, b, piece, sub);
            load_sub(p, t, b, pg, i, sub);
            if (t->n_subs == TILE_SUBS) do_tile(p, t, b, state);
        }
    }
    if (t->n_subs) do_tile(p, t, b, state);
}

static void cut_tile(const struct prefill * p, struct tile * t, int ith) {
    const struct kvt_job * j = p->j;
    t->n_subs = 0;
    t->s = p->tiles + (size_t) ith * p->tile_floats;
    t->row = t->s + KVT_ROW_GROUP * KVT_SUB;
    t->v = t->row + j->d_v_pad;
    t->k = t->v + TILE_SUBS * kvt_tile_v_floats(j->d_v_pad);
    t->turning = t->k + TILE_SUBS * kvt_tile_k_floats(j->op->geo.d_k);
}

static void do_chunk(void * arg, int ith, int nth) {
    (void) nth;
    struct prefill * p = (struct prefill *) arg;
    struct kvt_job * j = p->j;
    struct tile t;
    cut_tile(p, &t, ith);
    const size_t n_heads = (size_t) j->op->geo.n_head_kv, n_tasks = n_heads * p->n_blocks * p->n_pieces;
    for (;;) {
        const size_t task = j->next.fetch_add(1, std::memory_order_relaxed);
        if (task >= n_tasks) return;
        // the last rows see most under a causal mask, and the last pieces are largest: longest first
        const size_t rest = task / p->n_blocks;
        struct block b;
        b.h = (int) (rest % n_heads);
        b.i = p->n_blocks - 1 - task % p->n_blocks;
        b.g0 = b.i * p->groups_per_block;
        b.g1 = b.g0 + p->groups_per_block < p->n_groups ? b.g0 + p->groups_per_block : p->n_groups;
        const int64_t row_end = (int64_t) b.g1 * KVT_ROW_GROUP < j->n_rows ? (int64_t) b.g1 * KVT_ROW_GROUP : j->n_rows;
        b.vis0 = vis_block(j, (int64_t) b.g0 * KVT_ROW_GROUP);
        b.vis1 = vis_block(j, row_end - 1);
        do_task(p, &t, &b, &p->pieces[p->n_pieces - 1 - rest / n_heads]);
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

static void finish_row(const struct prefill * p, float * tmp, int h, int64_t row) {
    const struct kvt_job * j = p->j;
    struct kvt_row_sum sum;
    kvt_row_begin(j, &sum, tmp);
    for (size_t i = 0; i < p->n_states; i++) {
        const struct kvt_row_state st = state_rows(p, p->by_piece ? i : BEFORE - i, h, (size_t) row);
        kvt_row_join(j, &sum, { st.m, st.l, st.o });
    }
    if (j->sum_m) kvt_row_join(j, &sum, kvt_summary_partial(j, h, row));
    const int64_t kept = row - (j->n_rows - j->n_group);
    const size_t out = (size_t) h * j->n_group + (size_t) (kept < 0 ? 0 : kept);
    const bool mass = j->op->mass && kept >= 0;
    kvt_row_end(j, &sum, h * j->n_group + (int) (row % j->n_group), row / j->n_group, mass ? &j->final_m[out] : NULL,
        mass ? &j->final_f[out] : NULL);
}

static void finish_rows(void * arg, int ith, int nth) {
    (void) nth;
    struct prefill * p = (struct prefill *) arg;
    struct kvt_job * j = p->j;
    struct tile t;
    cut_tile(p, &t, ith);
    const int64_t n_all = j->n_rows * j->op->geo.n_head_kv;
    for (;;) {
        const int64_t first = (int64_t) j->next.fetch_add(64, std::memory_order_relaxed);
        if (first >= n_all) return;
        for (int64_t x = first; x < first + 64 && x < n_all; x++)
            finish_row(p, t.row, (int) (x / j->n_rows), x % j->n_rows);
    }
}

// Blocks as large as leaves every thread enough of them; where even small ones are few, pieces. None of it changes a
// bit.
static int cut_tasks(struct prefill * p) {
    struct kvt_job * j = p->j;
    const size_t n_heads = (size_t) j->op->geo.n_head_kv, n_threads = (size_t) j->n_threads;
    p->n_groups = (size_t) (j->n_rows + KVT_ROW_GROUP - 1) / KVT_ROW_GROUP;
    p->rows_pad = p->n_groups * KVT_ROW_GROUP;
    size_t n = p->n_groups * n_heads >= MANY_GROUPS ? 2 * GROUPS_PER_BLOCK : GROUPS_PER_BLOCK;
    // keys that are values too are turned once per block: pieces are better there
    while (
        n_threads > 1 && j->op->geo.d_v && n > 2 && (p->n_groups + n - 1) / n * n_heads < TASKS_PER_THREAD * n_threads)
        n /= 2;
    p->groups_per_block = n;
    p->n_blocks = (p->n_groups + n - 1) / n;
    p->by_piece = n_threads > 1 && p->n_blocks * n_heads < TASKS_PER_THREAD * n_threads / 2;
    const int err = kvt_pieces_cut(j, &p->pieces, &p->n_pieces, &p->n_states);
    if (err || p->by_piece) return err;
    p->n_states = 2;
    p->n_pieces = 1;
    p->pieces[0] = { 0, j->n_pages, 0, 1, 0, 0 };
    return 0;
}

static int prepare(struct prefill * p) {
    struct kvt_job * j = p->j;
    const struct kvt_geometry * geo = &j->op->geo;
    int err = kvt_queries_prepare(j, &p->q);
    if (!err) err = cut_tasks(p);
    if (err) return err;
    const size_t n_rows = p->n_states * geo->n_head_kv * p->rows_pad, n_ends = (size_t) geo->n_head_kv * p->n_blocks;
    p->o = (float *) kvt_buf_need(
        &j->a->state, n_rows * ((size_t) j->d_v_pad + KVT_SUM_LANES + 1) * sizeof(float) + n_ends * sizeof(size_t));
    const size_t turning = geo->d_v ? 0 : kvt_tile_k_floats(geo->d_k);
    p->tile_floats = KVT_ROW_GROUP * KVT_SUB + (size_t) j->d_v_pad + turning +
        TILE_SUBS * (kvt_tile_k_floats(geo->d_k) + kvt_tile_v_floats(j->d_v_pad)) + 16;
    p->tile_floats = kvt_round_up(p->tile_floats, 16);
    p->tiles = (float *) kvt_buf_need(&j->a->tiles, (size_t) j->n_threads * p->tile_floats * sizeof(float));
    p->chunk = (struct chunk_page *) kvt_buf_need(&j->a->mass, (j->n_pages + 1) * sizeof(struct chunk_page));
    if (!p->o || !p->tiles || !p->chunk) return KVT_ERR_NOMEM;
    p->l = p->o + n_rows * j->d_v_pad;
    p->segment_end = (size_t *) (p->l + n_rows * KVT_SUM_LANES); // rows_pad is even: aligned
    p->m = (float *) (p->segment_end + n_ends);
    memset(p->segment_end, 0, n_ends * sizeof(size_t));
    const struct kvt_row_state all = { p->m, p->l, p->o, j->d_v_pad };
    clear_rows(&all, n_rows);
    return kvt_mass_prepare(j, 1);
}

int kvt_prefill_run(struct kvt_job * j) {
    struct prefill p;
    p.j = j;
    const int err = prepare(&p);
    if (err) return err;
    for (size_t i = 0; i < j->n_pages; i++) {
        p.chunk[i] = { j->refs[i].data, j->refs[i].layout, j->pages[i] - j->op->page_first, j->refs[i].lost };
    }
    const int e = do_chunks(&p);
    if (e) return e;
    j->next = 0;
    kvt_team_run(j->n_threads, finish_rows, &p);
    return 0;
}
