/* Cuts requests of two block tables into runs of bytes, in the planner's order. */
#include "core/rows.h"

#include <string.h>

#include "core/sort.h"

enum { INSERTED = 24, MAX_REPEATS = 2 };

static size_t words_of(uint64_t bits) { return (size_t)(bits / 64 + 1); }

static bool reaches(const kvn_rows *rows, const kvn_rows_side *side, uint64_t nbytes)
{
    uint64_t end, more, total;
    if (side->count == 0 || side->tokens == 0 || rows->run == 0 ||
        __builtin_mul_overflow(side->count, side->tokens, &total) || total > INT64_MAX ||
        __builtin_add_overflow(side->start, rows->run, &end) ||
        __builtin_mul_overflow(side->count - 1, side->row_stride, &more) ||
        __builtin_add_overflow(end, more, &end) ||
        __builtin_mul_overflow(side->tokens - 1, side->token_stride, &more) ||
        __builtin_add_overflow(end, more, &end))
        return false;
    for (size_t i = 0; i < rows->num_levels; i++) {
        const kvn_level *level = &rows->levels[i];
        const uint64_t stride = side == &rows->src ? level->src_stride : level->dst_stride;
        if (level->times == 0 || __builtin_mul_overflow(level->times - 1, stride, &more) ||
            __builtin_add_overflow(end, more, &end))
            return false;
    }
    return end <= nbytes;
}

bool kvn_rows_fit(const kvn_rows *rows, uint64_t src_nbytes, uint64_t dst_nbytes)
{
    return rows->num_levels <= KVN_ROWS_LEVELS && reaches(rows, &rows->src, src_nbytes) &&
           reaches(rows, &rows->dst, dst_nbytes);
}

/* The maximum number of pieces of a request: each piece ends with a row of one of the sides. */
static bool most_pieces(const kvn_rows *rows, const kvn_rows_request *request, size_t *most)
{
    const kvn_rows_table *const src = &request->src, *const dst = &request->dst;
    const uint64_t tokens = rows->src.tokens;
    if (tokens == rows->dst.tokens && src->skipped % tokens == dst->skipped % tokens) {
        *most = src->count > dst->count ? src->count : dst->count;
        return true;
    }
    return !__builtin_add_overflow(src->count, dst->count, most);
}

size_t kvn_rows_scratch(const kvn_rows *rows, const kvn_rows_request *request)
{
    const size_t words = request->dst.count > KVN_ROWS_FEW ? words_of(rows->dst.count) : 0;
    size_t nbytes;
    if (!most_pieces(rows, request, &nbytes) ||
        __builtin_mul_overflow(nbytes, sizeof(kvn_run), &nbytes) ||
        __builtin_add_overflow(nbytes, words * sizeof(uint64_t), &nbytes) ||
        nbytes > PTRDIFF_MAX / 2)
        return 0;
    return nbytes;
}

static bool is_among(int64_t row, const int64_t *few, size_t count)
{
    bool found = false;
    for (size_t i = 0; i < count; i++) /* without an early exit, so that the compiler compares several at a time */
        found |= few[i] == row;
    return found;
}

/* Returns true if all rows are in range, and no row is written twice, or read and written in one cache. */
static bool are_good(const kvn_rows *rows, const kvn_rows_table *src, const kvn_rows_table *dst,
                     uint64_t *seen)
{
    if (dst->count > KVN_ROWS_FEW)
        memset(seen, 0, words_of(rows->dst.count) * sizeof *seen);
    for (size_t i = 0; i < dst->count; i++) {
        const uint64_t row = (uint64_t)dst->rows[i]; /* a negative row becomes larger than any count */
        if (row >= rows->dst.count)
            return false;
        if (dst->count <= KVN_ROWS_FEW) {
            if (is_among(dst->rows[i], dst->rows, i))
                return false;
        } else {
            const uint64_t bit = UINT64_C(1) << row % 64;
            if (seen[row / 64] & bit)
                return false;
            seen[row / 64] |= bit;
        }
    }
    for (size_t i = 0; i < src->count; i++) {
        const uint64_t row = (uint64_t)src->rows[i];
        if (row >= rows->src.count)
            return false;
        if (!rows->is_one)
            continue;
        if (dst->count <= KVN_ROWS_FEW ? is_among(src->rows[i], dst->rows, dst->count)
                                       : row < rows->dst.count && (seen[row / 64] >> row % 64 & 1))
            return false;
    }
    return true;
}

/* Computes the tokens of a table from the first moved one on; below 0 if the table ends before it. */
static bool held(const kvn_rows_side *side, const kvn_rows_table *table, int64_t *tokens)
{
    return !__builtin_mul_overflow(table->count, side->tokens, tokens) &&
           !__builtin_sub_overflow(*tokens, table->skipped, tokens);
}

