"""Tests on real kernels of several hosts: the lab, once for each file, and processes on its hosts.

Where no lab can be built the tests are skipped with the reason.  In CI as root that is a failure: there the lab is expected, and a
suite that skips itself for ever would look as one that passes.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from bench.children import Child, Children, open_children, python
from bench.lab import Lab, Network, needs, open_lab

START_S = 30.0  # an interpreter with the whole package on a busy machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/net/" in item.path.as_posix():
            item.add_marker(pytest.mark.net)


def available() -> None:
    """Skip, or fail where the lab must be there."""
    reason = needs()
    if reason is not None:
        if os.environ.get("CI") == "true" and os.geteuid() == 0:
            pytest.fail(f"CI as root must be able to build the lab: {reason}")
        pytest.skip(reason)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A line of 200 Mbit/s and 80 ms, without loss.  Whoever breaks something in it mends it."""
    available()
    with open_lab(Network(rate_mbit=200.0, rtt_ms=80.0)) as made:
        yield made


# Homes behind routers of these kinds, h1 first; tests/net/homes.py has names for them.  The last is for who changes its router.
KINDS = ("cone", "shift", "symmetric", "full", "cone", "shift", "symmetric", "cone")


@pytest.fixture(scope="session")
def world() -> Iterator[Lab]:
    """Eight homes, two public hosts, 80 ms between any two.  One for all tests: whoever breaks something in it mends it."""
    available()
    with open_lab(Network(rate_mbit=100.0, rtt_ms=80.0, public=2, routers=KINDS)) as made:
        yield made


class Hosts:
    """Nodes as processes on the hosts of a lab.  See `tests/net/node.py` for what they can be told."""

    def __init__(self, lab: Lab, children: Children) -> None:
        self.lab = lab
        self._children = children

    async def start(self, host: str, *arguments: str) -> Child:
        """A node on a host, not heard yet."""
        return await self._children.start(f"node on {host}", self.lab.exec(host, *python("tests.net.node", *arguments)))


@asynccontextmanager
async def open_hosts(lab: Lab) -> AsyncIterator[Hosts]:
    """Hosts whose processes are gone when the block is left.  They are killed: goodbyes, one after the other, take a second each."""
    async with open_children() as children:
        try:
            yield Hosts(lab, children)
        finally:
            await children.kill()
