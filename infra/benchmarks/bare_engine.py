"""The engine of a worker, in this process and without Kafka: what the pipeline is compared with."""

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

from infra.benchmarks.sse_client import StreamTimes
from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from workers.config import WorkerConfig
from workers.engine import EngineThread
from workers.request import Request
from workers.runners import load_engine

_STOP_S = 10.0


class BareEngine:
    """Runs requests one event loop wake-up away from the engine thread."""

    def __init__(self, config: WorkerConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self._running: dict[bytes, tuple[StreamTimes, asyncio.Future[StreamTimes]]] = {}
        engine = load_engine(config).engine
        self._thread = EngineThread(engine, self._wake, self._fail)
        self._thread.start()

    async def run(self, prompt_token_ids: list[int], sampling: SamplingParams) -> StreamTimes:
        """When each token came out."""
        request_id = secrets.token_bytes(16)
        times = StreamTimes(request_id=request_id.hex())
        done: asyncio.Future[StreamTimes] = self._loop.create_future()
        self._running[request_id] = times, done
        request = Request(request_id, 1, PriorityClass.INTERACTIVE, prompt_token_ids, sampling, 0)
        times.sent_at = time.perf_counter()
        self._thread.add(request)
        return await done

    def stop(self) -> None:
        if not self._thread.stop(_STOP_S):
            raise RuntimeError("the engine thread did not end")

    def _wake(self) -> None:
        self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        now = time.perf_counter()
        for result in self._thread.take_results():
            for output in result.outputs:
                running = self._running.get(output.request.request_id)
                if running is None:
                    continue
                times, done = running
                times.token_at += [now] * len(output.token_ids)
                if output.finish_reason is not None:
                    del self._running[output.request.request_id]
                    done.set_result(times)

    def _fail(self, error: BaseException) -> None:
        def tell() -> None:
            for _, done in self._running.values():
                done.set_exception(RuntimeError(f"the engine failed: {error}"))

        self._loop.call_soon_threadsafe(tell)


@contextmanager
def bare_engine(config: WorkerConfig) -> Iterator[BareEngine]:
    engine = BareEngine(config)
    try:
        yield engine
    finally:
        engine.stop()
