"""Private addresses are dialled only where a neighbour may be: in a network of this machine, few, and never on a claim alone."""

from __future__ import annotations

import pytest

from wire.address import Address, Scope
from wire.limits import DEFAULT_LIMITS
from wire.neighbours import neighbours
from wire.punching import usable

OWN = ("127.0.0.1", "::1", "192.168.1.2", "172.17.0.1", "fd00:1::2", "2a00:1::2")


def left(*hosts: str, own: tuple[str, ...] = OWN) -> list[str]:
    return [address.host for address in neighbours([Address(host, 4001) for host in hosts], own, DEFAULT_LIMITS)]


def test_neighbours_in_the_networks_of_this_machine_are_dialled() -> None:
    assert left("192.168.1.9", "fd00:1::9", "172.17.0.2") == ["192.168.1.9", "fd00:1::9", "172.17.0.2"]


@pytest.mark.parametrize(
    "host",
    ["192.168.2.9", "10.0.0.1", "fd00:2::9", "172.18.0.1", "192.168.1.2", "172.17.0.1", "127.0.0.1", "169.254.1.1", "8.8.8.8", "2a00:1::9"],
)
def test_other_networks_ourselves_and_what_is_not_private_are_not(host: str) -> None:
    assert left(host) == []


def test_no_more_than_a_few() -> None:
    assert left(*(f"192.168.1.{number}" for number in range(10, 20))) == ["192.168.1.10", "192.168.1.11", "192.168.1.12"]


def test_a_peer_that_claims_our_router_is_not_believed() -> None:
    """It names our outside address and a machine of our house: without a relay's word (`own` is empty) only the outside one is left."""
    named = ("/ip4/9.1.0.1/tcp/4001", "/ip4/192.168.1.9/tcp/22", "/dns/x.example/tcp/1", "nonsense")
    assert [address.host for address in usable(named, Scope.INTERNET, (), DEFAULT_LIMITS)] == ["9.1.0.1"]
    assert [address.host for address in usable(named, Scope.INTERNET, OWN, DEFAULT_LIMITS)] == ["9.1.0.1", "192.168.1.9"]
    many = [f"/ip4/9.1.0.{number}/tcp/4001" for number in range(1, 20)]
    assert len(usable((*many, *named), Scope.INTERNET, OWN, DEFAULT_LIMITS)) == DEFAULT_LIMITS.punch_candidates_max
