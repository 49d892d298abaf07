#include "fallback.h"
#include "last-error.h"
#include "log.h"
#include "paged-tensor.h"

#include <algorithm>
#include <atomic>
#include <cstring>

static ggml_backend_dev_t cpu_device() { return g_ggml.ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

kvt_fallback::~kvt_fallback() {
    if (m_cpu) { g_ggml.ggml_backend_free(m_cpu); }
}

bool kvt_fallback::start() {
    ggml_backend_dev_t dev = m_cpu ? nullptr : cpu_device();
    if (dev) {
        m_cpu = g_ggml.ggml_backend_dev_init(dev, nullptr);
        set_n_threads(m_n_threads);
    }
    return m_cpu != nullptr;
}

void kvt_fallback::set_n_threads(int n_threads) {
    m_n_threads = n_threads;
    if (m_cpu) {
        ggml_backend_reg_t reg = g_ggml.ggml_backend_dev_backend_reg(cpu_device());
        auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(
            g_ggml.ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"));
        if (set) { set(m_cpu, n_threads); }
    }
}

// A tensor as the CPU backend sees it when all its memory is at hand: no buffer, no view, no producer.
static ggml_tensor bare(const ggml_tensor * t) {
    ggml_tensor copy = *t;
    copy.op = GGML_OP_NONE;
    copy.buffer = nullptr;
    copy.view_src = nullptr;
    copy.extra = nullptr;
    memset(copy.src, 0, sizeof(copy.src));
    return copy;
}

bool kvt_fallback::supports(const ggml_tensor * op) {
    ggml_tensor srcs[GGML_MAX_SRC];
    ggml_tensor copy = *op;
    copy.buffer = nullptr;
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (op->src[i]) {
            srcs[i] = bare(op->src[i]);
            copy.src[i] = &srcs[i];
        }
    }
    ggml_backend_dev_t dev = cpu_device();
    return dev && g_ggml.ggml_backend_dev_supports_op(dev, &copy);
}

namespace {

// The rows of a cache that an operation touches, in its nominal layout.
struct gathered {
    kvt_root * root;
    size_t first, last; // bytes of the root
    std::vector<char> bytes, before;
    std::vector<float> numbers; // what the operation made, before it was rounded to the nominal type; empty: not known
};

void cover(std::vector<gathered>& all, const ggml_tensor * t) {
    kvt_root * root = kvt_root_of(t);
    if (!root) { return; }
    const size_t row = root->row_bytes, off = (char *) t->data - root->base;
    const size_t first = off / row * row;
    const size_t last = std::min((off + g_ggml.ggml_nbytes(t) + row - 1) / row * row, root->n_bytes);
    for (gathered& g : all) {
        if (g.root == root) {
            g.first = std::min(g.first, first);
            g.last = std::max(g.last, last);
            return;
        }
    }
    all.push_back({ root, first, last, {}, {}, {} });
}

void redirect(std::vector<gathered>& all, ggml_tensor * t, const ggml_tensor * original) {
    kvt_root * root = kvt_root_of(original);
    for (gathered& g : all) {
        if (g.root == root) { t->data = g.bytes.data() + ((char *) original->data - root->base - g.first); }
    }
}

// keys kept apart note what each operation on them rounds
bool notes_errors(const gathered& g) {
    const kvt_layer * layer = g.root->cache->layer;
    return layer && layer->keys && g.root->part == KVT_PART_K && g.root->nominal >= 0;
}

std::vector<float> numbers_of(const gathered& g) {
    std::vector<float> x(g.bytes.size() / g.root->row_bytes * (size_t) g.root->n_embd);
    kvt_row_to_f32((kvt_format) g.root->nominal, g.bytes.data(), x.data(), (int64_t) x.size());
    return x;
}

// The CPU backend rotates F32 and F16 rows and ends the process at any other type. A BF16 cache that is shifted is
// therefore taken as F32, and rounded again afterwards. So is an F16 one where what is rounded is noted.
bool is_widened(const ggml_tensor * node, const std::vector<gathered>& all) {
    return node->op == GGML_OP_ROPE && all.size() == 1 && kvt_root_of(node) == all[0].root &&
        kvt_root_of(node->src[0]) == all[0].root &&
        (node->type == GGML_TYPE_BF16 || (node->type == GGML_TYPE_F16 && notes_errors(all[0])));
}

void widen(gathered& g) {
    const std::vector<float> x = numbers_of(g);
    const char * bytes = reinterpret_cast<const char *>(x.data());
    g.bytes.assign(bytes, bytes + x.size() * sizeof(float));
}

void narrow(gathered& g) {
    const float * x = reinterpret_cast<const float *>(g.bytes.data());
    const size_t n = g.bytes.size() / sizeof(float);
    if (notes_errors(g)) { g.numbers.assign(x, x + n); }
    std::vector<char> rounded(kvt_row_bytes((kvt_format) g.root->nominal, (int64_t) n));
    kvt_row_from_f32((kvt_format) g.root->nominal, x, rounded.data(), (int64_t) n);
    g.bytes.swap(rounded);
}

// A quantized cache is turned as F32 in memory of llama.cpp's and copied back: `node` is that copy, before it is done.
void note_numbers(const ggml_tensor * node, std::vector<gathered>& all) {
    const ggml_tensor * src = node->src[0];
    if (node->op != GGML_OP_CPY || all.size() != 1 || kvt_root_of(node) != all[0].root || !notes_errors(all[0]) ||
        !src || kvt_root_of(src) || src->type != GGML_TYPE_F32 || src->nb[0] != sizeof(float) ||
        !std::equal(node->ne, node->ne + GGML_MAX_DIMS, src->ne)) {
        return;
    }
    gathered& g = all[0];
    const kvt_root * root = g.root;
    const auto at = [](const ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
        return (size_t) i1 * t->nb[1] + (size_t) i2 * t->nb[2] + (size_t) i3 * t->nb[3];
    };
    const size_t base = (size_t) ((const char *) node->data - root->base) - g.first;
    g.numbers = numbers_of(g); // channels that are not copied stay what they are
    for (int64_t i3 = 0; i3 < node->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < node->ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < node->ne[1]; i1++) {
                const size_t to = (base + at(node, i1, i2, i3)) * (size_t) root->n_embd / root->row_bytes;
                memcpy(&g.numbers[to], (const char *) src->data + at(src, i1, i2, i3),
                    (size_t) node->ne[0] * sizeof(float));
            }
        }
    }
}

