/* Block tables of two caches, cut into runs of bytes as the planner cuts them, but without its objects. A template of
 * the planner describes the rows of both sides. Requests that may be wrong are left to the planner, which explains
 * the refusal. */
#ifndef KVN_ROWS_H
#define KVN_ROWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Maximum number of destination rows that are compared pairwise, without a bit for each row. */
#define KVN_ROWS_FEW 64
/* Maximum number of axes besides the tokens, and of distinct numbers of tokens of a request's pieces. */
#define KVN_ROWS_LEVELS 6
#define KVN_ROWS_SIZES 16

typedef struct kvn_rows_side {
    uint64_t count;        /* rows of a tensor */
    uint64_t tokens;       /* tokens of a row, or its bytes if rows are copied as bytes */
    uint64_t row_stride;   /* bytes from one row to the next */
    uint64_t token_stride; /* bytes from one token to the next */
    uint64_t start;        /* bytes of a token before its first run */
    bool is_slot;          /* a request has one row, and moves as much of it as the other side has */
} kvn_rows_side;

/* An axis along which both sides step: the number of steps, and their bytes on each side. */
typedef struct kvn_level {
    uint64_t times;
    uint64_t src_stride;
    uint64_t dst_stride;
} kvn_level;

typedef struct kvn_rows {
    kvn_rows_side src;
    kvn_rows_side dst;
    uint64_t run; /* bytes that stay together in every cut */
    kvn_level levels[KVN_ROWS_LEVELS];
    size_t num_levels;
    kvn_level kv;     /* the level that becomes tensor pairs if too many levels are left; times 0: none */
    bool is_one;      /* one cache on both sides: no row may be both read and written */
    bool orders_ties; /* runs of one source must be in the order of their destinations */
} kvn_rows;

/* A block table, and the number of its tokens before the first moved one. */
typedef struct kvn_rows_table {
    const int64_t *rows;
    size_t count;
    uint64_t skipped;
    bool is_lease; /* rows for which the other table has no room are left out */
} kvn_rows_table;

typedef struct kvn_rows_request {
    kvn_rows_table src;
    kvn_rows_table dst;
    uint64_t num_tokens; /* 0: whole rows */
} kvn_rows_request;

/* Bytes from src to dst. In a piece, which is not cut along the levels yet, nbytes counts tokens. */
typedef struct kvn_run {
    uint64_t src;
    uint64_t dst;
    uint64_t nbytes;
} kvn_run;

/* All pieces of a request with the same number of tokens, and their cut. */
typedef struct kvn_rows_size {
    uint64_t tokens;
    size_t count;
    uint64_t run;
    kvn_level levels[KVN_ROWS_LEVELS + 1]; /* outermost first */
    size_t num_levels;
} kvn_rows_size;

typedef struct kvn_rows_cut {
    kvn_run *pieces;
    size_t num_pieces;
    kvn_rows_size sizes[KVN_ROWS_SIZES]; /* the largest first */
    size_t num_sizes;
    size_t num_runs; /* before adjacent ones are merged */
    bool merges;     /* order and merge runs, as the planner does */
} kvn_rows_cut;

/* True if all rows of the template lie in the first src_nbytes and dst_nbytes of a tensor. */
bool kvn_rows_fit(const kvn_rows *rows, uint64_t src_nbytes, uint64_t dst_nbytes);

/* Bytes of scratch memory, aligned to 8, that a request needs; 0: too many. */
size_t kvn_rows_scratch(const kvn_rows *rows, const kvn_rows_request *request);

/* Checks and cuts a request; the pieces are in `scratch`. False leaves it to the planner: a row is out of range,
 * written twice, or read and written in one cache; the tables do not hold the tokens or do not match; keys and values
 * become tensor pairs; or there are too many sizes or runs. */
bool kvn_rows_cut_up(const kvn_rows *rows, kvn_rows_request request, void *scratch,
                     kvn_rows_cut *cut);

/* Returns the number of runs for which kvn_rows_columns needs memory besides the pieces. */
size_t kvn_rows_room(const kvn_rows_cut *cut);

/* Makes the runs of a cut in the planner's order, once, because it overwrites the pieces. Returns three columns of
 * *num items: src, dst and nbytes. */
const uint64_t *kvn_rows_columns(const kvn_rows *rows, kvn_rows_cut *cut, kvn_run *room,
                                 size_t *num);

#endif