/* Removes rows of a lease for which the other table has no room. */
static bool leave_out(const kvn_rows_side *side, kvn_rows_table *table, int64_t other_held)
{
    int64_t most, needed;
    if (!table->is_lease)
        return true;
    if (__builtin_add_overflow(other_held, table->skipped, &most))
        return false;
    needed = most <= 0 ? 0 : (most - 1) / (int64_t)side->tokens + 1;
    if ((uint64_t)needed < table->count)
        table->count = (size_t)needed;
    return true;
}

/* Returns true if both tables can belong to one request: they hold equally many tokens, or both end in the block of the
 * last token, which may follow the moved ones. */
static bool are_of_one(const kvn_rows *rows, const kvn_rows_request *request, int64_t src_held,
                       int64_t dst_held, int64_t num_tokens)
{
    int64_t last = num_tokens, first_of_last;
    if (src_held + (int64_t)request->src.skipped == dst_held + (int64_t)request->dst.skipped)
        return true;
    first_of_last = src_held - (int64_t)rows->src.tokens + 1;
    last = first_of_last > last ? first_of_last : last;
    first_of_last = dst_held - (int64_t)rows->dst.tokens + 1;
    last = first_of_last > last ? first_of_last : last;
    return last <= src_held && last <= dst_held;
}

/* The number of moved tokens, without the removed rows of leases; 0: the request is invalid. */
static uint64_t tokens_of(const kvn_rows *rows, kvn_rows_request *request)
{
    kvn_rows_table *const src = &request->src, *const dst = &request->dst;
    const bool is_whole = request->num_tokens == 0;
    int64_t src_held, dst_held, num_tokens = (int64_t)request->num_tokens;
    if ((rows->src.is_slot && src->count != 1) || (rows->dst.is_slot && dst->count != 1))
        return 0;
    if (is_whole || rows->src.is_slot) /* as the planner does */
        src->is_lease = dst->is_lease = false;
    if (!held(&rows->dst, dst, &dst_held) || !leave_out(&rows->src, src, dst_held) ||
        !held(&rows->src, src, &src_held) || !leave_out(&rows->dst, dst, src_held) ||
        !held(&rows->dst, dst, &dst_held))
        return 0;
    if (is_whole && rows->src.is_slot) {
        /* The last block has at least one token of the slot. */
        if (!src->skipped && !dst->skipped && dst_held - (int64_t)rows->dst.tokens >= src_held)
            return 0;
        num_tokens = src_held < dst_held ? src_held : dst_held;
        num_tokens = num_tokens < 1 ? 1 : num_tokens;
    } else if (is_whole) {
        if (src_held != dst_held)
            return 0;
        num_tokens = src_held;
    }
    if (num_tokens < 1 || num_tokens > src_held || num_tokens > dst_held ||
        !are_of_one(rows, request, src_held, dst_held, num_tokens))
        return 0;
    return (uint64_t)num_tokens;
}

/* Tokens that lie in one row on both sides are a piece. */
static size_t cut_tokens(const kvn_rows *rows, const kvn_rows_request *request, uint64_t num_tokens,
                         kvn_run *pieces)
{
    const kvn_rows_side *const src = &rows->src, *const dst = &rows->dst;
    const int64_t *from = request->src.rows + request->src.skipped / src->tokens;
    const int64_t *to = request->dst.rows + request->dst.skipped / dst->tokens;
    uint64_t src_token = request->src.skipped % src->tokens;
    uint64_t dst_token = request->dst.skipped % dst->tokens;
    size_t num = 0;
    while (num_tokens > 0) {
        uint64_t tokens = src->tokens - src_token;
        if (tokens > dst->tokens - dst_token)
            tokens = dst->tokens - dst_token;
        if (tokens > num_tokens)
            tokens = num_tokens;
        pieces[num++] = (kvn_run){
            src->start + (uint64_t)*from * src->row_stride + src_token * src->token_stride,
            dst->start + (uint64_t)*to * dst->row_stride + dst_token * dst->token_stride,
            tokens,
        };
        num_tokens -= tokens;
        src_token += tokens;
        dst_token += tokens;
        if (src_token == src->tokens) {
            src_token = 0;
            from++;
        }
        if (dst_token == dst->tokens) {
            dst_token = 0;
            to++;
        }
    }
    return num;
}

