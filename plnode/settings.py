"""What one contributor chooses for one node: name, folder, addresses, device.  Nothing here may change what the run computes.

Four places can say the same thing, and the nearer one wins: a flag, then the environment (`PLNODE_*`, which is how a
container is told), then the settings file (TOML), then the default.  The same schema reads all of them, so a wrong value is
reported in the same words with the place it came from.  A `PLNODE_*` variable that is no setting is refused, because a
misspelt one would otherwise be a node that silently listens, or computes, somewhere else than its owner believes.
"""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from plnode.exits import BadInput
from plnode.typed_toml import Bounds, Doc, KeyProblem, OneOf, Refusal, Text, read_table, schema
from wire.address import Address, Advertised, Scope
from wire.identity import PeerId

__all__ = ["ENVIRONMENT_PREFIX", "Settings", "SettingsError", "load_settings", "parse_size"]

ENVIRONMENT_PREFIX = "PLNODE_"
STOP_GRACE_S = 10  # of `docker stop`
_FILE_VARIABLE = "PLNODE_SETTINGS"
_ENVIRONMENT = "the environment"


class SettingsError(KeyProblem):
    """A setting is unknown, of the wrong type or out of bounds; the message names the place that set it."""

    source = "settings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one node, checked."""

    name: str
    """Shown to other people; not an identity."""
    data_dir: Path
    """Holds the key, the peer book, snapshots and status.sock.  One process at a time."""
    listen: tuple[Address, ...]
    seeds: tuple[str, ...]
    """Where seeds stand: entries, files (absolute) and URLs; empty only for a seed."""
    owner: PeerId | None
    """Whose signed seed lists a seed follows; a node that joins has it from the manifest."""
    scope: Scope
    """How far this node's addresses are good for: internet, lan, or host (one machine)."""
    announce: tuple[Address, ...]
    """Addresses to tell others as this node's, beside those that others have reached: for a router that forwards another port."""
    relay: bool
    """Whether to forward for others that cannot be dialled, where this node can be."""
    relay_rate: int | None
    """Bytes per second for that, 0 for signalling only; None: a quarter of what the line has been seen to send."""
    portmap: bool
    """Whether to ask the router (PCP, NAT-PMP, UPnP) to forward this node's ports.  Off unless set: it opens the owner's network."""
    device: str
    """"cpu" or "cuda"."""
    threads: int
    """Threads of the device's computation."""
    memory_bytes: int | None
    """What the stage may use; None: what the machine has free."""
    stop_grace_s: int
    """How long whoever stops this node waits before killing it; the way out fits into that."""
    log_level: str

    @property
    def status_socket(self) -> Path:
        return self.data_dir / "status.sock"

    @property
    def key_file(self) -> Path:
        return self.data_dir / "identity.key"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """The keys as people write them, in a file, a variable or a flag; every one may be left out."""

    name: Annotated[str | None, Text(1, 32), Doc("Name shown to others.")] = None
    data: Annotated[str | None, Text(1, 4096), Doc("Data folder.")] = None
    listen: Annotated[str | None, Text(1, 1024), Doc("Addresses to listen on, separated by commas.")] = None
    seeds: Annotated[str | None, Text(1, 4096), Doc("Seeds: entries, files and URLs, separated by commas.")] = None
    owner: Annotated[str | None, Text(52, 52), Doc("Id of the run's owner, whose signed seed lists count.")] = None
    scope: Annotated[str | None, OneOf(("internet", "lan", "host")), Doc("Reach of this node's addresses.")] = None
    announce: Annotated[str | None, Text(1, 1024), Doc("Addresses to tell others, separated by commas.")] = None
    relay: Annotated[str | None, OneOf(("on", "off")), Doc("Forward for nodes that cannot be dialled.")] = None
    relay_rate: Annotated[str | None, Text(1, 32), Doc('Bytes a second for that, e.g. "2MB"; "0B": signalling only.')] = None
    portmap: Annotated[str | None, OneOf(("off", "on")), Doc("Ask the router to forward this node's ports.")] = None
    device: Annotated[str | None, OneOf(("cpu", "cuda")), Doc("Where the stage computes.")] = None
    threads: Annotated[int | None, Bounds(1, 1024), Doc("Threads of the device.")] = None
    memory: Annotated[str | None, Text(1, 32), Doc('Memory for the stage, e.g. "6GiB".')] = None
    stop_grace: Annotated[int | None, Bounds(2, 600), Doc("Seconds that whoever stops the node waits: docker stop's 10.")] = None
    log_level: Annotated[str | None, OneOf(("debug", "info", "warning", "error")), Doc("What stderr shows.")] = None


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str], *, file: Path | None = None, default_listen: str = "0.0.0.0:0"
) -> Settings:
    """Merges flags, environment, file and defaults.  `flags` has the keys of the file; None means "not given".

    Raises `SettingsError` with the key and the place, `BadInput` for a file that cannot be read.
    """
    if file is None and _FILE_VARIABLE in environment:
        file = Path(environment[_FILE_VARIABLE])
    places = [
        ("", {k: v for k, v in flags.items() if v is not None}),
        (_ENVIRONMENT, _from_environment(environment)),
        (str(file), _from_file(file) if file else {}),
    ]
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for place, table in places:
        keys = read_table(table, _Keys, _refuse_at(place))
        for key in table:
            if key not in merged:
                merged[key] = getattr(keys, key)
                origin[key] = place
    return _settings(merged, origin, default_listen)


