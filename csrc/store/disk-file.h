#pragma once

// The file of the disk tier and its slots. A slot is the page's bytes followed by a trailer with identity and checksum,
// at a fixed offset that is a multiple of 4 KiB. Nothing here locks.

#include "store.h"

#include <string>

struct disk_file {
    int fd = -1;
    std::string path;
    struct kvt_disk_ops ops = {};
};

struct slot_trailer {
    uint32_t magic;
    uint32_t array, page;
    uint32_t n_bytes;
    uint32_t fmt_k, fmt_v;
    uint32_t crc;         // of the page's bytes
    uint32_t crc_trailer; // of the fields above
    uint8_t reserved[32];
};
static_assert(sizeof(slot_trailer) == 64, "frames keep 64 bytes for the trailer");

static const size_t KVT_SLOT_ALIGN = 4096;
static inline size_t kvt_slot_bytes(size_t page_bytes) {
    return (page_bytes + sizeof(slot_trailer) + KVT_SLOT_ALIGN - 1) / KVT_SLOT_ALIGN * KVT_SLOT_ALIGN;
}

int kvt_disk_open(disk_file * f, const char * dir, const struct kvt_disk_ops * ops, std::string * err);
void kvt_disk_close(disk_file * f); // unlinks

// `buf` holds page_bytes and room for the trailer after them. *crc goes into the page table: what is read back must be
// this very copy, not an older one. Text of failures goes to err.
int kvt_slot_write(const disk_file& f, struct kvt_page_id id, const struct kvt_page_layout& l, uint8_t * buf,
    int64_t off, uint32_t * crc, std::string * err);
int kvt_slot_read(const disk_file& f, struct kvt_page_id id, const struct kvt_page_layout& l, uint8_t * buf,
    int64_t off, uint32_t crc, std::string * err);
