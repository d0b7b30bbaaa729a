"""`python -m gateway [--validate]`: a gateway, configured by HEADRACE_ variables."""

import argparse
import asyncio
import logging
import os
import resource
import signal
import sys

import uvloop

from gateway.config import GatewayConfig
from gateway.service import Gateway, KafkaUnavailableError, SupersededError
from gateway.token_log import LogTruncatedError
from schemas import logs
from schemas.catalog import CatalogError
from schemas.config import ConfigError, describe, from_env

log = logging.getLogger("gateway")

# Kafka's connections, logs, libraries.
_OTHER_FILES = 256


async def _serve(config: GatewayConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    await Gateway(config).run(stop)


def _allow_many_connections(config: GatewayConfig) -> None:
    """A stream is a file descriptor, and the usual soft limit is 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < config.max_connections + _OTHER_FILES:
        log.warning(
            "so many files may not be open as HEADRACE_MAX_CONNECTIONS has: raise the limit or lower it",
            extra={"open_files": hard, "max_connections": config.max_connections},
        )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gateway",
        epilog=describe(GatewayConfig),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--validate", action="store_true", help="check the settings and do nothing else")
    arguments = parser.parse_args(argv)
    try:
        config = from_env(GatewayConfig, os.environ)
    except ConfigError as e:
        print(e, file=sys.stderr)
        return 2
    if arguments.validate:
        return 0
    logs.configure("gateway", config.slot, config.log_level)
    _allow_many_connections(config)
    try:
        uvloop.run(_serve(config))
    except (
        SupersededError,
        KafkaUnavailableError,
        LogTruncatedError,
        CatalogError,
        ValueError,
        OSError,
    ) as e:
        log.critical("the gateway ends: %s", e)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
