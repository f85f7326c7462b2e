"""One local swarm from the first process to the last: what `plnode demo` does between its flags and its report.

A folder gets the run's files, a seed list and one data folder a node; the seed starts, says its address (readiness is a message,
never a sleep), then all nodes start at once and find each other through it: exactly what a swarm on many machines does.  The
events of all go into a `SwarmView`; a screen looks at it four times a second.

Three things end it early, each with the reasons that the nodes themselves gave: a process that ends before the run does, a swarm
that makes no step for too long, and the person.  Whatever happens, no process is left when `run_swarm` returns.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from plnode.demo.launcher import Exited, Launcher, Said, open_launcher
from plnode.demo.view import SwarmView
from plnode.exits import BadInput, ExitCode
from plnode.manifest import Manifest, sign
from plnode.manifest_text import render
from plnode.observe import events as e
from wire.address import Address
from wire.identity import Identity

__all__ = ["PROGRAM", "DemoFailed", "SwarmFolder", "prepare", "run_swarm"]

PROGRAM: tuple[str, ...] = (sys.executable, "-m", "plnode")
SEED = "seed"
REDRAW_S = 0.25
# After a node said that it is finished it writes its snapshot, tells its neighbours and leaves.
LEAVE_S = 20.0


class DemoFailed(Exception):
    """The swarm did not finish.  `code` is the exit code, the text names what happened and what the nodes said."""

    def __init__(self, code: ExitCode, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmFolder:
    """The files of one local swarm."""

    root: Path
    manifest: Manifest
    names: tuple[str, ...]

    @property
    def signed(self) -> Path:
        return self.root / "run.signed"

    @property
    def seeds(self) -> Path:
        return self.root / "seeds.txt"

    def data(self, name: str) -> Path:
        return self.root / "nodes" / name

    def log(self, name: str) -> Path:
        return self.root / "logs" / f"{name}.log"


def prepare(root: Path, values: Mapping[str, Any]) -> SwarmFolder:
    """Writes the run's files into `root`, which must not hold an earlier run.  Raises `BadInput`, `ManifestError`."""
    toml = render(values).encode()
    manifest = Manifest.parse(toml)
    if (root / "run.toml").exists():
        raise BadInput(f"{root} holds an earlier run", "Give --out another folder, or remove that one.")
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / "run.toml").write_bytes(toml)
        owner = Identity.load_or_create(root / "owner.key")
        (root / "run.signed").write_bytes(sign(owner, toml))
    except OSError as problem:
        raise BadInput(f"cannot write into {root}: {problem.strerror}", "Give --out a folder that can be written.") from None
    count = manifest.stages.count * manifest.stages.replicas
    return SwarmFolder(root=root, manifest=manifest, names=tuple(f"node-{i}" for i in range(count)))


async def run_swarm(
    folder: SwarmFolder,
    show: Callable[[SwarmView, float], None],
    *,
    patience_s: float,
    threads: int = 1,
    program: Sequence[str] = PROGRAM,
) -> SwarmView:
    """Runs the swarm to its end and returns what it told.  Raises `DemoFailed`; a cancel leaves no process.

    `show` is called with the view and the seconds since the beginning, some four times a second.
    """
    view = SwarmView(list(folder.names), steps=folder.manifest.steps, patience_s=patience_s)
    failure: DemoFailed | None = None
    async with open_launcher() as launcher:
        try:
            await _start(launcher, folder, patience_s, threads, program)
            await _watch(launcher, view, show)
        except DemoFailed as problem:
            failure = problem  # raised outside: the launcher's nursery would wrap it into a group
    if failure is not None:
        raise failure
    return view


