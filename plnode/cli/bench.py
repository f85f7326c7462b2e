"""`plnode bench`: how fast the line to another member is, before or while a run depends on it.

A measurement is a connection of its own with an identity of its own, so that it can be made beside a node that runs: two
processes with one identity would be taken for a mistake (DUPLICATE_IDENTITY) by everybody they meet.  With --data the folder's
identity is used, which a running node holds locked.

The connection is timed in two parts, because they fail for different reasons: the connect of TCP is one round trip and shows the
distance, the handshake is three more and the other side's computation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import trio

from plnode.cli.options import checked_seeds
from plnode.cli.service import run_until_signal
from plnode.exits import BadInput, ExitCode, Outcome
from plnode.manifest import SignedManifest
from plnode.settings import load_settings
from wire.address import Address, Scope
from wire.errors import Code, WireError
from wire.identity import Identity, KeyFileError, PeerId, lock_data_folder
from wire.net import Net, Peer, SeedList, TcpTransport, open_net
from wire.net.perf import Measured, Progress, Rate, measure
from wire.net.transport import TcpPipe

__all__ = ["command", "table"]

FIND_S = 20.0  # seeds answer within seconds; peer exchange has asked four times by then
CONNECT_S = 15.0
# What a person does about a refusal.  Others: the error's own advice.
_REMEDIES = {
    Code.NOT_MEMBER: "The peer answers only members of its run: give the manifest of that run with --manifest.",
    Code.RUN_MISMATCH: "The peer is in another run: give the manifest of that run with --manifest.",
    Code.PROTOCOL_UNKNOWN: "A seed is not measured, and an older node does not offer it: name a node that trains.",
    Code.REFUSED: "It measures with somebody else: try again after that time.",
    Code.RATE_LIMITED: "One measurement a peer and minute: try again after that time.",
    Code.SELF: "Name another node: this address or id is our own.",
    Code.PEER_MISMATCH: "Another node answers there: ask for the right id, or leave the id out.",
}


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the command says.  Milliseconds and Mbit/s are made where it is shown."""

    peer_id: str
    path: str
    congestion: str
    connect_s: float | None  # of TCP; None if the peer dialled us
    handshake_s: float | None
    measured: Measured


class _TimedTcp(TcpTransport):
    """TCP that remembers how long its last connect took."""

    connect_s: float | None = None

    async def dial(self, address: Address, *, local_port: int = 0) -> TcpPipe:
        began = trio.current_time()
        pipe = await super().dial(address, local_port=local_port)
        self.connect_s = trio.current_time() - began
        return pipe


