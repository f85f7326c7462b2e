"""How much this node's line to the internet has been seen to send: what a relay may promise of it.

Nobody tells a program how fast its line is.  What it has carried in its best second is a lower bound, and the only honest one.  What
goes wrong: two nodes in one house exchange at a gigabit, and the relay that counted it all offers a quarter of that to strangers over an
uplink of ten megabits.  So only connections that leave the house count: to a global address, and not to one in the same IPv6 /64, for in
a house with IPv6 neighbours have global addresses too.  A circuit is not counted beside the connection to the relay that carries it.

Bytes of a connection that ended since the last look are missed, which makes an estimate from below lower by part of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from wire.address import AddressClass
from wire.neighbours import home_network
from wire.net.link import Link
from wire.net.transport import literal
from wire.pipeinfo import PipeInfo


class Uplink:
    """`best` is in bytes per second, 0 before two looks.  `links()`: all connections that stand."""

    def __init__(self, links: Callable[[], Iterable[Link]]) -> None:
        self._links = links
        self._sent: dict[Link, int] = {}
        self._at: float | None = None
        self.best = 0.0

    def look(self, now: float) -> None:
        """Once in about a second."""
        sent = {link: link.bytes_out for link in self._links() if leaves_the_house(link.pipe.info())}
        if self._at is not None and now > self._at:
            grown = sum(count - self._sent.get(link, 0) for link, count in sent.items())
            self.best = max(self.best, grown / (now - self._at))
        self._sent, self._at = sent, now


def leaves_the_house(info: PipeInfo) -> bool:
    """Whether what is sent there goes over this node's line to the internet, as far as addresses tell."""
    if info.relay is not None:
        return False
    try:
        remote = literal(*info.remote)
    except ValueError:  # on other transports than TCP
        return False
    return remote.scope_class is AddressClass.GLOBAL and not _same_house(info.local[0], remote.host)


def _same_house(local: str, remote: str) -> bool:
    if ":" not in local or ":" not in remote:
        return local == remote
    return home_network(local) == home_network(remote)
