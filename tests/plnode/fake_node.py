"""A node that trains nothing: it tells the events of a short run, so that the demo is tested in a second and without torch.

Started like `python -m plnode seed|join ...` by tests/plnode/test_demo_swarm.py; FAKE_NODE says how it behaves.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys

from plnode.cli.service import exit_with_stdin
from plnode.observe import events as e

STEPS = 4


def say(event: e.Event) -> None:
    sys.stdout.write(json.dumps({**e.to_json(event), "time": 0.0}) + "\n")
    sys.stdout.flush()


def until_the_end() -> None:
    while True:
        signal.pause()


def train(name: str, data: str, behaviour: str) -> None:
    index = int(name.rpartition("-")[2])
    stage = index % 2
    say(e.StageAssigned(stage, stage, stage + 1, 100, 1000))
    if behaviour == "stuck":
        say(e.Waiting("for a replica of stage 1", "0 of 1 here"))
        until_the_end()
    say(e.RunStarted(1, 0, ((name, stage),)))
    sys.stdout.write("a library prints something that is no event\n")
    for step in range(STEPS):
        if behaviour == "die" and index == 1 and step == 2:
            sys.stderr.write("the device caught fire\n")
            sys.exit(7)
        loss = 7.0 - step if stage == 1 else None
        say(e.StepDone(step, loss, 64, 0.01, 1.0, False))
        if step % 2 == 0:
            say(e.HeldOut(step, 7.5 - step, 32))
    say(e.SnapshotWritten(STEPS, f"{data}/snapshots/{STEPS}/stage-{stage}.safetensors", 10, 0.1))
    boundary = {"0-1": e.BoundaryBytes(1000 * STEPS, 0) if stage == 0 else e.BoundaryBytes(0, 500 * STEPS)}
    status = e.NodeStatus(
        name=name, peer_id=name, stage=stage, state="training", waiting_for=None, waiting_since_s=None, step=STEPS, steps=STEPS,
        loss=4.0, tokens_per_s=100.0, bytes_in=1, bytes_out=2, queue=0, in_flight=0, credits=0, kept_graphs=0, recomputed=0,
        lost_microbatches=0, boundary_bytes=boundary, boundary_tokens=10 * STEPS, peers=(), loop_blocked_p99_ms=0.1, eta_s=0.0,
    )  # fmt: skip
    say(status)
    say(dataclasses.replace(status, state="stopping"))
    say(e.RunFinished(STEPS))
    if behaviour == "linger":
        until_the_end()


def main() -> None:
    role, flags = sys.argv[1], dict(zip(sys.argv[2:], sys.argv[3:], strict=False))
    behaviour = os.environ.get("FAKE_NODE", "")
    if behaviour == "deaf":  # neither the end of stdin nor SIGTERM moves it, and it has a child of its own
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import signal\nwhile True: signal.pause()"])
        sys.stdout.write(f"{child.pid}\n")
        sys.stdout.flush()
        until_the_end()
    exit_with_stdin()
    if behaviour == "no seed" and role == "seed":
        sys.stderr.write("port in use\n")
        sys.exit(2)
    name = flags["--name"]
    say(e.NodeStarted(name, name, ("/ip4/127.0.0.1/tcp/4000",), "cpu", 1))
    if role == "join":
        with open(flags["--seeds"], encoding="utf-8") as seeds:
            assert "seed@127.0.0.1:4000" in seeds.read()
        train(name, flags["--data"], behaviour)
    else:
        until_the_end()


if __name__ == "__main__":
    main()
