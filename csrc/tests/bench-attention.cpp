// Micro-benchmark of attention over pages. Not a test: prints times, asserts nothing.
//   bench-attention decode|prefill|bandwidth [--isa NAME] [--fmt NAME] [--threads N] [--tokens N] [--layers N]
//                   [--heads-kv N] [--group N] [--d N] [--queries N] [--page-tokens N] [--mass] [--mla] [--reps N]
//                   [--cpu-time]
// --cpu-time counts the processor time of the calling thread instead of the clock: for one thread on a busy machine.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>

#include "../attention/team.h"
#include "attention-fixture.h"

struct options {
    std::string what = "decode", isa, fmt;
    int threads = 1, tokens = 8000, layers = 30, heads_kv = 3, group = 3, d = 64, queries = 512, page_tokens = 32,
        reps = 7;
    bool mass = false, mla = false;
    int d_v_out() const { return mla ? d / 9 * 8 : d; } // of MLA: 512 of 576
};

static bool g_cpu_time = false;
static double now(void) {
    if (g_cpu_time) {
        timespec t;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
static double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}
static double best(const std::vector<double>& x) { return *std::min_element(x.begin(), x.end()); }

static options parse(int argc, char ** argv) {
    options o;
    if (argc > 1) o.what = argv[1];
    for (int i = 2; i < argc; i++) {
        const std::string a = argv[i];
        if (a == "--cpu-time") {
            g_cpu_time = true;
            continue;
        }
        if (a == "--mla") {
            o.mla = true;
            continue;
        }
        if (a == "--mass") {
            o.mass = true;
            continue;
        }
        const char * v = i + 1 < argc ? argv[++i] : "";
        if (a == "--isa")
            o.isa = v;
        else if (a == "--fmt")
            o.fmt = v;
        else if (a == "--threads")
            o.threads = atoi(v);
        else if (a == "--tokens")
            o.tokens = atoi(v);
        else if (a == "--layers")
            o.layers = atoi(v);
        else if (a == "--heads-kv")
            o.heads_kv = atoi(v);
        else if (a == "--group")
            o.group = atoi(v);
        else if (a == "--d")
            o.d = atoi(v);
        else if (a == "--queries")
            o.queries = atoi(v);
        else if (a == "--page-tokens")
            o.page_tokens = atoi(v);
        else if (a == "--reps")
            o.reps = atoi(v);
        else {
            fprintf(stderr, "unknown option %s\n", a.c_str());
            exit(2);
        }
    }
    return o;
}

// one memory block per layer set, pages in order, as slabs hold them
struct layers {
    std::vector<uint8_t> bytes;
    std::vector<memory_pages *> mem;
    kvt_geometry geo;

    layers(const options& o, kvt_format fmt, int n_layers) : geo{ o.heads_kv, o.d, o.mla ? 0 : o.d, o.page_tokens } {
        kvt_page_layout l;
        if (kvt_page_layout_init(&l, &geo, fmt, fmt) != 0) {
            fprintf(stderr, "format cannot hold %d channels\n", o.d);
            exit(2);
        }
        const size_t n_pages = (size_t) (o.tokens + o.page_tokens - 1) / o.page_tokens;
        bytes.resize(n_layers * n_pages * l.page_bytes + 4096);
        uint8_t * p = bytes.data() + 4096 - (uintptr_t) bytes.data() % 4096;
        std::mt19937 rng(1);
        std::vector<uint8_t> one(l.page_bytes);
        std::vector<float> row((size_t) geo.n_head_kv * o.d);
        std::normal_distribution<float> normal;
        for (int t = 0; t < o.page_tokens; t++)
            for (kvt_part part : { KVT_PART_K, KVT_PART_V }) {
                for (float& x : row) x = normal(rng);
                if (part == KVT_PART_K || geo.d_v) kvt_page_put_f32(&l, one.data(), part, t, row.data());
            }
        for (int i = 0; i < n_layers; i++) {
            memory_pages * m = new memory_pages(n_pages);
            const kvt_page_layout * own = m->layout(geo, fmt, fmt);
            for (size_t k = 0; k < n_pages; k++, p += l.page_bytes) {
                memcpy(p, one.data(), l.page_bytes);
                m->pages[k].layout = own;
                m->pages[k].data = p;
            }
            mem.push_back(m);
        }
    }
    ~layers() {
        for (memory_pages * m : mem) delete m;
    }
};

struct buffers {
    std::vector<float> q, dst;
    std::vector<uint16_t> mask;
    kvt_attention_op op;

    buffers(const options& o, const kvt_geometry& geo, int n_queries) {
        const int heads = o.heads_kv * o.group;
        q.resize((size_t) n_queries * heads * o.d);
        dst.resize(q.size());
        std::mt19937 rng(2);
        std::normal_distribution<float> normal;
        for (float& x : q) x = normal(rng);
        mask.assign((size_t) n_queries * o.tokens, 0);
        for (int i = 0; i < n_queries; i++)
            for (int t = 0; t < o.tokens; t++)
                if (t > o.tokens - n_queries + i) mask[(size_t) i * o.tokens + t] = 0xfc00;
        memset(&op, 0, sizeof(op));
        op.geo = geo;
        op.d_v_out = o.d_v_out();
        op.n_head_q = heads;
        op.n_queries = n_queries;
        op.n_kv = o.tokens;
        op.scale = 1.0f / std::sqrt((float) o.d);
        op.q = (const char *) q.data();
        op.q_nb_head = o.d * sizeof(float);
        op.q_nb_query = op.q_nb_head * heads;
        op.mask = (const char *) mask.data();
        op.mask_nb_query = o.tokens * sizeof(uint16_t);
        op.dst = (char *) dst.data();
        op.dst_nb_head = o.d_v_out() * sizeof(float);
        op.dst_nb_query = op.dst_nb_head * heads;
    }
};

static void decode(const options& o, kvt_format fmt, const char * isa, kvt_attention * a) {
    layers all(o, fmt, o.layers);
    buffers b(o, all.geo, 1);
    kvt_mass * mass = nullptr;
    if (o.mass) kvt_mass_create(&mass, (size_t) (o.tokens + o.page_tokens - 1) / o.page_tokens, o.page_tokens, 0.9f);
    b.op.mass = mass;
    std::vector<double> t;
    kvt_attention_stats s0, s1;
    for (int r = 0; r <= o.reps; r++) {
        kvt_attention_get_stats(a, &s0);
        const double t0 = now();
        for (memory_pages * m : all.mem) {
            b.op.source = &m->source;
            if (kvt_attention_run(a, &b.op) != 0) exit(1);
        }
        if (r) t.push_back(now() - t0);
        kvt_attention_get_stats(a, &s1);
    }
    const double bytes = (double) (s1.k_bytes - s0.k_bytes + s1.v_bytes - s0.v_bytes), sec = median(t);
    printf("decode  %-10s %-5s threads %d%s: %7.1f us/layer  %6.2f ms/token  %6.2f ns/(token*layer)  %6.2f GB/s  (best "
           "%.1f us, %.2f GB/s)\n",
        isa, kvt_format_name(fmt), o.threads, o.mass ? " mass" : "", sec / o.layers * 1e6, sec * 1e3,
        sec / o.layers / o.tokens * 1e9, bytes / sec * 1e-9, best(t) / o.layers * 1e6, bytes / best(t) * 1e-9);
    kvt_mass_free(mass);
}

static void prefill(const options& o, kvt_format fmt, const char * isa, kvt_attention * a) {
    layers all(o, fmt, 1);
    buffers b(o, all.geo, o.queries);
    b.op.source = &all.mem[0]->source;
    std::vector<double> t;
    for (int r = 0; r <= o.reps; r++) {
        const double t0 = now();
        if (kvt_attention_run(a, &b.op) != 0) exit(1);
        if (r) t.push_back(now() - t0);
    }
    const double pairs = (double) o.queries * (o.tokens - o.queries) + 0.5 * o.queries * (o.queries + 1.0),
                 flop = pairs * o.heads_kv * o.group * 2 * (o.d + o.d_v_out()), sec = median(t);
    printf("prefill %-10s %-5s threads %d: %8.2f ms  %7.1f GFLOP/s  (best %.1f)\n", isa, kvt_format_name(fmt),
        o.threads, sec * 1e3, flop / sec * 1e-9, flop / best(t) * 1e-9);
}

struct block {
    std::vector<uint64_t> words;
    std::atomic<uint64_t> sum;
};

static void read_share(void * arg, int ith, int nth) {
    block * b = static_cast<block *>(arg);
    const size_t n = b->words.size() / 64, begin = n * (size_t) ith / nth, end = n * (size_t) (ith + 1) / nth;
    uint64_t s[8] = { 0 };
    for (const uint64_t * x = &b->words[begin * 64]; x != b->words.data() + end * 64; x += 64)
        for (int k = 0; k < 64; k++) s[k % 8] += x[k];
    for (uint64_t sum : s) b->sum += sum;
}

// sequential reading of a block larger than the last-level cache
static void bandwidth(const options& o) {
    block b{ std::vector<uint64_t>((size_t) 1 << 26, 1), { 0 } }; // 512 MiB
    std::vector<double> t;
    for (int r = 0; r < o.reps; r++) {
        const double t0 = now();
        kvt_team_run(o.threads, read_share, &b);
        t.push_back(now() - t0);
    }
    printf("bandwidth threads %d: %.2f GB/s (read, median; best %.2f)%s\n", o.threads,
        b.words.size() * 8 / median(t) * 1e-9, b.words.size() * 8 / best(t) * 1e-9, b.sum ? "" : " ");
}

int main(int argc, char ** argv) {
    const options o = parse(argc, argv);
    if (o.what == "bandwidth") {
        bandwidth(o);
        return 0;
    }
    const char * isas[8];
    const size_t n_isa = kvt_isa_list(isas, 8);
    kvt_attention * a = nullptr;
    if (kvt_attention_create(&a, o.threads) != 0) return 1;
    for (size_t i = 0; i < n_isa; i++) {
        if (!o.isa.empty() && o.isa != isas[i]) continue;
        kvt_isa_select(isas[i]);
        for (int f = 0; f < KVT_FORMAT_COUNT; f++) {
            if ((!o.fmt.empty() && o.fmt != kvt_format_name((kvt_format) f)) ||
                !kvt_format_supports((kvt_format) f, o.d))
                continue;
            if (o.what == "decode")
                decode(o, (kvt_format) f, isas[i], a);
            else
                prefill(o, (kvt_format) f, isas[i], a);
        }
    }
    kvt_attention_free(a);
    return 0;
}