def parse_size(text: str) -> int | None:
    """Bytes of "6GiB", "800MB", "1024"; None if it is no size."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
    figure = text.strip().rstrip("BKMGIbkmgi ")
    unit = units.get(text.strip()[len(figure) :].strip().upper())
    try:
        value = float(figure)
    except ValueError:
        return None
    return int(value * unit) if unit is not None and 0 < value < 1e15 else None


def _settings(keys: dict[str, Any], origin: dict[str, str], default_listen: str) -> Settings:
    def problem(key: str, expected: str, remedy: str = "") -> SettingsError:
        return SettingsError(_named(origin.get(key, ""), key), expected, f'"{keys.get(key)}"', remedy)

    if "data" not in keys:
        raise SettingsError("data", "a folder for this node's key and snapshots", "nothing", "Give --data DIR (or PLNODE_DATA).")
    scope = Scope(keys.get("scope", "internet"))
    places: dict[str, list[Address]] = {"listen": [], "announce": []}
    for key, default in (("listen", default_listen), ("announce", "")):
        for text in str(keys.get(key, default)).split(","):
            if not text.strip() and key == "announce":
                continue
            try:
                places[key].append(Address.parse(text.strip()))
                if key == "announce":
                    Advertised(places[key][-1], scope)
            except ValueError as bad:
                raise problem(key, "host:port or /ip4/A/tcp/PORT, separated by commas", str(bad)) from None
    relay_rate = None
    if "relay_rate" in keys:
        text = str(keys["relay_rate"])
        relay_rate = 0 if text.strip().rstrip("Bb ") == "0" else parse_size(text)
        if relay_rate is None:
            raise problem("relay_rate", 'bytes a second such as "2MB", or "0B"')
    owner = None
    if "owner" in keys:
        try:
            owner = PeerId.parse(str(keys["owner"]))
        except ValueError as bad:
            raise problem("owner", "the id of the run's owner, as `plnode run show` prints it", str(bad)) from None
    memory = None
    if "memory" in keys and (memory := parse_size(keys["memory"])) is None:
        raise problem("memory", 'a size such as "6GiB" or "800MB"')
    return Settings(
        name=keys.get("name", platform.node()[:32] or "node"),
        data_dir=Path(keys["data"]).absolute(),
        listen=tuple(places["listen"]),
        announce=tuple(places["announce"]),
        relay=keys.get("relay", "on") == "on",
        relay_rate=relay_rate,
        portmap=keys.get("portmap", "off") == "on",
        seeds=tuple(_place(word.strip()) for word in str(keys.get("seeds", "")).split(",") if word.strip()),
        owner=owner,
        scope=scope,
        device=keys.get("device", "cpu"),
        threads=keys.get("threads", 1),
        memory_bytes=memory,
        stop_grace_s=keys.get("stop_grace", STOP_GRACE_S),
        log_level=keys.get("log_level", "info"),
    )


def _place(word: str) -> str:
    """A place of seeds; the path of a file becomes absolute, because the node may be started elsewhere the next time."""
    if word.lower().startswith(("http://", "https://")):
        return word
    try:
        return str(Address.parse(word))
    except ValueError:
        return str(Path(word).absolute())


def _from_file(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as bad:
        raise BadInput(f"cannot read the settings file {file}: {bad.strerror}", "Correct the path or leave it out.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as bad:
        raise BadInput(f"the settings file {file} is not TOML: {bad}", "Correct the line that it names.") from None


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Variables to keys; a whole number is one if the setting wants one."""
    kinds = schema(_Keys)
    table: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == _FILE_VARIABLE:
            continue
        key = variable[len(ENVIRONMENT_PREFIX) :].lower()
        wants_int = key in kinds and kinds[key][0] is int
        table[key] = int(text) if wants_int and text.isascii() and text.isdigit() else text
    return table


def _refuse_at(place: str) -> Refusal:
    """Refusals that say where the value came from."""
    return lambda path, expected, got, remedy: SettingsError(_named(place, path), expected, got, remedy)


def _named(place: str, key: str) -> str:
    return ENVIRONMENT_PREFIX + key.upper() if place == _ENVIRONMENT else f"{place} {key}".strip()
