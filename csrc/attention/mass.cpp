// Attention mass: the softmax weights that the drivers left behind, made into probabilities and summed per token and
// page.

#include "attention-impl.h"

#include <algorithm>

extern "C" int kvt_mass_create(struct kvt_mass ** out, size_t n_pages, int32_t page_tokens, float decay) {
    if (!out || n_pages == 0 || page_tokens <= 0 || page_tokens % KVT_SUB || !(decay >= 0.0f && decay < 1.0f))
        return KVT_ERR_INVALID;
    struct kvt_mass * m = (struct kvt_mass *) calloc(1, sizeof(*m));
    if (!m) return KVT_ERR_NOMEM;
    m->n_pages = n_pages;
    m->n_cells = n_pages * (size_t) page_tokens;
    m->decay = decay;
    m->token_mean = (float *) calloc(2 * (m->n_cells + n_pages), sizeof(float));
    if (!m->token_mean) {
        free(m);
        return KVT_ERR_NOMEM;
    }
    m->token_max = m->token_mean + m->n_cells;
    m->page_mean = m->token_max + m->n_cells;
    m->page_max = m->page_mean + n_pages;
    *out = m;
    return 0;
}

extern "C" void kvt_mass_free(struct kvt_mass * m) {
    if (!m) return;
    free(m->token_mean); // one allocation
    free(m);
}

extern "C" void kvt_mass_clear(struct kvt_mass * m, size_t cell_first, size_t n) {
    if (cell_first >= m->n_cells) return;
    if (n > m->n_cells - cell_first) n = m->n_cells - cell_first;
    const size_t page_tokens = m->n_cells / m->n_pages;
    // a page whose cells are all given away starts anew; else its mean loses what its lost tokens had
    for (size_t c = cell_first; c < cell_first + n;) {
        const size_t page = c / page_tokens;
        size_t end = (page + 1) * page_tokens;
        if (end > cell_first + n) end = cell_first + n;
        if (end - c == page_tokens) {
            m->page_mean[page] = m->page_max[page] = 0.0f;
        } else {
            for (; c < end; c++) { m->page_mean[page] -= m->token_mean[c]; }
            if (m->page_mean[page] < 0.0f) m->page_mean[page] = 0.0f;
        }
        c = end;
    }
    memset(m->token_mean + cell_first, 0, n * sizeof(float));
    memset(m->token_max + cell_first, 0, n * sizeof(float));
}

int kvt_mass_prepare(struct kvt_job * j, int64_t n_queries) {
    if (!j->op->mass) return 0;
    const size_t n_rows = (size_t) j->op->geo.n_head_kv * n_queries * j->n_group;
    j->n_mass_queries = n_queries;
    j->ld_probs = j->n_sub * KVT_SUB + 16; // rows do not start at the same place of every cache set
    j->ld_probs_m = kvt_round_up(j->n_sub, 16);
    const size_t n_floats = n_rows * (j->ld_probs + j->ld_probs_m + 2);
    float * p = (float *) kvt_buf_need(&j->a->probs, n_floats * sizeof(float));
    if (!p) return KVT_ERR_NOMEM;
    j->probs = p;
    j->probs_m = j->probs + n_rows * j->ld_probs;
    j->final_m = j->probs_m + n_rows * j->ld_probs_m;
    j->final_f = j->final_m + n_rows;
    for (size_t i = 0; i < n_rows * j->ld_probs_m; i++) j->probs_m[i] = -INFINITY; // a sub nobody visits weighs nothing
    return 0;
}

struct mass_work {
    struct kvt_job * j;
    int64_t query;
    size_t n_pages; // of the stream's cells 0..n_kv-1
    std::atomic<size_t> next;
};

