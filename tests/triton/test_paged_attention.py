"""Prefill chunks and decodes in one batch, against the reference."""

import os
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kernels.launch import FP8
from kernels.paged_attention import launches, paged_attention
from kernels.paged_attention_ref import paged_attention_ref
from kernels.reshape_and_cache import reshape_and_cache
from kernels.reshape_and_cache_ref import reshape_and_cache_ref

BLOCK_SIZE = 16
DTYPES = [(torch.float32, 1e-5, 1e-5), (torch.float16, 2e-3, 2e-3)]
if os.environ.get("TRITON_INTERPRET") != "1":  # whose bf16 is wrong
    DTYPES.append((torch.bfloat16, 1.6e-2, 1.6e-2))
MIXED = [(1, 1), (70, 1), (5, 5), (40, 23)]


@dataclass
class Batch:
    """Random sequences over a shuffled pool that holds other sequences' leftovers too."""

    chunks: list[tuple[int, int]]  # (seq_len, query_len)
    heads: tuple[int, int]
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    cache_dtype: torch.dtype | None = None
    spare_blocks: int = 3
    query: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(len(self.chunks) * self.head_dim)
        num_heads, num_kv_heads = self.heads

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        counts = [-(-seq_len // BLOCK_SIZE) for seq_len, _ in self.chunks]
        order = torch.randperm(sum(counts) + self.spare_blocks, generator=generator)
        tables = [table.int() for table in order[: sum(counts)].split(counts)]
        self.block_tables = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=-1)
        self.seq_lens = torch.tensor([seq_len for seq_len, _ in self.chunks], dtype=torch.int32)
        lens = torch.tensor([0, *(query_len for _, query_len in self.chunks)])
        self.query_start_loc = lens.cumsum(0).int()
        pool = (len(order), BLOCK_SIZE, num_kv_heads, self.head_dim)
        cache_dtype = self.cache_dtype or self.dtype
        self.keys, self.values = ((random(*pool) * 2).to(cache_dtype) for _ in range(2))
        # Queries are a part of what the query-key-value matrix gave.
        rows = random(int(self.query_start_loc[-1]), num_heads + 2 * num_kv_heads, self.head_dim)
        self.query = rows.to(self.device)[:, :num_heads]

    def reference(self, sliding_window: int | None = None, k: float = 1.0, v: float = 1.0) -> Tensor:
        keys, values = (cache.float() for cache in (self.keys, self.values))
        return paged_attention_ref(
            self.query.cpu(),
            keys,
            values,
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
            self.head_dim**-0.5,
            sliding_window,
            k,
            v,
        )

    def kernel(
        self, sliding_window: int | None = None, k: float = 1.0, v: float = 1.0, num_processors: int = 1
    ) -> Tensor:
        return paged_attention(
            self.query,
            self.keys.to(self.device),
            self.values.to(self.device),
            self.block_tables.to(self.device),
            self.seq_lens.to(self.device),
            self.query_start_loc.to(self.device),
            self.head_dim**-0.5,
            sliding_window,
            k,
            v,
            num_processors,
        ).cpu()


def assert_close(actual: Tensor, expected: Tensor, atol: float, rtol: float) -> None:
    difference = actual.float() - expected.float()
    relative_rmse = (difference.square().mean() / expected.float().square().mean()).sqrt().item()
    print(f"relative RMSE {relative_rmse:.2e}, max {difference.abs().max().item():.2e}")
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), DTYPES)
@pytest.mark.parametrize("sliding_window", [None, 20])
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((4, 1), 64), ((7, 1), 80), ((4, 2), 96), ((6, 2), 128), ((3, 1), 192), ((2, 2), 256)],
)
def test_prefill_and_decode_in_one_batch(
    device: torch.device,
    heads: tuple[int, int],
    head_dim: int,
    sliding_window: int | None,
    dtype: torch.dtype,
    atol: float,
    rtol: float,
) -> None:
    batch = Batch(MIXED, heads, head_dim, dtype, device)
    assert_close(batch.kernel(sliding_window), batch.reference(sliding_window), atol, rtol)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), DTYPES)
@pytest.mark.parametrize("sliding_window", [None, 530])
def test_keys_of_decodes_are_split_where_programs_are_few(
    device: torch.device, sliding_window: int | None, dtype: torch.dtype, atol: float, rtol: float
) -> None:
    # The short ones leave splits without a key.
    batch = Batch([(1030, 1), (3, 1)], (4, 2), 64, dtype, device)
    assert_close(
        batch.kernel(sliding_window, num_processors=100), batch.reference(sliding_window), atol, rtol
    )


