"""`python -m tests.rank_process PORT`: rank 1 of one model after another, without the start of a process for
each. It reads pickles on stdin: `ModelOptions`, where a new model begins, and commands."""

import pickle
import sys
from pathlib import Path

from workers.followers import connect, store_of
from workers.model_shard import ModelOptions, ModelShard
from workers.models.open_weights import open_weights
from workers.models.ranks import DistributedRanks

STEP_TIMEOUT_S = 30.0


def model_options(path: Path, *, deterministic: bool, num_ranks: int) -> ModelOptions:
    return ModelOptions(
        path,
        max_model_len=None,
        deterministic=deterministic,
        num_threads=1,
        linear="bf16",
        num_ranks=num_ranks,
    )


def main() -> None:
    connect(store_of(int(sys.argv[1])), 2, 1, STEP_TIMEOUT_S)
    shard: ModelShard | None = None
    while True:
        try:
            read = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if isinstance(read, ModelOptions):
            with open_weights(read.weights_path) as weights:
                shard = ModelShard(read, weights, 1)
            shard.join(DistributedRanks(exact=read.deterministic))
        else:
            assert shard is not None
            shard.execute(read)


if __name__ == "__main__":
    main()
