"""Seed lists: the one thing a contributor must have to find a swarm.

Plain form: one entry a line, `host:port`, `ID@host:port`, or a long address (`/dns/seed.example/tcp/4001/p2p/ID`); `#` begins
a comment; blank lines count for nothing.  An entry with an id is pinned: whoever answers there must prove that id.  Without
one, the seed is whoever the handshake proves; that is safe because a seed only introduces peers, and what it hands out
is signed by others.

A mistake in the file is named with file and line, because the person who made it sees only "no peers" otherwise.  All mistakes
are collected and reported together.  Where lists come from and how they are kept fresh is `seedlist.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from wire.address import Address
from wire.errors import Code, LocalProtocolError, WireError, printable
from wire.limits import DEFAULT_LIMITS, Limits


@dataclass(frozen=True, slots=True)
class SeedEntry:
    """One seed.  Two entries with the same address are the same seed, wherever they stand."""

    address: Address
    where: str = field(default="", compare=False)  # "seeds.txt:3", for messages

    def __str__(self) -> str:
        return str(self.address)


class SeedListError(LocalProtocolError):
    """A seed list that cannot be used.  `problems` holds one sentence a mistake, each beginning with file:line."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems[0], code=Code.PROTOCOL)

    def __str__(self) -> str:
        return "\n".join(self.problems)


def parse_seed_list(text: str, source: str = "seed list", limits: Limits = DEFAULT_LIMITS) -> tuple[SeedEntry, ...]:
    """The entries of a plain list in order, doubles removed.  Raises `SeedListError` naming source and line of every mistake."""
    entries: dict[SeedEntry, None] = {}
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        where = f"{source}:{number}"
        try:
            address = Address.parse(content)
        except (WireError, ValueError) as error:
            why = error.detail if isinstance(error, WireError) else str(error)
            problems.append(f"{where}: {printable(content)!r} is not a seed: {why}; write host:port or ID@host:port")
            continue
        if address.port == 0:
            problems.append(f"{where}: {printable(content)!r} has port 0, which nobody can dial")
            continue
        entries.setdefault(SeedEntry(address, where))
    if not problems and not entries:
        problems.append(f"{source}: no seed in it; write one host:port or ID@host:port a line")
    if len(entries) > limits.seeds_max:
        problems.append(f"{source}: {len(entries)} seeds, at most {limits.seeds_max} are used")
    if problems:
        raise SeedListError(problems)
    return tuple(entries)
