"""TCP with trio and bare AEAD frames: the least an encrypted stream in Python can cost, and so the limit we are held against.

A frame is 4 bytes of length, ciphertext and tag, AES-256-GCM with a counter for nonce.  There is no handshake (the key is shared
beforehand), no stream number, no credit, no priority, no rekeying.  Sealing goes from the message into one reused buffer, opening
from one reused read buffer into the place of the message: `encrypt_into` and `decrypt_into`, one pass each, nothing joined.

Frames of 64 KiB, two of them for one `send`: the best of 32 to 256 KiB and one to four.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bench.link import sockets
from bench.link.bytepipe import PipeClient, answer_stream
from bench.link.child import TRIO, main

__all__ = ["TrioAead"]

FRAME = 64 * 1024
GROUP = 2
TAG = 16
HEAD = 4
_LENGTH = struct.Struct("<I")
_NONCE = struct.Struct("<4xQ")


class AeadPipe:
    """A `BytePipe` of sealed frames.  A frame never spans two `send`s; `receive` gives one, whole, into a place that holds it."""

    def __init__(self, stream: trio.SocketStream, send_key: bytes, receive_key: bytes) -> None:
        self._send_all = stream.send_all
        self._receive_into = stream.socket.recv_into
        self._seal = AESGCM(send_key).encrypt_into
        self._open = AESGCM(receive_key).decrypt_into
        self._sent = 0
        self._received = 0
        self._out = memoryview(bytearray(GROUP * (HEAD + FRAME + TAG)))
        self._in = memoryview(bytearray(1 << 20))
        self._begin = self._end = 0

    async def send(self, data: memoryview) -> None:
        out, seal = self._out, self._seal
        for start in range(0, len(data), GROUP * FRAME):
            group = data[start : start + GROUP * FRAME]
            used = 0
            for first in range(0, len(group), FRAME):
                piece = group[first : first + FRAME]
                size = len(piece) + TAG
                _LENGTH.pack_into(out, used, size)
                used += HEAD
                seal(_NONCE.pack(self._sent), piece, None, out[used : used + size])
                self._sent += 1
                used += size
            await self._send_all(out[:used])

    async def receive(self, place: memoryview) -> int:
        if not await self._have(HEAD):
            return 0
        (size,) = _LENGTH.unpack_from(self._in, self._begin)
        if not TAG < size <= FRAME + TAG or not await self._have(HEAD + size):
            raise trio.BrokenResourceError("a frame that is none, or half of one")
        first = self._begin + HEAD
        self._open(_NONCE.pack(self._received), self._in[first : first + size], None, place[: size - TAG])
        self._received += 1
        self._begin = first + size
        return int(size) - TAG

    async def _have(self, count: int) -> bool:
        """Whether so many bytes are in the buffer, after reading what is needed; what is left over moves to its front first."""
        while self._end - self._begin < count:
            rest = self._end - self._begin
            if self._begin == self._end or len(self._in) - self._begin < count:
                self._in[:rest] = self._in[self._begin : self._end]
                self._begin, self._end = 0, rest
            got = await self._receive_into(self._in[self._end :])
            if not got:
                return False
            self._end += got
        return True


KEYS = (bytes(range(32)), bytes(range(32, 64)))


class TrioAeadClient(PipeClient):
    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(AeadPipe(stream, *KEYS))
        self.congestion = sockets.congestion_of(stream)

    async def handshake(self) -> float | None:
        return None


class TrioAead:
    name = "trio-aead"
    loop = TRIO

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[dict[str, Any]]:
        async with trio.open_nursery() as nursery:
            yield {"port": await sockets.listen(nursery, lambda stream: answer_stream(AeadPipe(stream, *KEYS[::-1]), stream))}
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def connect(self, where: dict[str, Any]) -> AsyncIterator[TrioAeadClient]:
        async with await sockets.dial(where["port"]) as stream:
            yield TrioAeadClient(stream)


if __name__ == "__main__":
    main(TrioAead())
