"""`python -m workers`: serves a slot. `--validate` only checks the configuration.

The process that is started is the parent (see parent.py); it runs itself again as the worker proper.
"""

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import sys

from schemas import logs
from schemas.catalog import Catalog, CatalogError
from schemas.config import ConfigError, describe
from workers.config import WorkerConfig, load_config
from workers.exit_status import ExitStatus

log = logging.getLogger("workers")

_PR_SET_PDEATHSIG = 1
# The engine thread is pure Python between kernels; at the default of 5 ms it would keep the event loop
# waiting for longer than a hop through Kafka takes.
_SWITCH_INTERVAL_S = 0.0005


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workers",
        description=__doc__,
        epilog="settings:\n" + describe(WorkerConfig),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--validate", action="store_true", help="check the configuration and exit")
    parser.add_argument("--child", nargs=2, type=int, metavar=("FD", "PID"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        _die_with_parent(arguments.child[1])
    try:
        config = load_config(os.environ)
        catalog = Catalog.load(config.models_dir)
        model = config.model_id(catalog)
        ranks = config.num_ranks(catalog.get(model))
    except (ConfigError, CatalogError) as error:
        print(f"worker: {error}", file=sys.stderr)
        return ExitStatus.CONFIG
    if arguments.validate:
        on = f" on {ranks} ranks" if ranks > 1 else ""
        print(f"worker: slot {config.slot} would serve {model} with the {config.runner} runner{on}")
        return 0
    logs.configure("worker" if arguments.child else "worker-parent", config.slot, config.log_level)
    if arguments.child:
        return serve(config, epoch_fd=arguments.child[0])

    from workers.parent import supervise

    return asyncio.run(supervise(config, ["-m", "workers", "--child"]))


def serve(config: WorkerConfig, epoch_fd: int) -> int:
    """Runs the worker proper, and tells its epoch to the parent; returns the exit status."""
    import uvloop

    from workers.canary import CanaryFailedError
    from workers.engine_watch import EngineStalledError
    from workers.mailbox import SupersededError
    from workers.rank_died import RankDiedError
    from workers.worker import Worker

    sys.setswitchinterval(_SWITCH_INTERVAL_S)

    def on_joined(epoch: int) -> None:
        os.write(epoch_fd, b"%d\n" % epoch)

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await Worker(config, on_joined, stop).run()

    status = ExitStatus.STOPPED
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    except* SupersededError as group:
        log.error("superseded", extra={"error": str(_first(group))})
        status = ExitStatus.SUPERSEDED
    except* CanaryFailedError as group:
        log.error("the engine computes wrong", extra={"error": str(_first(group))})
        status = ExitStatus.CANARY_FAILED
    except* EngineStalledError as group:
        log.error("the engine has stalled", extra={"error": str(_first(group))})
        status = ExitStatus.ENGINE_STALLED
    except* RankDiedError as group:
        log.error("a rank has died", extra={"error": str(_first(group))})
        status = ExitStatus.RANK_DIED
    except* Exception as group:
        log.error("failed: %s", _first(group), exc_info=_first(group))
        status = ExitStatus.FAILED
    if status in (ExitStatus.ENGINE_STALLED, ExitStatus.RANK_DIED):
        # The thread in its endless step, or waiting for a rank, can hold up the interpreter's end as well.
        logging.shutdown()
        os._exit(status)
    return status


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _die_with_parent(parent_pid: int) -> None:
    """A worker without its parent could end unnoticed, so the kernel ends it with the parent. Linux only."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # it died before we asked
        sys.exit("the parent is gone")


if __name__ == "__main__":
    sys.exit(main())
