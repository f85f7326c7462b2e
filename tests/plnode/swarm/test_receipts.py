"""Receipts: the bytes of one, what is not one, and when a neighbour signs.

Mutations that were tried, each fails a test here: no check of the signature's run, of an expiry, of the spelling, of the order of entries;
`<=` for `<` at the bounds; entries of another generation kept; sealing on `aborted`; an applied step whose later work is kept.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plnode.swarm import receipts
from plnode.swarm.receipts import (
    DOMAIN,
    ENVELOPE_MAX_BYTES,
    MOST_MICROBATCHES,
    STEPS_OPEN,
    BadEnvelope,
    Kind,
    ReceiptBody,
    ReceiptBook,
    Terms,
    open_receipt,
    pack_entries,
)
from tests.plnode.swarm.receiptworld import IDS, PEOPLE, TERMS, raw, work
from tests.wire.net.worlds import RUN
from wire.envelope import ForeignRun, Forged, Malformed, SequenceClock, seal
from wire.messages import encode, pack

ME = PEOPLE[0]
NOW = 1_000.0


def book() -> ReceiptBook:
    return ReceiptBook(ME, RUN, SequenceClock(None))


def sealed(payload: bytes, *, not_after: int = 0, run: bytes = RUN) -> bytes:
    return seal(ME, DOMAIN, payload, run=run, seq=1, not_after=not_after)


def body(**changes: object) -> ReceiptBody:
    values = {"generation": 1, "worker": IDS[1].raw, "stage": 1, "step": 5, "kind": 0, "entries": pack_entries([work()]), **changes}
    return ReceiptBody(**values)  # type: ignore[arg-type]


# -- bytes


def test_golden_bytes() -> None:
    """What is in logs must be readable for ever: a change here is another domain."""
    works = [work(index=258, tokens=4096, size_bytes=2**31, seconds=1.5), work(index=7, tokens=1, size_bytes=0, seconds=1e9)]
    entries = "0007 00000001 00000000 ffffffff 0102 00001000 80000000 0016e360".replace(" ", "")
    assert pack_entries(works).hex() == entries
    payload = encode(body(generation=3, step=70_000, kind=1, entries=pack_entries(works)))
    assert payload.hex() == "9770" + "03" + "c420" + IDS[1].raw.hex() + "01" + "ce00011170" + "01" + "c41c" + entries
    assert hashlib.sha256(raw(ME, IDS[1], 1, Kind.FORWARD, [0, 3])).hexdigest() == (
        "e96d9a3c6bbb415ac41db1647a9514d1ae3fad60960c9d4def7590ef407a3ff6"
    )


def test_a_receipt_says_what_was_sealed() -> None:
    receipt = open_receipt(raw(ME, IDS[1], 2, Kind.BACKWARD, [0, 3], step=9, generation=4, seq=77), run=RUN)
    assert (receipt.signer, receipt.worker, receipt.seq) == (IDS[0], IDS[1], 77)
    assert (receipt.generation, receipt.stage, receipt.step, receipt.kind, receipt.signer_stage) == (4, 2, 9, Kind.BACKWARD, 1)
    assert list(receipt.works()) == [work(stage=2, step=9, kind=Kind.BACKWARD, index=i) for i in (0, 3)]
    assert open_receipt(raw(ME, IDS[1], 2, Kind.FORWARD, [0]), run=RUN).signer_stage == 3


def test_the_largest_step_fits_one_envelope() -> None:
    longest = raw(ME, IDS[1], 2**32 - 1, Kind.FORWARD, list(range(MOST_MICROBATCHES)), step=2**32 - 1, generation=2**32 - 1, seq=2**64 - 1)
    assert len(longest) <= ENVELOPE_MAX_BYTES
    assert len(open_receipt(longest, run=RUN)) == MOST_MICROBATCHES


# -- what is none

ENTRY = pack_entries([work(index=3)])
HOSTILE = {
    "an expiry": sealed(encode(body()), not_after=2**40),
    "no entry": sealed(encode(body(entries=b""))),
    "half an entry": sealed(encode(body(entries=ENTRY + ENTRY[:-1]))),
    "an index twice": sealed(encode(body(entries=ENTRY + ENTRY))),
    "descending indices": sealed(encode(body(entries=ENTRY + pack_entries([work(index=2)])))),
    "an index beyond a step": sealed(encode(body(entries=MOST_MICROBATCHES.to_bytes(2, "big") + ENTRY[2:]))),
    "no tokens": sealed(encode(body(entries=ENTRY[:2] + bytes(4) + ENTRY[6:]))),
    "nobody's place": sealed(encode(body(stage=0, kind=1))),
    "a worker that is no key": sealed(encode(body(worker=bytes(32)))),
    "another spelling": sealed(encode(body()).replace(b"\x01\x05\x00\xc4", b"\x01\xcc\x05\x00\xc4")),
    "a surplus field": sealed(pack((112, 1, IDS[1].raw, 1, 5, 0, ENTRY, 0))),
    "another message": sealed(pack((113, 1, IDS[1].raw, 1, 5, 0, ENTRY))),
    "a third kind": sealed(pack((112, 1, IDS[1].raw, 1, 5, 2, ENTRY))),
    "a number that is true": sealed(pack((112, 1, IDS[1].raw, True, 5, 0, ENTRY))),
    "nothing": sealed(b""),
    "no envelope": b"\x97",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_receipt(case: str) -> None:
    with pytest.raises(Malformed):
        open_receipt(HOSTILE[case], run=RUN)
    open_receipt(sealed(encode(body(entries=ENTRY))), run=RUN)


def test_signatures_of_others_runs_and_purposes() -> None:
    good = raw(ME, IDS[1], 1, Kind.FORWARD, [0])
    with pytest.raises(Forged):
        open_receipt(good.replace(IDS[0].raw, IDS[2].raw), run=RUN)
    with pytest.raises(Forged):
        open_receipt(seal(ME, "plw/snapshot/1", encode(body()), run=RUN, seq=1, not_after=0), run=RUN)
    with pytest.raises(ForeignRun):
        open_receipt(good, run=bytes(32))
    assert open_receipt(good, run=None).run == RUN


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_changed_byte_makes_another_receipt(data: st.DataObject) -> None:
    good = raw(ME, IDS[1], 1, Kind.FORWARD, [0, 1, 2])
    cut = data.draw(st.integers(0, len(good)))
    how = data.draw(st.sampled_from(("flip", "cut", "insert", "swap")))
    if how == "flip" and cut < len(good):
        bad = good[:cut] + bytes([good[cut] ^ 1 << data.draw(st.integers(0, 7))]) + good[cut + 1 :]
    elif how == "cut":
        bad = good[:cut]
    elif how == "insert":
        bad = good[:cut] + data.draw(st.binary(min_size=1, max_size=20)) + good[cut:]
    else:
        bad = good[cut:] + good[:cut]
    if bad != good:
        with pytest.raises(BadEnvelope):
            open_receipt(bad, run=RUN)


@settings(max_examples=300, deadline=None)
@given(payload=st.one_of(st.binary(max_size=200), st.binary(max_size=60).map(lambda tail: encode(body())[:-4] + tail)))
def test_a_signed_body_of_any_bytes_is_read_or_refused(payload: bytes) -> None:
    """A member can sign what it likes: nothing but BadEnvelope ever comes of it, and what is read can be written again."""
    try:
        receipt = open_receipt(sealed(payload), run=RUN)
    except BadEnvelope:
        return
    assert pack_entries(list(receipt.works())) == receipt.packed


# -- terms


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"stage": 3}, "stage 3"), ({"stage": 3, "kind": Kind.BACKWARD}, "stage 3"),
        ({"stage": 2}, "stage 2"), ({"step": 10}, "step 10"), ({"indices": [0, 4]}, "microbatch 4"),
        ({"tokens": 127}, "127 tokens"), ({}, None), ({"stage": 2, "kind": Kind.BACKWARD}, None), ({"indices": [3], "step": 9}, None),
    ],
)  # fmt: skip
def test_work_that_the_run_does_not_have(changes: dict[str, object], word: str | None) -> None:
    values = {"stage": 1, "kind": Kind.FORWARD, "indices": [0], **changes}
    fault = TERMS.fault(open_receipt(raw(ME, IDS[1], **values), run=RUN))  # type: ignore[arg-type]
    assert (fault is None) if word is None else (fault is not None and word in fault)


def test_terms_have_a_figure_a_stage() -> None:
    with pytest.raises(ValueError, match="2 figures"):
        Terms(stages=3, steps=1, microbatches=1, tokens=1, flops_per_token=(1.0, 2.0))


# -- when a neighbour signs


def test_one_envelope_a_worker_after_the_step_was_applied() -> None:
    b = book()
    for index in (2, 0, 1):
        assert b.worked(work(IDS[1 + index % 2], index=index), 1)
    assert b.worked(work(IDS[1], index=0, step=6), 1)
    got = b.applied(5, 1, NOW)
    assert [one.worker for one in got] == sorted(IDS[1:3]) and {(one.generation, one.step) for one in got} == {(1, 5)}
    opened = {one.worker: open_receipt(one.raw, run=RUN) for one in got}
    assert [row[0] for row in opened[IDS[1]].rows()] == [0, 2] and [row[0] for row in opened[IDS[2]].rows()] == [1]
    assert len({receipt.seq for receipt in opened.values()}) == 2
    assert b.held == 1
    (later,) = b.applied(6, 1, NOW)
    assert open_receipt(later.raw, run=RUN).seq > max(receipt.seq for receipt in opened.values())


def test_what_was_not_applied_is_not_attested() -> None:
    b = book()
    b.worked(work(), 1)
    assert b.aborted(1) == 1 and b.held == 0
    assert not b.worked(work(), 1), "a task of the old generation that is still about"
    with pytest.raises(ValueError, match="generation 1"):
        b.applied(5, 1, NOW)
    # Done again, by another one, in the next generation: only that counts.
    assert b.worked(work(IDS[2]), 2)
    (one,) = b.applied(5, 2, NOW)
    assert one.worker == IDS[2] and open_receipt(one.raw, run=RUN).generation == 2


def test_a_new_generation_leaves_nothing_of_the_old_one() -> None:
    b = book()
    b.worked(work(), 1)
    assert b.worked(work(IDS[2], index=1), 2) and b.held == 1
    assert b.aborted(1) == 0 and b.held == 1, "a late word about the old one"
    assert [one.worker for one in b.applied(5, 2, NOW)] == [IDS[2]]


def test_an_older_step_comes_again_with_a_greater_generation_only() -> None:
    b = book()
    b.worked(work(), 1)
    b.applied(5, 1, NOW)
    assert not b.worked(work(index=1), 1), "the step is over"
    with pytest.raises(ValueError, match="step 5"):
        b.applied(5, 1, NOW)
    b.aborted(1)
    assert b.worked(work(step=3), 2) and len(b.applied(3, 2, NOW)) == 1


def test_the_first_word_of_a_worker_counts_and_another_worker_replaces_it() -> None:
    b = book()
    assert b.worked(work(seconds=0.5), 1)
    assert not b.worked(work(seconds=9.0), 1) and b.refused == 1
    assert b.worked(work(IDS[2]), 1)
    assert [one.worker for one in b.applied(5, 1, NOW)] == [IDS[2]]


def test_who_is_out_of_a_step_gets_no_receipt_for_it() -> None:
    b = book()
    for step in (5, 6):
        b.worked(work(IDS[1], step=step), 1)
        b.worked(work(IDS[2], step=step, index=1), 1)
    assert b.voided(IDS[1], 5) == 1
    assert [one.worker for one in b.applied(5, 1, NOW)] == [IDS[2]]
    assert len(b.applied(6, 1, NOW)) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"worker": IDS[0]}, {"index": MOST_MICROBATCHES}, {"index": -1}, {"tokens": 0}, {"tokens": 2**32}, {"size_bytes": 2**32},
        {"size_bytes": -1}, {"seconds": float("nan")}, {"seconds": float("inf")}, {"seconds": -0.1}, {"stage": -1}, {"step": 2**32},
        {"stage": 0, "kind": Kind.BACKWARD},
    ],
)  # fmt: skip
def test_work_out_of_bounds_is_refused(changes: dict[str, object]) -> None:
    b = book()
    assert not b.worked(work(**changes), 1) and b.held == 0 and b.refused == 1  # type: ignore[arg-type]


def test_open_steps_are_bounded() -> None:
    b = book()
    assert [b.worked(work(step=step), 1) for step in range(STEPS_OPEN + 2)] == [True] * STEPS_OPEN + [False] * 2
    b.applied(STEPS_OPEN - 1, 1, NOW)
    assert b.held == 0, "steps that are jumped over are over"


STEP = st.integers(0, 5)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("worked"), st.integers(1, 3), STEP, st.integers(0, 3), st.sampled_from(IDS[:4]), st.sampled_from(list(Kind))),
        st.tuples(st.just("applied"), st.integers(1, 3), STEP),
        st.tuples(st.just("aborted"), st.integers(1, 3)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(actions=ACTIONS)
def test_whatever_happens_only_applied_steps_are_attested_and_once(actions: list[tuple[object, ...]]) -> None:
    b = book()
    gone: set[int] = set()
    attested: Counter[tuple[object, ...]] = Counter()
    told: set[tuple[object, ...]] = set()
    for name, generation, *rest in actions:
        if name == "worked":
            step, index, worker, kind = rest
            if b.worked(work(worker, stage=1, step=step, index=index, kind=kind), generation):  # type: ignore[arg-type]
                assert generation not in gone
                told.add((generation, step, index, worker, kind))
        elif name == "applied":
            try:
                got = b.applied(rest[0], generation, NOW)  # type: ignore[arg-type]
            except ValueError:
                continue
            assert generation not in gone
            for one in got:
                receipt = open_receipt(one.raw, run=RUN)
                assert (receipt.step, receipt.generation) == (rest[0], generation)
                for w in receipt.works():
                    assert (generation, w.step, w.index, w.worker, w.kind) in told
                    attested[generation, w.step, w.index, w.kind] += 1
        else:
            b.aborted(generation)  # type: ignore[arg-type]
            gone |= set(range(generation + 1)) if not b.held else set()
        assert b.held <= STEPS_OPEN * 4 * len(Kind)
    assert max(attested.values(), default=0) <= 1


def test_the_domain_is_the_one_of_the_wire() -> None:
    assert receipts.DOMAIN == "plw/receipt/1" and Kind.FORWARD == 0 and Kind.BACKWARD == 1
