"""Vouchers: each way in which one does not hold has its own exception and code, and none gets through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from wire.envelope import VerifiedCache, seal
from wire.errors import Code
from wire.identity import SMALL_ORDER_Y, Identity
from wire.messages import encode
from wire.relaymessages import RelayClass, Voucher
from wire.statements import VOUCHER, BadEnvelope, Expired, ForeignRun, Forged, Malformed, TooLongLived, WrongSigner
from wire.vouchers import NotCovered, OtherBoot, open_voucher, seal_voucher

NOW = 1_750_000_000.0
RELAY, TARGET, OTHER = (Identity(bytes(31) + bytes([n])) for n in (1, 2, 3))
RUN = b"r" * 32
BOOT, EARLIER = b"bootboot", b"previous"
LIFE_S, GRACE_S = 3600, 300


def voucher(cls: int = RelayClass.BULK, boot_id: bytes = BOOT, peer: bytes = TARGET.peer_id.raw) -> Voucher:
    return Voucher(peer, cls, 5 << 20, boot_id)


def sealed(content: Voucher | None = None, by: Identity = RELAY, now_unix: float = NOW) -> bytes:
    return seal_voucher(by, content or voucher(), run=RUN, seq=1, now_unix=now_unix)


def opened(raw: bytes, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"now_unix": NOW, "run": RUN, "relay": RELAY.peer_id, "peer": TARGET.peer_id, **changes}
    return open_voucher(raw, **arguments)


def test_what_is_sealed_opens() -> None:
    cache = VerifiedCache()
    for _ in range(2):
        got = opened(sealed(), cls=RelayClass.BULK, boot_id=BOOT, own_clock=True, verified=cache)
        assert (got.relay, got.peer, got.voucher) == (RELAY.peer_id, TARGET.peer_id, voucher())
        assert got.expires_unix == int(NOW) + LIFE_S
    assert len(cache) == 1


def test_a_voucher_has_room_in_its_512_bytes_and_no_more() -> None:
    assert len(sealed(Voucher(TARGET.peer_id.raw, 255, 2**64 - 1, BOOT))) <= 300
    raw = seal(RELAY, "plw/stage/1", b"x" * 512, run=RUN, seq=1, not_after=int(NOW) + 10)
    with pytest.raises(Malformed) as failure:
        opened(raw)
    assert failure.value.code is Code.TOO_LARGE


def payload(content: bytes, not_after: int = int(NOW) + 100) -> bytes:
    return seal(RELAY, VOUCHER, content, run=RUN, seq=1, not_after=not_after)


CASES: list[tuple[str, Callable[[], bytes], dict[str, Any], type[BadEnvelope], Code]] = [
    ("forged", lambda: sealed()[:-1] + bytes([sealed()[-1] ^ 1]), {}, Forged, Code.BAD_SIGNATURE),
    ("another purpose", lambda: seal(RELAY, "plw/stage/1", encode(voucher()), run=RUN, seq=1, not_after=int(NOW) + 9), {}, Forged,
     Code.BAD_SIGNATURE),
    ("another run", sealed, {"run": b"s" * 32}, ForeignRun, Code.RUN_MISMATCH),
    ("too far ahead", lambda: payload(encode(voucher()), int(NOW) + LIFE_S + GRACE_S + 2), {}, TooLongLived, Code.PROTOCOL),
    ("another signer", lambda: sealed(by=OTHER), {}, WrongSigner, Code.PEER_MISMATCH),
    ("by the target itself", lambda: sealed(by=TARGET), {}, WrongSigner, Code.PEER_MISMATCH),
    ("no voucher inside", lambda: payload(b"\x01"), {}, Malformed, Code.PROTOCOL),
    ("a peer that is none", lambda: payload(encode(voucher(peer=next(iter(sorted(SMALL_ORDER_Y))).to_bytes(32, "little")))), {}, Malformed,
     Code.PROTOCOL),
    ("another peer", sealed, {"peer": OTHER.peer_id}, NotCovered, Code.NO_RESERVATION),
    ("a lower class", lambda: sealed(voucher(RelayClass.SIGNAL)), {"cls": RelayClass.BULK}, NotCovered, Code.NO_RESERVATION),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "changes", "kind", "code"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_nat_5_a_voucher_that_does_not_hold(raw: Callable[[], bytes], changes: dict[str, Any], kind: type[BadEnvelope], code: Code) -> None:
    with pytest.raises(kind) as failure:
        opened(raw(), **changes)
    assert failure.value.code is code and type(failure.value) is kind


def test_nat_5_after_the_relays_restart() -> None:
    raw = sealed(voucher(boot_id=EARLIER))
    assert opened(raw).voucher.boot_id == EARLIER  # a caller does not know the present one
    with pytest.raises(OtherBoot) as failure:
        opened(raw, boot_id=BOOT, own_clock=True)
    assert failure.value.code is Code.SUPERSEDED and failure.value.retryable


def test_nat_5_expired_without_grace_on_the_relays_own_clock() -> None:
    raw = sealed()
    opened(raw, now_unix=NOW + LIFE_S - 1, own_clock=True)
    for late, own in ((0.0, True), (GRACE_S + 1.0, False)):
        with pytest.raises(Expired) as failure:
            opened(raw, now_unix=NOW + LIFE_S + late, own_clock=own)
        assert failure.value.code is Code.STALE
    opened(raw, now_unix=NOW + LIFE_S + GRACE_S - 1)


def test_a_higher_class_holds_for_the_lower() -> None:
    for cls in (0, RelayClass.SIGNAL, RelayClass.BULK):
        opened(sealed(), cls=cls)
    opened(sealed(voucher(RelayClass.SIGNAL)), cls=RelayClass.SIGNAL)
