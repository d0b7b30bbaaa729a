"""`python -m streams admission|ledger`: one of the two stream services. See `--help` of each."""

import gc
import os
import sys

_USAGE = "usage: python -m streams admission|ledger [--validate]"


def main(argv: list[str]) -> int:
    name, rest = (argv[0] if argv else ""), argv[1:]
    # Imported here: neither service must load the other's libraries.
    if name == "admission":
        # What is loaded stays: looking for garbage in it is a tenth of the start. The service enables it.
        gc.disable()
        from streams.admission.app import main as admission

        return admission(rest)
    if name == "ledger":
        # How the embedded engine's allocator holds memory; read when it is loaded. By default each core has
        # four arenas, which keep some of what merges free (100,000 usage rows: 84 MB, and 55 with this).
        os.environ.setdefault("JE_MALLOC_CONF", "narenas:1,dirty_decay_ms:0,muzzy_decay_ms:0")
        from streams.ledger.app import main as ledger

        return ledger(rest)
    print(_USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
