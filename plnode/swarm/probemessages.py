"""What members say to each other about a third (type numbers 108..111; 110 and 111 are free)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from wire.messages import Range, Size, message

PROBE = "probe/1"


@message(108, extensible=True)
@dataclass(frozen=True, slots=True)
class ProbeAsk:
    """Does the process `boot_id` of `target` answer you now?"""

    target: Annotated[bytes, Size(32)]
    boot_id: Annotated[bytes, Size(8)]


@message(109, extensible=True)
@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """`seen`: it answered me just now.  `how`: `verdicts.Seen`; a number that is not known is read as "did not look"."""

    seen: bool
    how: Annotated[int, Range(0, 255)]
