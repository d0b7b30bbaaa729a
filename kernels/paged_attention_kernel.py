"""What runs on the GPU for `kernels.paged_attention`: the attention, and joining its parts."""

# mypy: disable-error-code="no-untyped-def"
# Triton reads annotations itself: of arguments that are compiled in, and no others.

import triton.language as tl

from kernels.launch import kernel


@kernel
def _find_sequence(query_start_loc, num_seqs, query_block, BLOCK_Q: tl.constexpr):
    """The last sequence whose blocks of queries begin at or before `query_block`.

    Sequence s begins at block query_start_loc[s] // BLOCK_Q + s: never before its predecessor has ended.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= query_block:
            low = middle
        else:
            high = middle
    return low


@kernel
def paged_attention_kernel(
    output,
    parts,
    lse,
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    query_start_loc,
    num_seqs,
    query_stride,
    table_stride,
    scale_log2,
    v_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    DECODE: tl.constexpr,
):
    """Row m of a program is query token m // GROUP_SIZE of its block, head m % GROUP_SIZE of its KV head."""
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if DECODE:
        seq = tl.program_id(0)
        start = seq
        query_len = 1
        first_query = 0
    else:
        seq = _find_sequence(query_start_loc, num_seqs, tl.program_id(0), BLOCK_Q)
        start = tl.load(query_start_loc + seq)
        query_len = tl.load(query_start_loc + seq + 1) - start
        first_query = (tl.program_id(0) - (start // BLOCK_Q + seq)) * BLOCK_Q
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens + seq)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_DIM_PADDED)
    query_index = first_query + m // GROUP_SIZE
    is_row = (m < BLOCK_Q * GROUP_SIZE) & (query_index < query_len)
    is_dim = d < HEAD_DIM
    token = (start + query_index).to(tl.int64)
    head = kv_head * GROUP_SIZE + m % GROUP_SIZE
    q = tl.load(
        query + (token * query_stride + head * HEAD_DIM)[:, None] + d[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )  # [BLOCK_M, HEAD_DIM_PADDED]

    position = seq_len - query_len + query_index
    first_position = seq_len - query_len + first_query
    last_key = tl.minimum(first_position + BLOCK_Q, seq_len)
    first_tile = 0
    if WINDOW > 0:
        first_tile = tl.maximum(first_position - WINDOW + 1, 0) // TILE
    end_tile = (last_key + TILE - 1) // TILE
    if NUM_SPLITS > 1:
        tiles_per_split = (end_tile - first_tile + NUM_SPLITS - 1) // NUM_SPLITS
        first_tile += split * tiles_per_split
        end_tile = tl.minimum(first_tile + tiles_per_split, end_tile)

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
    table = block_tables + seq.to(tl.int64) * table_stride
    for tile in range(first_tile, end_tile):
        key = tile * TILE + tl.arange(0, TILE)
        is_key = key < last_key
        block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        offset = ((block * BLOCK_SIZE + key % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
        k = tl.load(
            key_cache + offset[None, :] + d[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0
        )  # [HEAD_DIM_PADDED, TILE]
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale_log2
        visible = is_key[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible &= key[None, :] > position[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has seen no key yet must not become -inf - -inf.
        pivot = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - pivot[:, None])  # [BLOCK_M, TILE]
        rescale = tl.exp2(maximum - pivot)
        total = total * rescale + tl.sum(weights, 1)
        v = tl.load(
            value_cache + offset[:, None] + d[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0
        )  # [TILE, HEAD_DIM_PADDED]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * rescale[:, None], input_precision="ieee")
        maximum = new_maximum

    attended = acc / tl.where(total > 0, total, 1.0)[:, None] * v_scale
    row = token * (NUM_KV_HEADS * GROUP_SIZE) + head
    if NUM_SPLITS > 1:
        place = row * NUM_SPLITS + split
        tl.store(lse + place, maximum + tl.log2(tl.where(total > 0, total, 1.0)), mask=is_row)
        tl.store(
            parts + (place * HEAD_DIM)[:, None] + d[None, :], attended, mask=is_row[:, None] & is_dim[None, :]
        )
    else:
        tl.store(
            output + (row * HEAD_DIM)[:, None] + d[None, :],
            attended.to(output.dtype.element_ty),
            mask=is_row[:, None] & is_dim[None, :],
        )


@kernel
def join_parts_kernel(
    output,
    parts,
    lse,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Weighs each part by its share of the softmax's sum; lse: base 2, -inf for a part without keys."""
    row = tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    split = tl.arange(0, NUM_SPLITS)
    d = tl.arange(0, HEAD_DIM_PADDED)
    sums = tl.load(lse + row * NUM_SPLITS + split)
    top = tl.max(sums, 0)
    weights = tl.exp2(sums - tl.where(top == float("-inf"), 0.0, top))  # [NUM_SPLITS]
    total = tl.sum(weights, 0)
    part = tl.load(
        parts + (row * NUM_SPLITS + split)[:, None] * HEAD_DIM + d[None, :],
        mask=(d < HEAD_DIM)[None, :],
        other=0.0,
    )
    joined = tl.sum(part * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(output + row * HEAD_DIM + d, joined.to(output.dtype.element_ty), mask=d < HEAD_DIM)
