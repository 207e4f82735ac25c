/* Paged attention in float32: the tiles of a share of the work in their order, included after pointwise.h.
 *
 * The state of a row is joined by its tiles one by one, in order of their keys. Where shares meet inside a block, each
 * tile of it keeps its own state, and who ends last joins them in the same order: the same operations, the same bits.
 */
#include "attention_tile.h"

/* `call` for QUERY_TILE rows at a time, then for four, and for the three, two or one that are left; N is how many. */
#define EACH_ROWS(call)                                                                                                \
    r = 0;                                                                                                             \
    for (; QUERY_TILE > 4 && r + QUERY_TILE <= rows; r += QUERY_TILE) {                                                \
        enum { N = QUERY_TILE };                                                                                       \
        call;                                                                                                          \
    }                                                                                                                  \
    for (; r + 4 <= rows; r += 4) {                                                                                    \
        enum { N = 4 };                                                                                                \
        call;                                                                                                          \
    }                                                                                                                  \
    if (rows - r == 3) {                                                                                               \
        enum { N = 3 };                                                                                                \
        call;                                                                                                          \
    } else if (rows - r == 2) {                                                                                        \
        enum { N = 2 };                                                                                                \
        call;                                                                                                          \
    } else if (rows - r == 1) {                                                                                        \
        enum { N = 1 };                                                                                                \
        call;                                                                                                          \
    }

/* A tile of a block and one of its KV heads: keys by address, and those that come next. */
static void attend_tile(const AttentionProblem *p, const QueryBlock *block, int64_t tile, int64_t kv_head,
                        const uint8_t *const *keys, const uint8_t *const *next, const State *state, Work *work)
{
    const int rows = (int)(block->tokens * block->heads);
    const int64_t first = (block->first_tile + tile) * KEYS;
    const int count = (int)least(KEYS, block->stop - first), lanes = (count + ROWS - 1) / ROWS * ROWS;
    int r;
    tile_rows(p, &p->values, block, tile, kv_head, work->values);
    const uint8_t *const *k = widen(p, &p->keys, block, tile, kv_head, count, keys, work->values, work);
    for (int lane = 0; lane < lanes; lane += ROWS) {
        const int64_t ahead = k == keys ? work->values[lane] - k[lane] : 0;
        if (rows <= FEW_ROWS) {
            score_few(p, work, rows, k + lane, ahead, first + lane, lane);
            continue;
        }
        for (int64_t d = 0; d < p->dim; d += COLUMNS) {
            vi v[COLUMNS];
            turn(k + lane, 4 * d, COLUMNS, ahead, v);
            for (int i = 0; i < COLUMNS; i++)
                vi_store((uint8_t *)(work->turned + ROWS * (d + i)), v[i]);
        }
        EACH_ROWS(score_turned(p, work, r, N, first + lane, lane))
    }
    for (r = 0; r < rows; r++)
        softmax_row(work, state, r, lanes);
    join_sums(work, state, rows);
    const uint8_t *const *v = widen(p, &p->values, block, tile, kv_head, count, work->values, next, work);
    if (v != work->values)
        next = v; /* asked for already */
    EACH_ROWS(add_values(p, work, state, v, r ? v : next, r, N, VALUE_VECTORS(N), count))
}

static State state_at(float *floats, int64_t rows)
{
    const int64_t padded = (rows + ROWS - 1) / ROWS * ROWS;
    return (State){floats, floats + padded, floats + 2 * padded};
}

static int64_t row_head(const AttentionProblem *p, const QueryBlock *block, int64_t row)
{
    return block->first_head + row / (block->tokens * block->heads) * (p->heads / p->kv_heads) + row % block->heads;
}

/* Of the request's new tokens. */
static int64_t row_token(const QueryBlock *block, int64_t row)
{
    return block->first_token + row / block->heads % block->tokens;
}

static void begin_rows(const AttentionProblem *p, const QueryBlock *block, Work *work)
{
    const Request *request = block->request;
    for (int64_t r = 0; r < block_rows(block); r++) {
        const int64_t token = row_token(block, r);
        work->all_q[r] = p->q + (request->token + token) * p->q_token + row_head(p, block, r) * p->q_head;
        work->all_position[r] = request->context - request->length + token;
    }
}

/* Nothing is summed yet; a sink is a score without a value. */
static void begin_state(const AttentionProblem *p, const QueryBlock *block, const State *state)
{
    const int64_t rows = block_rows(block);
    for (int64_t r = 0; r < rows; r++) {
        state->top[r] = p->sinks ? p->sinks[row_head(p, block, r)] : -INFINITY;
        state->sum[r] = p->sinks ? 1.0f : 0.0f;
    }
    memset(state->acc, 0, sizeof(float) * (size_t)(rows * p->dim));
}