@pytest.mark.parametrize(("heads", "head_dim", "sliding_window"), [((4, 1), 64, None), ((6, 2), 128, 20)])
def test_fp8_cache(
    device: torch.device, heads: tuple[int, int], head_dim: int, sliding_window: int | None
) -> None:
    batch = Batch(MIXED, heads, head_dim, torch.float16, device, cache_dtype=FP8)
    actual, expected = batch.kernel(sliding_window, 0.25, 3.0), batch.reference(sliding_window, 0.25, 3.0)
    assert_close(actual, expected, 5e-3, 5e-3)


def test_fp8_cache_of_split_decodes(device: torch.device) -> None:
    batch = Batch([(530, 1)], (4, 1), 64, torch.float16, device, cache_dtype=FP8)
    actual = batch.kernel(None, 0.25, 3.0, num_processors=100)
    assert_close(actual, batch.reference(None, 0.25, 3.0), 5e-3, 5e-3)


def test_padding_of_a_cuda_graph_gets_zeros(device: torch.device) -> None:
    batch = Batch([(20, 1), (16, 1), (33, 1)], (4, 2), 64, torch.float32, device)
    expected = batch.reference()
    batch.seq_lens[1] = 0
    expected[1] = 0.0
    torch.testing.assert_close(batch.kernel(), expected, atol=1e-5, rtol=1e-5)


def test_blocks_whose_offset_does_not_fit_32_bits(device: torch.device) -> None:
    """Only what is read is ever touched, so the pool may be larger than memory: a sparse mapping."""
    blocks = 2**31 // (BLOCK_SIZE * 64) + 2
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < blocks * BLOCK_SIZE * 64 * 5:
        pytest.skip("needs a GPU with 11 GB free")
    pool = torch.empty(blocks, BLOCK_SIZE, 1, 64, dtype=torch.float16, device=device)
    new = torch.randn(5, 1, 64, generator=torch.Generator().manual_seed(0)).half().to(device)
    slots = (blocks - 1) * BLOCK_SIZE + torch.arange(5, device=device)
    reshape_and_cache(new, new, pool, pool, slots)
    table = torch.tensor([[blocks - 1]], dtype=torch.int32, device=device)
    ones, starts = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([5], [0, 1]))
    actual = paged_attention(new[:1], pool, pool, table, ones, starts, 1.0, num_processors=1)
    small = pool[-1:].cpu().float()
    expected = paged_attention_ref(
        new[:1].cpu().float(),
        small,
        small,
        torch.zeros(1, 1, dtype=torch.int32),
        ones.cpu(),
        starts.cpu(),
        1.0,
    )
    torch.testing.assert_close(actual.cpu().float(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, FP8], ids=str)
def test_reshape_and_cache(device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    source = torch.float16 if dtype is FP8 else dtype
    # Keys and values lie beside each other, as the query-key-value matrix gives them.
    new = (torch.randn(7, 6, 48, generator=generator) * 300).to(source)
    caches = [torch.full((4, BLOCK_SIZE, 3, 48), 7.0).to(dtype) for _ in range(2)]
    slots = torch.tensor([63, 0, 17, 16, 5, 40, 1])
    scales = (0.5, 2.0) if dtype is FP8 else (1.0, 1.0)
    actual = [cache.to(device) for cache in caches]
    on_device = new.to(device)
    mapping = torch.cat((slots[:3], torch.tensor([-1]), slots[4:])).to(device)
    reshape_and_cache(on_device[:, :3], on_device[:, 3:], actual[0], actual[1], mapping, *scales)
    kept = torch.arange(7) != 3
    reshape_and_cache_ref(new[kept, :3], new[kept, 3:], caches[0], caches[1], slots[kept], *scales)
    for one, other in zip(actual, caches, strict=True):
        assert torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))


def test_what_does_not_fit_is_refused_by_name(device: torch.device) -> None:
    batch = Batch([(20, 1)], (4, 2), 64, torch.float16, device)

    def plan(query: Tensor, keys: Tensor, values: Tensor) -> None:
        launches(
            torch.empty_like(query),
            query,
            keys,
            values,
            batch.block_tables,
            batch.seq_lens,
            batch.query_start_loc,
            1.0,
            None,
            1.0,
            1.0,
            1,
        )

    with pytest.raises(ValueError, match="3 heads of 64, the cache 2 of 64"):
        plan(batch.query[:, :3], batch.keys, batch.values)
    with pytest.raises(ValueError, match=r"key_cache must be torch.float16, .* it is torch.float32"):
        plan(batch.query, batch.keys.float(), batch.values.float())
    with pytest.raises(ValueError, match="same shape and dtype"):
        plan(batch.query, batch.keys, batch.values[:1])
