"""Steps as a device gets them: the same inputs as the model's, and padding that touches nothing."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from workers.batch import ScheduledSequence
from workers.block_pool import BLOCK_SIZE
from workers.decode_graphs import DecodeGraphs, decode_buckets
from workers.device_step import DeviceStep, StepShape, decode_shape, is_decode, pack, step_shape, unpack
from workers.model_step import ModelStep, StepLimits, prepare_step
from workers.request import Request

NUM_BLOCKS = 4096
MAX_MODEL_LEN = 1024
VOCAB_SIZE = 50


def make_step(lengths: list[tuple[int, int]], *, known_more: int = 0) -> ModelStep:
    """Sequences of (tokens computed, tokens now), with `known_more` tokens behind those of the first."""
    scheduled, first_block = [], 0
    for index, (computed, now) in enumerate(lengths):
        known = computed + now + (known_more if index == 0 else 0)
        num_blocks = -(-known // BLOCK_SIZE)
        request = Request(
            request_id=index.to_bytes(16, "big"),
            attempt=0,
            priority=PriorityClass.BATCH,
            prompt_token_ids=[(index * 7 + position) % VOCAB_SIZE for position in range(known)],
            sampling=SamplingParams(max_tokens=2),
            reply_partition=0,
            block_table=list(range(first_block, first_block + num_blocks))[::-1],
            num_computed_tokens=computed,
        )
        first_block += num_blocks
        samples = index > 0 or not known_more
        scheduled.append(ScheduledSequence(request, now, samples=samples))
    return prepare_step(scheduled, StepLimits(VOCAB_SIZE, NUM_BLOCKS, MAX_MODEL_LEN))


def assert_holds(device: DeviceStep, step: ModelStep) -> None:
    num_tokens, num_seqs = len(step.token_ids), len(step.seq_lens)
    assert torch.equal(device.token_ids[:num_tokens].long(), step.token_ids)
    assert torch.equal(device.positions[:num_tokens].long(), step.positions)
    assert torch.equal(device.slot_mapping[:num_tokens].long(), step.slot_mapping)
    assert device.seq_lens[:num_seqs].tolist() == step.seq_lens
    assert device.query_start_loc[: num_seqs + 1].tolist() == step.query_start_loc
    for row, table in zip(device.block_tables, step.block_tables, strict=False):
        assert row[: len(table)].tolist() == table


sequences = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60)), min_size=1, max_size=9)


@given(sequences)
def test_a_packed_step_is_the_step(lengths: list[tuple[int, int]]) -> None:
    step = make_step(lengths)
    shape = step_shape(step)
    device = unpack(pack(step, shape), shape)
    assert_holds(device, step)
    assert torch.equal(device.sampled_rows.long(), step.sampled_rows)
    assert is_decode(step) == all(now == 1 for _, now in lengths)
    for part in (device.token_ids, device.seq_lens, device.query_start_loc, device.block_tables):
        assert part.is_contiguous()
        assert part.storage_offset() % 4 == 0, "kernels are compiled for parts at multiples of 16 bytes"


@given(st.lists(st.integers(0, 900), min_size=1, max_size=20), st.integers(0, 11))
def test_padding_stores_nothing_and_attends_to_nothing(computed: list[int], more: int) -> None:
    step = make_step([(each, 1) for each in computed])
    num_rows, num_seqs = len(computed) + more, len(computed)
    shape = decode_shape(step, num_rows)
    device = unpack(pack(step, shape), shape)
    assert_holds(device, step)
    assert (device.slot_mapping[num_seqs:] == -1).all()
    assert (device.seq_lens[num_seqs:] == 0).all()
    assert device.query_start_loc.tolist() == list(range(num_rows + 1))
    assert device.sampled_rows.tolist() == list(range(num_rows))
    assert ((device.token_ids >= 0) & (device.token_ids < VOCAB_SIZE)).all()
    assert (device.positions[num_seqs:] == 0).all()


class Again:
    """Instead of a graph: computes anew, over what its inputs hold then."""

    def __init__(self, compute: object) -> None:
        self._compute = compute

    def replay(self) -> None:
        assert callable(self._compute)
        self._compute()


def spelled(step: DeviceStep) -> torch.Tensor:
    """Stands for a model: each row tells all inputs of its sequence, and nothing of others'."""
    rows = []
    for row in range(len(step.seq_lens)):
        seq_len = int(step.seq_lens[row])
        blocks = step.block_tables[row, : -(-seq_len // BLOCK_SIZE)].tolist()
        told = [int(each[row]) for each in (step.token_ids, step.positions, step.slot_mapping)]
        rows.append([*told, seq_len, len(blocks), sum(blocks), *blocks[:4], *[-5] * (4 - len(blocks[:4]))])
    return torch.tensor(rows, dtype=torch.float32)


@given(st.lists(st.lists(st.integers(0, 900), min_size=1, max_size=12), min_size=1, max_size=6))
def test_what_a_graph_reads_is_what_the_step_holds(batches: list[list[int]]) -> None:
    """Whatever ran in its bucket before."""
    graphs = DecodeGraphs([1, 2, 4, 8], 64, 10, torch.device("cpu"), spelled, Again)
    for computed in batches:
        step = make_step([(each, 1) for each in computed])
        logits = graphs.replay(step)
        if len(computed) > 8:
            assert logits is None
            continue
        shape = step_shape(step)
        assert logits is not None
        assert torch.equal(logits, spelled(unpack(pack(step, shape), shape)))


def test_rows_that_do_not_sample_are_left_out() -> None:
    """A prompt's chunk of one token looks like a decode."""
    graphs = DecodeGraphs([4], 64, 10, torch.device("cpu"), spelled, Again)
    step = make_step([(30, 1), (7, 1), (90, 1)], known_more=5)
    shape = decode_shape(step, 3)
    logits = graphs.replay(step)
    assert logits is not None
    assert torch.equal(logits, spelled(unpack(pack(step, shape), shape))[1:])


def test_buckets_leave_little_padding() -> None:
    assert decode_buckets(1) == [1]
    assert decode_buckets(3) == [1, 2, 3]
    assert decode_buckets(65) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 65]
    for max_num_seqs in range(1, 300):
        buckets = decode_buckets(max_num_seqs)
        assert buckets == sorted(set(buckets))
        assert buckets[-1] == max_num_seqs


def test_sizes_of_parts_are_those_of_the_shape() -> None:
    shape = StepShape(5, 3, 16, 2)
    assert shape.sizes == (5, 5, 5, 3, 4, 2, 48)
    assert shape.offsets == [0, 8, 16, 24, 28, 32, 36, 84]
