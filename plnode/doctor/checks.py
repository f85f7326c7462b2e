"""Verdicts from facts.  Every function here is pure and gives lines that stand for themselves: what was found, and what to do.

Four verdicts, and what they mean decides the exit code:

    ok       as it should be
    warning  a node takes part, but worse than it could, or something will go wrong later
    bad      a node with these settings does not take part: it would not start, or would never be given work
    skipped  not found out, and why

So "bad" is not the worst of a scale but a statement: what merely costs speed is a warning however slow it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from plnode.doctor.facts import Device, Disk, Network, SeedSeen, Versions
from plnode.observe.lines import quantity, short_id
from wire.limits import DEFAULT_LIMITS

__all__ = [
    "Check", "Verdict", "clock", "congestion", "descriptors", "device", "disk", "listening", "reachability", "relaying",
    "seeds", "versions",
]  # fmt: skip

PYTHON_LEAST = (3, 11)  # both as pyproject.toml has them
TORCH_LEAST = (2, 6)
CLOCK_BAD_S = DEFAULT_LIMITS.expiry_grace_s  # beyond it signed records count as expired on both sides
CLOCK_WARN_S = DEFAULT_LIMITS.clock_warn_s
CLOCK_PEERS = DEFAULT_LIMITS.clock_peers_min
DESCRIPTORS_LEAST = 128  # a data folder, torch's files and a few dozen connections


class Verdict(StrEnum):
    """See the module."""

    OK = "ok"
    WARNING = "warning"
    BAD = "bad"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.  `fix` is empty if there is nothing to mend."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""
    measured: Mapping[str, Any] | None = None
    """Figures for a program, where there are any that `found` only words."""


def versions(facts: Versions) -> Check:
    """Python, torch, the protocol, and what the manifest needs of the installation."""
    found = f"Python {'.'.join(map(str, facts.python))}, torch {facts.torch_text}, protocol {facts.protocol}"
    least = f"Python {PYTHON_LEAST[0]}.{PYTHON_LEAST[1]} and torch {TORCH_LEAST[0]}.{TORCH_LEAST[1]}"
    if facts.python[:2] < PYTHON_LEAST or facts.torch < TORCH_LEAST:
        return Check("versions", Verdict.BAD, found, f"install at least {least}")
    if facts.protocol != facts.manifest_protocol:
        text = f"{found}; the run speaks protocol {facts.manifest_protocol}"
        return Check("versions", Verdict.BAD, text, "install the version of this program that the owner of the run uses")
    if facts.lacking:
        return Check("versions", Verdict.BAD, f"{found}; {facts.lacking}", "install the version that the owner of the run uses")
    return Check("versions", Verdict.OK, f"{found}, as the run")


def disk(facts: Disk, snapshot_bytes: int | None, snapshots: int) -> Check:
    """`snapshot_bytes`: of the largest stage that fits, None if none does; so many `snapshots` are on the disk at once."""
    where = facts.folder if facts.exists else f"{facts.folder} (not there yet)"
    if facts.refused:
        return Check("disk", Verdict.BAD, f"{where}: {facts.refused}", "name a folder that you may write to with --data")
    if facts.free_bytes is None:
        return Check("disk", Verdict.SKIPPED, f"{where}: writable, the space that is free is not known")
    found = f"{where}: writable, {quantity(facts.free_bytes, 'B')} free"
    if snapshot_bytes is None:
        return Check("disk", Verdict.OK, found)
    need = snapshots * snapshot_bytes
    found += f"; snapshots of the largest stage that fits take {quantity(need, 'B')}"
    if facts.free_bytes < snapshot_bytes:
        return Check("disk", Verdict.BAD, found, f"free {quantity(need - facts.free_bytes, 'B')}, or name another disk with --data")
    if facts.free_bytes < need:
        return Check("disk", Verdict.WARNING, found, f"free {quantity(need - facts.free_bytes, 'B')}, or snapshots will fail later")
    return Check("disk", Verdict.OK, found)


def device(facts: Device) -> Check:
    """The device as set."""
    if facts.kind != "cpu":
        if facts.lacking:
            fix = "install a torch and a driver for this GPU, or take --device cpu"
            return Check("device", Verdict.BAD, f"{facts.kind}: {facts.lacking}", fix)
        free = "" if facts.free_bytes is None else f", {quantity(facts.free_bytes, 'B')} of its memory free"
        return Check("device", Verdict.OK, f"{facts.kind}: {facts.name}{free}")
    found = f"cpu, {facts.threads} thread(s) on {facts.cores} core(s)"
    if facts.threads > facts.cores:
        return Check("device", Verdict.WARNING, found, f"more threads than cores slow each other down: --threads {facts.cores}")
    if facts.cores > 2 and facts.threads * 2 <= facts.cores:
        return Check("device", Verdict.OK, f"{found}; --threads {facts.cores - 1} would leave one for the network")
    return Check("device", Verdict.OK, found)


def descriptors(limit: int, connections_most: int) -> Check:
    """A node takes a quarter of its descriptors for inbound connections."""
    found = f"{limit} files and sockets at once, so {min(connections_most, limit // 4)} connections from others"
    fix = f"ulimit -n {4 * connections_most} before the start (systemd: LimitNOFILE=)"
    if limit < DESCRIPTORS_LEAST:
        return Check("descriptors", Verdict.BAD, found, fix)
    if limit // 4 < connections_most:
        return Check("descriptors", Verdict.WARNING, found, fix)
    return Check("descriptors", Verdict.OK, found)


def congestion(bbr: str | None) -> Check:
    """Whether long lines with a little loss are filled."""
    if bbr is None:
        return Check("congestion", Verdict.SKIPPED, "this system offers no choice of TCP's congestion control")
    if bbr:
        fix = "as root: modprobe tcp_bbr, and add bbr to sysctl net.ipv4.tcp_allowed_congestion_control"
        return Check("congestion", Verdict.WARNING, f"bbr cannot be used ({bbr}): a lossy line carries a fraction of its rate", fix)
    return Check("congestion", Verdict.OK, "bbr can be used")


def listening(facts: Network) -> Check:
    """Where others would knock."""
    by = "the running node listens on" if facts.running else "listened on"
    found = f"{by} {', '.join(facts.bound) or 'nothing'}"
    if facts.not_bound:
        fix = "choose other addresses with --listen, or stop what uses the port"
        return Check("addresses", Verdict.WARNING if facts.bound else Verdict.BAD, f"{found}; {facts.not_bound}", fix)
    if not facts.fixed_port and not facts.running and facts.scope == "internet":
        fix = "name a port, so that a router can forward it: --listen 0.0.0.0:4001"
        return Check("addresses", Verdict.WARNING, f"{found}; the port is another at each start", fix)
    return Check("addresses", Verdict.OK, found)


_NAT = {
    "public": "no router in the way",
    "nat": "behind a router that keeps the port: connections can be punched",
    "nat-symmetric": "behind a router that gives each connection another port: only relays help",
    "outbound-only": "behind a firewall, or without a listener",
}
_OPEN = "open the port of --listen for TCP in the firewall and forward it in the router (--portmap on asks the router)"


def reachability(facts: Network) -> Check:
    """Whether others can dial this machine; `listening` has said on which port."""
    if facts.scope != "internet":
        within = "machine" if facts.scope == "host" else "network"
        return Check("reachability", Verdict.OK, f"direct: within this {within} everybody counts as reachable, nobody is asked")
    said = facts.access_reason or "no reason was given"
    kind = _NAT.get(facts.nat)
    found = f"{facts.access}: {said}" + (f" ({kind})" if kind is not None else "")
    match facts.access:
        case "direct":
            return Check("reachability", Verdict.OK, found)
        case "relayed":
            return Check("reachability", Verdict.WARNING, found, f"for direct connections {_OPEN}")
        case "unreachable":
            return Check("reachability", Verdict.WARNING, found, f"{_OPEN}; until then it meets only members that can be dialled")
    return Check("reachability", Verdict.SKIPPED, found, "ask again when more of the run's nodes are there")


def relaying(relay: bool, rate: int | None) -> Check:
    """What of the upload others may use."""
    if not relay:
        return Check("upload for others", Verdict.OK, "none: relaying is off")
    if rate is None:
        return Check("upload for others", Verdict.OK, "a quarter of the line, where this node can be dialled; --relay-rate sets it")
    return Check("upload for others", Verdict.OK, "signalling only" if not rate else f"at most {quantity(rate, 'B')}/s (--relay-rate)")


def clock(offsets_s: Sequence[float | None]) -> Check:
    """The peers' clocks minus ours; the median decides."""
    known = [offset for offset in offsets_s if offset is not None]
    if not known:
        return Check("clock", Verdict.SKIPPED, "no peer has said its time")
    median = statistics.median(known)
    behind = "behind" if median > 0 else "ahead of"
    found = f"{abs(median):.2f} s {behind} the median of {len(known)} peer(s)"
    fix = "set this machine's clock (timedatectl set-ntp true)"
    if abs(median) <= CLOCK_WARN_S:
        return Check("clock", Verdict.OK, found)
    if len(known) < CLOCK_PEERS:
        return Check("clock", Verdict.WARNING, f"{found}: too few to say whose clock is wrong", fix)
    return Check("clock", Verdict.BAD if abs(median) >= CLOCK_BAD_S else Verdict.WARNING, found, fix)