/* Finds the distinct numbers of tokens of the pieces, largest first; false if there are too many. */
static bool find_sizes(kvn_rows_cut *cut)
{
    size_t at = 0;
    cut->num_sizes = 0;
    for (size_t i = 0; i < cut->num_pieces; i++) {
        const uint64_t tokens = cut->pieces[i].nbytes;
        if (cut->num_sizes == 0 || cut->sizes[at].tokens != tokens) {
            for (at = 0; at < cut->num_sizes && cut->sizes[at].tokens > tokens; at++)
                ;
            if (at == cut->num_sizes || cut->sizes[at].tokens != tokens) {
                if (cut->num_sizes == KVN_ROWS_SIZES)
                    return false;
                memmove(&cut->sizes[at + 1], &cut->sizes[at],
                        (cut->num_sizes - at) * sizeof cut->sizes[0]);
                cut->sizes[at].tokens = tokens;
                cut->sizes[at].count = 0;
                cut->num_sizes++;
            }
        }
        cut->sizes[at].count++;
    }
    return true;
}

/* Finds the bytes that are contiguous on both sides, and the remaining levels, outermost first, like `_fuse` of the
 * planner, also in the order of equal levels. */
static void fuse(const kvn_rows *rows, kvn_rows_size *size)
{
    kvn_level open[KVN_ROWS_LEVELS + 1];
    size_t num = rows->num_levels, left = 0;
    memcpy(open, rows->levels, num * sizeof *open);
    if (size->tokens > 1)
        open[num++] = (kvn_level){size->tokens, rows->src.token_stride, rows->dst.token_stride};
    size->run = rows->run;
    for (size_t i = 0; i < num;) {
        if (open[i].src_stride != size->run || open[i].dst_stride != size->run) {
            i++;
            continue;
        }
        size->run *= open[i].times;
        num--;
        memmove(&open[i], &open[i + 1], (num - i) * sizeof *open);
        i = 0; /* other levels may be adjacent now */
    }
    for (size_t i = 1; i < num; i++) {
        const kvn_level level = open[i];
        size_t at = i;
        for (; at > 0 && open[at - 1].dst_stride < level.dst_stride; at--)
            open[at] = open[at - 1];
        open[at] = level;
    }
    for (size_t i = 0; i < num; i++) {
        kvn_level *const outer = &size->levels[left - (left > 0)];
        if (left > 0 && outer->src_stride == open[i].times * open[i].src_stride &&
            outer->dst_stride == open[i].times * open[i].dst_stride) {
            open[i].times *= outer->times;
            *outer = open[i];
        } else {
            size->levels[left++] = open[i];
        }
    }
    size->num_levels = left;
}

/* Returns true if the planner pairs keys and values separately: pairs are cheaper than many levels. */
static bool splits_kv(const kvn_rows *rows, const kvn_rows_size *size)
{
    if (rows->kv.times <= 1 || size->num_levels <= MAX_REPEATS)
        return false;
    for (size_t i = 0; i < size->num_levels; i++)
        if (memcmp(&size->levels[i], &rows->kv, sizeof rows->kv) == 0)
            return true;
    return false;
}

/* Fuses the levels of each size, and counts runs; false if there are too many. */
static bool count_runs(const kvn_rows *rows, kvn_rows_cut *cut)
{
    size_t most = 0;
    cut->num_runs = 0;
    for (size_t i = 0; i < cut->num_sizes; i++) {
        kvn_rows_size *const size = &cut->sizes[i];
        size_t runs = size->count, segments = size->count;
        fuse(rows, size);
        for (size_t level = 0; level < size->num_levels; level++) {
            if (__builtin_mul_overflow(runs, size->levels[level].times, &runs))
                return false;
            if (level + MAX_REPEATS < size->num_levels) /* the planner has these in its table */
                segments = runs;
        }
        if (__builtin_add_overflow(cut->num_runs, runs, &cut->num_runs))
            return false;
        /* The plan has the repeats of the largest table; with none, runs are ordered and merged. */
        if (segments > most) {
            most = segments;
            cut->merges = size->num_levels == 0;
        }
    }
    return !splits_kv(rows, &cut->sizes[0]) && cut->num_runs <= PTRDIFF_MAX / sizeof(kvn_run) / 2;
}

bool kvn_rows_cut_up(const kvn_rows *rows, kvn_rows_request request, void *scratch,
                     kvn_rows_cut *cut)
{
    kvn_run *const pieces = scratch;
    uint64_t num_tokens, *seen;
    size_t most;
    if (!most_pieces(rows, &request, &most))
        return false;
    seen = (uint64_t *)(pieces + most); /* a bit for each destination row, if there are many rows */
    if (!are_good(rows, &request.src, &request.dst, seen))
        return false;
    num_tokens = tokens_of(rows, &request);
    if (num_tokens == 0)
        return false;
    cut->pieces = pieces;
    cut->num_pieces = cut_tokens(rows, &request, num_tokens, pieces);
    return find_sizes(cut) && count_runs(rows, cut);
}

