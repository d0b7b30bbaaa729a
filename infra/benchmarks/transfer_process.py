"""One side of a KV transfer in a process of its own, told what to do by lines of JSON.

`python -m infra.benchmarks.transfer_process LAYOUT NUM_BLOCKS`; LAYOUT is a KVLayout as JSON, of one rank.
"""

import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from queue import Queue
from typing import Any

import numpy as np

from infra.local.paths import PROJECT_ROOT
from schemas.kv_layout import KVLayout
from schemas.records import ContentCheck, PoolRank, Reserved
from workers.handoff.kv_pool import KVPool, compare
from workers.handoff.layout import Place, RankPool
from workers.handoff.mooncake_transport import MooncakeTransport
from workers.handoff.write_lane import WriteEvents, WriteLimits
from workers.handoff.writer import Writer

_HOST = "127.0.0.1"
_TRANSFER = bytes(16)
_CLOSE_S = 10.0
_LEASE_S = 600.0


class TransferProcess:
    """The parent's end of it."""

    def __init__(self, layout: KVLayout, num_blocks: int, env: Mapping[str, str]) -> None:
        """Starts it. Raises RuntimeError with its last words when it ends."""
        self.layout = layout
        command = [sys.executable, "-m", __name__, json.dumps(asdict(layout)), str(num_blocks)]
        # Unbuffered: the library writes its own log lines to stderr, which is ours.
        self.process = subprocess.Popen(
            command, cwd=PROJECT_ROOT, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.rank = PoolRank(**self._answer())

    def fill(self, block_ids: list[int], num_tokens: int, seed: int) -> str:
        """Random KV; returns the digest of it."""
        return str(self._ask(do="fill", blocks=block_ids, num_tokens=num_tokens, seed=seed)["digest"])

    def write(
        self, to: "TransferProcess", ours: list[int], theirs: list[int], num_tokens: int, limits: WriteLimits
    ) -> dict[str, Any]:
        """Writes a sequence to another process: `error`, `seconds`, `counters` and `checks`."""
        return self._ask(
            do="write",
            layout=asdict(to.layout),
            rank=asdict(to.rank),
            ours=ours,
            theirs=theirs,
            num_tokens=num_tokens,
            limits=asdict(limits),
        )

    def compare(self, block_ids: list[int], num_tokens: int, checks: list[Any]) -> tuple[str, str]:
        """(what the content checks find, digest of all of it)."""
        answer = self._ask(do="compare", blocks=block_ids, num_tokens=num_tokens, checks=checks)
        return answer["error"], answer["digest"]

    def close(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the transfer process ended with {self.process.wait()} (see above)")
        answer: dict[str, Any] = json.loads(line)
        return answer


class _Side:
    def __init__(self, shape: RankPool) -> None:
        self.pool = KVPool.of(shape, *(np.ones(shape.pool_bytes, np.uint8) for _ in range(2)))
        self._transport = MooncakeTransport(_HOST)
        for memory in (self.pool.keys, self.pool.values):
            self._transport.register(memory.reshape(-1))
        addresses = (self.pool.keys_address, self.pool.values_address)
        self.rank = PoolRank(self._transport.segment, *addresses, shape.num_blocks)

    def fill(self, blocks: list[int], num_tokens: int, seed: int) -> dict[str, Any]:
        random = np.random.default_rng(seed)
        for array in (self.pool.keys, self.pool.values):
            shape = array[:, blocks].shape
            array[:, blocks] = np.frombuffer(random.bytes(math.prod(shape)), np.uint8).reshape(shape)
        return {"digest": self._digest(blocks, num_tokens)}

    def compare(self, blocks: list[int], num_tokens: int, checks: list[dict[str, Any]]) -> dict[str, Any]:
        told = [ContentCheck(**{**check, "digest": bytes.fromhex(check["digest"])}) for check in checks]
        error = compare(self.pool, Place(self.pool.shape, blocks), num_tokens, told)
        return {"error": error, "digest": self._digest(blocks, num_tokens)}

    def write(
        self,
        layout: dict[str, Any],
        rank: dict[str, Any],
        ours: list[int],
        theirs: list[int],
        num_tokens: int,
        limits: dict[str, Any],
    ) -> dict[str, Any]:
        words: Queue[tuple[str, Any]] = Queue()
        events = WriteEvents(
            lambda _, checks: words.put(("", checks)),
            lambda _, error: words.put((error, [])),
            lambda _, may_land: words.put(("", may_land)),
        )
        writer = Writer(self.pool, self._transport, events, WriteLimits(**limits))
        reserved = Reserved(
            _TRANSFER, bytes(16), 1, 0, 1, 1, 2, 0, theirs, KVLayout(**layout), [PoolRank(**rank)]
        )
        began = time.perf_counter()
        writer.start(reserved, ours, num_tokens, time.monotonic() + _LEASE_S)
        for layer in range(self.pool.shape.layout.num_layers):
            writer.computed(_TRANSFER, range(num_tokens), range(layer, layer + 1))
        writer.complete(_TRANSFER)
        error, checks = words.get()
        seconds = time.perf_counter() - began
        if error:
            writer.stop(_TRANSFER)
            words.get()
        writer.close()
        counters = writer.counters
        return {
            "error": error,
            "seconds": seconds,
            "num_bytes": counters.num_bytes,
            "num_calls": counters.num_calls,
            "busy_s": counters.busy_s,
            "queued_s": counters.queued_s,
            "checks": [{**asdict(check), "digest": check.digest.hex()} for check in checks],
        }

    def _digest(self, blocks: list[int], num_tokens: int) -> str:
        digest = hashlib.blake2b()
        shape = self.pool.shape
        for layer in range(shape.layout.num_layers):
            for values in (False, True):
                place = Place(shape, blocks)
                digest.update(self.pool.read(place, layer, values, range(num_tokens), shape.heads))
        return digest.hexdigest()


def main() -> int:
    layout = KVLayout(**json.loads(sys.argv[1]))
    side = _Side(RankPool(layout, 0, int(sys.argv[2])))
    _say(asdict(side.rank))
    for line in sys.stdin:
        request = json.loads(line)
        _say(getattr(side, request.pop("do"))(**request))
    # The library's threads do not end by themselves.
    os._exit(0)


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.exit(main())
