"""The shipped text: verified when loaded, split by chapter, and the token array is that of the text."""

from __future__ import annotations

import dataclasses
import hashlib
import math

import numpy as np
import pytest

from plnode.data import Corpus, CorpusError, corpus, load_corpus, load_tokenizer, unigram_loss
from plnode.data.build import tokenise, train_tokenizer
from plnode.data.corpus import chapters, heldout_chapters, load_text, training_chapters


@pytest.fixture(scope="module")
def kjv() -> Corpus:
    return load_corpus("kjv")


def test_text_is_the_whole_book_and_readable() -> None:
    text = load_text()
    assert len(text) > 4_000_000
    assert text.startswith("Genesis 1\n\nIn the beginning God created the heaven and the earth.\n")
    assert "\n\nJohn 1\n\nIn the beginning was the Word, and the Word was with God, and the Word was God.\n" in text
    assert text.endswith("The grace of our Lord Jesus Christ be with you all. Amen.\n\n")
    assert len(chapters(text)) == 1189
    assert "".join(chapters(text)) == text


def test_held_out_chapters_are_a_twentieth_and_disjoint_from_training() -> None:
    text = load_text()
    training, heldout = training_chapters(text), heldout_chapters(text)
    assert len(heldout) == 59
    assert len(training) == 1189 - 59
    assert not set(training) & set(heldout)
    assert sorted(training + heldout) == sorted(chapters(text))


def test_shipped_tokens_and_tokenizer_are_those_of_the_text(kjv: Corpus) -> None:
    text = load_text()
    trained = train_tokenizer(training_chapters(text))
    assert hashlib.sha256(trained.encode()).hexdigest() == kjv.tokenizer_hash
    data = tokenise(load_tokenizer(), training_chapters(text)) + tokenise(load_tokenizer(), heldout_chapters(text))
    assert hashlib.sha256(data).hexdigest() == kjv.sha256
    assert data == kjv.tokens.tobytes() + kjv.heldout.tobytes()


def test_tokens_decode_to_their_chapters(kjv: Corpus) -> None:
    text = load_text()
    tokenizer = load_tokenizer()
    assert tokenizer.decode(kjv.tokens.tolist()) == "".join(training_chapters(text))
    assert tokenizer.decode(kjv.heldout.tolist()) == "".join(heldout_chapters(text))


def test_corpus_is_read_only_and_within_the_vocabulary(kjv: Corpus) -> None:
    assert kjv.vocabulary == 2048
    assert int(kjv.tokens.max()) < kjv.vocabulary
    with pytest.raises(ValueError, match="read-only"):
        kjv.tokens[0] = 1


def test_unigram_loss_is_the_cross_entropy_of_smoothed_counts() -> None:
    small = Corpus("x", np.array([0, 0, 1], np.uint16), np.array([0, 2], np.uint16), 3, "", "")
    assert unigram_loss(small) == pytest.approx(-(math.log(3 / 6) + math.log(1 / 6)) / 2)


def test_unigram_loss_of_the_shipped_text_is_below_that_of_a_uniform_guess(kjv: Corpus) -> None:
    assert 5.8 < unigram_loss(kjv) < 6.1 < math.log(kjv.vocabulary)


@pytest.mark.parametrize("field", ["text_sha256", "tokens_sha256"])
def test_another_file_than_the_expected_is_refused(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    entry = dataclasses.replace(corpus._SHIPPED["kjv"], **{field: "0" * 64})
    monkeypatch.setitem(corpus._SHIPPED, "kjv", entry)
    with pytest.raises(CorpusError, match=r"expected 0{64}; reinstall"):
        load_corpus("kjv")


def test_missing_and_damaged_files_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("absent.zst", "tokenizer.json"):
        monkeypatch.setitem(corpus._SHIPPED, "kjv", dataclasses.replace(corpus._SHIPPED["kjv"], text_file=file))
        with pytest.raises(CorpusError, match=file):
            load_corpus("kjv")


def test_unknown_corpus_is_refused() -> None:
    with pytest.raises(CorpusError, match="no corpus 'moby'; shipped: kjv"):
        load_corpus("moby")
