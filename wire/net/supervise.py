"""Handlers of a peer's streams, run so that whatever they raise ends one stream and nothing else.

A handler that fails resets its stream; what nobody foresaw is logged once with its traceback here, the second of the two places in
this package with a broad `except`.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

import trio

from wire.errors import WireError
from wire.events import StreamOpened
from wire.net.bytestream import ByteStream
from wire.net.services import ChannelHandler, Service
from wire.net.stream import MessageStream

if TYPE_CHECKING:
    from wire.net.peer import Peer

log = logging.getLogger("wire.net")


async def announce(peer: Peer, handler: ChannelHandler, event: StreamOpened, counts: Counter[str]) -> None:
    """Tell the application of a tensor channel that nobody has made a receiver for."""
    try:
        await handler(peer, event.meta)
    except WireError as error:
        log.debug("%s: channel handler: %s", event.protocol, error)
    except Exception:
        _failed(peer, event.protocol, counts)


async def serve(peer: Peer, service: Service, stream: MessageStream | ByteStream, counts: Counter[str]) -> None:
    """Answer one accepted stream."""
    try:
        async with stream:
            await service.handler(peer, stream)
    except (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError):
        pass  # the peer left in mid-conversation: the stream is reset already
    except WireError as error:
        counts[f"stream-{error.code.name.lower()}"] += 1
    except Exception:
        _failed(peer, stream.protocol, counts)


def _failed(peer: Peer, protocol: str, counts: Counter[str]) -> None:
    counts["internal-error"] += 1
    log.exception("the handler of %s failed for peer %s", protocol, peer.peer_id)
