"""Checked by `mypy --strict` and never run: the classes of the in-memory internet fit the interface of the socket room."""

from __future__ import annotations

from wire.net import Listener, Pipe, Transport
from wire.sim import SimListener, SimPipe, SimTransport


def pipe(it: SimPipe) -> Pipe:
    return it


def listener(it: SimListener) -> Listener:
    return it


def transport(it: SimTransport) -> Transport:
    return it
