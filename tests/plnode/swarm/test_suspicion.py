"""The detector alone: what is decided when, in a table of time and answers."""

from __future__ import annotations

import math
from random import Random

import pytest

from plnode.swarm import suspicion as sus
from plnode.swarm.suspicion import Detector
from plnode.swarm.verdicts import Ask, Decision, Failure, Judged, Ping, Seen, Standing
from wire.identity import Identity, PeerId

PEERS = [Identity(bytes([n]) * 32).peer_id for n in range(1, 9)]
X, *OTHERS = PEERS
BOOT = b"process1"


class Bench:
    """Members who are well but for X; the test says what becomes of pings and asks."""

    def __init__(self, others: int = 4, seed: int = 1) -> None:
        self.detector = Detector(Random(seed))
        self.now = 0.0
        self.others = OTHERS[:others]
        self.verdicts: list[tuple[float, PeerId, Standing]] = []
        self.reasons: list[str] = []
        self.last: Judged | None = None
        self.heard: dict[PeerId, float] = {}  # when they were last
        self.lost: dict[PeerId, float] = {}
        self.pings: list[Ping] = []
        self.asks: list[Ask] = []
        self.well = set(self.others)
        for peer in (X, *self.others):
            self.do(self.detector.heard(peer, BOOT, 0.0, 0.08, 0.0))

    def do(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Judged(peer, verdict):
                    self.verdicts.append((round(self.now, 3), peer, verdict.standing))
                    self.reasons.append(verdict.reason)
                    self.last = decision
                case Ping():
                    self.pings.append(decision)
                case Ask():
                    self.asks.append(decision)

    def run(self, seconds: float) -> None:
        """Time goes by; those that are well are heard."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.05)
            for peer in (X, *self.others):
                at = self.now if peer in self.well else -1.0
                self.heard[peer] = max(at, self.heard.get(peer, 0.0))
                self.do(self.detector.heard(peer, BOOT, at, 0.08, self.now))
            self.do(self.detector.tick(self.now))

    def lose(self, peer: PeerId = X, **how: bool) -> None:
        self.well.discard(peer)
        self.lost[peer] = self.now
        self.do(self.detector.lost(peer, "reset", self.now, **how))

    def fail(self, how: Failure = Failure.SILENT) -> None:
        ping = self.pings[-1]
        self.do(self.detector.failed(ping.peer, ping.round, how, self.now))

    def answer(self, *seen: Seen) -> None:
        ask = self.asks[-1]
        for helper, one in zip(ask.helpers, seen, strict=False):
            self.do(self.detector.helped(ask.peer, ask.round, helper, one, self.now))

    def standings(self, peer: PeerId = X) -> list[Standing]:
        return [standing for _, who, standing in self.verdicts if who == peer]


def test_who_answers_the_ping_is_not_even_suspected() -> None:
    b = Bench()
    b.lose()
    assert len(b.pings) == 1 and not b.asks
    b.run(0.5)
    b.do(b.detector.answered(X, b.pings[0].round, b.now))
    b.well.add(X)
    b.run(60)
    assert not b.verdicts and not b.asks


def test_helpers_are_asked_when_the_ping_failed_or_takes_too_long_and_only_those_that_are_well() -> None:
    for early in (True, False):
        b = Bench()
        b.lose(OTHERS[0])
        b.lose()
        b.run(0.1)
        if early:
            b.fail()
            assert b.asks
        else:
            b.run(sus.DIRECT_S + sus.DIRECT_RTTS * 0.08)
        (ask,) = [ask for ask in b.asks if ask.peer == X]
        assert set(ask.helpers) == set(OTHERS[1:4]) and ask.boot_id == BOOT


@pytest.mark.parametrize(
    ("denials", "expected"),
    [(0, math.inf), (1, 4.0), (2, 6 - 4 * math.log(3, 4)), (3, 2.0)],
)
def test_a_suspicion_is_shorter_the_more_confirm_it(denials: int, expected: float) -> None:
    b = Bench()
    b.lose()
    b.fail()
    b.answer(*[Seen.SILENT] * denials, *[Seen.BUSY] * (3 - denials))
    assert b.standings() == [Standing.SUSPECT]
    began = b.now
    b.run(20 if denials == 0 else expected - 0.1)
    assert Standing.DEAD not in b.standings()
    if denials:
        b.run(0.2)
        assert b.standings() == [Standing.SUSPECT, Standing.DEAD]
        assert b.verdicts[-1][0] - began == pytest.approx(expected, abs=0.1)


def test_a_witness_means_unreachable_from_here_and_is_named() -> None:
    b = Bench()
    b.lose()
    b.fail()
    b.answer(Seen.SILENT, Seen.CONNECTED)
    assert b.last is not None and b.standings() == [Standing.UNREACHABLE_FROM_HERE]
    assert b.last.verdict.helper == b.asks[0].helpers[1]
    # Asked again and again; when the witness no longer hears it, it dies after all.
    b.run(sus.AGAIN_S + 0.1)
    b.fail()
    b.answer(Seen.SILENT, Seen.SILENT, Seen.SILENT)
    b.run(2.1)
    assert b.standings()[-1] is Standing.DEAD


def test_a_connection_that_stands_still_is_cut_only_after_10_s() -> None:
    b = Bench()
    b.well.discard(X)
    b.run(sus.QUIET_S + 0.1)
    b.fail()
    b.answer(Seen.CONNECTED)
    assert not b.verdicts
    b.run(sus.AGAIN_S)
    b.run(sus.CUT_S - b.now + 0.1)
    b.fail()
    b.answer(Seen.CONNECTED)
    assert b.standings() == [Standing.UNREACHABLE_FROM_HERE]
    b.well.add(X)
    b.run(0.1)
    assert b.standings()[-1] is Standing.ALIVE and b.detector.standing(X) is Standing.ALIVE


def test_a_refusal_that_a_helper_confirms_is_death_at_once_and_alone_is_a_suspicion() -> None:
    b = Bench()
    b.lose()
    b.fail(Failure.REFUSED)
    assert not b.verdicts, "a router may have refused: helpers are asked first"
    b.answer(Seen.REFUSED, Seen.SILENT, Seen.REFUSED)
    assert b.standings() == [Standing.DEAD]
    b = Bench()
    b.lose()
    b.fail(Failure.REFUSED)
    b.answer(Seen.SILENT, Seen.SILENT, Seen.SILENT)
    assert b.standings() == [Standing.SUSPECT]
    b = Bench()
    b.lose()
    b.fail(Failure.REFUSED)
    b.answer(Seen.CONNECTED)
    assert b.standings() == [Standing.UNREACHABLE_FROM_HERE], "whoever is heard is not dead, whatever we are told"
    b = Bench()
    b.lose()
    b.fail(Failure.SILENT)
    b.answer(Seen.REFUSED, Seen.REFUSED, Seen.REFUSED)
    assert b.standings() == [Standing.SUSPECT], "helpers alone kill nobody at once"


def test_of_two_members_a_refusal_is_death_and_silence_is_not() -> None:
    b = Bench(others=0)
    b.lose()
    b.fail(Failure.REFUSED)
    assert b.standings() == [Standing.DEAD]
    b = Bench(others=0)
    b.lose()
    b.fail()
    b.run(60)
    assert b.standings() == [Standing.SUSPECT, Standing.UNREACHABLE_FROM_HERE]


def suspected(seq: int = 7) -> Bench:
    b = Bench()
    b.do(b.detector.claimed(X, seq, b.now))
    b.do(b.detector.claimed(X, 3, b.now))  # an older one comes late
    b.lose()
    b.fail()
    b.answer(Seen.SILENT, Seen.SILENT, Seen.SILENT)
    assert b.standings() == [Standing.SUSPECT]
    return b


def test_a_newer_claim_refutes_and_the_same_one_does_not() -> None:
    for seq, ends in ((6, Standing.DEAD), (7, Standing.DEAD), (8, Standing.ALIVE)):
        b = suspected(7)
        b.run(1.0)
        b.do(b.detector.claimed(X, seq, b.now))
        b.run(1.5)
        assert b.standings()[-1] is ends


def test_who_refutes_but_is_never_heard_is_unreachable_and_last_words_do_not_keep_the_dead_alive() -> None:
    for again in (True, False):
        b = suspected(7)
        b.do(b.detector.claimed(X, 8, b.now))
        b.run(sus.AGAIN_S + 0.1)
        b.fail()
        b.answer(Seen.SILENT, Seen.SILENT, Seen.SILENT)
        if again:
            b.do(b.detector.claimed(X, 9, b.now))
            assert b.standings()[-1] is Standing.UNREACHABLE_FROM_HERE
        else:
            b.run(sus.SUSPICION_LEAST_S + 0.1)
            assert b.standings() == [Standing.SUSPECT, Standing.ALIVE, Standing.SUSPECT, Standing.DEAD]


def test_a_goodbye_is_believed_at_once_and_another_process_is_the_death_of_the_first() -> None:
    b = Bench()
    b.lose(goodbye=True)
    assert b.standings() == [Standing.DEAD] and b.last is not None and b.last.verdict.after_s == 0
    b = Bench()
    b.do(b.detector.heard(X, b"process2", 0.0, 0.08, 0.0))
    assert b.standings() == [Standing.DEAD, Standing.ALIVE]
    b = Bench()
    b.lose()
    b.fail()
    b.answer(Seen.RESTARTED, Seen.SILENT, Seen.SILENT)
    assert b.standings() == [Standing.DEAD]


def test_helpers_that_do_not_answer_make_us_distrust_ourselves_and_those_who_deny_do_not() -> None:
    b = suspected()
    assert b.detector.health.score == 0
    b = Bench()
    b.lose()
    b.fail()
    b.run(sus.ASK_S + 0.05)
    assert b.detector.health.score == 3
    took = [at for at, _, standing in b.verdicts if standing is Standing.SUSPECT]
    b.run(10)
    assert b.detector.health.score == 1, "one better in five seconds"
    assert b.standings() == [Standing.SUSPECT] and took == [pytest.approx(sus.ASK_S, abs=0.06)]
    b.run(4 * sus.SUSPICION_MOST_S)
    assert Standing.DEAD not in b.standings(), "nobody has confirmed it"


def test_a_node_that_hears_nobody_accuses_nobody() -> None:
    b = Bench()
    b.well.clear()
    scores = []
    for _ in range(60):
        b.run(1.0)
        scores.append(b.detector.health.score)
    assert max(scores) == sus.HEALTH_MOST
    for peer in (X, *b.others):
        assert b.standings(peer) == [Standing.SUSPECT, Standing.UNREACHABLE_FROM_HERE]
        at = next(at for at, who, s in b.verdicts if who == peer and s is Standing.UNREACHABLE_FROM_HERE)
        assert at < 60
    b.well = {X, *b.others}
    b.run(0.1)
    assert all(b.detector.standing(peer) is Standing.ALIVE for peer in (X, *b.others))


def test_a_stall_of_our_loop_puts_off_everything_by_its_length() -> None:
    b = suspected()
    b.run(1.0)
    b.now += 30
    b.detector.stalled(30, b.now)
    b.do(b.detector.tick(b.now))
    assert b.standings() == [Standing.SUSPECT] and b.detector.health.score == sus.HEALTH_MOST
    b.run(0.9)
    assert b.standings() == [Standing.SUSPECT]
    b.run(0.2)
    assert b.standings() == [Standing.SUSPECT, Standing.DEAD]
    assert not any(b.standings(peer) for peer in b.others)


def test_answers_of_an_old_round_and_of_nobody_asked_count_nothing() -> None:
    b = Bench()
    b.lose()
    b.fail()
    ask = b.asks[0]
    b.do(b.detector.helped(X, ask.round + 1, ask.helpers[0], Seen.CONNECTED, b.now))
    b.do(b.detector.helped(X, ask.round, X, Seen.CONNECTED, b.now))
    b.do(b.detector.answered(X, ask.round + 1, b.now))
    assert not b.verdicts and b.detector.standing(X) is Standing.ALIVE
    b.run(sus.ASK_S + 0.1)
    assert b.standings() == [Standing.SUSPECT]


def test_rounds_and_members_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sus, "ROUNDS_AT_ONCE", 2)
    monkeypatch.setattr(sus, "MOST_MEMBERS", 8)
    b = Bench(others=7)
    for peer in PEERS:
        b.lose(peer)
    assert len(b.pings) == 2
    b.run(60)
    assert {ping.peer for ping in b.pings} == set(PEERS), "everybody has its turn"
    for n in range(20, 30):
        b.do(b.detector.heard(Identity(bytes([n]) * 32).peer_id, BOOT, b.now, 0.08, b.now))
    assert len(b.detector) == 8


@pytest.mark.parametrize("seed", range(40))
def test_whatever_comes_nobody_who_is_heard_dies(seed: int) -> None:
    """Random inputs.  Without a goodbye one dies only if it was lost or quiet since it was heard last, and without a refusal only after
    a suspicion's time; nobody stays a suspect for longer than twice the sickest node's waits."""
    rng = Random(seed)
    b = Bench(others=5, seed=seed)
    suspect_since: dict[PeerId, float] = {}
    for _ in range(400):
        peer = rng.choice(PEERS[:6])
        before = len(b.verdicts)
        goodbye = False
        match rng.randrange(7):
            case 0:
                b.well ^= {peer}
            case 1:
                goodbye = rng.random() < 0.02
                b.lose(peer, goodbye=goodbye)
            case 2 if b.pings:
                b.fail(rng.choice(list(Failure)))
            case 3 if b.asks:
                b.answer(*[rng.choice([s for s in Seen if s is not Seen.RESTARTED]) for _ in range(3)])
            case 4:
                b.do(b.detector.claimed(peer, rng.randrange(2000), b.now))
            case 5 if rng.random() < 0.1:
                b.detector.stalled(rng.random() * 5, b.now)
            case _:
                b.run(rng.random() * 2)
        for (at, who, standing), reason in zip(b.verdicts[before:], b.reasons[before:], strict=True):
            if standing is Standing.DEAD and not goodbye:
                unheard_s = at - b.heard.get(who, 0.0)
                assert unheard_s >= sus.QUIET_S or b.lost.get(who, -1.0) >= b.heard.get(who, 0.0)
                assert unheard_s >= sus.SUSPICION_LEAST_S - 0.1 or reason == Failure.REFUSED.value
            if standing is Standing.SUSPECT:
                suspect_since[who] = at
            else:
                suspect_since.pop(who, None)
        assert all(b.now - since <= 2 * 5 * (sus.SUSPICION_MOST_S + sus.ASK_S + 1 + 2 * sus.AGAIN_S) for since in suspect_since.values())
    assert b.verdicts