/* Where the states of single tiles are kept, that of one of them, empty. */
static State begin_part(const AttentionProblem *p, const QueryBlock *block, int64_t tile)
{
    const int64_t rows = block_rows(block);
    const State part = state_at(block->parts + tile * state_floats(rows, p->dim), rows);
    for (int64_t r = 0; r < rows; r++)
        part.top[r] = -INFINITY, part.sum[r] = 0.0f;
    return part;
}

/* The states of single tiles, in order. */
static void join_parts(const AttentionProblem *p, const QueryBlock *block, const State *state, Work *work)
{
    const int rows = (int)block_rows(block);
    for (int64_t tile = 0; tile < block->tiles; tile++) {
        const State part = state_at(block->parts + tile * state_floats(rows, p->dim), rows);
        for (int r = 0; r < rows; r++)
            join_top(work, state, r, part.top[r], part.sum[r]);
        join_sums(work, state, rows);
        for (int r = 0; r < rows; r++)
            for (int64_t d = 0; d < p->dim; d += ROWS)
                join_values(work, r, state->acc + r * p->dim + d, vf_load(part.acc + r * p->dim + d));
    }
}

static void finish_rows(const AttentionProblem *p, const QueryBlock *block, const State *state)
{
    for (int64_t r = 0; r < block_rows(block); r++) {
        const int64_t token = block->request->token + row_token(block, r);
        float *out = p->out + (token * p->heads + row_head(p, block, r)) * p->dim;
        for (int64_t d = 0; d < p->dim; d += ROWS)
            vf_store(out + d, vf_div(vf_load(state->acc + r * p->dim + d), vf_set1(state->sum[r])));
    }
}

static int is_before(Cut a, Cut b)
{
    return a.block < b.block || (a.block == b.block && a.tile < b.tile);
}

/* A tile and every KV head of its block. `side` is which of two places holds the addresses of this head's keys; those of
 * the next go to the other. Keys of neighbouring heads are neighbours in memory: so they are read together. */
static void attend_heads(const AttentionProblem *p, const QueryBlock *blocks, Cut at, Cut to, const State *state, int *side,
                         Work *work)
{
    const QueryBlock *block = &blocks[at.block];
    const int64_t rows = block->tokens * block->heads;
    for (int64_t k = 0; k < block->kv_heads; k++, *side ^= 1) {
        const Cut after = at.tile + 1 < block->tiles ? (Cut){at.block, at.tile + 1} : (Cut){at.block + 1, 0};
        const uint8_t **keys = work->keys[*side], **next = work->keys[*side ^ 1];
        if (k + 1 < block->kv_heads)
            tile_rows(p, &p->keys, block, at.tile, block->kv_head + k + 1, next);
        else if (is_before(after, to))
            tile_rows(p, &p->keys, &blocks[after.block], after.tile, blocks[after.block].kv_head, next);
        else
            next = keys;
        work->q = work->all_q + k * rows;
        work->position = work->all_position + k * rows;
        const State head = {state->top + k * rows, state->sum + k * rows, state->acc + k * rows * p->dim};
        attend_tile(p, block, at.tile, block->kv_head + k, keys, next, &head, work);
    }
}

/* The tiles from one cut to another. */
static void attend_share(const AttentionProblem *p, QueryBlock *blocks, Cut from, Cut to)
{
    _Alignas(64) Work work;
    int side = 0;
    tile_rows(p, &p->keys, &blocks[from.block], from.tile, blocks[from.block].kv_head, work.keys[side]);
    for (Cut at = from; is_before(at, to); at = (Cut){at.block + 1, 0}) {
        QueryBlock *block = &blocks[at.block];
        const int64_t stop = at.block == to.block ? to.tile : block->tiles;
        const State state = state_at(work.state, block_rows(block));
        begin_rows(p, block, &work);
        if (!block->parts)
            begin_state(p, block, &state);
        for (; at.tile < stop; at.tile++) {
            const State part = block->parts ? begin_part(p, block, at.tile) : state;
            attend_heads(p, blocks, at, to, &part, &side, &work);
        }
        if (block->parts) {
            if (__atomic_sub_fetch(&block->pending, 1, __ATOMIC_ACQ_REL))
                continue;
            begin_state(p, block, &state);
            join_parts(p, block, &state, &work);
        }
        finish_rows(p, block, &state);
    }
}
