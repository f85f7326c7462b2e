"""A small coverage-guided fuzzer: one loop, one oracle, the same from the same seed.

An input is kept if it ran a line of `wire/` that none before it ran, or ended in a way (`Outcome.signature`) that none before it did;
what is kept is the stock for the next mutations.

The oracle.  A target raises what its protocol calls a refusal and nothing else: `allowed`.  It allocates less than `MEMORY_MOST`, plus
what it says it was given (`Outcome.fed`: bytes that credit covered): Python's own memory, by tracemalloc, at its peak.  It takes less
than `TIME_MOST_S` of the processor.  A time is only believed when it comes out three times without any tracer, so that a busy machine
is no finding; nothing else here depends on a clock, and so a number of inputs, not of seconds, is what a test asks for.

Memory is traced for every input that is new ground and one in `MEMORY_EVERY` others, because tracing slows Python down by two.
"""

from __future__ import annotations

import hashlib
import time
import traceback
import tracemalloc
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.fuzz.coverage import Line, Lines
from tests.fuzz.mutate import MOST, mutate

MEMORY_MOST = 256 << 10
MEMORY_EVERY = 8
TIME_MOST_S = 0.25


@dataclass(frozen=True)
class Outcome:
    """How an input ended.  `signature`: equal for what is the same to the fuzzer.  `fed`: bytes that may be held at the end."""

    signature: Hashable
    fed: int = 0


@dataclass(frozen=True)
class Target:
    """`prepare` makes what must exist before (not counted as the input's memory) and returns the function that takes the input."""

    name: str
    prepare: Callable[[], Callable[[bytes], Outcome]]
    allowed: tuple[type[Exception], ...]
    seeds: Callable[[], list[bytes]]


class Finding(Exception):
    """An input that breaks the oracle."""

    def __init__(self, target: str, data: bytes, what: str) -> None:
        self.target, self.data, self.what = target, data, what
        super().__init__(f"{target}: {what}; input {data[:200].hex()}")


def name_of(data: bytes) -> str:
    """File name of an input."""
    return hashlib.sha256(data).hexdigest()[:16]


def execute(target: Target, data: bytes, lines: Lines | None = None, *, memory: bool = True) -> Hashable:
    """Run one input under the oracle; returns how it ended.  Raises Finding."""
    run = target.prepare()
    if memory:
        tracemalloc.start()
    base = tracemalloc.get_traced_memory()[0] if memory else 0
    began = time.process_time()
    fed = 0
    try:
        if lines is None:
            outcome = run(data)
        else:
            with lines:
                outcome = run(data)
        signature, fed = outcome.signature, outcome.fed
    except target.allowed as error:
        signature = type(error).__name__
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno}, {last.line})"
        raise Finding(target.name, data, what) from error
    finally:
        took = time.process_time() - began
        peak = tracemalloc.get_traced_memory()[1] - base if memory else 0
        if memory:
            tracemalloc.stop()
    if peak > MEMORY_MOST + fed:
        raise Finding(target.name, data, f"{peak} bytes of memory, at most {MEMORY_MOST} + {fed}")
    if took > TIME_MOST_S and (least := min(_time(target, data) for _ in range(3))) > TIME_MOST_S:
        raise Finding(target.name, data, f"{least:.2f} s of the processor")
    return signature


def _time(target: Target, data: bytes) -> float:
    run = target.prepare()
    began = time.process_time()
    with suppress(*target.allowed):
        run(data)
    return time.process_time() - began


@dataclass
class Fuzzer:
    """One target and what was learnt about it."""

    target: Target
    lines: Lines
    seed: int
    stock: list[bytes] = field(default_factory=list)
    signatures: set[Hashable] = field(default_factory=set)
    inputs: int = 0

    def __post_init__(self) -> None:
        self._random = Random(f"{self.target.name}/{self.seed}")
        self.lines.fresh()

    def load(self, inputs: Iterable[bytes]) -> None:
        """Replay known inputs; all of them become stock."""
        for data in inputs:
            self.take(data)
            if data not in self.stock:
                self.stock.append(data)

    def take(self, data: bytes) -> bool:
        """Run one input; True if it was new ground.  Raises Finding."""
        self.inputs += 1
        memory = self.inputs % MEMORY_EVERY == 0
        signature = execute(self.target, data, self.lines, memory=memory)
        new = self.lines.take()
        if not new and signature in self.signatures:
            return False
        self.signatures.add(signature)
        if not memory:
            execute(self.target, data)
        if data not in self.stock:
            self.stock.append(data)
        return True

    def step(self) -> bool:
        """Make one input and run it.  Half the time from the newest quarter of the stock: news leads to news."""
        random, stock = self._random, self.stock
        low = len(stock) * 3 // 4 if random.random() < 0.5 else 0
        parent = stock[random.randrange(low, len(stock))] if stock else b""
        other = random.choice(stock) if stock else b""
        return self.take(mutate(random, parent, other))


def features(target: Target, lines: Lines, data: bytes) -> frozenset[Line]:
    """Every line that one input by itself reaches."""
    lines.fresh()
    execute(target, data, lines, memory=False)
    return lines.take()


def minimised(target: Target, lines: Lines, stock: list[bytes], rounds: int = 200) -> list[bytes]:
    """A small set of short inputs that reaches the lines that `stock` reaches.  Endings are many and cheap to find again."""
    reached = {data: features(target, lines, data) for data in stock}
    missing = set().union(*reached.values()) if reached else set()
    chosen: list[bytes] = []
    for data in sorted(reached, key=lambda data: (len(data), data)):
        mine = reached[data] & missing
        if not mine:
            continue
        missing -= mine
        chosen.append(_shrunk(target, lines, data, mine, rounds))
    return sorted(set(chosen))


def _shrunk(target: Target, lines: Lines, data: bytes, needed: frozenset[Line], rounds: int) -> bytes:
    """Cut pieces out, larger ones first, as long as everything that is needed is still reached."""
    size = len(data) // 2
    while size and rounds > 0:
        at = 0
        while at < len(data) and rounds > 0:
            shorter = data[:at] + data[at + size :]
            rounds -= 1
            if needed <= features(target, lines, shorter):
                data = shorter
            else:
                at += size
        size //= 2
    return data


def read_corpus(folder: Path) -> list[bytes]:
    """The inputs in a folder, in the order of their names."""
    return [path.read_bytes() for path in sorted(folder.glob("*")) if path.is_file()] if folder.is_dir() else []


def write_corpus(folder: Path, inputs: Iterable[bytes]) -> None:
    """Make the folder hold exactly these inputs."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {name_of(data): data[:MOST] for data in inputs}
    for path in folder.glob("*"):
        if path.name not in names:
            path.unlink()
    for name, data in names.items():
        (folder / name).write_bytes(data)
