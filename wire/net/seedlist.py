"""Seed lists: the one thing a contributor must have to find a swarm.

Plain form: one entry a line, `host:port`, `ID@host:port`, or a long address (`/dns/seed.example/tcp/4001/p2p/ID`); `#` begins
a comment; blank lines count for nothing.  An entry with an id is pinned: whoever answers there must prove that id.  Without
one, the seed is whoever the handshake proves; that is safe because a seed only introduces peers, and what it hands out
is signed by others.

A mistake in the file is named with file and line, because the person who made it sees only "no peers" otherwise.  All mistakes
are collected and reported together.  A list that was changed while the node runs is read again; if the new text is wrong, the
old entries stay in force.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wire.address import Address
from wire.errors import Code, LocalProtocolError, WireError, printable
from wire.limits import DEFAULT_LIMITS, Limits

# 64 entries of at most 256 bytes with as much comment again; a larger file is not a seed list.
FILE_MAX_BYTES = 64 * 1024


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


class SeedList:
    """The entries in force, and the file they came from if there is one."""

    def __init__(self, entries: Sequence[SeedEntry], *, path: Path | None = None, content: bytes = b"") -> None:
        self.entries = tuple(entries)
        self.path = path
        self._content = content

    @classmethod
    def of(cls, *texts: str, limits: Limits = DEFAULT_LIMITS) -> SeedList:
        """From single entries, e.g. command line flags."""
        return cls(parse_seed_list("\n".join(texts), "seed", limits))

    @classmethod
    def read(cls, path: Path, limits: Limits = DEFAULT_LIMITS) -> SeedList:
        """From a plain file.  Raises `SeedListError`, also for a file that cannot be read."""
        content = _content(path)
        return cls(parse_seed_list(_text(content, path), str(path), limits), path=path, content=content)

    def reread(self, limits: Limits = DEFAULT_LIMITS) -> bool:
        """Read the file again; True if the entries changed.  Raises `SeedListError` once per bad text and keeps the entries."""
        if self.path is None:
            return False
        content = _content(self.path)
        if content == self._content:
            return False
        self._content = content
        entries = parse_seed_list(_text(content, self.path), str(self.path), limits)
        changed = set(entries) != set(self.entries)
        self.entries = entries
        return changed


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_MAX_BYTES + 1)
    except OSError as error:
        raise SeedListError([f"{path}: {error.strerror}"]) from error
    if len(content) > FILE_MAX_BYTES:
        raise SeedListError([f"{path}: more than {FILE_MAX_BYTES} bytes: not a seed list"])
    return content


def _text(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise SeedListError([f"{path}:{line}: not UTF-8 text: not a seed list"]) from error
