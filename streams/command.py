"""The command line of a service, its exit statuses, and the process around it."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import uvloop

from schemas import logs
from schemas.config import CommonConfig, ConfigError, describe, from_env
from schemas.topic_check import MissingTopicsError
from streams.membership import SupersededError

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_SUPERSEDED = 3

C = TypeVar("C", bound=CommonConfig)


class Service(Protocol):
    async def run(self, stop: asyncio.Event) -> None:
        """Returns after `stop` is set, and raises what ended it else."""


def main(role: str, settings: type[C], make: Callable[[C], Service], argv: Sequence[str]) -> int:
    """The exit status: 0 stopped, 1 failed, 2 wrong configuration, 3 a younger process has the slot.

    `make` is called in the running loop.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m streams {role}",
        epilog="settings:\n" + describe(settings),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--validate", action="store_true", help="check the configuration and exit")
    arguments = parser.parse_args(list(argv))
    try:
        config = from_env(settings, os.environ)
    except ConfigError as error:
        print(f"{role}: {error}", file=sys.stderr)
        return EXIT_CONFIG
    if arguments.validate:
        print(f"{role}: slot {config.slot}, {config.shards} shards, brokers {config.kafka}")
        return 0
    logs.configure(role, config.slot, config.log_level)
    # At INFO they tell of every part that starts or stops.
    for noisy in ("faust", "mode", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # By policy, not by runner: Faust's consumer thread makes a loop of its own, which is to be fast too.
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        asyncio.run(_run_until_signalled(lambda: make(config)))
    except SupersededError as error:
        log.error("stopped: %s", error)
        return EXIT_SUPERSEDED
    except MissingTopicsError as error:
        log.error("failed: %s", error)
        return EXIT_FAILED
    except Exception as error:
        log.exception("failed: %s", error)
        return EXIT_FAILED
    return 0


async def _run_until_signalled(make: Callable[[], Service]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await make().run(stop)
