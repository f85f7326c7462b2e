"""Measured processes: their answers, their deaths, and that none is left."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable

import pytest
import trio

from bench.children import BenchFailed, Child, open_children, pinned

pytestmark = pytest.mark.processes

ECHO = "import sys\nprint('{\"ready\": 1}', flush=True)\nfor line in sys.stdin: print(line, end='', flush=True)"


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


async def one_leaf(what: Callable[[], Awaitable[object]]) -> str:
    with pytest.raises(BenchFailed) as failed:
        await what()
    return str(failed.value)


async def test_readiness_is_a_line_and_every_request_has_its_answer() -> None:
    async with open_children() as children:
        child = await children.start("echo", script(ECHO))
        assert await child.hear(20) == {"ready": 1}
        for number in range(3):
            assert await child.ask({"number": number}, 20) == {"number": number}


async def test_a_death_is_told_with_its_last_words() -> None:
    async with open_children() as children:
        child = await children.start("dying", script("import sys; sys.exit('no such thing')"))
        said = await one_leaf(lambda: child.hear(20))
        assert "dying ended without an answer" in said and "no such thing" in said


async def test_what_is_no_answer_is_named() -> None:
    async with open_children() as children:
        child = await children.start("talker", script("print('hello'); print('[1]')"))
        assert "'hello'" in await one_leaf(lambda: child.hear(20))
        assert "[1]" in await one_leaf(lambda: child.hear(20))


async def test_silence_has_an_end() -> None:
    async with open_children() as children:
        child = await children.start("silent", script("input()"))
        assert "no answer within 0.05 s" in await one_leaf(lambda: child.hear(0.05))


@pytest.mark.parametrize("how", ["normal", "error", "cancel"])
async def test_no_process_is_left(how: str) -> None:
    started: list[Child] = []

    async def use() -> None:
        async with open_children() as children:
            child = await children.start("echo", script(ECHO))
            started.append(child)
            await child.hear(20)
            if how == "error":
                raise BenchFailed("on purpose")
            if how == "cancel":
                scope.cancel()
                await trio.lowlevel.checkpoint()

    with trio.CancelScope() as scope:
        if how == "error":
            with pytest.RaisesGroup(BenchFailed):
                await use()
        else:
            await use()
    with pytest.raises(ProcessLookupError):
        os.kill(started[0].pid, 0)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="binding to cores is Linux'")
async def test_a_bound_child_sees_only_its_cores() -> None:
    core = max(os.sched_getaffinity(0))
    async with open_children() as children:
        child = await children.start(
            "bound", script("import json, os; print(json.dumps({'cores': sorted(os.sched_getaffinity(0))}))"), [core]
        )
        assert await child.hear(20) == {"cores": [core]}


def test_no_cores_mean_no_binding() -> None:
    assert pinned([], ["x"]) == ["x"]
