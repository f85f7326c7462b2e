"""Nodes that train, followed by their events: when the first step was done, which way the stages reach each other, what was lost.

A path may change while steps are done (relayed first, punched half a second later), so steps are counted over the path that is asked
for: from the moment at which the node says that it stands, and anew if it changes to another.  The count ends with a status, which
says the same once more: what is read from it at the end holds for these steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from bench.children import Child
from bench.homes.swarm import Swarm
from tests.net.conftest import START_S

__all__ = ["Followed", "Stood", "Trainers", "open_trainers"]


@dataclass(slots=True)
class Stood:
    """The steps over paths of some kinds ("direct", "punched", "relayed") to the node of another stage."""

    kinds: frozenset[str]
    now: bool = False
    steps: int = 0

    def take(self, event: dict[str, Any], other: str) -> None:
        """The next event of a node; `other` is the peer of the other stage."""
        if event["kind"] == "PathChanged" and event["peer_id"] == other:
            self._is(event["path"].split()[0])
        elif event["kind"] == "NodeStatus":
            self._is(next((line["path"] for line in event["peers"] if line["peer_id"] == other and line["connected"]), "none"))
        elif event["kind"] == "StepDone":
            self.steps += self.now

    def _is(self, kind: str) -> None:
        self.now = kind in self.kinds
        self.steps = self.steps if self.now else 0


@dataclass(slots=True)
class Followed:
    """One node.  `events`: all so far, each with `after`, seconds since its process was started."""

    host: str
    child: Child
    began: float
    events: list[dict[str, Any]] = field(default_factory=list)
    changed: trio.Event = field(default_factory=trio.Event)

    async def read(self) -> None:
        """Until the node says that it stops."""
        while not self.events or self.events[-1]["kind"] != "NodeStopped":
            event = await self.child.hear(START_S)
            self.events.append({**event, "after": time.monotonic() - self.began})
            self.changed.set()
            self.changed = trio.Event()

    async def until(self, found: Callable[[dict[str, Any]], bool], after: int = 0) -> dict[str, Any]:
        """The first event that is found, from number `after` on; `found` is shown each once, in order."""
        while True:
            while after < len(self.events):
                after += 1
                if found(self.events[after - 1]):
                    return self.events[after - 1]
            await self.changed.wait()

    async def wait_for(self, kind: str, after: int = 0, **fields: object) -> dict[str, Any]:
        """The first event of this kind with these fields."""
        return await self.until(lambda event: event["kind"] == kind and all(event[key] == value for key, value in fields.items()), after)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def tale(self) -> str:
        """What it told, of its statuses and steps the last one, for who reads why a test failed."""
        many = ("NodeStatus", "StepDone")
        told = [event for event in self.events if event["kind"] not in many] + [self.of(kind)[-1] for kind in many if self.of(kind)]
        return "\n  ".join([f"{self.host}, {time.monotonic() - self.began:.1f} s after its start:", *map(json.dumps, told)])

    @property
    def peer_id(self) -> str:
        return str(self.of("NodeStarted")[0]["peer_id"])

    async def steps_over(self, kinds: frozenset[str], other: Followed, steps: int, after: int = 0) -> dict[str, Any]:
        """Wait until `steps` were done over such a path to the other node; the status that says so."""
        await other.wait_for("NodeStarted")
        stood = Stood(kinds)

        def done(event: dict[str, Any]) -> bool:
            stood.take(event, other.peer_id)
            return event["kind"] == "NodeStatus" and stood.steps >= steps

        return await self.until(done, after)

    def first_over(self, kinds: frozenset[str], other: Followed) -> float:
        """Seconds after the start at which the path to the other node was first of these kinds."""
        stood = Stood(kinds)
        for event in self.events:
            stood.take(event, other.peer_id)
            if stood.now:
                return float(event["after"])
        raise AssertionError(f"{self.host} never had such a path")


@dataclass(frozen=True, slots=True)
class Trainers:
    """A swarm of two stages, one node each."""

    swarm: Swarm
    seeds: list[Followed]
    nodes: list[Followed]
    nursery: trio.Nursery

    async def seed(self, host: str, *flags: str) -> Followed:
        """Start a seed."""
        child = await self.swarm.seed(host, *flags)
        self.seeds.append(_follow(self.nursery, host, child))
        return self.seeds[-1]


@asynccontextmanager
async def open_trainers(swarm: Swarm, homes: Sequence[str], *relay: str) -> AsyncIterator[Trainers]:
    """All of them started at once, for an interpreter with torch takes seconds; killed when the block is left.  `relay`: for seeds."""
    async with trio.open_nursery() as nursery:
        made = Trainers(swarm, [], [], nursery)
        try:
            for host in swarm.seeds:
                await made.seed(host, *relay)
            made.nodes.extend([_follow(nursery, host, await swarm.node(host)) for host in homes])
            yield made
        finally:
            nursery.cancel_scope.cancel()
            await swarm.children.kill()


def _follow(nursery: trio.Nursery, host: str, child: Child) -> Followed:
    followed = Followed(host, child, time.monotonic())
    nursery.start_soon(followed.read)
    return followed
