"""Replicas that train in virtual time and give their state away over production nets on the in-memory internet."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trio
from torch import Tensor

from plnode.collective.statefollow import Follower, FollowTerms
from plnode.collective.statejoin import Pulled, PullTerms, pull
from plnode.collective.stateserver import StateServer
from plnode.stage.snapshot_file import ROOT_DOMAIN
from tests.wire.net.worlds import RUN
from wire.address import Address, Scope
from wire.envelope import seal
from wire.identity import Identity, PeerId
from wire.limits import DEFAULT_LIMITS, Limits
from wire.net import Net, open_net
from wire.sim import Host, Internet, Link, seed_tasks

STAGE = 2
CHUNK = 64 << 10


async def inline(work: Callable[[], Any]) -> Any:
    """Threads do not keep virtual time."""
    await trio.lowlevel.checkpoint()
    return work()


def state(elements: int, frozen: int = 0, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "w": torch.randn(elements, generator=generator),
        "optimizer.w.exp_avg": torch.zeros(elements),
        "optimizer.w.exp_avg_sq": torch.zeros(elements),
        "optimizer.w.step": torch.zeros((), dtype=torch.int64),
    }
    return tensors | ({"frozen": torch.randn(frozen, generator=generator)} if frozen else {})


def gradient(step: int, elements: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(step).standard_normal(elements, np.float32)


def adam(tensors: dict[str, Tensor], vector: np.ndarray[Any, Any]) -> None:
    """A step that uses and changes every tensor."""
    g, w = torch.from_numpy(vector), tensors["w"]
    m, v, count = (tensors[f"optimizer.w.{key}"] for key in ("exp_avg", "exp_avg_sq", "step"))
    count += 1
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    w.sub_(0.01 * (m / (1 - 0.9 ** int(count))) / ((v / (1 - 0.99 ** int(count))).sqrt() + 1e-8))


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@dataclass
class Node:
    host: Host
    identity: Identity
    net: Net

    @property
    def id(self) -> PeerId:
        return self.identity.peer_id


@dataclass
class Replica(Node):
    tensors: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0
    server: StateServer = field(init=False)
    history: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)  # of boundaries

    def serve(self, **settings: Any) -> None:
        terms: dict[str, Any] = {"budget_bytes": 1 << 30, "updates_budget_bytes": 1 << 30, "chunk_bytes": CHUNK}
        self.server = StateServer(
            self.net, run=RUN, offload=inline, open_step=lambda: self.step,
            seal=lambda payload, step: seal(self.identity, ROOT_DOMAIN, payload, run=RUN, seq=step, not_after=0),
            **(terms | settings),
        )  # fmt: skip
        self.server.hold(STAGE)

    async def snapshot(self) -> dict[str, Tensor]:
        await trio.lowlevel.checkpoint()
        return {name: tensor if name == "frozen" else tensor.clone() for name, tensor in self.tensors.items()}

    async def boundary(self) -> None:
        self.times[self.step] = trio.current_time()
        self.history[self.step] = await self.snapshot()
        await self.server.boundary(self.step, 1, self.snapshot)

    def apply(self) -> None:
        vector = gradient(self.step, len(self.tensors["w"]))
        self.server.on_reduced(self.step, memoryview(vector.data).cast("B"))
        adam(self.tensors, vector)
        self.step += 1

    async def train(self, step_s: float) -> None:
        while True:
            await self.boundary()
            await trio.sleep(step_s)
            self.apply()


@asynccontextmanager
async def world(
    donors: int,
    joiners: int,
    *,
    link: Link,
    elements: int = 20_000,
    frozen: int = 0,
    seed: int = 1,
    send_buffer: int = 64 << 10,
    congestion: str = "bbr",
    limits: Limits = DEFAULT_LIMITS,
    **settings: Any,
) -> AsyncIterator[tuple[Internet, list[Replica], list[Node]]]:
    """All connected: every joiner with every donor, donors with each other."""
    seed_tasks(seed)
    net = Internet(seed)
    rng = random.Random(seed)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(net.running())

        async def node(kind: type[Node], number: int) -> Any:
            address = f"10.0.{number // 200}.{number % 200 + 1}"
            host = net.host(address, link=link, send_buffer=send_buffer, receive_buffer=256 << 10, congestion=congestion)
            identity = Identity(rng.randbytes(32))
            made = await stack.enter_async_context(
                open_net(
                    identity, run=RUN, listen=[Address(address, 4001)], scope=Scope.HOST, transport=host.transport,
                    rng=random.Random(number), wall_time=host.wall_time, limits=limits,
                )
            )  # fmt: skip
            return kind(host, identity, made)

        replicas = [await node(Replica, number) for number in range(donors)]
        newcomers = [await node(Node, donors + number) for number in range(joiners)]
        for replica in replicas:
            replica.tensors = state(elements, frozen)
            replica.serve(**settings)
        for number, one in enumerate([*replicas, *newcomers]):
            for other in replicas[:number]:
                await one.net.dial(other.net.addresses[0])
        yield net, replicas, newcomers


async def take(node: Node, donors: list[Replica], folder: Path, **settings: Any) -> Pulled:
    terms = {"run": RUN, "stage": STAGE, "donors": [d.id for d in donors], "folder": folder, "now_unix": node.host.wall_time}
    return await pull(node.net, PullTerms(**terms, offload=inline, **settings))


def follower(node: Node, donors: list[Replica], tensors: dict[str, Tensor], **settings: Any) -> Follower:
    size = sum(t.nbytes for t in tensors.values())

    async def apply(step: int, vector: memoryview) -> None:
        await trio.lowlevel.checkpoint()
        adam(tensors, np.frombuffer(vector, np.float32))

    terms = {"stage": STAGE, "donors": [d.id for d in donors], "state_bytes": size, "apply": apply, "offload": inline}
    return Follower(node.net, FollowTerms(**(terms | settings)))
