"""Text to token ids and back: a byte-level BPE with 2,048 tokens, shipped as `files/tokenizer.json`.

Byte-level: the 256 first tokens are the bytes, so every byte string has an encoding and there is no unknown token.  The backend
takes `str` only, and a `str` cannot hold bytes that are not UTF-8; such bytes are encoded here one token each.  Decoding goes
through bytes as well, because a token may end in the middle of a character: joining decoded *strings* would corrupt it.

The file is pinned by its SHA-256: two nodes whose tokenizers differ would train on different text without any error. The
backend's file is parsed by it; we parse the vocabulary ourselves only for the bytes of each token.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from importlib import resources

from tokenizers import Tokenizer as BackendTokenizer

_SHIPPED = {"kjv": ("tokenizer.json", "08baf1b2348ec9d8e9a37e3f7e962ad0377d68f492d68e18d7bb0be74d67507b")}
_ESCAPED = re.compile("([\udc80-\udcff])")  # bytes that are not UTF-8, as Python's surrogateescape writes them


def _byte_of_character() -> dict[str, int]:
    """GPT-2's stand-ins for bytes (openai/gpt-2, encoder.py): printable Latin-1 is itself, the rest is U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """Encode and decode.  `vocabulary` is the number of tokens, `sha256` (hex) names the tokenizer."""

    def __init__(self, file_text: str) -> None:
        self.sha256 = hashlib.sha256(file_text.encode()).hexdigest()
        self._backend = BackendTokenizer.from_str(file_text)
        byte_of = _byte_of_character()
        vocab: dict[str, int] = json.loads(file_text)["model"]["vocab"]
        self._bytes = [b""] * len(vocab)
        for token, index in vocab.items():
            self._bytes[index] = bytes(byte_of[character] for character in token)
        self._id_of_byte = {data[0]: index for index, data in enumerate(self._bytes) if len(data) == 1}
        self.vocabulary = len(vocab)

    def encode(self, text: str | bytes) -> list[int]:
        """Token ids of `text`; total: any `str` without lone surrogates and any `bytes` (UTF-8 or not)."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "surrogateescape")
        ids: list[int] = []
        for piece in _ESCAPED.split(text):
            if _ESCAPED.fullmatch(piece):
                ids.append(self._id_of_byte[ord(piece) - 0xDC00])
            elif piece:
                ids.extend(self._backend.encode(piece).ids)
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The exact bytes that `ids` stand for.  Raises IndexError for an id outside the vocabulary."""
        if any(index < 0 for index in ids):
            raise IndexError("a token id is negative")
        return b"".join(self._bytes[index] for index in ids)

    def decode(self, ids: Sequence[int]) -> str:
        """`decode_bytes` as text; bytes that are not UTF-8 (as a model may sample them) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


def load_tokenizer(name: str = "kjv") -> Tokenizer:
    """The shipped tokenizer of a corpus.  Raises ValueError if the file is not the expected one."""
    file, sha256 = _SHIPPED[name]
    tokenizer = Tokenizer(resources.files("plnode.data").joinpath("files", file).read_text(encoding="utf-8"))
    if tokenizer.sha256 != sha256:
        raise ValueError(f"tokenizer file {file} has SHA-256 {tokenizer.sha256}, expected {sha256}; reinstall plnode")
    return tokenizer
