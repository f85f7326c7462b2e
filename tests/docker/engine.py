"""The Docker engine as tests use it: one image, containers that are followed by their JSON lines, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
IMAGE = os.environ.get("PLNODE_TEST_IMAGE", "plnode:test")
HARD = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
BUILD_S = 1800.0
EVENT_S = 120.0  # an event of a container on a machine that has other work
LOOK_EVERY_S = 0.2  # the engine's command line has no call that waits for a line


def docker(*arguments: str, check: bool = True, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """One call of the command line; its output as text.  Raises AssertionError with stderr unless `check` is False."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout_s)
    assert not check or done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
    return done


def missing() -> str | None:
    """Why no container can be run here; None if one can."""
    try:
        done = docker("info", "--format", "{{.ServerVersion}}", check=False, timeout_s=20)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"no Docker engine answers: {problem}"
    return None if done.returncode == 0 else f"no Docker engine answers: {done.stderr.strip()}"


def build() -> None:
    """The image from this working tree: from docker/wheels alone if that was filled (docker/engine.sh wheels), else from the indexes."""
    offline = ["--build-arg", "PIP_NO_INDEX=1"] if list((ROOT / "docker" / "wheels").glob("torch-*.whl")) else []
    docker("build", "--quiet", "--tag", IMAGE, "--file", str(ROOT / "docker" / "Dockerfile"), *offline, str(ROOT), timeout_s=BUILD_S)


@dataclass(frozen=True, slots=True)
class Container:
    """A started container."""

    name: str

    def state(self) -> dict[str, Any]:
        return dict(json.loads(docker("inspect", "--format", "{{json .State}}", self.name).stdout))

    def started_at(self) -> float:
        """Unix seconds of the last start."""
        text = self.state()["StartedAt"].partition(".")
        return datetime.fromisoformat(f"{text[0]}+00:00").timestamp() + float(f"0.{text[2].rstrip('Z')}")

    def output(self) -> str:
        done = docker("logs", self.name)
        return done.stdout + done.stderr

    def events(self, kind: str, since: float = 0.0) -> list[dict[str, Any]]:
        lines = docker("logs", self.name).stdout.splitlines()
        events = [json.loads(line) for line in lines if line.startswith("{")]
        return [event for event in events if event["kind"] == kind and event["time"] >= since]

    def wait_for(self, kind: str, since: float = 0.0, match: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
        """The first such event at or after `since`.  Fails when the container ends before it, or after EVENT_S."""
        end = time.monotonic() + EVENT_S
        while time.monotonic() < end:
            running = self.state()["Running"]
            for event in self.events(kind, since):
                if match(event):
                    return event
            assert running, f"{self.name} ended before {kind}:\n{self.output()[-3000:]}"
            time.sleep(LOOK_EVERY_S)
        raise AssertionError(f"{self.name}: no {kind} within {EVENT_S:g} s:\n{self.output()[-3000:]}")

    def ended(self) -> int:
        """Wait for its end; the exit code."""
        return int(docker("wait", self.name, timeout_s=EVENT_S).stdout)

    def stop(self) -> float:
        """SIGTERM, and SIGKILL after Docker's usual ten seconds; the seconds that it took."""
        began = time.monotonic()
        docker("stop", "--time", "10", self.name)
        return time.monotonic() - began
