"""Dial a peer again whose last connection was lost while tensor channels exist.

How long depends on what ended it.  If our kernel was told (FIN, RST) a living peer dials at once, so 5 s suffice, and a refused dial
says that the process is gone; after silence its line is down or its address has changed: 60 s (`Limits.resume_*`).

Only one side should dial at first, or two connections arise and one is made for nothing: whoever was dialled waits a second.  If
its own address has changed (`Moved`) the other side cannot know where to dial, so it does not wait.  Pauses double up to 5 s, and
begin anew when this machine's addresses change: what failed before says nothing then.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from wire.errors import WireError
from wire.net.dial import DialFailed
from wire.net.moved import Moved
from wire.net.peer import Peer

if TYPE_CHECKING:
    from wire.net.manager import Manager

log = logging.getLogger("wire.net")

RECONNECT_S = 1.0  # whoever was dialled gives the other side so long to dial again
RECONNECT_MOST_S = 5.0


async def reconnect(manager: Manager, peer: Peer, cause: WireError, grace_s: float, *, told: bool) -> None:
    """Until a connection stands, the peer is known to be gone, or the time is up; then it ends with `cause`.

    `told`: its end was said by a FIN or RST.
    """
    with trio.move_on_after(grace_s):
        if peer.dialled is None and not isinstance(cause, Moved):
            await trio.sleep(RECONNECT_S)  # it dialled us, and does it again
        pause_s = RECONNECT_S / 4
        while not peer.links and not peer.closed:
            known = [*manager.addresses(peer.peer_id)]
            addresses = known if peer.dialled is None else [peer.dialled, *known]
            try:
                await manager.dial(addresses, expected=peer.peer_id, target=str(peer.peer_id), patient=True)
            except DialFailed as failed:
                if told and failed.causes and all(item.kind == "refused" for item in failed.causes.values()):
                    break  # its machine answers, its process is not there
            except WireError as error:
                log.debug("reconnecting %s: %s", peer.peer_id, error)
            with trio.move_on_after(pause_s) as pause:
                await manager.next_network.wait()
            pause_s = min(2 * pause_s, RECONNECT_MOST_S) if pause.cancelled_caught else RECONNECT_S / 4
    if not peer.links:
        peer.end(cause)
