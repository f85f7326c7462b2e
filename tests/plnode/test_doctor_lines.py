"""The verdict about a line: what is said of lanes, what to do, and the same for programs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from plnode.doctor.checks import Check, Verdict
from plnode.doctor.facts import Line, OverLanes
from plnode.doctor.lines import AGAIN, bandwidth
from plnode.doctor.report import conclude, document, lines
from plnode.doctor.surroundings import line_of
from plnode.exits import ExitCode
from wire.identity import Identity
from wire.net.perflanes import Flow, Ladder, Rung

PEER = str(Identity(bytes(32)).peer_id)
MBIT = 1e6 / 8


def flow(mbit: float | None) -> Flow:
    return Flow(None if mbit is None else mbit * MBIT, 1, 0.1)


def line(*figures: tuple[float | None, float | None], congestion: str = "cubic", rtt_s: float = 0.1, **changes: Any) -> Line:
    """Measured: Mbit/s up and down over one lane, over two, ...; None down for what was not reached."""
    rungs = tuple(Rung(lanes, flow(up), None if down is None else flow(down)) for lanes, (up, down) in enumerate(figures, 1))
    ladder = Ladder(rtt_s, wanted=len(figures), had=len(figures), served=len(figures), rungs=rungs, ended="")
    return line_of(replace(ladder, **changes), PEER, "direct", congestion)


FULL = line((20, 50), (20.4, 50), (19, 51), (20, 50))
LOSSY = line((5, 6), (9, 12), (14, 18), (19, 24))
MODEM = [(0.5, 8.0), (0.5, 8.0)]

ROWS = [
    # what was measured, verdict, words of what was found, words that must not be there, what to do
    (FULL, Verdict.OK, ["direct over 1 lane(s) of cubic, round trip 100 ms, 20 Mbit/s up and 50 Mbit/s down", "1: 20/50, 2: 20.4/50",
        "one is best", "fills the line"], ["loss", "ended"], ""),
    (LOSSY, Verdict.WARNING, ["over 4 lane(s)", "19 Mbit/s up and 24", "4 are best, 4 times one", "loss or a long way"], ["fills"], "bbr"),
    (line((5, 6), (9, 12), congestion="bbr2"), Verdict.OK, ["2 are best, 2 times one"], [], ""),
    (line((5, 6), (9, 12), congestion=""), Verdict.WARNING, ["direct over 2 lane(s), round", "2 are best"], [], "bbr"),
    # much more in one direction is much more; a little more is the spread of a measurement, or a lane of those a node opens by itself
    (line((5, 50), (9, 50)), Verdict.WARNING, ["2 are best, 1.8 times one"], [], "bbr"),
    (line((5, 50), (6, 50)), Verdict.OK, ["2 are best, 1.2 times one"], [], ""),
    # 300 Mbit/s in 100 ms are 3.75 MB under way: more than a socket holds, whatever its congestion control
    (line((300, 300), (600, 600)), Verdict.OK, ["2 are best, 2 times one"], [], ""),
    (line((300, 300), (600, 600), rtt_s=0.01), Verdict.WARNING, ["2 are best, 2 times one"], [], "bbr"),
    # one lane, or none
    (line((20, 50), had=0, wanted=0), Verdict.OK, ["direct over one connection of cubic"], ["lane(s)", "best"], ""),
    (line((20, 50), had=1, wanted=1), Verdict.OK, ["over 1 lane(s)"], ["best"], ""),
    (line((20, 50), had=4, served=1, wanted=4), Verdict.OK, ["the peer measures over one lane only"], ["best"], ""),
    (line((20, 50), had=1, served=1, wanted=1), Verdict.OK, ["20 Mbit/s"], ["one lane only"], ""),
    (line((20, 50), had=4, wanted=4, served=4, full=True), Verdict.OK, ["more than 1 lane(s) were not tried", "queue"], ["best"], ""),
    (line((20, 50), (21, 50), had=4, wanted=4, full=True), Verdict.OK, ["more than 2 lane(s) were not tried", "one is best"], [], ""),
    # lanes that could not be had
    (line((20, 50), had=0, wanted=4), Verdict.WARNING, ["over one connection", "4 lane(s) of those wanted could not be had"], ["best"],
        "allow 5 connections"),
    (line((20, 50), (20, 50), wanted=4), Verdict.WARNING, ["2 lane(s) of those wanted could not be had", "one is best"], [], "allow 5"),
    # ended early
    (line((20, 50), (20, 50), ended="the peer left"), Verdict.WARNING, ["one is best", "; ended early: the peer left"], [], AGAIN),
    (line((20, 50), (50, None), ended="it left"), Verdict.WARNING, ["over 1 lane(s)", "20 Mbit/s up and 50", "2: 50/?", "early: it left"],
        ["not known"], AGAIN),
    (line((20, None), ended="it left"), Verdict.WARNING, ["20 Mbit/s up and not known down", "; ended early: it left"], ["best"], AGAIN),
    (line((None, 50)), Verdict.WARNING, ["not known up and 50 Mbit/s down"], [], "something else using the line"),
    # slow is worse than everything that comes behind it
    (line(*MODEM), Verdict.WARNING, ["0.5 Mbit/s up"], [], "slower than a megabit"),
    (line(*MODEM, ended="it left", wanted=4), Verdict.WARNING, ["early: it left"], [], "slower than a megabit"),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "verdict", "words", "never", "fix"), ROWS, ids=range(len(ROWS)))
def test_what_is_said_of_a_line(seen: Line, verdict: Verdict, words: list[str], never: list[str], fix: str) -> None:
    check = bandwidth(seen, 0.0)
    assert check.verdict is verdict, check
    for word in words:
        assert word in check.found, check
    for word in never:
        assert word not in check.found, check
    assert (fix in check.fix) if fix else not check.fix, check
    assert check.name == f"line to {PEER[-6:]}" and "tokens" not in check.found
    assert len(lines(check)) == 1 + bool(check.fix) and all(len(text.splitlines()) == 1 for text in lines(check))


def test_tokens_are_those_of_the_slower_direction_with_the_best_number_of_lanes() -> None:
    assert "enough for 2.38 k tokens/s" in bandwidth(LOSSY, 1000.0).found  # 19 Mbit/s, not 5 and not 24
    assert "enough for 2.5 k tokens/s" in bandwidth(FULL, 1000.0).found


def measured(check: Check) -> dict[str, Any]:
    """As a program reads it."""
    (entry,) = json.loads(json.dumps(document([check], conclude([check], [0], "direct"))))["checks"]
    assert (entry["name"], entry["verdict"], entry["found"], entry["fix"]) == (check.name, str(check.verdict), check.found, check.fix)
    return entry.get("measured", {})  # type: ignore[no-any-return]


def test_the_figures_for_a_program() -> None:
    assert measured(bandwidth(line((8, 16), (None, 32), (24, None), ended="it left", wanted=4), 1000.0)) == {
        "rtt_s": 0.1,
        "best_lanes": 1,
        "lanes": [
            {"lanes": 1, "up_bytes_per_s": 1e6, "down_bytes_per_s": 2e6},
            {"lanes": 2, "up_bytes_per_s": None, "down_bytes_per_s": 4e6},
            {"lanes": 3, "up_bytes_per_s": 3e6, "down_bytes_per_s": None},
        ],
        "ended": "it left",
        "full": False,
    }
    assert measured(bandwidth(LOSSY, 0.0))["best_lanes"] == 4
    assert measured(bandwidth(line((20, 50), had=0, wanted=0), 0.0))["best_lanes"] == 0  # the control connection
    assert measured(bandwidth(line((20, 50), full=True), 0.0))["full"] is True


def test_a_line_that_was_not_measured_has_words_and_no_figures() -> None:
    nothing = Line(peer_id=PEER, path="direct", congestion="", lanes=0, rtt_s=None, up_bytes_per_s=None, down_bytes_per_s=None,
        refused="not measured: it measures with somebody else; again in 7 s")  # fmt: skip
    check = bandwidth(nothing, 1000.0)
    assert (check.verdict, check.found, check.fix) == (Verdict.SKIPPED, nothing.refused, "")
    assert "measured" not in document([check], conclude([check], [0], "direct"))["checks"][0] and measured(check) == {}


def test_no_line_keeps_anybody_from_taking_part() -> None:
    """What merely costs speed is a warning, however slow it is."""
    worst = bandwidth(line((0.001, 0.001), ended="it left", wanted=4), 1e6)
    assert worst.verdict is Verdict.WARNING
    assert conclude([worst], [0], "direct").exit_code is ExitCode.OK


def test_the_facts_are_those_of_the_best_number_of_lanes() -> None:
    assert (LOSSY.lanes, LOSSY.up_bytes_per_s, LOSSY.down_bytes_per_s) == (4, 19 * MBIT, 24 * MBIT)
    assert LOSSY.over[0] == OverLanes(lanes=1, up_bytes_per_s=5 * MBIT, down_bytes_per_s=6 * MBIT) and len(LOSSY.over) == 4
    assert (FULL.lanes, FULL.missing, FULL.one_only, FULL.full, FULL.refused) == (1, 0, False, False, "")
    assert line((20, 50), had=3, wanted=4).missing == 1 and line((20, 50), had=1, wanted=0).missing == 0
