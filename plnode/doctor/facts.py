"""What a doctor's visit finds out, before anybody judges it: plain values, so that every verdict can be tested from a table.

None always means "could not be found out", never "none": a check then says so instead of guessing.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Device", "Disk", "Line", "Machine", "Network", "OverLanes", "PeerSeen", "SeedSeen", "Versions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Of the programs, and whether this installation has what the manifest names."""

    python: tuple[int, int, int]
    torch: tuple[int, int]
    torch_text: str
    protocol: int
    manifest_protocol: int
    lacking: str
    """What of the manifest this installation does not have (corpus, tokenizer), in words; "" for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Of the data folder, or of the nearest folder above it that exists."""

    folder: str
    exists: bool
    refused: str
    """Why nothing can be written there; "" if it can."""
    free_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where the stage would compute."""

    kind: str
    """"cpu" or "cuda"."""
    threads: int
    cores: int
    name: str
    """Of the GPU; "" without."""
    free_bytes: int | None
    """Of the GPU's memory."""
    lacking: str
    """Why a GPU cannot be used; "" if it can or none is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This machine, without the network."""

    versions: Versions
    disk: Disk
    device: Device
    allowed_bytes: int | None
    """The setting `memory`."""
    available_bytes: int
    """What a node that was told nothing would take for its stage."""
    limit_bytes: int
    """The machine's memory, or what a container's limit leaves for a stage if that is lower."""
    descriptors: int
    connections_most: int
    """Inbound connections that a node takes when nothing limits it."""
    bbr: str | None
    """"" if bbr can be chosen, else why not; None where the system has no choice to offer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedSeen:
    """One entry of the seed list.  `state`: connected, failed, dialling, released, self."""

    entry: str
    state: str
    reason: str
    peer_id: str | None
    rtt_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSeen:
    """One connected peer.  `clock_offset_s`: its wall clock minus ours."""

    peer_id: str
    rtt_s: float | None
    clock_offset_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How this machine stands in the network."""

    running: bool
    """Told by the node that runs on the data folder, not tried out."""
    held_stage: int | None
    """What that node holds."""
    scope: str
    """internet, lan or host."""
    bound: tuple[str, ...]
    """Where it listens, with real ports."""
    not_bound: str
    """Why it does not; "" if it does."""
    fixed_port: bool
    """Whether the settings name a port: one that changes at each start cannot be opened in a router."""
    access: str
    """direct, relayed, unreachable or unknown."""
    access_reason: str
    nat: str
    """public, nat, nat-symmetric, outbound-only or unknown; "" if a running node was asked, which does not tell."""
    seeds: tuple[SeedSeen, ...]
    peers: tuple[PeerSeen, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverLanes:
    """The rates over so many lanes at once.  Bytes a second; None if too little came to say, or it was not measured."""

    lanes: int
    up_bytes_per_s: float | None
    down_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The line to one member of the run, with the number of lanes that is best.  Bytes a second; None if too little came to say."""

    peer_id: str
    path: str
    congestion: str
    """Congestion control; "" if it is not known."""
    lanes: int
    """The best number of bulk connections beside the control connection; 0: that one carried everything."""
    rtt_s: float | None
    up_bytes_per_s: float | None
    down_bytes_per_s: float | None
    refused: str
    """Why it was not measured; "" if it was."""
    over: tuple[OverLanes, ...] = ()
    """All that was measured, from one lane on."""
    ended: str = ""
    """Why not over more; "" if over all that there are to be, or `full` is why."""
    full: bool = False
    """Over more lanes it was not measured, because the line was full already."""
    missing: int = 0
    """How many of the lanes that there were to be could not be had."""
    one_only: bool = False
    """The peer measures over one lane and has more."""
