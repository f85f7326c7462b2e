"""What others use of the machine while something is measured."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import psutil
import pytest

from bench.others import Others


class MachineTimes(NamedTuple):
    user: float = 0.0
    system: float = 0.0
    idle: float = 0.0
    iowait: float = 0.0
    steal: float = 0.0
    guest: float = 0.0


class ProcessTimes(NamedTuple):
    user: float
    system: float


def test_our_own_work_and_idleness_are_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now, machine, own = 100.0, MachineTimes(user=50.0, idle=100.0), ProcessTimes(1.0, 0.5)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(psutil, "cpu_times", lambda: machine)
    monkeypatch.setattr(psutil.Process, "cpu_times", lambda self: own)
    others = Others([os.getpid()])
    now += 10.0
    machine = MachineTimes(user=60.0, system=2.0, steal=3.0, guest=4.0, idle=104.0, iowait=1.0)  # 15 s busy; guests are in user
    own = ProcessTimes(5.0, 1.5)  # 5 s of them are ours
    assert others.cores() == pytest.approx((15.0 - 5.0) / 10.0)


def test_a_process_that_is_gone_and_a_tick_too_many_do_no_harm() -> None:
    others = Others([2**22 + 1])  # beyond Linux' greatest process id
    assert others.cores() >= 0.0
