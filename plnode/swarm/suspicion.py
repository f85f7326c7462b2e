"""Whether a member of the run is dead, cannot be reached from here, or was only slow.  Sans-IO: time comes as an argument.

A lost connection says little: a line drops, a router forgets, one way between two members breaks while both live.  A run that ends its
generation for each of these never trains; one that waits for a process that is gone does not either.  The method is SWIM (Das, Gupta,
Motivala 2002): ask the member, then ask others to ask it, then *suspect* it, and only a suspicion that nobody refutes is death.
From Lifeguard (Dadgar, Phillips, Currey 2018) come local health, suspicion that shortens as others confirm it, and that a helper's "I
cannot reach it either" proves our own line.  Different here, and why:

* Nobody is asked for as long as anything comes from it.  The wire pings whoever is silent (every 5 s, with tensor channels every 2 s), so
  silence of `quiet_s` is a ping that was not answered for a second, and costs no message of its own.
* A refused redial says that the machine answers and the process is gone.  With one helper who says the same it is death at once; a refusal
  alone may come from a router, or be forged.
* While a helper hears a member, it is not dead: UNREACHABLE_FROM_HERE, with the helper's name.  A helper that lies can keep a dead member
  in that state and no better one, and can kill nobody whom we hear.
* Another process under the same identity is the death of the one we knew: what it held is gone.
* A node that hears nobody accuses nobody: all others are UNREACHABLE_FROM_HERE, without a helper.

Waits, for a round trip of 80 ms (bars: a process that died 5 s, a black hole 12 s, none dead of 5 % loss within an hour):

    quiet 6 s + direct 0.8 s and three round trips + helpers 1.6 s + suspicion 2 s = 10.6 s, of which a lost connection skips the first

At 5 % loss a segment waits over 1 s three losses in (RFC 6298, minimum of 0.2 s), once in 4,000 pings; that three helpers' own connections
lose as much in the same second is 1e-11.  Suspicion that nobody confirms lasts 6 s; and everything from `direct` on is multiplied by
1 + health, up to 5 (Lifeguard: 9; ours must end before a generation counts as silent, see plnode/deadlines.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from plnode.swarm.verdicts import DENIED, SEEN_ALIVE, Ask, Decision, Failure, Judged, Ping, Seen, Standing, Verdict
from wire.identity import PeerId

QUIET_S = 6.0  # one ping interval of an idle connection, and a second for the answer
DIRECT_S, DIRECT_RTTS = 0.8, 3.0  # TCP, handshake and hello are three round trips, beside a first repetition
PING_S = 3.0  # that our own try goes on while helpers are asked: a lost SYN is repeated after 1 s
HELP_S = 1.2  # a helper's own try: two repetitions of a lost packet at 80 ms
ASK_S = 1.6  # until a helper's answer counts as missing: its try, and a round trip of 400 ms
SUSPICION_LEAST_S, SUSPICION_MOST_S = 2.0, 6.0
CUT_S = 10.0  # a connection that stands, but is silent for so long while a helper hears the member, is broken (wire: `dead_after_s`)
AGAIN_S, PAUSES_MOST = 2.0, 5  # between two rounds about a member who is not heard here, once more as long after each
HEALTH_MOST = 4
RECOVER_S = 5.0  # without trouble, and health is one better
HELPERS = 3  # memberlist's IndirectChecks
ROUNDS_AT_ONCE = 32  # times (1 + HELPERS) tasks; a whole rack that goes dark is looked at in portions
FRUITLESS = 2  # rounds in which nobody could tell, and the caller may wait no longer
MOST_MEMBERS = 1024


class Phase(Enum):
    """Of a round."""

    NONE = 0
    WAITING = 1  # for a place among the rounds
    DIRECT = 2
    INDIRECT = 3
    SUSPICION = 4
    PAUSE = 5  # before the next round


OPEN = (Phase.DIRECT, Phase.INDIRECT)


@dataclass(slots=True)
class _Member:
    boot_id: bytes
    heard_at: float
    linked: bool = True
    rtt_s: float = 0.0
    standing: Standing = Standing.ALIVE
    phase: Phase = Phase.NONE
    until: float = math.inf
    round: int = 0
    doubted_at: float = 0.0
    why: str = ""
    ping: Failure | None = None
    answers: dict[PeerId, Seen | None] = field(default_factory=dict)  # of helpers; None: not yet
    seq: int = -1  # of its newest claim
    suspected_seq: int = -1
    refutations: int = 0
    fruitless: int = 0  # rounds in which nobody could tell
    pauses: int = 0

    @property
    def trusted(self) -> bool:
        return self.linked and self.phase is Phase.NONE and self.standing is Standing.ALIVE


class Health:
    """Lifeguard's local health: 0 is well; each point makes this node wait once more as long before it thinks ill of others."""

    def __init__(self) -> None:
        self.score = 0
        self._better_at = math.inf

    @property
    def times(self) -> int:
        return 1 + self.score

    def worse(self, points: int, now: float) -> None:
        if points > 0:
            self.score = min(HEALTH_MOST, self.score + points)
            self._better_at = now + RECOVER_S

    def better(self, now: float) -> None:
        self.score = max(0, self.score - 1)
        self._better_at = now + RECOVER_S if self.score else math.inf

    def tick(self, now: float) -> None:
        while now >= self._better_at:
            self.better(self._better_at)


