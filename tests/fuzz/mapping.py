"""Answers of a router as a target: two ports of it, any datagrams at any time.  Nothing is raised, no private address is told."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.engine import Outcome, Target
from tests.wire.routers import NONCE, address_answer, map_answer, pcp_answer, unsupported
from wire.limits import DEFAULT_LIMITS
from wire.portmapping import Epoch, Mapper, not_public

PORT = 4001
HEAD_BYTES = 3  # length, seconds from the one before, which port


def _prepared() -> Callable[[bytes], Outcome]:
    def run(data: bytes) -> Outcome:
        epoch, now, at = Epoch(), 0.0, 0
        mappers = [Mapper("192.168.1.7", port, NONCE, epoch, DEFAULT_LIMITS, now) for port in (PORT, PORT + 1)]
        states: list[str] = []
        while at + HEAD_BYTES <= len(data):
            size, pause, which = data[at : at + HEAD_BYTES]
            at += HEAD_BYTES
            now += pause * 10.0
            mapper = mappers[which & 1]
            assert len(mapper.poll(now)) <= 2 and mapper.due > now
            mapper.received(data[at : at + size], now)
            at += size
            mapping = mapper.mapping(now)
            assert mapping is None or not not_public(mapping.outside)
            if not states or states[-1] != mapper.state:
                states.append(mapper.state)
        removals = [mapper.release() for mapper in mappers]
        return Outcome((tuple(states[-8:]), tuple(None if removal is None else removal[0] for removal in removals)))

    return run


def _seeds() -> list[bytes]:
    def sequence(*answers: bytes, pause: int = 0) -> bytes:
        return b"".join(bytes((len(answer), pause, 0)) + answer for answer in answers)

    return [
        sequence(pcp_answer(PORT)),
        sequence(pcp_answer(PORT), pcp_answer(PORT, epoch=1900), pause=180),
        sequence(pcp_answer(PORT, result=8), pcp_answer(PORT), pause=200),
        sequence(pcp_answer(PORT, host="10.0.0.1")),
        sequence(unsupported(), address_answer(), map_answer(PORT)),
        sequence(unsupported(), address_answer(host="100.64.0.1")),
    ]


PORT_MAPPING = Target("port_mapping", _prepared, (), _seeds)
