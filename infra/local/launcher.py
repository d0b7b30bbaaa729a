"""Becomes the program it is given, after asking the kernel to kill that program when its parent dies.

Run by path in a bare interpreter: `python -I -S launcher.py PARENT_PID PROGRAM [ARGUMENT…]`. A program of its
own, because code between fork and exec of a process that has threads may deadlock. Linux only.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = int(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the request was made
        sys.exit("the parent is gone")
    # Python ignores SIGPIPE and exec hands ignored signals on.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"cannot run {sys.argv[2]}: {error.strerror}")


main()
