// Offload hooks that are exchanged while pages move: what a hook uses may be freed as soon as it has been replaced.

#include "store-fixture.h"

#include <atomic>
#include <memory>
#include <thread>

static const uint32_t N_PAGES = 24;

struct hook_user {
    struct kvt_store * s;
    std::atomic<uint64_t> * n_calls;
    std::vector<uint32_t> pages; // used without a lock: one thread moves
};

static void note(void * ctx, struct kvt_page_id id, int32_t, int, const void * data, size_t n_bytes, int, int) {
    hook_user * user = static_cast<hook_user *>(ctx);
    CHECK(kvt_store_in_hook(user->s) && data && n_bytes == PAGE_F16);
    user->pages.push_back(id.page);
    std::this_thread::yield(); // the other thread comes while the call is under way
    CHECK_EQ(user->pages.back(), id.page);
    ++*user->n_calls;
}

// Every page leaves and comes back, until told to stop.
static void mover(struct kvt_store * s, struct kvt_array * a, const std::atomic<bool>& stop) {
    while (!stop) {
        for (const uint8_t tier : { (uint8_t) KVT_TIER_DISK, (uint8_t) KVT_TIER_HOST }) {
            std::vector<struct kvt_move> moves;
            for (uint32_t page = 0; page < N_PAGES; page++) {
                moves.push_back({ { kvt_array_id(a), page }, tier, 255, 255 });
            }
            CHECK_EQ(kvt_store_apply(s, moves.data(), moves.size(), nullptr), KVT_ERR_OK);
        }
    }
}

static void test_exchange() {
    temp_dir dir;
    struct kvt_store * s = open_store(small_params(dir.path.c_str(), N_PAGES + 4, N_PAGES + 4));
    struct kvt_array * a = add_array(s, array_params(0, N_PAGES));
    for (uint32_t page = 0; page < N_PAGES; page++) { CHECK_EQ(write_page(a, page, 1), KVT_ERR_OK); }
    std::atomic<bool> stop{ false };
    std::atomic<uint64_t> n_calls{ 0 };
    std::thread moving(mover, s, a, std::cref(stop));
    std::unique_ptr<hook_user> before;
    for (int i = 0; i < 200; i++) {
        std::unique_ptr<hook_user> user(new hook_user{ s, &n_calls, {} });
        const struct kvt_offload_hooks hooks = { user.get(), note, i % 3 ? note : nullptr };
        const uint64_t n = n_calls;
        kvt_store_set_hooks(s, &hooks);
        before = std::move(user); // frees the one before
        while (n_calls == n) { std::this_thread::yield(); }
    }
    kvt_store_set_hooks(s, nullptr);
    before.reset();
    const uint64_t n = n_calls;
    CHECK(!kvt_store_in_hook(s));
    stop = true;
    moving.join();
    CHECK_EQ(n_calls.load(), n);
    for (uint32_t page = 0; page < N_PAGES; page++) { CHECK_EQ(check_page(a, page, 1), KVT_ERR_OK); }
    kvt_store_close(s);
}

static void take_off(void * ctx, struct kvt_page_id, int32_t, int, const void *, size_t, int, int) {
    hook_user * user = static_cast<hook_user *>(ctx);
    ++*user->n_calls;
    kvt_store_set_hooks(user->s, nullptr);
}

static void test_from_inside() {
    temp_dir dir;
    struct kvt_store * s = open_store(small_params(dir.path.c_str(), 8, 8));
    struct kvt_store * other = open_store(small_params(nullptr, 8, 0));
    struct kvt_array * a = add_array(s, array_params(0, 4));
    std::atomic<uint64_t> n_calls{ 0 };
    hook_user user = { s, &n_calls, {} };
    const struct kvt_offload_hooks hooks = { &user, take_off, nullptr };
    kvt_store_set_hooks(s, &hooks);
    for (uint32_t page = 0; page < 2; page++) {
        CHECK_EQ(write_page(a, page, 1), KVT_ERR_OK);
        const struct kvt_move out = { { kvt_array_id(a), page }, KVT_TIER_DISK, 255, 255 };
        CHECK_EQ(kvt_store_apply(s, &out, 1, nullptr), KVT_ERR_OK);
    }
    CHECK_EQ(n_calls.load(), 1);
    CHECK(!kvt_store_in_hook(s) && !kvt_store_in_hook(other));
    kvt_store_close(s);
    kvt_store_close(other);
}

int main() {
    test_exchange();
    test_from_inside();
    return 0;
}
