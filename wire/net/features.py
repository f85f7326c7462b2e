"""What this node understands beyond the least that every node does: the words in `features` of its HELLO.

One place, because a word is a promise: what is listed here for peers is what the receiving ends of channels accept.
"""

from __future__ import annotations

from wire.planes import FEATURE as PLANES

FEATURES: tuple[str, ...] = (PLANES,)
