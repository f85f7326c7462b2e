"""The facts of this machine.  Everything is asked of the system; nothing is judged, and nothing is left behind.

What goes wrong: a folder that looks writable is not (read-only mount, quota, another user's), so a file is really made there; the
folder itself is not made, because looking must not change what `plnode join` finds.  That bbr is loaded does not mean that a
program may choose it, so a socket is asked for it, as a node would.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import psutil

from plnode.doctor.facts import Device, Disk, Machine, Versions
from plnode.manifest import PROTOCOL, Manifest
from plnode.memory import room_for_stage, system_limit
from plnode.settings import Settings
from wire.limits import DEFAULT_LIMITS
from wire.net.interfaces import descriptor_limit

__all__ = ["look_at_disk", "look_at_machine"]


def look_at_machine(settings: Settings, manifest: Manifest) -> Machine:
    """Some seconds, for torch is imported."""
    total, limit = psutil.virtual_memory().total, system_limit()
    room = room_for_stage(None, limit_bytes=limit)
    return Machine(
        versions=_versions(manifest),
        disk=look_at_disk(settings.data_dir),
        device=_device(settings),
        allowed_bytes=settings.memory_bytes,
        available_bytes=max(room.stage_bytes, 0),
        limit_bytes=total if limit is None else max(limit - room.set_aside_bytes, 0),
        descriptors=descriptor_limit(),
        connections_most=DEFAULT_LIMITS.inbound_connections_max,
        bbr=_bbr(),
    )


def _versions(manifest: Manifest) -> Versions:
    import torch

    from plnode.workload.lm import JobError, LanguageModel

    lacking = ""
    try:
        LanguageModel(manifest)
    except JobError as wrong:
        lacking = str(wrong)
    text = str(torch.__version__)
    major, minor = text.split(".")[:2]
    return Versions(
        python=sys.version_info[:3],
        torch=(int(major), int(minor)),
        torch_text=text,
        protocol=PROTOCOL,
        manifest_protocol=manifest.protocol,
        lacking=lacking,
    )


def look_at_disk(folder: Path) -> Disk:
    """Of the folder, or of where it would be made."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    refused, free = "", None
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".plnode-doctor-"):
            pass
        free = shutil.disk_usage(place).free
    except OSError as problem:
        refused = f"cannot be written to: {problem.strerror or problem}"
    return Disk(folder=str(folder), exists=folder.is_dir(), refused=refused, free_bytes=free)


def _device(settings: Settings) -> Device:
    name, lacking, free = "", "", None
    if settings.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            built = torch.version.cuda is not None
            lacking = "torch finds no GPU and driver that work" if built else "this torch was built without CUDA"
        else:
            try:
                name, free = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0]
            except RuntimeError as problem:
                lacking = str(problem).splitlines()[0]
    return Device(
        kind=settings.device, threads=settings.threads, cores=_cores(), name=name, free_bytes=free, lacking=lacking
    )


def _cores() -> int:
    """Those that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _bbr() -> str | None:
    option: int | None = getattr(socket, "TCP_CONGESTION", None)
    if option is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as asked:
        try:
            asked.setsockopt(socket.IPPROTO_TCP, option, b"bbr")
        except OSError as problem:
            return {errno.ENOENT: "not in this kernel", errno.EPERM: "not allowed to programs"}.get(problem.errno or 0, str(problem))
    return ""
