"""The corpus holds, a fixed number of new inputs finds nothing, and the fuzzer finds what was planted for it."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.__main__ import CORPUS, ROOTS
from tests.fuzz.coverage import lines_of
from tests.fuzz.engine import MEMORY_MOST, Finding, Fuzzer, Outcome, Target, execute, minimised, read_corpus, write_corpus
from tests.fuzz.mutate import MOST, MUTATORS, mutate
from tests.fuzz.targets import TARGETS
from wire.errors import RemoteProtocolError

# Under a second each, so that the room stays below 20 s on a slow machine.  A number and not a time: the same inputs on every machine.
NEW_INPUTS = {
    "hello": 5000,
    "handshake_responder": 2000,
    "handshake_initiator": 1800,
    "session": 1500,
    "session_raw": 1500,
    "tensor_receiver": 800,
    "tensor_sender": 800,
    "tickets": 300,
    "perf_serving": 100,
    "perf_asking": 150,
    "messages": 8000,
    "addresses": 6000,
    "envelopes": 3000,
    "planes": 5000,
    "chunks": 2500,
    "port_mapping": 2000,
}
SEED = int(os.environ.get("FUZZ_SEED", "1"))


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_small_and_survived(name: str) -> None:
    corpus = read_corpus(CORPUS / name)
    assert len(corpus) >= 3, "the corpus of this target is missing"
    assert max(map(len, corpus)) <= MOST and sum(map(len, corpus)) < 128 << 10
    for data in (*corpus, *TARGETS[name].seeds()):
        execute(TARGETS[name], data)


@pytest.mark.parametrize("name", TARGETS)
def test_new_inputs_find_nothing(name: str) -> None:
    fuzzer = Fuzzer(TARGETS[name], lines_of(ROOTS), SEED)
    fuzzer.load([*TARGETS[name].seeds(), *read_corpus(CORPUS / name)])
    for _ in range(NEW_INPUTS[name]):
        fuzzer.step()


# -- the fuzzer itself, on a target with faults


def parser(data: bytes) -> str:
    """A parser with a fault behind four bytes that must be right one after the other."""
    if data[:1] != b"P":
        return "magic"
    if data[1:2] != b"L":
        return "magic"
    if data[2:3] < b"\xf0":
        return "version"
    if len(data) > 5:
        return "long"
    if data[3:4] == b"\x00":
        raise IndexError("planted")
    return "done"


def toy(run, allowed: tuple[type[Exception], ...] = (RemoteProtocolError,)) -> Target:
    """Signatures say nothing, so that only lines lead."""

    def outcome(data: bytes) -> Outcome:
        run(data)
        return Outcome("")

    return Target("toy", lambda: outcome, allowed, lambda: [b"seed"])


def hunted(target: Target, roots: tuple[str, ...], seed: int = 0, most: int = 150_000) -> tuple[Finding | None, int]:
    fuzzer = Fuzzer(target, lines_of(roots), seed)
    fuzzer.load(target.seeds())
    try:
        for _ in range(most):
            fuzzer.step()
    except Finding as finding:
        return finding, fuzzer.inputs
    return None, fuzzer.inputs


def test_a_planted_fault_is_found_and_replayed() -> None:
    found, _ = hunted(toy(parser), (__file__,))
    assert found is not None and "IndexError: planted" in found.what
    with pytest.raises(Finding):
        execute(toy(parser), found.data)


def test_without_coverage_it_is_not_found() -> None:
    """So it is the lines that lead there, and not luck."""
    assert hunted(toy(parser), ("/nowhere/",))[0] is None


def test_the_same_seed_gives_the_same_run() -> None:
    (first, count), (again, counted), (other, counts) = (hunted(toy(parser), (__file__,), seed) for seed in (3, 3, 7))
    assert first is not None and again is not None and other is not None
    assert (first.data, count) == (again.data, counted)
    assert counts != count, "another seed is another run"


def test_a_refusal_is_no_finding_and_any_other_error_is() -> None:
    def refuse(_data: bytes) -> None:
        raise RemoteProtocolError(detail="no")

    execute(toy(refuse), b"")
    with pytest.raises(Finding):
        execute(toy(refuse, allowed=()), b"")


def test_memory_that_an_input_makes_is_a_finding_and_what_it_fed_is_not() -> None:
    with pytest.raises(Finding, match="memory"):
        execute(toy(lambda data: bytes(MEMORY_MOST + 1000)), b"")
    execute(Target("fed", lambda: lambda data: Outcome(len(bytes(MEMORY_MOST + 1000)), 2000), (), list), b"")
    assert not tracemalloc.is_tracing()


def test_an_input_that_takes_long_is_a_finding() -> None:
    def slow(_data: bytes) -> None:
        end = time.process_time() + 0.26
        while time.process_time() < end:
            pass

    with pytest.raises(Finding, match="processor"):
        execute(toy(slow), b"", memory=False)


def test_every_mutator_keeps_the_size_and_takes_an_empty_input() -> None:
    random = Random(5)
    for mutator in MUTATORS:
        for data in (b"", b"a", b"\x93\x01\xc4\x02ab\xa1x"):
            changed = {mutator(random, data, b"other") for _ in range(50)}
            assert len(data) < 2 or any(result != data for result in changed)
    assert all(len(mutate(random, bytes(MOST), bytes(MOST))) <= MOST for _ in range(200))


def test_a_minimised_stock_reaches_the_same_lines(tmp_path: Path) -> None:
    target, lines = toy(parser), lines_of((__file__,))
    stock = [b"seed", b"Pxxxxxxx", b"PLxx", b"PL\xff\x01junk", b"PL\xff\x01", b"seed2"]
    kept = minimised(target, lines, stock)

    def reach(inputs: list[bytes]) -> frozenset[object]:
        lines.fresh()
        for data in inputs:
            execute(target, data, lines, memory=False)
        return lines.take()

    assert reach(kept) == reach(stock)
    assert sum(map(len, kept)) < sum(map(len, stock))
    write_corpus(tmp_path, [b"old"])
    write_corpus(tmp_path, kept)
    assert sorted(read_corpus(tmp_path)) == sorted(kept)
