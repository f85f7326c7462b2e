"""`python -m bench.pinned 0,1 COMMAND ...`: become COMMAND, bound to these cores (Linux)."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    cores, command = sys.argv[1], sys.argv[2:]
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execvp(command[0], command)
