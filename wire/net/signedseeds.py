"""Signed seed lists: how the owner of a run moves its seeds without writing to every contributor.

A contributor's file names the seeds of the day he joined.  When they move, he is out (FIND-6) unless somebody he trusts can tell
him the new ones: the owner of the run, whose key he knows from the manifest.  So the owner may sign a list (`plw/seeds/1`, the
plain text of a list as payload, for one run, at most 90 days), put it on any seed, and every node asks for the newest at each
contact with a seed.  What goes wrong, and what holds against it:

* A seed hands out a list of its own: only the owner's signature counts.
* An old list comes back after a newer one: only a greater number is taken (`Latest`), and what is kept on disk is newer than
  what was in force the last time.
* Two lists under one number: an equivocation, and that owner's lists are no longer believed by this node (wire/latest.py).
* A list that empties the swarm: it adds to what the operator wrote himself, and never takes that away.

A seed for all runs knows no owner.  It serves the lists that its operator gave it, one a run, and takes none from the network.

Source: the project's wire specification, sections "Signed statements" and "Discovery".
"""

from __future__ import annotations

from dataclasses import dataclass

from wire.envelope import BadEnvelope, Latest, Statement, WrongSigner, open_envelope, seal
from wire.errors import LocalProtocolError
from wire.identity import Identity, PeerId
from wire.limits import DEFAULT_LIMITS, Limits
from wire.net.seedentries import SeedEntry, SeedListError, parse_seed_list
from wire.statements import DOMAINS, SEEDS, Malformed

ENVELOPE_FIRST_BYTE = 0x97  # msgpack: an array of seven; no UTF-8 text begins so


@dataclass(frozen=True, slots=True)
class SignedSeeds:
    """A list that was verified and read."""

    statement: Statement
    entries: tuple[SeedEntry, ...]


def seal_seed_list(
    identity: Identity, text: str, *, run: bytes, seq: int, now_unix: float, life_s: int | None = None, limits: Limits = DEFAULT_LIMITS
) -> bytes:
    """The signed list of a run, valid for `life_s` seconds from now (None: as long as may be, 90 days).

    Raises `SeedListError` for a text that is no list, LocalProtocolError for one that is too large: nothing is signed that a
    node would refuse.
    """
    parse_seed_list(text, "seed list", limits)
    longest = DOMAINS[SEEDS].life_s
    assert longest is not None
    life_s = longest if life_s is None else min(life_s, longest)
    data = seal(identity, SEEDS, text.encode(), run=run, seq=seq, not_after=int(now_unix) + life_s)
    if len(data) > limits.seed_list_max_bytes:
        raise LocalProtocolError(f"a signed seed list of {len(data)} bytes, at most {limits.seed_list_max_bytes}: leave out comments")
    return data


def open_seed_list(
    data: bytes, *, owner: PeerId | None, run: bytes | None, now_unix: float, limits: Limits = DEFAULT_LIMITS
) -> SignedSeeds:
    """Verify a signed list: by `owner`, for `run`; None accepts any, for lists from the operator's own hand.

    Raises BadEnvelope: as `open_envelope`, WrongSigner, Malformed for a payload that is no list.
    """
    if len(data) > limits.seed_list_max_bytes:
        raise Malformed(f"a signed seed list of {len(data)} bytes, at most {limits.seed_list_max_bytes}")
    statement = open_envelope(data, SEEDS, now_unix=now_unix, run=run, limits=limits)
    if owner is not None and statement.signer != owner:
        raise WrongSigner(f"a seed list signed by {statement.signer.short}, not by the run's owner {owner.short}")
    try:
        entries = parse_seed_list(statement.payload.decode(), f"signed list {statement.seq}", limits)
    except (UnicodeDecodeError, SeedListError) as error:
        raise Malformed(f"{SEEDS}: {error}") from None
    return SignedSeeds(statement, entries)


class SignedLists:
    """The newest list of each run.  `owner` and `run`: whose list this node follows; None for a seed of all runs."""

    def __init__(self, owner: PeerId | None = None, run: bytes | None = None, limits: Limits = DEFAULT_LIMITS) -> None:
        self.owner = owner
        self.run = run
        self._limits = limits
        self._latest = Latest(limits.seeds_max)
        self._newest: dict[bytes, SignedSeeds] = {}

    @property
    def entries(self) -> tuple[SeedEntry, ...]:
        """Of the lists in force here: our own run's, or all that the operator of a seed gave."""
        return tuple(entry for run, found in self._newest.items() if self.run in (None, run) for entry in found.entries)

    def take(self, data: bytes, now_unix: float, *, own_hand: bool = False) -> SignedSeeds | None:
        """Keep a list if it is newer; None if one as new is known.  Raises BadEnvelope.

        `own_hand`: it comes from the operator's disk.  From the network only the owner's counts, so without one, none.
        """
        if not own_hand and (self.owner is None or self.run is None):
            return None
        found = open_seed_list(data, owner=self.owner, run=self.run, now_unix=now_unix, limits=self._limits)
        statement = found.statement
        known = self._newest.get(statement.run)
        if known is not None and known.statement.signer != statement.signer and statement.seq <= known.statement.seq:
            return None
        if not self._latest.accept(statement, SEEDS):
            return None
        if known is None and len(self._newest) >= self._limits.seeds_max:
            raise BadEnvelope(f"signed seed lists of more than {self._limits.seeds_max} runs")
        self._newest[statement.run] = found
        return found

    def newest(self, run: bytes | None) -> SignedSeeds | None:
        return None if run is None else self._newest.get(run)
