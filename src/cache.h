/*
 * Key/value caches, for the files of this module.
 *
 * Storage of K, and alike of V: a pool of pages of page_size rows, row r of
 * page g of head h being row (h num_pages + g) page_size + r of all. So pages
 * that follow each other are one run of rows for a head, which is what the
 * pages of a sequence that grows alone are. Of CONTIGUOUS and RING a sequence
 * is one page, whose number is its own.
 */
#ifndef ATTN_CACHE_H
#define ATTN_CACHE_H

#include "alloc.h"

/* A sequence holds the keys at positions first <= p < end. Key p is in row
 * p % capacity of a ring, else first is 0 and key p is in row p % page_size of
 * page p / page_size. */
typedef struct attn__cache_seq {
    int64_t first, end;
    int64_t batch; /* of the last append that named it; tells duplicates */
} attn__cache_seq;

struct attn_kv_cache {
    attn__allocator allocator;
    size_t bytes; /* of everything, this struct included */
    int32_t kind;
    attn_dtype dtype;
    attn_dtype real; /* F64, or F32 beside 16 bits too: of queries, rotation */
    int64_t num_seqs, kv_heads, capacity, width, v_width;
    int64_t page_size, num_pages, pages_per_seq;
    int32_t rotary_style;
    attn_tensor cos_table, sin_table;
    attn__cache_seq *seqs; /* [num_seqs] */
    int64_t appends;       /* counts calls, for attn__cache_seq.batch */
    unsigned char *k, *v;
    /* PAGED: */
    int32_t *table;   /* [num_seqs * pages_per_seq] */
    int32_t *users;   /* [num_pages]: sequences that have the page */
    int32_t *writers; /* [num_pages]: of those, how many append; else 0 */
    int32_t *free;    /* [num_pages]: a stack of the pages without users */
    int64_t num_free;
};

/* Not NULL. */
attn_status attn__cache_check(const char *call, const attn_kv_cache *cache);
/* 0 <= seq < num_seqs. */
attn_status attn__cache_check_seq(const char *call, const char *name,
                                  const attn_kv_cache *cache, int64_t seq);
/* Each of seqs[0..batch), or if seqs is NULL, that there are `batch`. */
attn_status attn__cache_check_seqs(const char *call, const attn_kv_cache *cache,
                                   int64_t batch, const int64_t *seqs);

static inline int64_t attn__cache_seq_of(const int64_t *seqs, int64_t b)
{
    return seqs ? seqs[b] : b;
}

/* The row of all rows of the pool where key `position` of head 0 is; that of
 * head h is num_pages page_size h further. */
static inline int64_t attn__cache_row(const attn_kv_cache *c, int64_t seq,
                                      int64_t position)
{
    int64_t page = seq, row = position;

    if (c->kind == ATTN_KV_CACHE_RING)
        row = position % c->capacity;
    if (c->kind == ATTN_KV_CACHE_PAGED) {
        page = c->table[seq * c->pages_per_seq + position / c->page_size];
        row = position % c->page_size;
    }
    return page * c->page_size + row;
}

/* Copies `rows` rows of K and V of every head between places of the pool. */
void attn__cache_copy_rows(const attn_kv_cache *c, int64_t to, int64_t from,
                           int64_t rows);

/* PAGED: takes a page with one user from the stack; gives up one use. */
int32_t attn__cache_take_page(attn_kv_cache *c);
void attn__cache_drop_page(attn_kv_cache *c, int32_t page);

#endif
