"""Free TCP ports on the loopback address, all below the ephemeral range.

A probe that connects to a port inside the ephemeral range can be given that very port as its own source
and so connect to itself; below the range this cannot happen.
"""

import random
import socket
from collections.abc import Collection
from pathlib import Path

LOWEST = 20_000
HIGHEST = 32_767
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortTakenError(RuntimeError):
    """A port that was asked for by number is in use."""


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """True when nothing listens on `port`. Connections that linger in TIME_WAIT do not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def choose_port(rng: random.Random, taken: Collection[int] = ()) -> int:
    """A free port that is not in `taken`. Raises RuntimeError when 1,000 draws find none.

    Drawn at random, so that stacks which start at the same time seldom meet.
    """
    highest = min(HIGHEST, _first_ephemeral_port() - 1)
    if highest < LOWEST:
        raise RuntimeError(
            f"no port range left: the system's ephemeral range begins at {highest + 1}, "
            f"and ports are chosen from {LOWEST} on. Ask for the ports by number."
        )
    for _ in range(1_000):
        port = rng.randint(LOWEST, highest)
        if port not in taken and is_free(port):
            return port
    raise RuntimeError(f"found no free port between {LOWEST} and {highest}")


def claim_port(wanted: int, purpose: str, rng: random.Random, taken: Collection[int] = ()) -> int:
    """`wanted` itself, or a chosen port where it is 0.

    Raises ValueError for a number that is no port, PortTakenError for one in use; both name `purpose`.
    """
    if wanted == 0:
        return choose_port(rng, taken)
    if not 0 < wanted <= 65_535:
        raise ValueError(f"{purpose}: {wanted} is not a port; use 1 to 65535, or 0 to have one chosen")
    if wanted in taken or not is_free(wanted):
        raise PortTakenError(f"{purpose}: port {wanted} is in use; stop what uses it or choose another port")
    return wanted


def _first_ephemeral_port() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return HIGHEST + 1
