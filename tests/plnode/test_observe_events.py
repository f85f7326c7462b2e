"""Events: their JSON form goes and comes back, and what is no event is refused."""

from __future__ import annotations

import json
import math

import pytest

from plnode.observe import events as e
from plnode.observe.lines import LEVELS, quantity, sentence

PEER = "12D3KooWExampleExampleExampleExampleExampleExampleabcd"
STATUS = e.NodeStatus(
    name="a", peer_id=PEER, stage=1, state="training", waiting_for=None, waiting_since_s=None, step=4, steps=10, loss=5.5,
    tokens_per_s=900.0, bytes_in=10, bytes_out=20, queue=1, in_flight=2, credits=3, kept_graphs=4, recomputed=5,
    lost_microbatches=0, boundary_bytes={"0-1": e.BoundaryBytes(100, 90)}, boundary_tokens=512,
    peers=(
        e.PeerLine(PEER, 0, 1.25, connections=(e.ConnectionLine(0, "bbr", 3, 2, 1),), rtt_median_ms=1.25, rtt_p99_ms=2.5),
        e.PeerLine(PEER, None, None),
    ),
    loop_blocked_p99_ms=0.3, eta_s=12.0,
)  # fmt: skip
EXAMPLES: tuple[e.Event, ...] = (
    e.NodeStarted(PEER, "a", ("/ip4/127.0.0.1/tcp/4001",), "cpu", 1),
    e.SeedState("127.0.0.1:4001", "refused", "another run"),
    e.PeerSeen(PEER, None),
    e.PeerLost(PEER, 2, "connection lost"),
    e.PathChanged(PEER, "punched", "relayed via somebody"),
    e.Waiting("for a replica of stage 2", "1 of 2 here"),
    e.WaitingOver("for a replica of stage 2"),
    e.StageAssigned(1, 2, 4, 123456, 1 << 20),
    e.RunStarted(3, 0, ((PEER, 0), (PEER, 1))),
    e.StepDone(1, 7.5, 8192, 0.5, 1.25, False),
    e.StepDone(2, None, 8192, 0.5, None, True),
    e.HeldOut(2, 7.25, 2048),
    e.SnapshotWritten(2, "/data/x", 1000, 0.1),
    e.SnapshotFailed(2, "no space left on the device"),
    e.SnapshotLoaded(2, "/data/x", 1000, 0.1),
    e.SnapshotFailed(2, "no space left on the device"),
    e.Notice("not listening on [::]:4001: no such address family"),
    e.RunAborted(2, "a peer died", PEER),
    e.RunFinished(10),
    e.NodeStopped("finished"),
    STATUS,
)


def test_the_examples_cover_every_kind() -> None:
    assert {type(x) for x in EXAMPLES} == set(e.KINDS.values()) == set(LEVELS)


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: event.kind)
def test_an_event_survives_json(event: e.Event) -> None:
    line = json.dumps(e.to_json(event), allow_nan=False)
    assert e.event_from_json(json.loads(line)) == event
    text, figures = sentence(event)
    assert text.isprintable()
    assert all(isinstance(key, str) for key in figures)


def test_what_is_not_finite_is_null_in_json() -> None:
    document = e.to_json(e.StepDone(1, math.inf, 10, 0.5, math.nan, True))
    assert document["loss"] is None
    assert document["grad_norm"] is None
    assert math.isnan(e.event_from_json(e.to_json(e.HeldOut(1, math.nan, 10))).loss)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"kind": "Surprise"},
        {"kind": 3},
        {"kind": "RunFinished"},
        {"kind": "RunFinished", "step": "3"},
        {"kind": "RunFinished", "step": True},
        {"kind": "RunStarted", "generation": 1, "step": 1, "roster": [["a", 1, 2]]},
        {"kind": "NodeStarted", "peer_id": "p", "name": "n", "addresses": "a", "device": "cpu", "threads": 1},
        {**e.to_json(STATUS), "boundary_bytes": {"0-1": 3}},
    ],
)
def test_what_is_no_event_is_refused(document: object) -> None:
    with pytest.raises(e.BadEvent):
        e.event_from_json(document)


QUANTITIES = [(0, "0"), (999, "999"), (1000, "1 k"), (999_600, "1 M"), (1_234_567, "1.23 M"), (0.25, "0.25")]


@pytest.mark.parametrize(("value", "text"), QUANTITIES)
def test_quantities_have_three_digits(value: float, text: str) -> None:
    assert quantity(value) == text
    assert quantity(1500, "B") == "1.5 kB"
