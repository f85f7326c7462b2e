"""Nodes as real processes, through the commands that a person types; they are followed by their JSON lines."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio


@dataclass(slots=True)
class Process:
    """One `plnode` process.  `events` are its JSON lines so far."""

    name: str
    folder: Path
    process: trio.Process
    events: list[dict[str, Any]] = field(default_factory=list)
    changed: trio.Event = field(default_factory=trio.Event)

    async def read(self) -> None:
        assert self.process.stdout is not None
        rest = b""
        async with self.process.stdout:
            async for part in self.process.stdout:
                *lines, rest = (rest + part).split(b"\n")
                self.events.extend(map(json.loads, lines))
                self._tell()
        await self.process.wait()
        self._tell()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def wait_for(self, kind: str, after: int = 0, **fields: object) -> dict[str, Any]:
        """The first event of this kind with these fields, from number `after` on.  Fails if the process ends before."""
        seen = after
        while True:
            changed = self.changed
            for event in self.events[seen:]:
                if event["kind"] == kind and all(event[k] == v for k, v in fields.items()):
                    return event
            seen = len(self.events)
            assert self.process.returncode is None, f"{self.name} ended with {self.process.returncode} before {kind} {fields}"
            await changed.wait()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    async def ended(self) -> int:
        """Wait for the end of the process; its exit code."""
        return await self.process.wait()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


async def start(nursery: trio.Nursery, name: str, folder: Path, *arguments: str) -> Process:
    """`plnode ARGUMENTS --data FOLDER --json`, listening on a free port of loopback."""
    command = [sys.executable, "-m", "plnode", *arguments, "--data", str(folder), "--listen", "127.0.0.1:0", "--scope", "host", "--json"]
    with (folder.parent / f"{name}.log").open("ab") as log:
        process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, stderr=log)
    started = Process(name, folder, process)
    nursery.start_soon(started.read)
    return started
