"""The lab itself: without this, a test that fails on it says nothing about us."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.lab import CLIENT, SERVER, Lab, LabFailed

# Prints the shortest of five round trips of TCP's handshake in ms, or the error's name.
DIAL = """
import socket, sys, time
best = []
for _ in range(int(sys.argv[3])):
    began = time.monotonic()
    try:
        socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1.0).close()
    except ConnectionRefusedError:  # answered by the host itself: a round trip as well
        pass
    except OSError as error:
        sys.exit(print(type(error).__name__))
    best.append((time.monotonic() - began) * 1e3)
print(min(best))
"""
CLOSED_PORT = "9"


def dial(lab: Lab, host: str, address: str, tries: int = 5) -> str:
    return lab.run(host, sys.executable, "-c", DIAL, address, CLOSED_PORT, str(tries)).strip()


def test_the_round_trip_is_what_was_asked_for(lab: Lab) -> None:
    took = float(dial(lab, CLIENT, lab.addr(SERVER)))
    assert 79.0 <= took < 200.0  # never less than the line's own; more on a busy machine


def test_hosts_behind_a_home_router_reach_the_world(lab: Lab) -> None:
    assert 79.0 <= float(dial(lab, "a", lab.addr(SERVER))) < 200.0


def test_a_black_hole_is_silent_and_can_be_undone(lab: Lab) -> None:
    address = lab.addr(SERVER)
    lab.black_hole(address)
    try:
        assert dial(lab, CLIENT, address, 1) == "TimeoutError"
    finally:
        lab.unblock(address)
    assert float(dial(lab, CLIENT, address)) < 200.0


def test_a_cut_line_is_silent_and_can_be_mended(lab: Lab) -> None:
    lab.cut(SERVER)
    try:
        assert dial(lab, CLIENT, lab.addr(SERVER), 1) in ("TimeoutError", "OSError")  # nobody, or the router that has no way
    finally:
        lab.mend(SERVER)
    assert float(dial(lab, CLIENT, lab.addr(SERVER))) < 200.0


def test_a_client_with_another_address_still_reaches_the_server(lab: Lab) -> None:
    old = lab.addr(CLIENT)
    new = lab.readdress_client()
    try:
        assert new != old and new in lab.run(CLIENT, "ip", "-4", "addr", "show", "dev", "w-c")
        assert float(dial(lab, CLIENT, lab.addr(SERVER))) < 200.0
    finally:
        assert lab.readdress_client(2) == old


def test_what_the_tool_refuses_is_told(lab: Lab) -> None:
    with pytest.raises(LabFailed, match="no host"):
        lab.addr("nowhere")


def test_nothing_is_left_of_a_lab_whose_block_fails() -> None:
    """Also a negative control of the fixture: this lab is gone, that of the fixture is not touched."""
    from bench.lab import Network, open_lab
    from tests.net.conftest import available

    available()
    prefix = ""
    with pytest.raises(RuntimeError), open_lab(Network(None, 0.0)) as lab:
        prefix = lab.prefix
        assert f"{prefix}-s" in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        raise RuntimeError
    assert prefix not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not Path(f"/run/netlab-{prefix}").exists()