@click.command("bench")
@click.argument("peer")
@click.option("--manifest", "manifest_file", required=True, metavar="FILE", type=Path, help="The signed run file; only members measure.")
@click.option("--seeds", metavar="WHERE", envvar="PLNODE_SEEDS", help="Seeds as for `plnode join`, to find a peer by its id.")
@click.option("--data", metavar="DIR", type=Path, help="Use this folder's identity (default: one for this measurement).")
@click.option("--seconds", type=click.FloatRange(0.1, 15), default=10.0, show_default=True, help="Time for each direction.")
@click.option("--both", is_flag=True, help="Both directions at once instead of one after the other.")
@click.option("--scope", type=click.Choice(["internet", "lan", "host"]), default="internet", help="How far to dial found addresses.")
@click.option("--json", "as_json", is_flag=True, help="The result as one JSON object on stdout.")
def command(
    peer: str, manifest_file: Path, seeds: str | None, data: Path | None, seconds: float, both: bool, scope: str, as_json: bool
) -> int:
    """Measure the line to PEER: connecting, round trip, and the steady rate each way.

    PEER is host:port, ID@host:port, or a peer id, which is found through --seeds. The bytes give way to training on both
    sides, so the rate is what the run leaves over. A node measures with one peer at a time, once a minute.

    \b
    Examples:
      plnode bench 192.0.2.7:4000 --manifest run.signed
      plnode bench PEER_ID --seeds seeds.txt --manifest run.signed --seconds 15
      plnode bench 192.0.2.7:4000 --manifest run.signed --both --json | jq .up_mbit_s
    """
    target = _target(peer)
    if isinstance(target, PeerId) and seeds is None:
        raise BadInput("a peer id says not where the peer is", "Give --seeds, or PEER as host:port.")
    seed_list = None
    if seeds is not None:
        settings = load_settings({"data": ".", "seeds": seeds}, {})
        checked_seeds(settings)
        seed_list = SeedList.gather(settings.seeds)
    signed = SignedManifest.load(manifest_file)
    reports: list[Report] = []
    show = _live if sys.stderr.isatty() and not as_json else lambda progress: None

    async def program() -> Outcome:
        transport = _TimedTcp()
        async with open_net(identity, run=signed.run_id, scope=Scope(scope), seeds=seed_list, transport=transport) as net:
            began = trio.current_time()
            met = await _meet(net, target)
            whole_s = trio.current_time() - began
            try:
                measured = await measure(met, seconds=seconds, both_at_once=both, progress=show)
            except WireError as refused:
                raise _told(f"{peer} was reached but not measured", refused) from None
            connect_s = transport.connect_s if isinstance(target, Address) else None
            handshake_s = None if connect_s is None else max(whole_s - connect_s, 0.0)
            reports.append(
                Report(str(met.peer_id), str(met.path), met.stats.congestion or "not known", connect_s, handshake_s, measured)
            )
        return Outcome(ExitCode.OK, "measured")

    with _held(data), _clean_line(show is _live):
        identity = Identity.generate() if data is None else Identity.load_or_create(data / "identity.key")
        code = run_until_signal(program, lambda reason: None)
    for report in reports:
        click.echo(json.dumps(document(report)) if as_json else "\n".join(table(report)))
    return code


def _target(text: str) -> Address | PeerId:
    try:
        return PeerId.parse(text) if ":" not in text and "/" not in text else Address.parse(text)
    except (ValueError, WireError) as bad:
        raise BadInput(f'PEER: "{text}" is no address and no peer id: {bad}', "Give host:port, ID@host:port or a peer id.") from None


@contextmanager
def _held(data: Path | None) -> Iterator[None]:
    """The data folder for us alone.  Raises BadInput if a node runs on it."""
    if data is not None and not data.is_dir():
        raise BadInput(f"there is no folder {data}", "Leave --data out to measure with an identity of its own.")
    lock = nullcontext() if data is None else lock_data_folder(data)
    try:
        lock.__enter__()
    except KeyFileError as busy:
        remedy = "A node runs there. Leave --data out (the measurement gets an identity of its own), or stop the node first."
        raise BadInput(str(busy), remedy if busy.code is Code.DUPLICATE_IDENTITY else "") from None
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


async def _meet(net: Net, target: Address | PeerId) -> Peer:
    """Connected, or BadInput with what to do."""
    try:
        if isinstance(target, Address):
            return await net.dial(target, deadline_s=CONNECT_S)
        with trio.move_on_after(FIND_S):
            # Records come with seeds and peer exchange, to which nobody gives an event; the wait is a person's.
            while net.peer(target) is None and all(record.peer_id != target for record in net.known()):  # noqa: ASYNC110
                await trio.sleep(0.1)
            return await net.connect(target, deadline_s=CONNECT_S)
    except WireError as failed:
        remedy = "Is the node running, is the address right, and does its router or firewall let this port through?"
        # A refused connect has the code of a busy peer, so only what says more than the dial's own causes is added.
        told = failed.code in (Code.RUN_MISMATCH, Code.SELF, Code.PEER_MISMATCH)
        raise BadInput(str(failed), _REMEDIES[failed.code] if told else remedy) from None
    states = ", ".join(f"{entry}: {state.status}" for entry, state in net.seed_states.items()) or "no seed"
    raise BadInput(f"nobody knows {target} ({states})", "Is it in this run? Ask for its address and give host:port.")