async def _start(launcher: Launcher, folder: SwarmFolder, patience_s: float, threads: int, program: Sequence[str]) -> None:
    """The seed, then all nodes at once."""
    common = ["--scope", "host", "--listen", "127.0.0.1:0", "--json", "--exit-with-stdin"]
    environment = _environment()
    argv = [*program, "seed", "--name", SEED, "--data", str(folder.data(SEED)), *common]
    await launcher.start(SEED, argv, log=folder.log(SEED), env=environment)
    entry = await _seed_entry(launcher, patience_s)
    await trio.Path(folder.seeds).write_text(f"# the seed of this swarm\n{entry}\n")
    files = ["--seeds", str(folder.seeds), "--manifest", str(folder.signed)]
    for name in folder.names:
        own = ["--name", name, "--data", str(folder.data(name)), "--threads", str(threads)]
        argv = [*program, "join", *own, *files, *common]
        await launcher.start(name, argv, log=folder.log(name), env=environment)


async def _watch(launcher: Launcher, view: SwarmView, show: Callable[[SwarmView, float], None]) -> None:
    """Until all nodes have finished and left.  Raises `DemoFailed` when that cannot happen any more."""
    began = trio.current_time()
    drawn = 0.0
    now = 0.0
    while not _over(view, now):
        message = None
        with trio.move_on_after(REDRAW_S):
            message = await launcher.messages.receive()
        now = trio.current_time() - began
        if message is not None:
            _take(view, message, now)
        if now - drawn >= REDRAW_S:
            show(view, now)
            drawn = now
        _raise_if_hopeless(view, now)
    show(view, now)


async def _seed_entry(launcher: Launcher, patience_s: float) -> str:
    """The seed's line for the seed list, from its own first words."""
    with trio.move_on_after(patience_s):
        while True:
            message = await launcher.messages.receive()
            if isinstance(message, Exited):
                raise _died("the seed", None, message.code, message.last_lines)
            event = _event(message)
            if isinstance(event, e.NodeStarted) and event.addresses:
                address = Address.parse(event.addresses[0])
                return f"{event.peer_id}@{address.host}:{address.port}"
    raise DemoFailed(ExitCode.NO_PROGRESS, f"the seed did not say its address within {patience_s:g} s")


def _take(view: SwarmView, message: Said | Exited, now: float) -> None:
    if message.name == SEED:
        if isinstance(message, Exited):
            raise _died("the seed", None, message.code, message.last_lines)
    elif isinstance(message, Exited):
        view.exited(message.name, message.code, message.last_lines, now)
    elif (event := _event(message)) is not None:
        view.apply(message.name, event, now)


def _event(message: Said) -> e.Event | None:
    """The event in a line of stdout.  Lines that are none (a gap, a library's print) are in the log, nothing more."""
    if message.stream != "stdout":
        return None
    try:
        return e.event_from_json(json.loads(message.text))
    except ValueError:
        return None


def _over(view: SwarmView, now: float) -> bool:
    """All nodes have finished, and have left or had the time to."""
    if not view.all_finished:
        return False
    return all(n.exit_code is not None for n in view.nodes.values()) or now - view.moved_at > LEAVE_S


def _raise_if_hopeless(view: SwarmView, now: float) -> None:
    for node in view.dead():
        assert node.exit_code is not None
        raise _died(node.name, node.stage, node.exit_code, node.last_lines or (node.stopped,))
    if view.is_stuck(now):
        lines = [f"no progress for {now - view.moved_at:.0f} s after {view.done} steps; the nodes say:"]
        lines += [f"  {n.name} (stage {'not known' if n.stage is None else n.stage}): {n.reason}" for n in view.nodes.values()]
        lines += [f"  step {a.step} was given up: {a.reason}" for a in view.aborts[-3:]]
        raise DemoFailed(ExitCode.NO_PROGRESS, "\n".join(lines))


def _died(name: str, stage: int | None, code: int, last_lines: Sequence[str]) -> DemoFailed:
    held = "" if stage is None else f" (stage {stage})"
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    said = "".join(f"\n  | {line}" for line in last_lines if line) or "\n  | (nothing)"
    return DemoFailed(ExitCode.NODE_DIED, f"{name}{held} {how} before the run was finished; its last lines:{said}")


def _environment() -> dict[str, str]:
    """Ours without settings of a node: those are given as flags, and a stray one would reach all of them."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PLNODE_")}
