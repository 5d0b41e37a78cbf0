"""The site's sentences as words, and the words that the glossary explains."""

import re
from functools import cache

from snowballstemmer import stemmer  # which Sphinx's search needs, too

from .conftest import ROOT

_english = stemmer("english")
_GLOSSARY = ROOT / "docs" / "glossary.md"


@cache
def stem(word):
    """What `averages` and `averaging` have in common, and `GPUs` and `GPU`."""
    word = re.sub(r"'s?$|(?<=[A-Z])s$", "", word)
    return _english.stemWord(word.lower())


def prose(text):
    """A Markdown page without code, comments, addresses and options of directives."""
    text = re.sub(r"<!--.*?-->", " ", text, flags=re.DOTALL)
    text = re.sub(r"^(`{3,})(?!\{glossary\}).*?^\1$", " ", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"``.*?``|`[^`]*`", " , ", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "] ", text)
    return re.sub(r"<[^>\n]*>|https?://\S+|arXiv:\S+|\\\w+", " ", text)


def words(text):
    """What is left after `prose`, word by word."""
    return re.findall(r"[^\W\d_][^\W_]*(?:'[a-z]+)?|[.,;:|]", text)


def terms():
    """Every term of the glossary, as its stems."""
    (entries,) = re.findall(r"^```\{glossary\}\n(.*?)^```$", _GLOSSARY.read_text(), re.DOTALL | re.MULTILINE)
    heads = [line for line in entries.splitlines() if line and line[0] != " "]
    names = [re.sub(r" \(.*?\)", "", name) for head in heads for name in head.split(", ")]
    return {tuple(map(stem, words(name))) for name in names}


def unexplained(text, known):
    """Words of a text that are part of no known term; the longest term counts, so `noise` is none of `noise scale`."""
    all_words = words(prose(text))
    stems = [stem(word) for word in all_words]
    longest, at = max(map(len, known)), 0
    while at < len(stems):
        size = next((size for size in range(longest, 0, -1) if tuple(stems[at : at + size]) in known), 0)
        if not size and re.match(r"[^\W\d]{3}", all_words[at]):  # neither punctuation nor names such as h5py
            yield all_words[at]
        at += max(size, 1)