// probabilities of one sub, summed over the query heads
static void mass_of_sub(
    const struct kvt_job * j, int64_t query, size_t sub, const float * factors, size_t ld_factors, float * out) {
    const size_t rows_per_head = (size_t) j->n_mass_queries * j->n_group;
    float f[KVT_SUB];
    memset(out, 0, KVT_SUB * sizeof(float));
    for (int h = 0; h < j->op->geo.n_head_kv; h++) {
        for (int g0 = 0; g0 < j->n_group; g0 += KVT_SUB) {
            const int n = j->n_group - g0 < KVT_SUB ? j->n_group - g0 : KVT_SUB;
            const size_t row = h * rows_per_head + (size_t) query * j->n_group + g0;
            for (int g = 0; g < n; g++) f[g] = factors[(row + g) * ld_factors];
            if (std::all_of(f, f + n, [](float x) { return x == 0.0f; }))
                continue; // nobody visited it: its weights are not there
            j->k->mass_sub(j->probs + row * j->ld_probs + sub * KVT_SUB, j->ld_probs, n, f, out);
        }
    }
}

// Of a page that is gone the figures stay as they are: they are cleared when it is dropped.
static bool is_gone(const struct kvt_job * j, size_t page) {
    if (!j->lost || !j->lost[page]) return false;
    for (int s = 0; s < j->subs_per_page; s++) {
        if (j->lost[page][s] != UINT32_MAX) return false;
    }
    return true;
}

float kvt_mass_take_sub(
    const struct kvt_job * j, int64_t query, size_t sub, bool seen, const float * factors, size_t ld_factors) {
    struct kvt_mass * m = j->op->mass;
    const size_t cell = (size_t) j->op->page_first * j->op->geo.page_tokens + sub * KVT_SUB;
    float mass[KVT_SUB];
    if (!seen || kvt_job_lost(j, sub) == UINT32_MAX)
        memset(mass, 0, sizeof(mass));
    else
        mass_of_sub(j, query, sub, factors, ld_factors, mass);
    return j->k->mass_update(
        m->token_mean + cell, m->token_max + cell, mass, (size_t) kvt_job_n_valid(j->op, sub), m->decay);
}

void kvt_mass_take_page(const struct kvt_job * j, size_t page, float total) {
    struct kvt_mass * m = j->op->mass;
    const size_t p = j->op->page_first + page;
    m->page_mean[p] = m->decay * m->page_mean[p] + (1.0f - m->decay) * total;
    m->page_max[p] = total > m->page_max[p] ? total : m->page_max[p];
}

static void mass_pages(void * arg, int ith, int nth) {
    (void) ith;
    (void) nth;
    struct mass_work * w = (struct mass_work *) arg;
    struct kvt_job * j = w->j;
    const int64_t q = j->n_mass_queries == j->op->n_queries ? w->query : j->op->n_queries - 1;
    const uint8_t * cls = kvt_vis_row(j->vis, (size_t) q / KVT_VIS_BLOCK);
    for (;;) {
        const size_t first = w->next.fetch_add(64, std::memory_order_relaxed);
        if (first >= w->n_pages) return;
        for (size_t page = first; page < first + 64 && page < w->n_pages; page++) {
            if (is_gone(j, page)) continue;
            float total = 0.0f;
            for (size_t s = page * j->subs_per_page; s < (page + 1) * j->subs_per_page && s < j->n_sub; s++) {
                total += kvt_mass_take_sub(
                    j, w->query, s, cls[s] != KVT_VIS_NONE, j->probs_m + s, j->ld_probs_m); // factors by now
            }
            kvt_mass_take_page(j, page, total);
        }
    }
}

int kvt_mass_apply(struct kvt_job * j) {
    struct mass_work w;
    w.j = j;
    const size_t n_rows = (size_t) j->op->geo.n_head_kv * j->n_mass_queries * j->n_group;
    for (size_t r = 0; r < n_rows; r++) {
        const float last_m = j->final_m[r] == -INFINITY ? 0.0f : j->final_m[r]; // a row that saw nothing
        j->k->mass_factors(j->probs_m + r * j->ld_probs_m, j->ld_probs_m, last_m, j->final_f[r]);
    }
    w.n_pages = (j->n_sub + j->subs_per_page - 1) / j->subs_per_page;
    for (int64_t q = 0; q < j->n_mass_queries; q++) {
        w.query = q;
        w.next = 0;
        kvt_team_run(w.n_pages < 256 ? 1 : j->n_threads, mass_pages, &w);
        j->op->mass->n_steps++;
    }
    return 0;
}
