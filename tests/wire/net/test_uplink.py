"""The rate that a relay promises comes from its line to the internet, whatever goes on in the house."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from wire.identity import PeerId
from wire.net.uplink import Uplink, leaves_the_house
from wire.path import relayed_via
from wire.pipeinfo import PipeInfo


@pytest.mark.parametrize(
    ("local", "remote", "counts"),
    [
        ("192.168.1.2", "8.8.8.8", True),
        ("2a00:1::2", "2a00:1:0:1::2", True),
        ("192.168.1.2", "192.168.1.3", False),
        ("100.64.0.2", "100.64.0.3", False),
        ("127.0.0.1", "127.0.0.1", False),
        ("2a00:1::2", "2a00:1::3", False),
        ("8.8.8.8", "8.8.8.8", False),
        ("a", "b", False),
    ],
)
def test_what_leaves_the_house(local: str, remote: str, counts: bool) -> None:
    assert leaves_the_house(PipeInfo("tcp", (local, 1), (remote, 2))) is counts


def test_a_circuit_is_in_the_connection_to_its_relay() -> None:
    relay = PeerId(bytes(range(32)))
    assert not leaves_the_house(PipeInfo("circuit", ("", 0), ("", 0), "", relayed_via(relay)))


class FakeLink:
    """Counts what it sent."""

    def __init__(self, remote: str, sent: int = 0) -> None:
        self.pipe = SimpleNamespace(info=lambda: PipeInfo("tcp", ("192.168.1.2", 1), (remote, 2)))
        self.bytes_out = sent


def test_the_best_second_of_the_outside_alone() -> None:
    far, near = FakeLink("8.8.8.8", 5_000_000), FakeLink("192.168.1.9")
    links: Any = [far, near]
    line = Uplink(lambda: links)
    line.look(10.0)
    assert line.best == 0.0, "what was sent before the first look took an unknown time"
    near.bytes_out += 1_000_000_000
    far.bytes_out += 3_000
    line.look(11.0)
    assert line.best == 3_000
    far.bytes_out += 1_000
    line.look(12.0)
    assert line.best == 3_000
    links.append(FakeLink("9.9.9.9", 8_000))
    line.look(14.0)
    assert line.best == 4_000, "a new connection counts from its first byte, and a long look is no fast line"
    links.clear()
    line.look(15.0)
    assert line.best == 4_000
