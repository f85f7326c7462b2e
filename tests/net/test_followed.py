"""The counting that the training rows rest on: steps over another path than the one asked for must not count."""

from __future__ import annotations

from typing import Any

import pytest

from tests.net.followed import Stood

OTHER, RELAY = "other", "relay"
STEP = {"kind": "StepDone"}


def changed(path: str, peer: str = OTHER) -> dict[str, Any]:
    return {"kind": "PathChanged", "peer_id": peer, "path": path}


def status(path: str | None, connected: bool = True) -> dict[str, Any]:
    peers = [{"peer_id": RELAY, "path": "direct", "connected": True}]
    return {"kind": "NodeStatus", "peers": peers + ([{"peer_id": OTHER, "path": path, "connected": connected}] if path else [])}


@pytest.mark.parametrize(
    ("events", "counted"),
    [
        ([status("punched"), STEP, STEP, status("punched")], 2),
        ([STEP, changed("punched"), STEP], 1),
        ([status("relayed"), STEP, STEP], 0),
        ([changed("relayed via relay"), STEP], 0),
        ([status("direct"), STEP], 0),
        ([status(None), STEP], 0),
        ([status("punched", connected=False), STEP], 0),
        ([changed("punched", RELAY), STEP], 0),
        ([status("punched"), STEP, STEP, changed("relayed via relay"), STEP, status("punched"), STEP], 1),
    ],
)
def test_only_steps_over_the_path_that_is_asked_for_count(events: list[dict[str, Any]], counted: int) -> None:
    stood = Stood(frozenset({"punched"}))
    for event in events:
        stood.take(event, OTHER)
    assert stood.steps == counted