class Detector:
    """Members as this node sees them.  Every input returns what is to be done; `tick` is due at `next_due`."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._members: dict[PeerId, _Member] = {}
        self._rounds = 0
        self.health = Health()

    # -- what is known -------------------------------------------------------------------------------------------------------
    def standing(self, peer: PeerId) -> Standing | None:
        """None for one that was never connected, or was forgotten."""
        member = self._members.get(peer)
        return member.standing if member is not None else None

    def __len__(self) -> int:
        return len(self._members)

    def doubted(self) -> tuple[PeerId, ...]:
        """Those about whom a question is open."""
        return tuple(peer for peer, member in self._members.items() if member.phase is not Phase.NONE)

    def next_due(self) -> float:
        """Silence is not the tick's: by then `heard` must have said what came meanwhile."""
        dues = (m.heard_at + QUIET_S if m.trusted else m.until for m in self._members.values())
        return min(dues, default=math.inf)

    # -- inputs --------------------------------------------------------------------------------------------------------------
    def heard(self, peer: PeerId, boot_id: bytes, at: float, rtt_s: float, now: float) -> list[Decision]:
        """A connection with that process stands, and something came over it at `at`, whatever it was.  The first time introduces it."""
        member = self._members.get(peer)
        decisions: list[Decision] = []
        if member is None:
            self._make_room()
            member = self._members[peer] = _Member(boot_id, at)
        elif member.boot_id != boot_id:
            if member.trusted:
                member.doubted_at = now
            decisions = self._judge(peer, member, Standing.DEAD, "it was restarted: another process of this identity is here", now)
            member = self._members[peer] = _Member(boot_id, at, standing=Standing.DEAD, seq=member.seq)
            decisions += self._clear(peer, member, "it was restarted", now)
        member.rtt_s = rtt_s
        news, member.heard_at = at > max(member.heard_at, member.doubted_at), max(member.heard_at, at)
        if news and not member.trusted:
            member.linked = True
            return decisions + self._clear(peer, member, "it is heard again", now)
        if member.trusted and now - member.heard_at >= QUIET_S:
            return decisions + self._doubt(peer, member, f"nothing came from it for {now - member.heard_at:.1f} s", now)
        return decisions

    def lost(self, peer: PeerId, why: str, now: float, *, goodbye: bool = False) -> list[Decision]:
        """The last connection has ended or is interrupted; `goodbye`: the member said that it stops."""
        member = self._members.get(peer)
        if member is None or member.standing is Standing.DEAD:
            return []
        was, member.linked = member.linked, False
        if goodbye:
            if member.phase is Phase.NONE:
                member.doubted_at = now
            return self._judge(peer, member, Standing.DEAD, f"it said that it stops: {why}", now)
        if not was:
            return []
        if member.phase in (Phase.NONE, Phase.PAUSE) and member.standing is not Standing.SUSPECT:
            return self._doubt(peer, member, why, now)
        return []

    def answered(self, peer: PeerId, round_: int, now: float) -> list[Decision]:
        """Our ping was answered, however late."""
        member = self._members.get(peer)
        if member is None or member.round != round_ or member.standing is Standing.DEAD:
            return []
        member.heard_at, member.linked = now, True
        self.health.better(now)
        return self._clear(peer, member, "it answered", now)

    def failed(self, peer: PeerId, round_: int, how: Failure, now: float) -> list[Decision]:
        member = self._members.get(peer)
        if member is None or member.round != round_:
            return []
        member.ping = how
        return self._ask(peer, member, now) if member.phase is Phase.DIRECT else []

    def helped(self, peer: PeerId, round_: int, helper: PeerId, seen: Seen, now: float) -> list[Decision]:
        """What a helper answered."""
        member = self._members.get(peer)
        if member is None or member.round != round_ or helper not in member.answers:
            return []
        member.answers[helper] = seen
        if member.phase is Phase.SUSPICION and seen in SEEN_ALIVE:
            return self._conclude(peer, member, now)
        if member.phase is not Phase.INDIRECT:
            return []
        everybody = all(answer is not None for answer in member.answers.values())
        return self._conclude(peer, member, now) if everybody or seen in SEEN_ALIVE else []

    def claimed(self, peer: PeerId, seq: int, now: float) -> list[Decision]:
        """A claim that the member signed, by whichever way; of a suspect, a newer one than it was suspected with is a refutation."""
        member = self._members.get(peer)
        if member is None or seq <= member.seq:
            return []
        member.seq = seq
        if member.phase is not Phase.SUSPICION or seq <= member.suspected_seq:
            return []
        # Its last words may have been on their way when it died, so that once proves little, and it is looked at again.
        member.refutations += 1
        self._pause(member, now)
        if member.refutations > 1 or member.standing is Standing.UNREACHABLE_FROM_HERE:
            why = f"it signs claims, the newest number {seq}; it is not heard here"
            return self._judge(peer, member, Standing.UNREACHABLE_FROM_HERE, why, now)
        return self._judge(peer, member, Standing.ALIVE, f"it refuted the suspicion by its claim number {seq}", now)

    def stalled(self, late_s: float, now: float) -> None:
        """Our own loop did not run for so long: nobody was listened to, and what came lies unread."""
        self.health.worse(math.ceil(late_s), now)
        for member in self._members.values():
            member.until += late_s
            if member.linked:
                member.heard_at = max(member.heard_at, min(now, member.heard_at + late_s))

    def forget(self, peer: PeerId) -> None:
        """It is no longer of interest."""
        self._members.pop(peer, None)

    def tick(self, now: float) -> list[Decision]:
        self.health.tick(now)
        decisions: list[Decision] = []
        for peer, member in list(self._members.items()):
            if now < member.until:
                continue
            match member.phase:
                case Phase.DIRECT:
                    decisions += self._ask(peer, member, now)
                case Phase.INDIRECT:
                    decisions += self._conclude(peer, member, now)
                case Phase.SUSPICION:
                    decisions += self._expire(peer, member, now)
                case Phase.PAUSE:
                    decisions += self._begin(peer, member, now)
                case Phase.WAITING | Phase.NONE:
                    member.until = math.inf
        for peer, member in self._members.items():
            if member.phase is Phase.WAITING:
                decisions += self._begin(peer, member, now)
        return decisions

    # -- a round -------------------------------------------------------------------------------------------------------------
    def _doubt(self, peer: PeerId, member: _Member, why: str, now: float) -> list[Decision]:
        if member.standing is Standing.ALIVE:
            member.doubted_at, member.why = now, why
        return self._begin(peer, member, now)

    def _begin(self, peer: PeerId, member: _Member, now: float) -> list[Decision]:
        if sum(other.phase in OPEN for other in self._members.values()) >= ROUNDS_AT_ONCE:
            member.phase, member.until = Phase.WAITING, math.inf
            return []
        self._rounds += 1
        member.round = self._rounds
        member.ping, member.answers = None, {}
        times = self.health.times
        member.phase, member.until = Phase.DIRECT, now + times * (DIRECT_S + DIRECT_RTTS * member.rtt_s)
        return [Ping(peer, member.round, times * PING_S)]

    def _ask(self, peer: PeerId, member: _Member, now: float) -> list[Decision]:
        trusted = sorted(other for other, m in self._members.items() if other != peer and m.trusted)
        helpers = tuple(self._random.sample(trusted, min(HELPERS, len(trusted))))
        if not helpers:
            if self._others(peer):
                self.health.worse(1, now)  # all of them doubted at once: rather it is us
            return self._conclude(peer, member, now)
        member.answers = dict.fromkeys(helpers)
        times = self.health.times
        member.phase, member.until = Phase.INDIRECT, now + times * ASK_S
        return [Ask(peer, member.boot_id, member.round, helpers, times * ASK_S)]

    def _conclude(self, peer: PeerId, member: _Member, now: float) -> list[Decision]:
        """The helpers have answered, or had their time."""
        # A helper that is in doubt itself by now says nothing about us.
        answers = {h: seen for h, seen in member.answers.items() if seen is not None or self._trusted(h)}
        if member.phase is Phase.INDIRECT and now >= member.until:
            self.health.worse(sum(seen is None for seen in answers.values()) or not answers, now)
        witness = next((helper for helper, seen in answers.items() if seen in SEEN_ALIVE), None)
        if witness is not None:
            self._pause(member, now)
            if member.linked and now - member.heard_at < CUT_S:
                return []  # one connection may stand still for so long
            why = f"{witness.short} hears it, this node does not"
            return self._judge(peer, member, Standing.UNREACHABLE_FROM_HERE, why, now, witness)
        denials = [seen for seen in answers.values() if seen in DENIED]
        if Seen.RESTARTED in denials and member.ping is not None:
            return self._judge(peer, member, Standing.DEAD, "it was restarted: another process of this identity answers others", now)
        if member.ping is Failure.REFUSED and (Seen.REFUSED in denials or not self._others(peer)):
            return self._judge(peer, member, Standing.DEAD, Failure.REFUSED.value, now)
        member.suspected_seq = member.seq
        member.phase, member.until = Phase.SUSPICION, now + self.health.times * self._suspicion_s(peer, len(denials), len(answers))
        if member.standing is Standing.UNREACHABLE_FROM_HERE:
            return []  # no better news than that
        why = f"{member.why}; {len(denials)} of {len(answers)} helpers do not hear it either"
        return self._judge(peer, member, Standing.SUSPECT, why, now)

    def _suspicion_s(self, peer: PeerId, confirmed: int, asked: int) -> float:
        """Lifeguard, section IV-B: logarithmically shorter with each independent confirmation."""
        if not asked:
            return SUSPICION_MOST_S if self._others(peer) else SUSPICION_LEAST_S
        return SUSPICION_MOST_S - (SUSPICION_MOST_S - SUSPICION_LEAST_S) * math.log(confirmed + 1) / math.log(asked + 1)

    def _expire(self, peer: PeerId, member: _Member, now: float) -> list[Decision]:
        confirmed = any(seen in DENIED for seen in member.answers.values())
        heard = any(m.trusted and now - m.heard_at < QUIET_S for other, m in self._members.items() if other != peer)
        if confirmed and heard:
            return self._judge(peer, member, Standing.DEAD, f"{member.why}, and nobody who was asked hears it", now)
        if member.ping is Failure.REFUSED:
            return self._judge(peer, member, Standing.DEAD, Failure.REFUSED.value, now)
        self._pause(member, now)
        if heard:
            # Nobody could tell: look again, but do not leave it at that for ever.
            member.fruitless += 1
            if member.fruitless < FRUITLESS:
                return []
            why = "nothing comes from it, and none of the others could tell"
            return self._judge(peer, member, Standing.UNREACHABLE_FROM_HERE, why, now)
        why = "this node hears nobody: its own line is broken, or all are gone"
        return self._judge(peer, member, Standing.UNREACHABLE_FROM_HERE, why, now)

    def _pause(self, member: _Member, now: float) -> None:
        member.pauses = min(member.pauses + 1, PAUSES_MOST)  # who stays unreachable is looked at more and more rarely
        member.phase, member.until = Phase.PAUSE, now + self.health.times * AGAIN_S * member.pauses

    def _clear(self, peer: PeerId, member: _Member, reason: str, now: float) -> list[Decision]:
        member.phase, member.until, member.refutations = Phase.NONE, math.inf, 0
        member.answers, member.ping, member.doubted_at = {}, None, now
        member.fruitless = member.pauses = 0
        return self._judge(peer, member, Standing.ALIVE, reason, now)

    def _judge(
        self, peer: PeerId, member: _Member, standing: Standing, reason: str, now: float, helper: PeerId | None = None
    ) -> list[Decision]:
        if standing is Standing.DEAD:
            member.phase, member.until, member.linked = Phase.NONE, math.inf, False
        if standing is member.standing:
            return []
        member.standing = standing
        return [Judged(peer, Verdict(standing, reason, helper, max(0.0, now - member.doubted_at)))]

    def _others(self, peer: PeerId) -> bool:
        """Whether there is anybody else who could be asked, if all were well."""
        return any(other != peer and m.standing is not Standing.DEAD for other, m in self._members.items())

    def _trusted(self, peer: PeerId) -> bool:
        member = self._members.get(peer)
        return member is not None and member.trusted

    def _make_room(self) -> None:
        if len(self._members) >= MOST_MEMBERS:
            dead = (peer for peer, m in self._members.items() if m.standing is Standing.DEAD)
            del self._members[next(dead, next(iter(self._members)))]
