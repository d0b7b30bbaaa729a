"""Rank 0's side of a tensor-parallel model: starts the other ranks as processes, tells them what to do, and
notices at once when one is gone."""

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from workers.model_shard import ModelOptions, RankCommand
from workers.models.ranks import DistributedRanks
from workers.rank_died import RankDiedError

# Ranks load at the same time; the slowest has as long as a large model's files take.
LOAD_S = 600.0
_POLL_S = 0.02
_CLOSE_S = 5.0
# All ranks are on this machine.
_HOST, _INTERFACE = "127.0.0.1", "lo"
_CPU = torch.device("cpu")
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True)
class FollowerOptions:
    """What a follower is told first. `step_timeout_s`: a rank that waits longer for another gives up."""

    model: ModelOptions
    rank: int
    port: int
    step_timeout_s: float


class Followers:
    """Ranks 1 and up. They end when `close` is called, or this process ends, however it does.

    `on_died` is called once, from a thread, when one of them ends before.
    """

    def __init__(
        self, options: ModelOptions, step_timeout_s: float, on_died: Callable[[RankDiedError], None]
    ) -> None:
        self._options = options
        self._step_timeout_s = step_timeout_s
        self._on_died = on_died
        self._store, port = listen()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = self._connected = False
        self._told = threading.Lock()
        for rank in range(1, options.num_ranks):
            self._processes.append(_start())
            self._send(rank, pickle.dumps(FollowerOptions(options, rank, port, step_timeout_s)))
            threading.Thread(target=self._watch, args=(rank,), name=f"rank-{rank}", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Of ranks 1 and up."""
        return [process.pid for process in self._processes]

    def join(self) -> DistributedRanks:
        """Waits until all ranks have loaded, and connects them.

        Raises RankDiedError when one ends meanwhile, TimeoutError after LOAD_S.
        """
        deadline = time.monotonic() + LOAD_S
        keys = [loaded_key(rank) for rank in range(1, self._options.num_ranks)]
        while not self._store.check(keys):
            for rank, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    raise _died(rank, process.returncode)
            if time.monotonic() > deadline:
                raise TimeoutError(f"the other ranks have not loaded the model within {LOAD_S:.0f} s")
            time.sleep(_POLL_S)
        self._store.set(loaded_key(0), "")
        connect(
            self._store,
            self._options.num_ranks,
            0,
            self._step_timeout_s,
            self._options.torch_device(0),
        )
        self._connected = True
        return DistributedRanks(exact=self._options.deterministic)

    def send(self, command: RankCommand) -> None:
        """Tells all; does not wait for what they do. Raises RankDiedError."""
        message = pickle.dumps(command)
        for rank in range(1, self._options.num_ranks):
            self._send(rank, message)

    def close(self) -> None:
        """Ends all, and the connections between them."""
        self._closing = True
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_CLOSE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._connected:
            self._connected = False
            dist.destroy_process_group()

    def _send(self, rank: int, message: bytes) -> None:
        process = self._processes[rank - 1]
        assert process.stdin is not None
        try:
            process.stdin.write(message)
            process.stdin.flush()
        except BrokenPipeError:
            raise _died(rank, process.poll()) from None

    def _watch(self, rank: int) -> None:
        status = self._processes[rank - 1].wait()
        # The first says it: the others end because of it.
        if not self._closing and self._told.acquire(blocking=False):
            self._on_died(_died(rank, status))


def connect(
    store: dist.Store, num_ranks: int, rank: int, step_timeout_s: float, device: torch.device = _CPU
) -> None:
    """Makes torch's default process group, once all ranks have loaded: NCCL's where `device`, the rank's, is
    a GPU, gloo's else."""
    for variable in _INTERFACE_VARIABLES:
        os.environ.setdefault(variable, _INTERFACE)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        backend_of(device),
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=step_timeout_s),
        device_id=device if on_gpu else None,
    )


def backend_of(device: torch.device) -> str:
    """What its ranks talk by."""
    return "nccl" if device.type == "cuda" else "gloo"


def store_of(port: int) -> dist.Store:
    """Rank 0's store, for another rank."""
    return dist.TCPStore(_HOST, port, is_master=False, timeout=timedelta(seconds=LOAD_S))


def loaded_key(rank: int) -> str:
    """Is in the store once the rank has loaded."""
    return f"loaded-{rank}"


def listen() -> tuple[dist.Store, int]:
    """A store that can be reached from this machine alone, and its port."""
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            _HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=LOAD_S),
            master_listen_fd=listener.detach(),
        )
    return store, port


def _start() -> "subprocess.Popen[bytes]":
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = (sys.executable, "-m", "workers.follower")
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)


def _died(rank: int, status: int | None) -> RankDiedError:
    return RankDiedError(f"rank {rank} has ended with status {status}")
