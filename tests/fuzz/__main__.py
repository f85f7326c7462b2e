"""`python -m tests.fuzz [--target T] [--seconds N] [--seed S] [--grow]`: look for inputs that `wire/` does not survive.

Each target gets its share of the time, in slices, starting from the corpus in the tree.  A finding is written to tests/fuzz/crashes/
and the run goes on with the next input; at the end the status is 1 if there was one.  `--grow` puts what was learnt, minimised, back
into the corpus.  `--replay FILE --target T` runs one input and shows the trace.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

from tests.fuzz.coverage import lines_of
from tests.fuzz.engine import Finding, Fuzzer, execute, minimised, name_of, read_corpus, write_corpus
from tests.fuzz.targets import TARGETS

HERE = Path(__file__).resolve().parent
CORPUS, CRASHES = HERE / "corpus", HERE / "crashes"
ROOTS = (str(HERE.parent.parent / "wire") + "/",)
SHOWN_MOST = 20  # findings of one target: the same fault comes again and again


def save(finding: Finding) -> Path:
    """Write the input down and say how to run it again."""
    CRASHES.mkdir(exist_ok=True)
    path = CRASHES / f"{finding.target}-{name_of(finding.data)}"
    path.write_bytes(finding.data)
    print(f"FOUND {finding.target}: {finding.what}\n  again: python -m tests.fuzz --target {finding.target} --replay {path}")  # noqa: T201
    return path


def explore(name: str, seconds: float, seed: int, grow: bool) -> int:
    """Fuzz one target for so long; returns how many findings there were."""
    target, lines = TARGETS[name], lines_of(ROOTS)
    fuzzer = Fuzzer(target, lines, seed)
    found = 0
    began = time.monotonic()
    known = [*target.seeds(), *read_corpus(CORPUS / name)]
    pending = iter(known)
    while found < SHOWN_MOST and time.monotonic() - began < seconds:
        try:
            data = next(pending, None)
            if data is not None:
                fuzzer.load([data])
            else:
                fuzzer.step()
        except Finding as finding:
            found += 1
            save(finding)
    took = time.monotonic() - began
    rate = fuzzer.inputs / took
    print(f"{name:20} {fuzzer.inputs:8} inputs {rate:7.0f}/s {lines.count:5} lines {len(fuzzer.stock):5} kept {found:3} found")  # noqa: T201
    if grow and not found:
        kept = minimised(target, lines, fuzzer.stock)
        write_corpus(CORPUS / name, kept)
        print(f"{'':20} corpus: {len(kept)} inputs, {sum(map(len, kept))} bytes")  # noqa: T201
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the wire protocol.")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append", help="default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of all targets together (60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grow", action="store_true", help="put what was learnt into the corpus")
    parser.add_argument("--replay", type=Path, help="run this one input of the target")
    options = parser.parse_args()
    names = options.target or list(TARGETS)
    if options.replay is not None:
        try:
            print(execute(TARGETS[names[0]], options.replay.read_bytes()))  # noqa: T201
        except Finding as finding:
            traceback.print_exception(finding.__cause__ or finding)
            return 1
        return 0
    found = 0
    for name in names:
        found += explore(name, options.seconds / len(names), options.seed, options.grow)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
