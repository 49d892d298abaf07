// Which sub-pages a mask shows to which queries: one pass over the mask, in words of four F16.

#include "attention-impl.h"

enum { SEEN_NOT_ZERO = 1, SEEN_NOT_INF = 2 };
static const uint64_t INF4 = 0xfc00fc00fc00fc00ull; // four times -inf

// ORs what one mask row shows of subs [s0, s1) into flags
static void scan_row(const uint16_t * row, int64_t n_kv, size_t s0, size_t s1, uint8_t * flags) {
    for (size_t s = s0; s < s1; s++) {
        uint64_t w[KVT_SUB / 4];
        uint64_t zero = 0, inf = 0;
        const int64_t left = n_kv - (int64_t) s * KVT_SUB;
        if (left >= KVT_SUB) {
            memcpy(w, row + s * KVT_SUB, sizeof(w));
        } else {
            for (int i = 0; i < KVT_SUB / 4; i++) w[i] = INF4;
            memcpy(w, row + s * KVT_SUB, (size_t) left * sizeof(uint16_t));
        }
        for (int i = 0; i < KVT_SUB / 4; i++) {
            zero |= w[i];
            inf |= w[i] ^ INF4;
        }
        flags[s] |= (zero ? SEEN_NOT_ZERO : 0) | (inf ? SEEN_NOT_INF : 0);
    }
}

struct scan {
    struct kvt_visibility * vis;
    const char * mask;
    size_t nb_query, nb_head;
    int64_t n_head;
    size_t subs_per_task, n_col_tasks;
    std::atomic<size_t> next;
};

// a task is one block of queries and some consecutive subs
static void scan_tasks(void * arg, int ith, int nth) {
    (void) ith;
    (void) nth;
    struct scan * c = (struct scan *) arg;
    struct kvt_visibility * v = c->vis;
    for (;;) {
        const size_t task = c->next.fetch_add(1, std::memory_order_relaxed);
        if (task >= v->n_blocks * c->n_col_tasks) return;
        const size_t block = task / c->n_col_tasks, s0 = task % c->n_col_tasks * c->subs_per_task;
        const size_t s1 = s0 + c->subs_per_task < v->n_sub ? s0 + c->subs_per_task : v->n_sub;
        uint8_t * cls = (uint8_t *) v->cls.p + block * v->n_sub;
        memset(cls + s0, 0, s1 - s0);
        const int64_t q0 = (int64_t) block * KVT_VIS_BLOCK;
        const int64_t q1 = q0 + KVT_VIS_BLOCK < v->n_queries ? q0 + KVT_VIS_BLOCK : v->n_queries;
        for (int64_t h = 0; h < c->n_head; h++) {
            for (int64_t q = q0; q < q1; q++) {
                scan_row((const uint16_t *) (c->mask + (size_t) h * c->nb_head + (size_t) q * c->nb_query), v->n_kv, s0,
                    s1, cls);
            }
        }
        for (size_t s = s0; s < s1; s++) {
            cls[s] = !(cls[s] & SEEN_NOT_INF) ? KVT_VIS_NONE : !(cls[s] & SEEN_NOT_ZERO) ? KVT_VIS_FULL : KVT_VIS_MIXED;
        }
    }
}

int kvt_visibility_compute(struct kvt_visibility * v, const void * mask, size_t nb_query, size_t nb_head,
    int64_t n_head, int64_t n_kv, int64_t n_queries, int n_threads) {
    if (n_kv < 1 || n_queries < 1 || n_head < 1) return KVT_ERR_INVALID;
    const size_t n_sub = (size_t) (n_kv + KVT_SUB - 1) / KVT_SUB,
                 n_blocks = (size_t) (n_queries + KVT_VIS_BLOCK - 1) / KVT_VIS_BLOCK;
    if (!kvt_buf_need(&v->cls, n_sub * n_blocks) || !kvt_buf_need(&v->any, n_sub)) return KVT_ERR_NOMEM;
    v->n_kv = n_kv;
    v->n_queries = n_queries;
    v->n_sub = n_sub;
    v->n_blocks = n_blocks;
    uint8_t *cls = (uint8_t *) v->cls.p, *any = (uint8_t *) v->any.p;
    if (!mask) {
        memset(cls, KVT_VIS_FULL, n_sub * n_blocks);
        for (size_t b = 0; b < n_blocks && n_kv % KVT_SUB; b++) cls[b * n_sub + n_sub - 1] = KVT_VIS_MIXED;
        memset(any, 1, n_sub);
        return 0;
    }
    struct scan c;
    c.vis = v;
    c.mask = (const char *) mask;
    c.nb_query = nb_query;
    c.nb_head = nb_head;
    c.n_head = n_head;
    c.next = 0;
    c.subs_per_task = 256;
    c.n_col_tasks = (n_sub + c.subs_per_task - 1) / c.subs_per_task;
    const double n_entries = (double) n_kv * n_queries * n_head;
    kvt_team_run(n_entries < 1 << 16 ? 1 : n_threads, scan_tasks, &c);
    memset(any, 0, n_sub);
    for (size_t b = 0; b < n_blocks; b++) {
        for (size_t s = 0; s < n_sub; s++) any[s] |= cls[b * n_sub + s] != KVT_VIS_NONE;
    }
    return 0;
}
