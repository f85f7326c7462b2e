"""Bulk at work: where the bytes of a byte stream are decrypted."""

from __future__ import annotations

import pytest

from tests.wire.net.worlds import RUN
from wire.address import Address, Scope
from wire.calls import StreamCalls
from wire.identity import Identity
from wire.net import ByteStream, Kind, MessageStream, Peer, open_net

MEBIBYTE = 1 << 20
COUNT = 32


async def test_a_reader_that_posts_again_at_once_is_spared_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link gives way after a full buffer; without it more than a third of all bytes come by way of memory of their own.

    On real sockets: the pipe in memory yields at each read.
    """
    copied, whole = 0, True
    read_into = StreamCalls.read_into

    def counting(self: StreamCalls, stream: int, view: memoryview) -> int | None:
        nonlocal copied
        count = read_into(self, stream, view)
        copied += count or 0
        return count

    async def sink(peer: Peer, stream: MessageStream | ByteStream) -> None:
        nonlocal whole
        assert isinstance(stream, ByteStream)
        place = memoryview(bytearray(MEBIBYTE))
        for number in range(COUNT):
            assert await stream.receive_into(place, at_least=MEBIBYTE) == MEBIBYTE
            whole = whole and place == bytes([number]) * MEBIBYTE
        await stream.send_all(b"!")

    here = Address("127.0.0.1", 0)
    async with (
        open_net(Identity.generate(), run=RUN, scope=Scope.HOST) as a,
        open_net(Identity.generate(), run=RUN, listen=[here], scope=Scope.HOST) as b,
    ):
        b.serve("sink", sink)
        peer = await a.dial(b.addresses[0].with_peer(b.peer_id))
        monkeypatch.setattr(StreamCalls, "read_into", counting)
        async with await peer.open("sink", Kind.BYTE, 2) as stream:
            assert isinstance(stream, ByteStream)
            for number in range(COUNT):
                await stream.send_all(bytes([number]) * MEBIBYTE)
            assert await stream.receive_some() == b"!"
    assert whole
    assert copied < COUNT * MEBIBYTE // 10
