"""Where a node's seeds stand: typed entries, files, URLs and the run owner's signed list, together one list.

A person names *places*, each in one word: an entry itself (`host:port`, `ID@host:port`, `/dns/...`), a file, or a URL
(`http://`, `https://`).  A file or URL holds a plain list (`seedentries.py`) or a signed one (`signedseeds.py`); the first byte
tells which.  What goes wrong: a list was wrong for a minute while somebody saved it, a web server answers with its error page, a
new list is longer than 64.  A place whose content cannot be used is complained of once a content, and its old entries stay in
force.  A file must be in order when the node starts, because the person is there to mend it; a URL that does not answer then is
a seed that does not answer: fetched again for ever.

This file reads files and nothing else; who fetches URLs hands their content in (`put`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wire.address import Address
from wire.envelope import BadEnvelope
from wire.identity import PeerId
from wire.limits import DEFAULT_LIMITS, Limits
from wire.net.seedentries import SeedEntry, SeedListError, parse_seed_list
from wire.net.signedseeds import ENVELOPE_FIRST_BYTE, SignedLists

__all__ = ["SeedEntry", "SeedList", "SeedListError", "is_url"]


@dataclass(slots=True)
class _Place:
    """A file or URL, and what it held the last time."""

    name: str
    content: bytes | None = None
    entries: tuple[SeedEntry, ...] = ()


class SeedList:
    """The entries in force.  `signed`: the lists of the run's owner, also those that come from the network."""

    def __init__(
        self,
        typed: Sequence[SeedEntry] = (),
        *,
        files: Sequence[Path] = (),
        urls: Sequence[str] = (),
        signed: SignedLists | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.signed = signed or SignedLists(limits=limits)
        self._typed = tuple(typed)
        self._files = [_Place(str(path)) for path in files]
        self._urls = {url: _Place(url) for url in urls}
        self._limits = limits

    @classmethod
    def of(cls, *texts: str, limits: Limits = DEFAULT_LIMITS) -> SeedList:
        """From single entries.  Raises `SeedListError`."""
        return cls(parse_seed_list("\n".join(texts), "seed", limits), limits=limits)

    @classmethod
    def read(cls, path: Path, limits: Limits = DEFAULT_LIMITS) -> SeedList:
        """From one file.  Raises `SeedListError`, also for a file that cannot be read."""
        return cls.gather([str(path)], limits=limits)

    @classmethod
    def gather(
        cls, places: Sequence[str], *, owner: PeerId | None = None, run: bytes | None = None, limits: Limits = DEFAULT_LIMITS
    ) -> SeedList:
        """From places as people name them.  `owner`, `run`: whose signed lists count; see `SignedLists`.

        Raises `SeedListError` for a file that cannot be used and for more than 64 entries; URLs are not looked at yet.
        """
        typed, files, urls = [], [], []
        for place in places:
            if is_url(place):
                urls.append(place)
            elif (entry := _entry(place)) is not None:
                typed.append(entry)
            else:
                files.append(Path(place))
        found = cls(typed, files=files, urls=urls, signed=SignedLists(owner, run, limits), limits=limits)
        found.reread()
        if len(found._all()) > limits.seeds_max:
            raise SeedListError([f"{len(found._all())} seeds in all, at most {limits.seeds_max} are used"])
        if not urls and not found.entries:
            raise SeedListError(["no seed was given"])
        return found

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(self._urls)

    @property
    def entries(self) -> tuple[SeedEntry, ...]:
        """At most 64: typed ones, then files, URLs and signed lists in their order; each once."""
        return self._all()[: self._limits.seeds_max]

    def _all(self) -> tuple[SeedEntry, ...]:
        places = [entry for place in (*self._files, *self._urls.values()) for entry in place.entries]
        return tuple(dict.fromkeys([*self._typed, *places, *self.signed.entries]))

    def reread(self) -> bool:
        """Read the files again; True if the entries changed.

        Raises `SeedListError`, once a bad content, after everything else has been read; what was bad keeps its old entries.
        """
        before = set(self.entries)
        problems: list[str] = []
        for place in self._files:
            try:
                self._take(place, _content(Path(place.name), self._limits.seed_fetch_max_bytes))
            except SeedListError as error:
                problems += error.problems
        if problems:
            raise SeedListError(problems)
        return set(self.entries) != before

    def put(self, url: str, content: bytes) -> bool:
        """The content of a URL has come; True if the entries changed.  Raises `SeedListError`, once a bad content."""
        before = set(self.entries)
        self._take(self._urls[url], content)
        return set(self.entries) != before

    def _take(self, place: _Place, content: bytes) -> None:
        if content == place.content:
            return
        place.content = content
        if content[:1] == bytes([ENVELOPE_FIRST_BYTE]):
            try:
                self.signed.take(content, time.time(), own_hand=True)
            except BadEnvelope as error:
                raise SeedListError([f"{place.name}: a signed list that is not believed: {error.detail or error.code.name}"]) from error
            place.entries = ()
        else:
            place.entries = parse_seed_list(_text(content, place.name), place.name, self._limits)


def is_url(place: str) -> bool:
    return place.lower().startswith(("http://", "https://"))


def _entry(place: str) -> SeedEntry | None:
    """The entry that a word is; None for what must be a file."""
    try:
        address = Address.parse(place)
    except ValueError:
        return None
    if address.port == 0:
        raise SeedListError([f"{place}: port 0 is one that nobody can dial"])
    return SeedEntry(address, "typed")


def _content(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise SeedListError([f"{path}: {error.strerror}"]) from error
    if len(content) > most:
        raise SeedListError([f"{path}: more than {most} bytes: not a seed list"])
    return content


def _text(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise SeedListError([f"{name}:{line}: not UTF-8 text: not a seed list"]) from error
