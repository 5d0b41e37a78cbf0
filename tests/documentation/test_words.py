"""No sentence of the site needs a word that the glossary lacks, but for those that everybody knows: ordinary_words.txt."""

from collections import defaultdict
from pathlib import Path

import pytest

from paceline.algorithms import registry
from paceline.cli.card import card

from .conftest import ROOT
from .prose import stem, terms, unexplained
from .test_pages import TEXTS

ORDINARY_FILE = Path(__file__).parent / "ordinary_words.txt"
ORDINARY = [
    word for line in ORDINARY_FILE.read_text().splitlines() if not line.startswith("#") for word in line.split()
]


def cards():
    """Each algorithm's page, but for the titles of papers."""
    for name in registry:
        one = card(name)
        parts = [text for heading, text in one.parts.items() if heading != "Reference"]
        yield f"cards/{name}", "\n\n".join([one.summary, *one.about, *parts, *one.arguments.values()])


@pytest.fixture(scope="module")
def site():
    """Page -> its Markdown: those that are written, and those that are made of the code and of measurements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        from extension import measured, specs, verbs

        made = {name: text for one in (measured, specs, verbs) for name, text in one.files().items()}
    return {**TEXTS, **dict(cards()), **{name: text for name, text in made.items() if name.endswith(".md")}}


def test_every_word_is_in_the_glossary_or_ordinary(site):
    known = terms() | {(stem(word),) for word in ORDINARY}
    unknown = defaultdict(set)
    for page, text in site.items():
        for word in unexplained(text, known):
            unknown[word].add(page)
    assert len(site) > 90
    assert not unknown, (
        f"explain them in docs/glossary.md, or say it in other words: {dict(sorted(unknown.items()))}; "
        f"a word that every reader knows goes into {ORDINARY_FILE.name}"
    )


def test_the_check_finds_what_is_not_explained():
    known = terms() | {(stem(word),) for word in ORDINARY}
    assert [*unexplained("The gradient's frobnication, of `leashed`, grows.", known)] == ["frobnication"]
    assert [*unexplained("```sh\nfrob\n```\nSee [the loop](frob.md) <!-- frob -->.", known)] == []
    assert [*unexplained("See the gradient noise scale; see a scale.", terms())] == ["See", "the", "see", "scale"]


def test_ordinary_words_are_no_terms():
    """Nor can one be there twice, in whatever form."""
    stems = [stem(word) for word in ORDINARY]
    assert [word for word in ORDINARY if (stem(word),) in terms()] == []
    assert [word for word in ORDINARY if stems.count(stem(word)) > 1] == []
