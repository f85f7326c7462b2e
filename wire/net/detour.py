"""Around a relay that is about to stop: a pair whose circuit goes through it makes another before it is gone.

What goes wrong without it: the relay's last act breaks the circuit, both ends find out together, and what was under way waits until
one of them has dialled again, a second or more for a pipeline that has none to give.  So GOAWAY on the connection to a relay counts for
the circuits in it, too.  They still stand, for as long as the relay's owner waits.

Only the end that dialled the circuit makes the next, because of connections of one initiator the newer is primary at both ends
(primary.py), whoever hears the relay first; of two initiators the lower id's would stay, which may be the one that dies.  It has the
other's newest record through the circuit itself.  Channels move when the new connection stands, streams finish on the old one.  If no
other way is found until the relay has gone, there is the loss and what follows it (reconnect.py), as without a notice.

Anyone may say goodbye: what moves is what goes through *that* peer, and it moves once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from wire.errors import WireError
from wire.net.link import Link
from wire.net.peer import Peer

if TYPE_CHECKING:
    from wire.net.manager import Manager

log = logging.getLogger("wire.net")

RETRY_S = 0.5  # the other end may be about to get a place at its next relay
RETRY_MOST_S = 4.0


async def go_round(manager: Manager, peer: Peer, link: Link) -> None:
    """Until another connection than the circuit `link` is primary, or it has ended."""
    pause_s = RETRY_S
    while link.error is None and peer.primary is link:
        addresses = [address for address in manager.addresses(peer.peer_id) if address.relay != link.relay]
        if addresses:
            try:
                await manager.dial(addresses, expected=peer.peer_id, target=str(peer.peer_id), patient=True)
                return
            except WireError as error:
                log.debug("around the relay %s to %s: %s", link.relay, peer.peer_id, error)
        with trio.move_on_after(pause_s):
            await link.closed.wait()
        pause_s = min(2 * pause_s, RETRY_MOST_S)
