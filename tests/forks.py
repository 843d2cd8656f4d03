"""Work in a forked process, for tests that die at chosen moments."""

import os
import sys


def in_a_child(work) -> int:
    """Runs `work` in a fork. Returns the wait status."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]
