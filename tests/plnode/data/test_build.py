"""Making the corpus from a verse dump: what is not the expected dump is refused."""

from __future__ import annotations

import pytest

from plnode.data.build import text_of, train_tokenizer

GOOD = "Ge1:1 In the beginning.\nGe1:2 And  the earth.\nGe2:1 Thus the heavens.\nExo1:1 Now these.\n"


@pytest.fixture
def small_edition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plnode.data.build.BOOKS", {"Ge": "Genesis", "Exo": "Exodus"})
    monkeypatch.setattr("plnode.data.build.CHAPTERS", 3)
    monkeypatch.setattr("plnode.data.build.VERSES", 4)


@pytest.mark.usefixtures("small_edition")
def test_text_has_headings_and_a_verse_a_line() -> None:
    assert text_of(GOOD) == (
        "Genesis 1\n\nIn the beginning.\nAnd the earth.\n\nGenesis 2\n\nThus the heavens.\n\nExodus 1\n\nNow these.\n\n"
    )


@pytest.mark.usefixtures("small_edition")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("Ge1:2 And", "And"), "line 2 is not a verse"),
        (("Ge1:2", "Job1:2"), "line 2 is not a verse"),
        (("Ge1:2", "Ge1:3"), "does not follow"),
        (("Ge2:1", "Ge3:1"), "does not follow"),
        (("Exo1:1 Now these.\n", ""), "1 books, 2 chapters, 3 verses; expected 2, 3, 4"),
    ],
)
def test_a_dump_of_another_shape_is_refused(change: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text_of(GOOD.replace(*change))


def test_training_a_tokenizer_is_deterministic_and_depends_on_the_text() -> None:
    text = ["the cat and the dog and the bird"] * 3
    assert train_tokenizer(text, 270) == train_tokenizer(text, 270)
    assert train_tokenizer(text, 270) != train_tokenizer(["some other words"], 270)