def seeds(seen: Sequence[SeedSeen], peers: int) -> list[Check]:
    """A line each.  One that fails is bad only when nobody else is there."""
    alone = not peers and all(seed.state != "connected" for seed in seen)
    return [_seed(seed, alone) for seed in seen] or [_no_seeds(peers)]


def _no_seeds(peers: int) -> Check:
    if peers:
        return Check("seed", Verdict.SKIPPED, "no list was read, but peers are connected")
    return Check("seed", Verdict.BAD, "the seed list has no entry that could be tried", "ask the owner of the run for the newest list")


def _seed(seed: SeedSeen, alone: bool) -> Check:
    name = f"seed {seed.entry}"
    match seed.state:
        case "connected":
            rtt = "" if seed.rtt_s is None else f", round trip {seed.rtt_s * 1000:.3g} ms"
            return Check(name, Verdict.OK, f"connected{f' to {short_id(seed.peer_id)}' if seed.peer_id else ''}{rtt}")
        case "released":
            return Check(name, Verdict.OK, "not needed now: enough peers are connected")
        case "self":
            return Check(name, Verdict.SKIPPED, "this node itself")
    fix = "is the address right, does this network let connections out, and is the seed running? Its owner knows"
    found = f"{seed.state}: {seed.reason}" if seed.reason else f"{seed.state}: no answer yet"
    return Check(name, Verdict.BAD if alone else Verdict.WARNING, found, fix)