// the same elements, twice as far apart
void widen_tensor(ggml_tensor * t, const gathered& g) {
    t->type = GGML_TYPE_F32;
    t->data = const_cast<char *>(g.bytes.data()) + 2 * ((char *) t->data - g.bytes.data());
    for (size_t& nb : t->nb) { nb *= 2; }
}

} // namespace

static enum ggml_status run_one(ggml_backend_t cpu, ggml_tensor * node) {
    const size_t overhead = g_ggml.ggml_graph_overhead_custom(2 * GGML_MAX_SRC, false);
    ggml_context * ctx = g_ggml.ggml_init({ overhead, nullptr, true });
    if (!ctx) { return GGML_STATUS_ALLOC_FAILED; }
    ggml_cgraph * graph = g_ggml.ggml_new_graph_custom(ctx, 2 * GGML_MAX_SRC, false);
    g_ggml.ggml_build_forward_expand(graph, node);
    const enum ggml_status status = g_ggml.ggml_backend_graph_compute(cpu, graph);
    g_ggml.ggml_free(ctx);
    return status;
}

// llama.cpp computes attention itself, step by step, and each of them wants the whole cache as it would lie in memory.
static void say_once_if_slow(const ggml_tensor * node) {
    static std::atomic<bool> said{ false };
    if (node->op == GGML_OP_MUL_MAT && kvt_root_of(node->src[0]) && !said.exchange(true)) {
        kvt_log_error(
            "kvtier: flash attention is off, and attention over pages is slow without it: start with -fa on\n");
    }
}

int kvt_fallback::compute(ggml_tensor * node) {
    say_once_if_slow(node);
    if (!start()) {
        return kvt_fail(
            KVT_ERR_UNSUPPORTED, "this ggml has no CPU backend to run %s on", g_ggml.ggml_op_name(node->op));
    }
    std::vector<gathered> all;
    cover(all, node);
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (node->src[i]) { cover(all, node->src[i]); }
    }
    for (gathered& g : all) {
        g.bytes.resize(g.last - g.first);
        const int rc = kvt_paged_read(
            g.root, g.first, g.last - g.first, g.bytes.data(), true); // what is lost is zeros, and stays so
        if (rc != KVT_OK) { return rc; }
        g.before = g.bytes;
        g.root->buffer->domain->counts.n_fallback++;
    }
    ggml_tensor srcs[GGML_MAX_SRC];
    ggml_tensor copy = *node;
    copy.buffer = nullptr;
    copy.view_src = nullptr;
    copy.flags |= GGML_TENSOR_FLAG_COMPUTE;
    redirect(all, &copy, node);
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (node->src[i]) {
            srcs[i] = bare(node->src[i]);
            redirect(all, &srcs[i], node->src[i]);
            copy.src[i] = node->src[i] == node ? &copy : &srcs[i];
        }
    }
    note_numbers(node, all);
    const bool wide = is_widened(node, all);
    if (wide) {
        const ptrdiff_t dst_off = (char *) copy.data - all[0].bytes.data(),
                        src_off = (char *) srcs[0].data - all[0].bytes.data();
        widen(all[0]);
        copy.data = all[0].bytes.data() + dst_off;
        srcs[0].data = all[0].bytes.data() + src_off;
        widen_tensor(&copy, all[0]);
        widen_tensor(&srcs[0], all[0]);
    }
    const enum ggml_status status = run_one(m_cpu, &copy);
    if (wide) { narrow(all[0]); }
    if (status != GGML_STATUS_SUCCESS) {
        return kvt_fail(status == GGML_STATUS_ALLOC_FAILED ? KVT_ERR_NOMEM : KVT_ERR_UNSUPPORTED,
            "the CPU backend could not run %s on %s", g_ggml.ggml_op_name(node->op), node->name);
    }
    for (gathered& g : all) {
        const int rc = kvt_paged_put_back(g.root, (int64_t) (g.first / g.root->row_bytes), g.before, g.bytes,
            g.numbers.empty() ? nullptr : g.numbers.data());
        if (rc != KVT_OK) { return rc; }
    }
    return KVT_OK;
}
