"""Errors: the published numbers, whose fault, retry or not, and foreign text that cannot harm a terminal."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import (
    ADVICE,
    ERRORS,
    RETRYABLE,
    Code,
    ConnectionLost,
    LimitExceeded,
    LocalProtocolError,
    PeerIdMismatch,
    RemoteProtocolError,
    StreamReset,
    WireError,
    error_for,
    printable,
)
from wire.identity import Identity

# Written out a second time, from the specification: a reordered enum must fail here.
PUBLISHED = """
    OK INTERNAL PROTOCOL VERSION AUTH PEER_MISMATCH RUN_MISMATCH REFUSED RESOURCE_LIMIT RATE_LIMITED PROTOCOL_UNKNOWN TOO_LARGE
    CANCELLED TIMEOUT SUPERSEDED SHUTDOWN IDLE NO_RESERVATION RELAY_LIMIT BANNED EXCESSIVE BAD_SIGNATURE STALE EXPECTATION
    DUPLICATE NOT_MEMBER DUPLICATE_IDENTITY SELF
""".split()  # noqa: SIM905
PUBLISHED_RETRYABLE = {7, 8, 9, 13, 14, 15, 16, 18}


def test_numbers_are_the_published_ones() -> None:
    assert [(code.value, code.name) for code in Code] == list(enumerate(PUBLISHED))
    assert {code.value for code in RETRYABLE} == PUBLISHED_RETRYABLE
    assert set(ADVICE) == set(Code)


@pytest.mark.parametrize("code", Code)
def test_one_class_a_code(code: Code) -> None:
    error = error_for(code, detail="why", retry_after=2.5)
    assert type(error) is ERRORS[code]
    assert (error.code, error.retryable, error.local, error.detail, error.retry_after) == (
        code,
        code.value in PUBLISHED_RETRYABLE,
        False,
        "why",
        2.5,
    )
    assert code.name in str(error) and ADVICE[code] in str(error) and "2.5 s" in str(error)
    assert len({cls.__name__ for cls in ERRORS.values()}) == len(Code)
    for other in Code:
        assert isinstance(error, ERRORS[other]) == (other is code)


@pytest.mark.parametrize("number", [28, 255, 65_535])
def test_a_code_of_a_newer_peer_is_internal_and_named(number: int) -> None:
    error = error_for(number, detail="new trouble")
    assert error.code is Code.INTERNAL and str(number) in error.detail and "new trouble" in error.detail
    reset = StreamReset(number, b"x")
    assert reset.code is Code.INTERNAL and str(number) in reset.detail


def test_whose_fault() -> None:
    assert LocalProtocolError("two senders").local
    assert not RemoteProtocolError(Code.AUTH, "bad tag").local
    assert RemoteProtocolError(Code.AUTH).code is Code.AUTH
    assert RemoteProtocolError(detail="x").code is Code.PROTOCOL
    assert error_for(Code.PROTOCOL, local=True).local


def test_bases_say_what_they_know() -> None:
    a, b = Identity(bytes(31) + b"\x01").peer_id, Identity(bytes(31) + b"\x02").peer_id
    mismatch = PeerIdMismatch(a, b)
    assert (mismatch.expected, mismatch.got) == (a, b) and str(a) in str(mismatch) and str(b) in str(mismatch)
    limit = LimitExceeded("half_open_max", 65, 64)
    assert (limit.name, limit.value, limit.cap) == ("half_open_max", 65, 64) and limit.retryable
    lost = ConnectionLost(OSError(104, "Connection reset by peer"))
    assert lost.retryable and isinstance(lost.cause, OSError) and "reset by peer" in str(lost)
    assert ConnectionLost(error_for(Code.BANNED, detail="x")).code is Code.BANNED
    for error in (mismatch, limit, lost):
        assert isinstance(error, WireError)


@given(st.one_of(st.text(max_size=300), st.binary(max_size=300)))
def test_foreign_text_is_harmless(text: str | bytes) -> None:
    shown = printable(text)
    assert len(shown.encode()) <= 128
    assert set(shown) <= set(string.printable) - set("\t\n\r\x0b\x0c")
    assert printable(shown) == shown
    assert len(error_for(Code.REFUSED, detail=text).detail) <= 128


def test_the_cut_is_shown_and_short_text_is_not_touched() -> None:
    assert printable("a" * 128) == "a" * 128
    assert printable("a" * 129) == "a" * 125 + "..."
    assert printable("\x1b[31m\u202e\U0001f600é") == "\\x1b[31m\\u202e\\U0001f600\\xe9"
    assert printable(b"\x00\xff") == "\\x00\\xff"
    assert printable("\u202e" * 100).endswith("...")
