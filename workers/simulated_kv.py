"""KV of simulated models, for handing it over: a few bytes for each token, which its id and place give."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from schemas.kv_layout import KVLayout
from workers.batch import SchedulerOutput
from workers.block_pool import BLOCK_SIZE
from workers.handoff.kv_pool import Bytes

LAYOUT = KVLayout(
    BLOCK_SIZE, "float8_e4m3fn", tp_degree=1, num_layers=2, num_kv_heads=1, head_dim=4, arithmetic="simulated"
)

# A token has four bytes in each: a word.
_Words = npt.NDArray[np.uint32]
# Odd numbers without a pattern, so that neighbours differ in all bytes.
_BY_TOKEN, _BY_POSITION, _BY_PLACE = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


class SimulatedKV:
    """What a model would have written, and where. Wrong bytes are seen where they are compared; no token
    depends on them."""

    def __init__(self, num_blocks: int, num_host_blocks: int) -> None:
        self._device = _words(num_blocks)  # [2 * num_layers, num_blocks, block_size]: keys, then values
        self._host = _words(num_host_blocks)

    def memory(self) -> tuple[Bytes, Bytes]:
        """Keys and values as bytes in one piece, in the same memory."""
        keys, values = (part.reshape(-1).view(np.uint8) for part in np.split(self._device, 2))
        return keys, values

    def store(self, batch: SchedulerOutput) -> None:
        """Copies the blocks that are swapped, then stores all that the step computes."""
        _copy(self._device, self._host, batch.swap_out)
        _copy(self._host, self._device, batch.swap_in)
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence in batch.scheduled:
            request = sequence.request
            start, table = request.num_computed_tokens, request.block_table
            end = start + sequence.num_scheduled_tokens
            token_ids += request.tokens(start, end)
            positions += range(start, end)
            slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)]
        if slots:
            self._device.reshape(len(self._device), -1)[:, slots] = stored_words(token_ids, positions)


def stored_words(token_ids: Sequence[int], positions: Sequence[int]) -> _Words:
    """uint32 [2 * num_layers, len(token_ids)]: what layers have of tokens, keys, then values."""
    tokens = np.array(token_ids, np.uint32) * np.uint32(_BY_TOKEN)
    tokens ^= np.array(positions, np.uint32) * np.uint32(_BY_POSITION)
    places = np.arange(1, 2 * LAYOUT.num_layers + 1, dtype=np.uint32) * np.uint32(_BY_PLACE)
    return (tokens[None] ^ places[:, None]) * np.uint32(_BY_TOKEN)


def _words(num_blocks: int) -> _Words:
    return np.zeros((2 * LAYOUT.num_layers, num_blocks, BLOCK_SIZE), np.uint32)


def _copy(source: _Words, target: _Words, pairs: Sequence[tuple[int, int]]) -> None:
    if pairs:
        sources, targets = zip(*pairs, strict=True)
        target[:, list(targets)] = source[:, list(sources)]
