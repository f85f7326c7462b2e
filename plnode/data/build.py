"""How the shipped corpus was made: from a verse dump to a text, a tokenizer and their hashes.

Nothing at run time calls this file.  It is kept so that `files/` can be made again from its source and compared to the byte
(`tests/plnode/data/test_build.py` retrains the tokenizer and compares).  What could go wrong is silent change: another version
of the source, another order of books, another trainer.  So the input is one plain dump (one verse a line, `Ge1:1 In the ...`,
as the Debian program `bible` prints it), every line must match, the counts of books, chapters and verses are checked against
those of the King James Bible, and the result is deterministic.

The tokenizer sees only the training chapters: held-out text must not shape the vocabulary it is judged with.  It is byte-level
BPE (Sennrich et al., arXiv 1508.07909, on bytes as in GPT-2): any byte string has an encoding, there is no unknown token. 2,048
tokens keep the embedding and the head of a demonstration model small against its layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import zstandard
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from plnode.data.corpus import heldout_chapters, training_chapters
from plnode.data.tokenizer import Tokenizer

VOCABULARY = 2048

# The 66 books in the order and with the abbreviations of the dump.
BOOKS: dict[str, str] = {
    "Ge": "Genesis", "Exo": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deu": "Deuteronomy", "Josh": "Joshua",
    "Jdgs": "Judges", "Ruth": "Ruth", "1Sm": "1 Samuel", "2Sm": "2 Samuel", "1Ki": "1 Kings", "2Ki": "2 Kings",
    "1Chr": "1 Chronicles", "2Chr": "2 Chronicles", "Ezra": "Ezra", "Neh": "Nehemiah", "Est": "Esther", "Job": "Job",
    "Psa": "Psalm", "Prv": "Proverbs", "Eccl": "Ecclesiastes", "SSol": "Song of Solomon", "Isa": "Isaiah", "Jer": "Jeremiah",
    "Lam": "Lamentations", "Eze": "Ezekiel", "Dan": "Daniel", "Hos": "Hosea", "Joel": "Joel", "Amos": "Amos",
    "Obad": "Obadiah", "Jonah": "Jonah", "Mic": "Micah", "Nahum": "Nahum", "Hab": "Habakkuk", "Zep": "Zephaniah",
    "Hag": "Haggai", "Zec": "Zechariah", "Mal": "Malachi", "Mat": "Matthew", "Mark": "Mark", "Luke": "Luke", "John": "John",
    "Acts": "Acts", "Rom": "Romans", "1Cor": "1 Corinthians", "2Cor": "2 Corinthians", "Gal": "Galatians",
    "Eph": "Ephesians", "Phi": "Philippians", "Col": "Colossians", "1Th": "1 Thessalonians", "2Th": "2 Thessalonians",
    "1Tim": "1 Timothy", "2Tim": "2 Timothy", "Titus": "Titus", "Phmn": "Philemon", "Heb": "Hebrews", "Jas": "James",
    "1Pet": "1 Peter", "2Pet": "2 Peter", "1Jn": "1 John", "2Jn": "2 John", "3Jn": "3 John", "Jude": "Jude",
    "Rev": "Revelation",
}  # fmt: skip
# Counts of the King James Bible; a dump that differs is cut short or of another edition.
CHAPTERS, VERSES = 1189, 31102

_VERSE = re.compile(r"(\d?[A-Za-z]+)(\d+):(\d+) (\S.*)")


def text_of(dump: str) -> str:
    """The plain text of a verse dump: for each chapter its heading, a blank line, a verse a line, a blank line.

    Raises ValueError for a line that is no verse, a book or verse out of order, or counts that are not those of the edition.
    """
    chapters: list[list[str]] = []
    order = list(BOOKS)
    at, last = (0, 1, 0), 0
    for number, line in enumerate(dump.splitlines(), start=1):
        match = _VERSE.fullmatch(line)
        if match is None or match[1] not in BOOKS:
            raise ValueError(f"line {number} is not a verse: {line[:60]!r}")
        here = (order.index(match[1]), int(match[2]), int(match[3]))
        follows = {(at[0], at[1], at[2] + 1), (at[0], at[1] + 1, 1), (at[0] + 1, 1, 1)}
        if here not in follows:
            raise ValueError(f"line {number}: {line[:20]!r} does not follow the verse before it")
        if here[2] == 1:
            chapters.append([f"{BOOKS[match[1]]} {match[2]}\n"])
        chapters[-1].append(" ".join(match[4].split()))
        at, last = here, number
    if (at[0] + 1, len(chapters), last) != (len(BOOKS), CHAPTERS, VERSES):
        counts = f"{at[0] + 1} books, {len(chapters)} chapters, {last} verses"
        raise ValueError(f"{counts}; expected {len(BOOKS)}, {CHAPTERS}, {VERSES}")
    return "".join("\n".join(chapter) + "\n\n" for chapter in chapters)


def train_tokenizer(chapters: Sequence[str], vocabulary: int = VOCABULARY) -> str:
    """Train the byte-level BPE on `chapters`; the JSON text of the tokenizer.  The same input gives the same bytes."""
    tokenizer = BackendTokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=sorted(ByteLevel.alphabet()), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(chapters, trainer)
    return str(tokenizer.to_str(pretty=False)) + "\n"


def tokenise(tokenizer: Tokenizer, chapters: Sequence[str]) -> bytes:
    """The chapters' token ids one after another, each chapter encoded by itself, as little-endian uint16."""
    return b"".join(np.asarray(tokenizer.encode(chapter), dtype="<u2").tobytes() for chapter in chapters)


def build(dump: Path, folder: Path) -> None:
    """Write the three data files into `folder`.  Their SHA-256 (uncompressed) and the count go into the code by hand."""
    text = text_of(dump.read_text(encoding="ascii"))
    training = training_chapters(text)
    trained = train_tokenizer(training)
    tokens = tokenise(Tokenizer(trained), training + heldout_chapters(text))
    compress = zstandard.ZstdCompressor(level=19).compress
    (folder / "kjv.txt.zst").write_bytes(compress(text.encode("ascii")))
    (folder / "tokenizer.json").write_text(trained, encoding="utf-8")
    (folder / "kjv.tokens.zst").write_bytes(compress(tokens))
