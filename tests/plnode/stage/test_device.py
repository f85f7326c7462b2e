"""Copies.  The CPU's for real; of the CUDA device what can be tried without one: the order of streams, events and reports."""

import threading
from contextlib import nullcontext

import pytest
import torch

from plnode.stage import StageError, device
from plnode.stage.device import PIECE_BYTES, CpuDevice, CudaDevice


def test_cpu_copies_are_complete_and_our_own():
    cpu = CpuDevice()
    host = bytearray(b"abcdef")
    tensor = cpu.to_device(memoryview(host))
    host[0] = 0
    assert bytes(tensor.numpy()) == b"abcdef"
    out, seen = bytearray(6), []
    cpu.to_host([tensor[:2], tensor[2:]], memoryview(out), seen.append)
    assert bytes(out) == b"abcdef" and seen == [6] and not cpu.poll()


class Stream:
    def __init__(self, log):
        self.log = log

    def wait_stream(self, other):
        self.log.append(("waits", self, other))


class Event:
    def __init__(self):
        self.passed = False

    def record(self, stream):
        self.stream = stream

    def query(self):
        return self.passed


@pytest.fixture
def cuda(monkeypatch):
    """(device, log of waits, events): a CudaDevice on CPU memory with streams and events that do nothing by themselves."""
    log, events = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append(("recorded", tensor.numel(), stream)))
    monkeypatch.setattr(device, "_new_stream", lambda _: Stream(log))
    monkeypatch.setattr(device, "_new_event", lambda: events.append(Event()) or events[-1])
    made = CudaDevice(torch.device("cuda:0"), threading.Condition())
    made.torch_device = torch.device("cpu")
    return made, log, events


def test_a_payload_leaves_in_pieces_and_progress_follows_the_events(cuda):
    made, log, events = cuda
    parts = [torch.arange(PIECE_BYTES + 5).to(torch.uint8), torch.ones(7, dtype=torch.uint8)]
    out, seen = bytearray(PIECE_BYTES + 12), []
    made.to_host(parts, memoryview(out), seen.append)
    assert log == [("waits", made._out, made._compute)] and [e.stream for e in events] == [made._out] * 3
    assert made.poll() and seen == []
    events[1].passed = True  # not the first yet
    assert made.poll() and seen == []
    events[0].passed = True
    assert made.poll() and seen == [PIECE_BYTES, PIECE_BYTES + 5]
    events[2].passed = True
    assert not made.poll() and seen[-1] == len(out)
    assert bytes(out) == bytes(torch.cat(parts).numpy())


def test_an_input_is_copied_as_it_lands_and_must_be_whole_when_used(cuda):
    made, log, _ = cuda
    host = bytearray(b"0123456789")
    inflow = made.inflow(memoryview(host))
    inflow.landed(5, 10)
    made.poll()
    with pytest.raises(StageError, match="5 of 10 bytes"):
        made.to_device(inflow)
    inflow.landed(0, 5)
    tensor = made.to_device(inflow)
    assert bytes(tensor.numpy()) == bytes(host)
    assert log == [("waits", made._compute, made._in), ("recorded", 10, made._compute)]
    assert bytes(made.to_device(memoryview(host)).numpy()) == bytes(host)
