"""The receipt log on disk: what was appended is read back, whatever happened to the file in between.

Mutations that were tried, each fails a test here: no cut at the start; cutting at a damaged frame in the middle; the length left out of
the checksum; the budget checked after the write; the frame of a failed write left behind; mode 0644; `unsynced` without its own descriptor.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plnode.swarm import receiptlog
from plnode.swarm.receiptlog import LEAST_BUDGET_BYTES, MAGIC, Flaw, Frame, NotALog, ReceiptLog, read_log, segments
from plnode.swarm.receipts import ENVELOPE_MAX_BYTES

ENVELOPES = [b"one", b"two" * 100, bytes(1000), b"four"]


def written(folder: Path, envelopes: list[bytes] = ENVELOPES) -> Path:
    log = ReceiptLog(folder)
    for envelope in envelopes:
        log.append(envelope)
    log.close()
    (path,) = segments(folder)
    return path


def read(path: Path) -> list[Frame | Flaw]:
    with path.open("rb") as file:
        return list(read_log(file))


def envelopes(folder: Path) -> list[bytes]:
    return [item.envelope for path in segments(folder) for item in read(path) if isinstance(item, Frame)]


def test_golden_bytes(tmp_path: Path) -> None:
    path = written(tmp_path, [b"receipt"])
    assert path.name == "receipts-00000001.log"
    assert path.read_bytes() == b"plw-receipts/1\n\x00" + bytes.fromhex("00000007 afb7d1ce") + b"receipt"
    assert read(path) == [Frame(16, b"receipt")]


def test_what_was_appended_is_read_in_order_and_goes_on_after_a_start(tmp_path: Path) -> None:
    path = written(tmp_path)
    log = ReceiptLog(tmp_path)
    log.append(b"five")
    assert log.size_bytes == path.stat().st_size
    log.close()
    log.close()
    assert envelopes(tmp_path) == [*ENVELOPES, b"five"] and segments(tmp_path) == [path]


def test_only_the_owner_reads_it(tmp_path: Path) -> None:
    path = written(tmp_path / "receipts")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    ReceiptLog(tmp_path / "receipts").close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = written(tmp_path / "elsewhere")
    before = victim.read_bytes()
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "receipts-00000001.log").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        ReceiptLog(tmp_path / "log")
    assert victim.read_bytes() == before


@pytest.mark.parametrize("size", [0, ENVELOPE_MAX_BYTES + 1])
def test_what_cannot_be_read_is_not_written(tmp_path: Path, size: int) -> None:
    log = ReceiptLog(tmp_path)
    with pytest.raises(ValueError, match=f"{size} bytes"):
        log.append(bytes(size))
    log.append(b"x" * ENVELOPE_MAX_BYTES)
    log.close()
    assert [len(e) for e in envelopes(tmp_path)] == [ENVELOPE_MAX_BYTES]


def test_a_crash_anywhere_costs_the_unfinished_frame_only(tmp_path: Path) -> None:
    """Every length that a file can have when the machine stops: the whole frames stay, the rest is cut and told, and it goes on."""
    whole = written(tmp_path / "whole").read_bytes()
    ends = [len(MAGIC)]
    for envelope in ENVELOPES:
        ends.append(ends[-1] + 8 + len(envelope))
    for size in sorted({*range(len(MAGIC) + 25), *range(ends[1] - 2, ends[1] + 12), *range(ends[3] - 3, len(whole) + 1)}):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "receipts-00000001.log").write_bytes(whole[:size])
        told: list[str] = []
        log = ReceiptLog(folder, tell=told.append)
        kept = sum(end <= size for end in ends[1:])
        assert len(told) == (size not in (*ends, 0)), size
        log.append(b"next")
        log.close()
        assert envelopes(folder) == [*ENVELOPES[:kept], b"next"], size
        assert not any(isinstance(item, Flaw) for item in read(segments(folder)[0]))


@pytest.mark.parametrize("tail", [bytes(1), bytes(8), bytes(5000), bytes(200_000)])
def test_zeros_at_the_end_are_a_crash(tmp_path: Path, tail: bytes) -> None:
    path = written(tmp_path)
    good = path.read_bytes()
    path.write_bytes(good + tail)
    (flaw,) = [item for item in read(path) if isinstance(item, Flaw)]
    assert (flaw.offset, flaw.size_bytes, flaw.torn) == (len(good), len(tail), True)
    told: list[str] = []
    ReceiptLog(tmp_path, tell=told.append).close()
    assert path.read_bytes() == good and f"cut {len(tail)} bytes" in told[0]


def test_a_last_frame_with_a_wrong_checksum_is_a_crash(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert [item.torn for item in read(path) if isinstance(item, Flaw)] == [True]
    ReceiptLog(tmp_path).close()
    assert envelopes(tmp_path) == ENVELOPES[:-1]


def test_damage_in_the_middle_is_left_and_a_new_file_begun(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(MAGIC) + 8 + 3 + 8 + 5] ^= 1  # within the second envelope
    path.write_bytes(data)
    assert [type(item).__name__ for item in read(path)] == ["Frame", "Flaw", "Frame", "Frame"]
    told: list[str] = []
    log = ReceiptLog(tmp_path, tell=told.append)
    log.append(b"next")
    log.close()
    assert path.read_bytes() == data and "is left as it is" in told[0]
    assert envelopes(tmp_path) == [ENVELOPES[0], *ENVELOPES[2:], b"next"] and len(segments(tmp_path)) == 2


def test_a_damaged_length_ends_what_can_be_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(MAGIC) + 11] ^= 0x80  # the first byte of the second length: 2^31
    path.write_bytes(data)
    frame, flaw = read(path)
    assert isinstance(frame, Frame) and isinstance(flaw, Flaw)
    assert not flaw.torn and flaw.size_bytes == len(data) - flaw.offset
    ReceiptLog(tmp_path).close()
    assert path.read_bytes() == data


def test_another_file_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "receipts-00000001.log"
    path.write_bytes(b"something else, and long enough")
    with pytest.raises(NotALog):
        read(path)
    log = ReceiptLog(tmp_path)
    log.append(b"next")
    log.close()
    assert path.read_bytes() == b"something else, and long enough" and segments(tmp_path)[-1] != path


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_bytes_are_read_without_a_surprise(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every byte is in one frame or flaw, in order; a frame is what was written."""
    base = MAGIC + b"".join(receiptlog._HEAD.pack(len(e), receiptlog._checksum(e)) + e for e in (b"a", b"bb" * 20, b"c" * 300))
    content = bytearray(base)
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(len(MAGIC), len(content) - 1))] = data.draw(st.integers(0, 255))
    content += data.draw(st.binary(max_size=40))
    path = tmp_path_factory.mktemp("log") / "x.log"
    path.write_bytes(content)
    at = len(MAGIC)
    for item in read(path):
        assert item.offset == at
        at += item.size_bytes if isinstance(item, Flaw) else 8 + len(item.envelope)
        if isinstance(item, Frame) and bytes(content) == base:
            assert item.envelope in (b"a", b"bb" * 20, b"c" * 300)
    assert at == len(content)