static kvn_run *repeat(kvn_run *out, kvn_run run, const kvn_level *levels, size_t num_levels)
{
    if (num_levels == 0) {
        *out = run;
        return out + 1;
    }
    for (uint64_t i = 0; i < levels->times; i++) {
        out = repeat(out, run, levels + 1, num_levels - 1);
        run.src += levels->src_stride;
        run.dst += levels->dst_stride;
    }
    return out;
}

static bool is_after(const kvn_run *a, const kvn_run *b)
{
    return a->src > b->src || (a->src == b->src && a->dst > b->dst);
}

static void sort_few(kvn_run *runs, size_t num)
{
    for (size_t i = 1; i < num; i++) {
        const kvn_run run = runs[i];
        size_t at = i;
        for (; at > 0 && is_after(&runs[at - 1], &run); at--)
            runs[at] = runs[at - 1];
        runs[at] = run;
    }
}

static uint64_t src_of(const void *item, const void *unused)
{
    (void)unused;
    return ((const kvn_run *)item)->src;
}

static uint64_t dst_of(const void *item, const void *unused)
{
    (void)unused;
    return ((const kvn_run *)item)->dst;
}

/* Sorts runs by source, then destination, into either array. If no source descends, only for ties that matter. */
static kvn_run *sort(bool orders_ties, kvn_run *runs, kvn_run *other, size_t num)
{
    bool descends = false, ties = false;
    for (size_t i = 1; i < num; i++) {
        descends |= runs[i].src < runs[i - 1].src;
        ties |= runs[i].src == runs[i - 1].src;
    }
    if (!descends && !(ties && orders_ties))
        return runs;
    if (num <= INSERTED) {
        sort_few(runs, num);
        return runs;
    }
    kvn_run *sorted = kvn_sort(runs, other, num, sizeof *runs, src_of, NULL);
    for (size_t i = 1; i < num; i++)
        if (is_after(&sorted[i - 1], &sorted[i])) { /* one source is copied to several rows */
            kvn_run *spare = sorted == runs ? other : runs;
            sorted = kvn_sort(sorted, spare, num, sizeof *runs, dst_of, NULL);
            spare = sorted == runs ? other : runs;
            return kvn_sort(sorted, spare, num, sizeof *runs, src_of, NULL);
        }
    return sorted;
}

/* Merges runs that are adjacent on both sides. */
static size_t merge(kvn_run *runs, size_t num)
{
    size_t last = 0;
    for (size_t i = 1; i < num; i++)
        if (runs[i].src - runs[last].src == runs[last].nbytes &&
            runs[i].dst - runs[last].dst == runs[last].nbytes)
            runs[last].nbytes += runs[i].nbytes;
        else
            runs[++last] = runs[i];
    return last + 1;
}

/* Returns true if the pieces are runs already: they have one size, which is not cut further. */
static bool are_runs(const kvn_rows_cut *cut)
{
    return cut->num_sizes == 1 && cut->sizes[0].num_levels == 0;
}

size_t kvn_rows_room(const kvn_rows_cut *cut)
{
    return cut->num_runs <= cut->num_pieces ? cut->num_runs : 2 * cut->num_runs;
}

const uint64_t *kvn_rows_columns(const kvn_rows *rows, kvn_rows_cut *cut, kvn_run *room,
                                 size_t *num)
{
    kvn_run *const spare = cut->num_runs <= cut->num_pieces ? cut->pieces : room + cut->num_runs;
    kvn_run *runs = room, *other = spare, *end = room;
    *num = cut->num_runs;
    if (are_runs(cut)) {
        runs = cut->pieces;
        other = room;
        for (size_t at = 0; at < *num; at++)
            runs[at].nbytes = cut->sizes[0].run;
    }
    for (size_t i = 0; runs == room && i < cut->num_sizes; i++) {
        const kvn_rows_size *const size = &cut->sizes[i];
        for (size_t at = 0; at < cut->num_pieces; at++) {
            kvn_run run = cut->pieces[at];
            if (run.nbytes != size->tokens)
                continue;
            run.nbytes = size->run;
            end = repeat(end, run, size->levels, size->num_levels);
        }
    }
    if (cut->merges) {
        kvn_run *const sorted = sort(rows->orders_ties, runs, other, *num);
        other = sorted == runs ? other : runs;
        runs = sorted;
        *num = merge(runs, *num);
    }
    uint64_t *const columns = (uint64_t *)other;
    for (size_t i = 0; i < *num; i++) {
        columns[i] = runs[i].src;
        columns[*num + i] = runs[i].dst;
        columns[2 * *num + i] = runs[i].nbytes;
    }
    return columns;
}
