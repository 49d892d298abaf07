#pragma once

// The host program's callbacks for pages that leave the host or return: the store's hooks, handed on with the program's
// own user pointer.
//
// Threads: any, but not from inside a callback. The store runs callbacks on the thread that moves the page.

#include "../include/kvtier.h"
#include "../store/store.h"

#include <mutex>

class kvt_offload {
public:
    explicit kvt_offload(kvt_store * store) : m_store(store) {}
    ~kvt_offload() { disarm(); }

    // Replaces both; NULL: none. Waits for callbacks that run. INVALID inside one.
    int set(kvt_offload_fn on_leave, kvt_offload_fn on_return, void * user);
    void disarm(); // no callback runs any more, except one that calls this

    struct callbacks {
        kvt_offload_fn on_leave, on_return;
        void * user;
    };

private:
    kvt_store * m_store;
    std::mutex m_mutex; // one change of the callbacks at a time
    callbacks m_callbacks = {};
};
