"""What the seed keeper sees of the network: dial this entry, tell me when that peer is gone, how many are connected."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wire.address import Address
from wire.errors import Code, WireError, error_for
from wire.identity import PeerId
from wire.net.manager import Manager
from wire.net.seedlist import SeedEntry


class ManagerReach:
    """`seeds.Reach` over a manager.  `bound()`: where this node listens, which makes an entry the node itself."""

    def __init__(self, manager: Manager, own: PeerId, bound: Callable[[], Sequence[Address]]) -> None:
        self._manager = manager
        self._own = own
        self._bound = bound

    async def dial_seed(self, entry: SeedEntry) -> PeerId:
        address = entry.address
        if self._is_own(address):
            raise error_for(Code.SELF, local=True)
        if address.peer_id is not None:
            peer = self._manager.peers.get(address.peer_id)
            if peer is not None and not peer.closed:
                return peer.peer_id
        peer = await self._manager.dial([address], expected=address.peer_id, target=str(entry), patient=True)
        return peer.peer_id

    async def wait_lost(self, peer_id: PeerId) -> WireError | None:
        peer = self._manager.peers.get(peer_id)
        return None if peer is None else await peer.wait_closed()

    def connected_peers(self) -> int:
        return len(self._manager.peers)

    def _is_own(self, address: Address) -> bool:
        return address.peer_id == self._own or any((at.host, at.port) == (address.host, address.port) for at in self._bound())
