"""`python -m workers.follower`: a rank of a tensor-parallel model other than 0, which starts it.

It is told by pickles on stdin (`FollowerOptions`, then commands). It has no other input and tells nothing but
its part of each step to the other ranks, and it ends with rank 0, whose end of the pipe closes then.
"""

import os
import pickle
import queue
import signal
import sys
import threading
from datetime import timedelta
from typing import Any, BinaryIO

from workers.followers import LOAD_S, FollowerOptions, connect, loaded_key, store_of
from workers.model_shard import ModelShard
from workers.models.open_weights import open_weights
from workers.models.ranks import DistributedRanks


def main() -> None:
    # A drain goes on with all ranks; rank 0 says when it is over.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, commands), daemon=True).start()
    options: FollowerOptions = commands.get()
    store = store_of(options.port)
    with open_weights(options.model.weights_path) as weights:
        shard = ModelShard(options.model, weights, options.rank)
    store.set(loaded_key(options.rank), "")
    store.wait([loaded_key(0)], timedelta(seconds=LOAD_S))
    device = options.model.torch_device(options.rank)
    connect(store, options.model.num_ranks, options.rank, options.step_timeout_s, device)
    shard.join(DistributedRanks(exact=options.model.deterministic))
    while True:
        shard.execute(commands.get())


def _read(stream: BinaryIO, commands: "queue.SimpleQueue[Any]") -> None:
    """A thread of its own, so that the end of rank 0 ends this process in the middle of a step too."""
    while True:
        try:
            command = pickle.load(stream)
        except (EOFError, pickle.UnpicklingError):
            os._exit(0)
        commands.put(command)


if __name__ == "__main__":
    main()
