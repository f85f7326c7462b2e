"""The shipped corpus: a real text, split once and for all, verified before use.

Theory.  A run must start without a download, and every origin must draw the same tokens for the same index.  So the package
carries the King James text (4.15 MB; `files/SOURCES.md` says where from) in three files: the text for people and tests, the
tokenizer, and the token array, because tokenising takes a second of CPU in each process of a swarm that shares two cores. All
three are checked against SHA-256 values in this file when they are loaded, and a test tokenises the text again and compares, so
that none can drift from the others.

The split is by chapter: every 20th chapter (index mod 20 = 10) is held out, 59 of 1,189.  A contiguous tail would be easier to
cut but would hold out epistles and the Apocalypse only, and the figure would mostly tell how these differ from the rest.
Chapters are tokenised one by one, hence no token and no training window of the held-out text touches a training chapter.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

import numpy as np
import numpy.typing as npt
import zstandard

from plnode.data.tokenizer import load_tokenizer

HELDOUT_PERIOD, HELDOUT_PHASE = 20, 10
# No shipped file expands beyond this; a corrupted frame header must not make us reserve more.
_FILE_MAX_BYTES = 16 << 20


class CorpusError(Exception):
    """A shipped data file is missing, damaged, or not the one this version was built with."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the package ships under one name; hashes are of the uncompressed bytes."""

    text_file: str
    text_sha256: str
    tokens_file: str
    tokens_sha256: str
    train_tokens: int


_SHIPPED = {
    "kjv": _Entry(
        text_file="kjv.txt.zst",
        text_sha256="886db9a821295d00017ab08c5623f5cb8f86c05ad98974fc17a1894d70ad9699",
        tokens_file="kjv.tokens.zst",
        tokens_sha256="719cdaf681ebf1271ccfe7182cf797fce3b96401e6fe1567cc1c9e3dc2f02efb",
        train_tokens=1106384,
    )
}


@dataclass(frozen=True, slots=True)
class Corpus:
    """A tokenised text with a fixed held-out part.

    `tokens` and `heldout` are read-only uint16 arrays, shape (n,): the chapters of each part in the order of the text. `sha256`
    (hex) names the token array: `tokens` followed by `heldout`, little-endian; a manifest pins it. `tokenizer_hash` (hex) is
    the SHA-256 of the tokenizer's file.
    """

    name: str
    tokens: npt.NDArray[np.uint16]
    heldout: npt.NDArray[np.uint16]
    vocabulary: int
    tokenizer_hash: str
    sha256: str


def _read(file: str, sha256: str) -> bytes:
    try:
        packed = resources.files("plnode.data").joinpath("files", file).read_bytes()
        data = zstandard.ZstdDecompressor().decompress(packed, max_output_size=_FILE_MAX_BYTES)
    except (OSError, zstandard.ZstdError) as error:
        raise CorpusError(f"data file {file} cannot be read: {error}; reinstall plnode") from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise CorpusError(f"data file {file} has SHA-256 {found}, expected {sha256}; reinstall plnode")
    return data


def _entry(name: str) -> _Entry:
    if name not in _SHIPPED:
        raise CorpusError(f"there is no corpus {name!r}; shipped: {', '.join(sorted(_SHIPPED))}")
    return _SHIPPED[name]


def load_text(name: str = "kjv") -> str:
    """The text itself: for each chapter a heading line, a blank line, one verse a line, a blank line."""
    entry = _entry(name)
    return _read(entry.text_file, entry.text_sha256).decode("ascii")


def load_corpus(name: str = "kjv") -> Corpus:
    """Load the token array of a shipped corpus.  Raises CorpusError if a file is missing or not the expected one.

    Takes some 20 ms: text and tokens are decompressed and hashed, nothing is tokenised.
    """
    entry = _entry(name)
    tokenizer = load_tokenizer(name)
    load_text(name)
    data = np.frombuffer(_read(entry.tokens_file, entry.tokens_sha256), dtype="<u2")
    return Corpus(
        name=name,
        tokens=data[: entry.train_tokens],
        heldout=data[entry.train_tokens :],
        vocabulary=tokenizer.vocabulary,
        tokenizer_hash=tokenizer.sha256,
        sha256=entry.tokens_sha256,
    )


def chapters(text: str) -> list[str]:
    """Cut the text into chapters, heading and closing blank line included; their concatenation is `text`."""
    pieces = text.split("\n\n")
    return [f"{heading}\n\n{body}\n\n" for heading, body in zip(pieces[:-1:2], pieces[1:-1:2], strict=True)]


def is_heldout(chapter: int) -> bool:
    """Whether the chapter with this index (from 0) belongs to the held-out part."""
    return chapter % HELDOUT_PERIOD == HELDOUT_PHASE


def training_chapters(text: str) -> list[str]:
    """The chapters that training may see, in order."""
    return [chapter for index, chapter in enumerate(chapters(text)) if not is_heldout(index)]


def heldout_chapters(text: str) -> list[str]:
    """The chapters that training never sees, in order."""
    return [chapter for index, chapter in enumerate(chapters(text)) if is_heldout(index)]


def unigram_loss(corpus: Corpus) -> float:
    """Mean loss (nats a token) on the held-out part of the best model without context.

    The model is the training part's token counts plus one each (Laplace), so a token never seen has a finite loss.  A trained
    model that is not clearly below this figure has learned word frequencies and nothing else.
    """
    counts = np.bincount(corpus.tokens, minlength=corpus.vocabulary).astype(np.float64) + 1.0
    log_p = np.log(counts / counts.sum())
    return float(-log_p[corpus.heldout].mean())