def _told(what: str, error: WireError, remedy: str = "") -> BadInput:
    return BadInput(f"{what}: {error}", _REMEDIES.get(error.code, remedy))


# -- what is shown


def _mbit(rate: float | None) -> float | None:
    return None if rate is None else round(rate * 8 / 1e6, 3)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def document(report: Report) -> dict[str, Any]:
    """The result as JSON values: milliseconds, Mbit/s, and bytes by second."""
    m = report.measured
    return {
        "peer_id": report.peer_id,
        "path": report.path,
        "congestion": report.congestion,
        "connect_ms": _ms(report.connect_s),
        "handshake_ms": _ms(report.handshake_s),
        "rtt_ms": _ms(m.rtt_idle_s),
        "rtt_up_ms": _ms(m.rtt_up_s),
        "rtt_down_ms": _ms(m.rtt_down_s),
        "up_mbit_s": _mbit(m.up.steady_bytes_per_s),
        "down_mbit_s": _mbit(m.down.steady_bytes_per_s),
        "both_at_once": m.both_at_once,
        "up": asdict(m.up),
        "down": asdict(m.down),
    }


def table(report: Report) -> list[str]:
    """The result for a person, at most 80 columns but for the id."""
    m = report.measured
    rows = [
        ("peer", report.peer_id),
        ("path", f"{report.path}, congestion control {report.congestion}"),
        ("connect + handshake", f"{_figure(_ms(report.connect_s), 'ms')} + {_figure(_ms(report.handshake_s), 'ms')}"),
        ("round trip", f"{_figure(_ms(m.rtt_idle_s), 'ms')} idle"),
        ("  under load", f"{_figure(_ms(m.rtt_up_s), 'ms')} up, {_figure(_ms(m.rtt_down_s), 'ms')} down"),
        ("first byte", f"{_figure(_ms(m.up.first_byte_s), 'ms')} up, {_figure(_ms(m.down.first_byte_s), 'ms')} down"),
        ("steady rate up", _rate(m.up)),
        ("steady rate down", _rate(m.down)),
    ]
    return [f"{name:<20} {text}" for name, text in rows] + ["", _meaning(m)]


def _figure(value: float | None, unit: str) -> str:
    return "not known" if value is None else f"{value:.4g} {unit}"


def _rate(rate: Rate) -> str:
    return f"{_figure(_mbit(rate.steady_bytes_per_s), 'Mbit/s')} (over {rate.span_s:.1f} s)"


def _meaning(m: Measured) -> str:
    """What a contributor makes of it: a boundary tensor of 1 MiB is what a stage sends on for some thousand tokens."""
    rates = [r for r in (m.up.steady_bytes_per_s, m.down.steady_bytes_per_s) if r]
    if len(rates) < 2:
        return "Too little came through to say what this line can carry."
    each_s = (1 << 20) / min(rates) + m.rtt_idle_s / 2
    loaded = max(m.rtt_up_s or 0.0, m.rtt_down_s or 0.0)
    slow = "; under load it answers much later: another use of the line will be felt" if loaded > 4 * m.rtt_idle_s + 0.05 else ""
    return f"A megabyte of activations takes about {each_s * 1000:.3g} ms over the slower direction{slow}."


def _live(progress: Progress) -> None:
    left = max(progress.total_s - progress.elapsed_s, 0.0)
    up, down = (value * 8 / 1e6 for value in (progress.up_bytes_per_s, progress.down_bytes_per_s))
    sys.stderr.write(f"\r\x1b[K{progress.what:<4}  up {up:.1f}  down {down:.1f} Mbit/s  {left:.0f} s to go")
    sys.stderr.flush()


@contextmanager
def _clean_line(live: bool) -> Iterator[None]:
    """Takes the progress line away, whatever comes after it."""
    try:
        yield
    finally:
        if live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
