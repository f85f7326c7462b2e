"""Every wait of the node that lies inside another one, in one table, and the check that they nest.

An inner wait that outlasts the outer one makes the outer one's error lie: a member is named that was about to answer, or a generation
counts as silent while somebody still counts a dead peer's seconds.  Each constant is right where it stands, in its own module beside
its reason; whoever changes one does not see the other ten.  So the rules between them are data here, and the node does not start when
one is broken (architecture.md, section 5).

Names are looked up when `check` runs: importing this file imports none of the modules that need torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from plnode.swarm.suspicion import HEALTH_MOST

NAMES: Mapping[str, tuple[str, str]] = {
    # what the rules call it: where it is
    "wire.ping_interval_s": ("wire.limits", "DEFAULT_LIMITS.ping_interval_s"),
    "wire.quiet_ping_s": ("wire.limits", "DEFAULT_LIMITS.quiet_ping_s"),
    "wire.quiet_dead_s": ("wire.limits", "DEFAULT_LIMITS.quiet_dead_s"),
    "wire.dead_after_s": ("wire.limits", "DEFAULT_LIMITS.dead_after_s"),
    "wire.dial_timeout_s": ("wire.limits", "DEFAULT_LIMITS.dial_timeout_s"),
    "wire.dial_backoff_base_s": ("wire.limits", "DEFAULT_LIMITS.dial_backoff_base_s"),
    "wire.resume_closed_s": ("wire.limits", "DEFAULT_LIMITS.resume_closed_s"),
    "wire.GOODBYE_S": ("wire.net.network", "GOODBYE_S"),
    "wire.NOTICE_S": ("wire.net.opening", "NOTICE_S"),
    "probing.DOUBT_LOOK_S": ("plnode.swarm.probing", "DOUBT_LOOK_S"),
    "probing.LOOK_S": ("plnode.swarm.probing", "LOOK_S"),
    "probing.LATE_S": ("plnode.swarm.probing", "LATE_S"),
    "suspicion.QUIET_S": ("plnode.swarm.suspicion", "QUIET_S"),
    "suspicion.DIRECT_S": ("plnode.swarm.suspicion", "DIRECT_S"),
    "suspicion.PING_S": ("plnode.swarm.suspicion", "PING_S"),
    "suspicion.HELP_S": ("plnode.swarm.suspicion", "HELP_S"),
    "suspicion.ASK_S": ("plnode.swarm.suspicion", "ASK_S"),
    "suspicion.SUSPICION_LEAST_S": ("plnode.swarm.suspicion", "SUSPICION_LEAST_S"),
    "suspicion.SUSPICION_MOST_S": ("plnode.swarm.suspicion", "SUSPICION_MOST_S"),
    "suspicion.CUT_S": ("plnode.swarm.suspicion", "CUT_S"),
    "claims.LIFE_S": ("plnode.swarm.claims", "LIFE_S"),
    "membership.CALL_S": ("plnode.swarm.membership", "CALL_S"),
    "membership.SECOND_DIALLER_WAITS_S": ("plnode.swarm.membership", "SECOND_DIALLER_WAITS_S"),
    "membership.DIAL_AGAIN_S": ("plnode.swarm.membership", "DIAL_AGAIN_S"),
    "greeting.FIRST_PAUSE_S": ("plnode.swarm.greeting", "FIRST_PAUSE_S"),
    "greeting.LONGEST_PAUSE_S": ("plnode.swarm.greeting", "LONGEST_PAUSE_S"),
    "muster.VOTE_S": ("plnode.swarm.muster", "VOTE_S"),
    "muster.RETRY_S": ("plnode.swarm.muster", "RETRY_S"),
    "muster.VOTES_APART_S": ("plnode.swarm.muster", "VOTES_APART_S"),
    "muster.SHUNNED_S": ("plnode.swarm.muster", "SHUNNED_S"),
    "group.BEGIN_S": ("plnode.collective.group", "BEGIN_S"),
    "participant.CALL_S": ("plnode.participant", "CALL_S"),
    "alarm.ABORT_CALL_S": ("plnode.alarm", "ABORT_CALL_S"),
    "participant.SILENCE_FLOOR_S": ("plnode.participant", "SILENCE_FLOOR_S"),
    "participant.SILENCE_CEILING_S": ("plnode.participant", "SILENCE_CEILING_S"),
    "participant.SETTLE_S": ("plnode.participant", "SETTLE_S"),
    "participant.LEAVE_S": ("plnode.participant", "LEAVE_S"),
    "leaving.EXIT_S": ("plnode.leaving", "EXIT_S"),
    "leaving.GOODBYES_S": ("plnode.leaving", "GOODBYES_S"),
    "settings.STOP_GRACE_S": ("plnode.settings", "STOP_GRACE_S"),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """The sum of `inner` (name, how many times) lies inside `times` x `outer`, and `why` that must be so."""

    inner: tuple[tuple[str, float], ...]
    outer: str
    why: str
    times: float = 1.0


def _in(inner: str, outer: str, why: str, *, times: float = 1.0) -> Rule:
    return Rule(((inner, 1.0),), outer, why, times)


_FROM_DOUBT = (("suspicion.DIRECT_S", 1.0), ("suspicion.ASK_S", 1.0))
_SICKEST = 1.0 + HEALTH_MOST  # how many times as long a node waits that distrusts itself most

RULES: tuple[Rule, ...] = (
    # the wire
    _in("wire.quiet_ping_s", "wire.quiet_dead_s", "silence is judged after several pings"),
    _in("wire.quiet_dead_s", "wire.dead_after_s", "one silent connection of several lives longer than all of them together"),
    # is a member alive?
    _in("wire.ping_interval_s", "suspicion.QUIET_S", "a healthy idle connection is heard once in a ping interval"),
    _in("suspicion.HELP_S", "suspicion.ASK_S", "a helper's look must end before its answer counts as missing"),
    _in("suspicion.DIRECT_S", "suspicion.PING_S", "our own try goes on while helpers are asked"),
    _in("suspicion.PING_S", "wire.dial_timeout_s", "a try that is given up must not count as a failure of the address"),
    _in("suspicion.SUSPICION_LEAST_S", "suspicion.SUSPICION_MOST_S", "confirmations shorten"),
    _in("suspicion.QUIET_S", "suspicion.CUT_S", "a connection is doubted before it counts as cut"),
    _in("suspicion.CUT_S", "wire.dead_after_s", "a member who lives elsewhere is known when the wire gives the connection up"),
    _in("probing.DOUBT_LOOK_S", "probing.LOOK_S", "in doubt one looks more often"),
    _in("probing.LOOK_S", "suspicion.QUIET_S", "who was quiet is looked at before it counts as quiet"),
    _in("probing.LATE_S", "suspicion.DIRECT_S", "a loop that stood still is noticed before a ping counts as failed"),
    Rule((*_FROM_DOUBT, ("suspicion.SUSPICION_LEAST_S", 1.0)), "wire.resume_closed_s", "a process that died is known within 5 s"),
    Rule(
        (("suspicion.QUIET_S", 1.0), *_FROM_DOUBT, ("suspicion.SUSPICION_LEAST_S", 1.0)),
        "group.BEGIN_S",
        "a word that waits for a generation learns that a member is gone",
    ),
    Rule(
        (
            ("suspicion.QUIET_S", 1.0),
            ("suspicion.DIRECT_S", _SICKEST),
            ("suspicion.ASK_S", _SICKEST),
            ("suspicion.SUSPICION_MOST_S", _SICKEST),
        ),
        "participant.SILENCE_FLOOR_S",
        "also a node that distrusts itself names who is gone before the whole generation counts as silent",
    ),
    # claims
    _in("greeting.FIRST_PAUSE_S", "greeting.LONGEST_PAUSE_S", "pauses grow"),
    _in("membership.CALL_S", "claims.LIFE_S", "a renewed claim arrives before the old one expires", times=0.5),
    _in("membership.SECOND_DIALLER_WAITS_S", "membership.DIAL_AGAIN_S", "who waits for the other's dial is done before all are looked at"),
    _in("wire.dial_backoff_base_s", "membership.DIAL_AGAIN_S", "an address may be dialled again when it is looked at again"),
    # agreement on a generation
    _in("muster.VOTES_APART_S", "muster.RETRY_S", "an honest proposer's next try is not refused as too soon", times=0.5),
    Rule((("muster.VOTE_S", 2.0),), "muster.SHUNNED_S", "who is left out is left out for more than one proposal"),
    Rule((("muster.VOTE_S", 2.0),), "group.BEGIN_S", "a word for a generation waits through vote and commit"),
    _in("group.BEGIN_S", "participant.CALL_S", "a call reaches a member that has not begun yet"),
    _in("participant.CALL_S", "participant.SILENCE_FLOOR_S", "a call that fails names its member before the generation counts as silent"),
    _in("alarm.ABORT_CALL_S", "participant.CALL_S", "a broken generation is left sooner than it would be waited for"),
    _in("participant.SILENCE_FLOOR_S", "participant.SILENCE_CEILING_S", "the deadline has room"),
    # leaving
    _in("participant.SETTLE_S", "participant.LEAVE_S", "who still delivers receipts is waited for"),
    _in("membership.CALL_S", "participant.LEAVE_S", "the last word is answered within the time for leaving"),
    _in("wire.GOODBYE_S", "leaving.GOODBYES_S", "the network's goodbyes end within the time for them"),
    Rule(
        (("wire.NOTICE_S", 1.0), ("leaving.GOODBYES_S", 1.0), ("leaving.EXIT_S", 1.0)),
        "settings.STOP_GRACE_S",
        "circuits move, goodbyes are said and files closed before the kill",
    ),
)


class DeadlineError(ValueError):
    """Two waits do not nest, or the table names one that does not exist.  A fault of this program, not of its settings."""


def seconds_of(name: str) -> float:
    """The value of a name of the table.  Raises DeadlineError."""
    module, path = NAMES[name]
    try:
        value: object = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as missing:
        raise DeadlineError(f"{name} stands for {module}.{path}, which does not exist ({missing}): correct plnode/deadlines.py") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DeadlineError(f"{name} stands for {module}.{path}, which is {value!r} and no number of seconds")
    return float(value)


def check(value: Callable[[str], float] = seconds_of) -> None:
    """Every rule of the table; raises DeadlineError naming the pair that does not nest, all of them if there are several."""
    broken = [text for rule in RULES if (text := _broken(rule, value)) is not None]
    if broken:
        raise DeadlineError("waits do not nest: " + "; ".join(broken))


def _broken(rule: Rule, value: Callable[[str], float]) -> str | None:
    inner_s, outer_s = sum(times * value(name) for name, times in rule.inner), rule.times * value(rule.outer)
    if inner_s <= outer_s:
        return None
    inner = " + ".join(_term(name, times, value) for name, times in rule.inner)
    return f"{inner} = {inner_s:g} s is longer than {_term(rule.outer, rule.times, value)}, inside which it lies ({rule.why})"


def _term(name: str, times: float, value: Callable[[str], float]) -> str:
    return f"{name} ({value(name):g} s)" if times == 1 else f"{times:g} x {name} ({value(name):g} s)"
