"""The facts of the network: found out as a node would, on the node's own port; or told by the node that runs already.

A second node with the same identity would be taken for a mistake by everybody it meets, and its port is taken anyhow.  So when the
data folder is in use, the one that uses it is asked; it has been looking for longer than we could.

How long to wait is the question here.  A seed answers within a second, but its reason for silence takes the dial's 15 s; verdicts how
others reach us take a dial-back from each of three networks, and a relay is looked for after those.  So it is waited until everything
that could still get better has been heard, at most `WAIT_S`; and when no seed answers and nobody is there, only `HOPELESS_S`.

A line is measured with perf/1, once a minute and peer, over 1, 2, 3 and 4 lanes: which number is best there is a property of the way
(wire/net/perflanes.py).  So this net wants four lanes from the start, unlike a node's.  Nobody is to be hurt by a visit: seconds and
bytes are bounded for each peer there, and for all lines together by `LINES_S` here, whatever a peer does.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import trio

from plnode.doctor.facts import Line, Network, OverLanes, PeerSeen, SeedSeen
from plnode.exits import BadInput
from plnode.observe.status import NodeAbsent, ask
from plnode.settings import Settings
from wire.address import Scope
from wire.errors import Code, WireError
from wire.identity import Identity
from wire.limits import DEFAULT_LIMITS
from wire.net import BindFailed, Net, Peer, PeerStatus, RelayOffer, SeedList, SeedStatus, TcpTransport, Transport, open_net
from wire.net.listen import bind_all
from wire.net.perf import Progress
from wire.net.perflanes import Ladder, best, measure_lanes
from wire.reachability import Reach

__all__ = ["Surroundings", "entered", "lines_to_peers", "settled", "told_by_node"]

WAIT_S = 25.0
HOPELESS_S = 5.0
MEET_S = 10.0  # for members whose addresses are known: a dial, or a circuit and then a punch
DIALLED_BACK_S = DEFAULT_LIMITS.reach_dial_s + 1.0  # the first checker has given up by then
LOOK_S = 0.1
MEMBERS = 8  # enough for three checkers and three lines, few enough to be nobody's burden
LINES = 3
LINES_S = 120.0  # for all of them: three of 24 s at the usual 3 s, with lanes to dial and tails to wait for
LINE_LEAST_S = 5.0  # less is left: another one would only be begun
LANES = DEFAULT_LIMITS.lanes_max
_LIMITS = replace(
    DEFAULT_LIMITS,
    ping_interval_s=1.0,  # round trips and clocks are what we came for; usually silence is enough
    lanes_start=LANES,
    lanes_start_bbr=LANES,
)

_REFUSALS = {
    Code.REFUSED: "it measures with somebody else",
    Code.RATE_LIMITED: "it has measured with us within this minute",
    Code.NOT_MEMBER: "it is not in this run",
}


def told_by_node(data_dir: Path, settings: Settings) -> Network:
    """What the node that runs on the folder says.  Raises BadInput if what holds the folder is none, or does not answer."""
    try:
        return from_status(json.loads(ask(data_dir)), settings)
    except NodeAbsent:
        remedy = "Wait until that command has ended (`plnode bench` also takes it), or look without --data."
        raise BadInput(f"another process uses the data folder {data_dir}, and it is no node that could be asked", remedy) from None


def from_status(document: dict[str, Any], settings: Settings) -> Network:
    """The facts in a status document."""
    node, status, stage = document["node"] or {}, document["status"] or {}, document["stage"]
    peers = [peer for peer in status.get("peers", ()) if peer["connected"]]
    return Network(
        running=True,
        held_stage=None if stage is None else int(stage["stage"]),
        scope=str(settings.scope),
        bound=tuple(node.get("addresses", ())),
        not_bound="",
        fixed_port=True,
        access=status.get("access") or "unknown",
        access_reason=status.get("access_reason") or "the node has just started",
        nat="",
        seeds=tuple(
            SeedSeen(entry=entry, state=seed["state"], reason=seed["reason"] or "", peer_id=None, rtt_s=None)
            for entry, seed in document["seeds"].items()
        ),
        peers=tuple(
            PeerSeen(peer_id=p["peer_id"], rtt_s=_seconds(p["rtt_median_ms"]), clock_offset_s=_seconds(p["clock_offset_ms"]))
            for p in peers
        ),
    )


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


@dataclass(frozen=True, slots=True)
class Surroundings:
    """A network that stands; `not_bound`: why it does not listen, "" if it does."""

    net: Net
    settings: Settings
    not_bound: str

    async def look(self, waiting: Callable[[str], None]) -> Network:
        """Wait until things have settled; `waiting` hears again and again for what."""
        began = trio.current_time()
        while True:
            members = [record.peer_id for record in self.net.known()][:MEMBERS]
            self.net.want(members)
            facts = self._facts()
            missing = sum(self.net.peer(peer_id) is None for peer_id in members)
            elapsed_s = trio.current_time() - began
            if settled(facts, elapsed_s, missing=missing, mapping=self.settings.portmap):
                return facts
            waiting(f"{len(facts.peers)} peer(s) connected, others reach this machine: {facts.access}, {elapsed_s:.0f} s")
            await trio.sleep(LOOK_S)

    def _facts(self) -> Network:
        net, verdict = self.net, self.net.access.verdict
        status = {peer.peer_id: peer for peer in net.status() if peer.connected}
        return Network(
            running=False,
            held_stage=None,
            scope=str(self.settings.scope),
            bound=tuple(str(address) for address in net.addresses),
            not_bound=self.not_bound,
            fixed_port=all(address.port for address in self.settings.listen),
            access=verdict.verdict,
            access_reason=verdict.reason,
            nat=str(net.access.reach.finding.state),
            seeds=tuple(
                SeedSeen(
                    entry=str(entry),
                    state=str(state.status),
                    reason=state.reason,
                    peer_id=None if state.peer_id is None else str(state.peer_id),
                    rtt_s=_rtt(None if state.peer_id is None else status.get(state.peer_id)),
                )
                for entry, state in net.seed_states.items()
            ),
            peers=tuple(
                PeerSeen(peer_id=str(peer_id), rtt_s=_rtt(peer), clock_offset_s=peer.clock_offset_s) for peer_id, peer in status.items()
            ),
        )


def settled(facts: Network, elapsed_s: float, *, missing: int, mapping: bool = False) -> bool:
    """Whether waiting would tell nothing more.

    `missing`: members whose address is known and that are not connected yet.  `mapping`: the router is asked to forward the port,
    so that a relay may not be the last word.
    """
    if elapsed_s >= WAIT_S:
        return True
    heard = bool(facts.seeds) and all(seed.state != SeedStatus.DIALLING for seed in facts.seeds)
    if not facts.peers:
        return heard and elapsed_s >= HOPELESS_S
    # A relay may be found before the first dial-back has failed or not: then "relayed" is not the last word.
    relayed = facts.access == "relayed" and not mapping and facts.nat != Reach.UNKNOWN and elapsed_s >= DIALLED_BACK_S
    reached = facts.scope != Scope.INTERNET or facts.access == "direct" or relayed
    timed = all(peer.rtt_s is not None for peer in facts.peers)
    return heard and reached and timed and (not missing or elapsed_s >= MEET_S)


def _rtt(status: PeerStatus | None) -> float | None:
    return None if status is None or status.rtt is None else status.rtt.median


@asynccontextmanager
async def entered(
    settings: Settings, identity: Identity, run: bytes, seeds: SeedList | None, *, transport: Transport | None = None
) -> AsyncIterator[Surroundings]:
    """The network as the node would have it, but nothing is kept on the disk.  Without the port if that cannot be had."""
    transport = transport or TcpTransport()
    listen, not_bound = settings.listen, ""
    try:
        listeners, failures = await bind_all(transport, listen)
        for listener in listeners:
            listener.close()
    except BindFailed as none_of_them:
        failures, listen = list(none_of_them.failures), ()
    if failures:
        not_bound = "cannot listen: " + "; ".join(f"{address}: {why}" for address, why in failures)
    async with open_net(
        identity,
        run=run,
        listen=listen,
        scope=settings.scope,
        seeds=seeds,
        announce=settings.announce,
        portmap=settings.portmap,
        limits=_LIMITS,
        transport=transport,
        relay=RelayOffer(False, 0),  # gone in half a minute: nobody should build on it
    ) as net:
        yield Surroundings(net, settings, not_bound)


async def lines_to_peers(
    net: Net, seconds: float, waiting: Callable[[str], None], *, most_time_s: float = LINES_S
) -> AsyncGenerator[Line, None]:
    """The line to up to three members that answer perf/1, one after the other: together they would share ours.

    One for which no time is left is a line as well, which says so.
    """
    found, ends = 0, trio.current_time() + most_time_s
    for peer in net.peers():
        if found < LINES and not peer.guest:
            waiting(f"measuring the line to {peer.peer_id.short}")
            line = await _line(peer, seconds, waiting, ends - trio.current_time())
            if line is not None:
                found += 1
                yield line


async def _line(peer: Peer, seconds: float, waiting: Callable[[str], None], left_s: float) -> Line | None:
    """None if the peer does not offer it: a seed."""
    peer_id, path, refused, measured = str(peer.peer_id), str(peer.path), "", None

    def progress(now: Progress) -> None:
        waiting(f"measuring the line to {peer.peer_id.short}: {now.what}, {now.elapsed_s:.0f} of {now.total_s:.0f} s")

    if left_s < LINE_LEAST_S:
        refused = "not measured: the time for all lines was over"
    else:
        try:
            measured = await measure_lanes(peer, lanes=LANES, seconds=seconds, most_time_s=left_s, progress=progress)
        except WireError as error:
            if error.code is Code.PROTOCOL_UNKNOWN:
                return None
            again = f"; again in {error.retry_after:.0f} s" if error.retry_after else ""
            refused = f"not measured: {_REFUSALS.get(Code(error.code), str(error))}{again}"
    congestion = peer.stats.congestion or ""
    if measured is None:
        return Line(
            peer_id=peer_id, path=path, congestion=congestion, lanes=0, rtt_s=None, up_bytes_per_s=None, down_bytes_per_s=None,
            refused=refused,
        )  # fmt: skip
    return line_of(measured, peer_id, path, congestion)


def line_of(measured: Ladder, peer_id: str, path: str, congestion: str) -> Line:
    """The facts of a measurement; its `rungs` are not empty."""
    over = tuple(
        OverLanes(
            lanes=rung.lanes,
            up_bytes_per_s=rung.up.bytes_per_s,
            down_bytes_per_s=None if rung.down is None else rung.down.bytes_per_s,
        )
        for rung in measured.rungs
    )
    chosen = over[measured.rungs.index(best(measured.rungs))]
    return Line(
        peer_id=peer_id,
        path=path,
        congestion=congestion,
        lanes=chosen.lanes if measured.had else 0,
        rtt_s=measured.rtt_idle_s,
        up_bytes_per_s=chosen.up_bytes_per_s,
        down_bytes_per_s=chosen.down_bytes_per_s,
        refused="",
        over=over,
        ended=measured.ended,
        full=measured.full,
        missing=max(0, measured.wanted - measured.had),
        one_only=measured.had > 1 and measured.served == 1,
    )
