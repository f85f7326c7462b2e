"""The tokenizer: total, lossless, pinned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plnode.data import Tokenizer, load_tokenizer, tokenizer

TOKENIZER = load_tokenizer()


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.binary(max_size=60))
def test_any_bytes_come_back(data: bytes) -> None:
    assert TOKENIZER.decode_bytes(TOKENIZER.encode(data)) == data


def test_every_byte_is_a_token_and_there_are_no_others_than_joined_ones() -> None:
    singles = {TOKENIZER.decode_bytes([i]) for i in range(TOKENIZER.vocabulary) if len(TOKENIZER.decode_bytes([i])) == 1}
    assert singles == {bytes([b]) for b in range(256)}
    assert len({TOKENIZER.decode_bytes([i]) for i in range(TOKENIZER.vocabulary)}) == TOKENIZER.vocabulary == 2048


def test_a_character_cut_between_tokens_is_joined_before_decoding() -> None:
    ids = TOKENIZER.encode("é")  # no token of this text holds it: two bytes, two tokens
    assert len(ids) == 2
    assert TOKENIZER.decode(ids) == "é"
    assert TOKENIZER.decode(ids[:1]) == "\ufffd"


def test_words_of_the_corpus_are_short_in_tokens() -> None:
    assert len(TOKENIZER.encode(" unto the LORD")) == 3


@pytest.mark.parametrize("bad", [[2048], [-1]])
def test_an_id_outside_the_vocabulary_is_an_error(bad: list[int]) -> None:
    with pytest.raises(IndexError):
        TOKENIZER.decode(bad)


def test_another_tokenizer_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tokenizer._SHIPPED, "kjv", ("tokenizer.json", "0" * 64))
    with pytest.raises(ValueError, match=r"expected 0{64}"):
        load_tokenizer()


def test_its_hash_is_that_of_the_file_text() -> None:
    from importlib import resources

    text = resources.files("plnode.data").joinpath("files", "tokenizer.json").read_text(encoding="utf-8")
    assert Tokenizer(text).sha256 == TOKENIZER.sha256
