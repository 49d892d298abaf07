#pragma once

// What of a matrix of cases a test runs, where all of them would take too long (sanitizers, emulation).
// usage: test-NAME [ISA|all [EVERY]]: one instruction set, and every so many cases

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "attention-fixture.h"

struct selection {
    const char * wanted;
    uint32_t every, n_isa = 0;

    selection(int argc, char ** argv)
        : wanted(argc > 1 ? argv[1] : "all"), every(argc > 2 ? (uint32_t) std::max(1, atoi(argv[2])) : 1) {}
    ~selection() { CHECK(n_isa > 0); } // a name that this machine does not know tests nothing

    bool takes_isa(const char * name) {
        const bool taken = strcmp(wanted, "all") == 0 || strcmp(wanted, name) == 0;
        n_isa += taken;
        return taken;
    }
    // `number` counts the cases from 1
    bool takes_case(uint32_t number) const { return number % every == 0; }
};
