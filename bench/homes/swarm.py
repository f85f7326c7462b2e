"""A run whose nodes are `plnode` processes on the hosts of a lab, through the commands that a person types.

Every node listens on the same port, one that the routers of the kinds `shift` and `full` treat, and has a folder of its own.  The
seeds stand in the lists of all nodes from the start, also those that are started later or never.  A seed belongs to the run, since
only such a one relays for its members.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trio

from bench.children import Child, Children, python
from bench.lab import Lab

__all__ = ["PORT", "Swarm", "new_run"]

PORT = 20001


async def new_run(root: Path, *settings: str) -> Path:
    """Make a run with these settings ("stages.count=2") in a folder of `root`; its signed file."""
    chosen = [word for setting in settings for word in ("--set", setting)]
    await trio.run_process(python("plnode", "run", "init", "--out", str(root / "run"), *chosen, "--json"), capture_stdout=True)
    return root / "run" / "run.signed"


@dataclass(frozen=True, slots=True)
class Swarm:
    """`seeds`: their hosts.  `root`: where the nodes' folders are; one name, the host's, in one swarm."""

    lab: Lab
    children: Children
    root: Path
    signed: Path
    seeds: tuple[str, ...] = ("p1",)

    async def seed(self, host: str, *flags: str) -> Child:
        """Start a seed on a public host, not heard yet."""
        own = ("--data", str(self.root / f"seed-{host}"), "--announce", self._entry(host))
        return await self._start(f"seed on {host}", host, "seed", *own, *flags)

    async def node(self, host: str, *flags: str) -> Child:
        """Start a node that takes part, not heard yet."""
        own = ("--data", str(self.root / host), "--seeds", ",".join(map(self._entry, self.seeds)), "--name", host)
        return await self._start(host, host, "join", *own, *flags)

    async def _start(self, name: str, host: str, command: str, *own: str) -> Child:
        every = ("--manifest", str(self.signed), "--listen", f"0.0.0.0:{PORT}", "--json", "--exit-with-stdin")
        return await self.children.start(name, self.lab.exec(host, *python("plnode", command, *own, *every)))

    def _entry(self, host: str) -> str:
        return f"{self.lab.addr(host)}:{PORT}"