# -- budget


def test_the_oldest_goes_before_the_budget_is_exceeded(tmp_path: Path) -> None:
    told: list[str] = []
    log = ReceiptLog(tmp_path, budget_bytes=LEAST_BUDGET_BYTES, tell=told.append)
    put: list[bytes] = []
    for number in range(40):
        put.append(number.to_bytes(2, "big") * 5000)
        log.append(put[-1])
        on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert on_disk == log.size_bytes <= LEAST_BUDGET_BYTES
    log.close()
    left = envelopes(tmp_path)
    assert left == put[-len(left) :] and 5 <= len(left) < 12
    assert len(told) >= 5 and "is full" in told[0]


def test_a_smaller_budget_holds_after_the_next_append(tmp_path: Path) -> None:
    written(tmp_path, [bytes(50_000)] * 10)
    log = ReceiptLog(tmp_path, budget_bytes=LEAST_BUDGET_BYTES)
    log.append(b"next")
    assert log.size_bytes <= LEAST_BUDGET_BYTES
    log.close()
    assert envelopes(tmp_path) == [b"next"]
    assert segments(tmp_path)[0].name == "receipts-00000002.log", "a number is not used again"


def test_segments_are_an_eighth_of_the_budget(tmp_path: Path) -> None:
    log = ReceiptLog(tmp_path, budget_bytes=1 << 20)
    for _ in range(30):
        log.append(bytes(50_000))
    log.close()
    assert all(path.stat().st_size <= (1 << 20) // 8 for path in segments(tmp_path)) and len(segments(tmp_path)) >= 7


def test_too_small_a_budget_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs"):
        ReceiptLog(tmp_path, budget_bytes=LEAST_BUDGET_BYTES - 1)


# -- the disk


def test_a_full_disk_leaves_no_half_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    log = ReceiptLog(tmp_path)
    honest, writes = os.write, 0

    def refuse() -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    def write(fd: int, data: bytes | memoryview) -> int:
        nonlocal writes
        writes += 1
        return honest(fd, data[:5]) if writes % 2 else refuse()

    with monkeypatch.context() as patch:
        patch.setattr(receiptlog.os, "write", write)
        with pytest.raises(OSError, match="No space"):
            log.append(b"lost")
        patch.setattr(receiptlog.os, "ftruncate", lambda fd, size: refuse())
        writes = 0
        with pytest.raises(OSError, match="No space"):
            log.append(b"lost, and its half stays")
    log.append(b"next")
    log.close()
    assert envelopes(tmp_path) == [*ENVELOPES, b"next"] and len(segments(tmp_path)) == 2
    assert [item.torn for item in read(path) if isinstance(item, Flaw)] == [True]


def test_an_fsync_is_due_once_and_survives_a_new_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    honest = os.fsync
    monkeypatch.setattr(receiptlog.os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), honest(fd)))
    log = ReceiptLog(tmp_path, budget_bytes=LEAST_BUDGET_BYTES)
    assert log.unsynced() is None
    log.append(bytes(40_000))
    first = segments(tmp_path)[0].stat().st_ino
    sync = log.unsynced()
    assert sync is not None and log.unsynced() is None
    log.append(bytes(40_000))  # another segment: the first one is closed, and synced by that
    assert len(segments(tmp_path)) == 2 and first in synced
    synced.clear()
    before = len(os.listdir("/proc/self/fd"))
    sync()
    assert synced == [first] and len(os.listdir("/proc/self/fd")) == before - 1
    again = log.unsynced()
    assert again is not None
    again()
    log.close()
