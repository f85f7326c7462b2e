"""Waits that lie inside others: those that ship nest, and one that does not is named with both figures and the reason."""

from __future__ import annotations

import subprocess
import sys

import pytest

from plnode import deadlines
from plnode.deadlines import NAMES, RULES, DeadlineError, check, seconds_of


def test_the_waits_of_this_program_nest() -> None:
    check()


def test_every_name_is_used_and_every_rule_says_why() -> None:
    used = {name for rule in RULES for name, _ in rule.inner} | {rule.outer for rule in RULES}
    assert used == set(NAMES)
    assert all(rule.why and rule.inner for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.inner[0][0]}-{rule.outer}")
def test_each_rule_is_broken_by_an_outer_wait_that_is_too_short(rule: deadlines.Rule) -> None:
    with pytest.raises(DeadlineError) as failure:
        check(lambda name: 0.001 if name == rule.outer else seconds_of(name))
    text = str(failure.value)
    assert rule.outer in text and rule.why in text and all(name in text for name, _ in rule.inner)


def test_a_wrong_constant_is_named_with_what_it_should_fit_into(monkeypatch: pytest.MonkeyPatch) -> None:
    from plnode.swarm import muster

    monkeypatch.setattr(muster, "VOTE_S", 11.0)
    with pytest.raises(DeadlineError, match=r"2 x muster\.VOTE_S \(11 s\) = 22 s is longer than group\.BEGIN_S \(20 s\)"):
        check()


@pytest.mark.parametrize("place", [("plnode.swarm.muster", "NOTHING_S"), ("plnode.nowhere", "X_S"), ("plnode.swarm.muster", "Muster")])
def test_a_name_that_is_gone_is_said(place: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "NAMES", {**NAMES, "muster.VOTE_S": place})
    with pytest.raises(DeadlineError, match=r"muster\.VOTE_S stands for"):
        check()


def test_the_table_needs_no_torch() -> None:
    code = "import sys, plnode.deadlines, plnode.swarm.probing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
