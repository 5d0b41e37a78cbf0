"""The built site: no warning, no broken link, and every page in a browser, on a phone's and a desk's width, light and dark."""

import html.parser
import shutil
import urllib.parse

import pytest

from chromium import SCREENS, pages_shown, search_found
from forked import run

from .conftest import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory, fork_server):
    """The site as `make docs` builds it, of a copy of its pages."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("cards", "generated", "measured"))
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    words = ["-m", "sphinx", "--fail-on-warning", "--nitpicky", "-q", "-b", "html", "docs", "site"]
    done = run(words, folder, errors=())
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


class Links(html.parser.HTMLParser):
    """What a page links to, and the places in it that can be linked to."""

    def __init__(self, path):
        super().__init__()
        self.to, self.places = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        """Collects."""
        given = dict(attrs)
        self.places |= {given[key] for key in ("id", "name") if given.get(key)}
        self.to += [given[key] for key in ("href", "src") if given.get(key)]


def test_every_link_leads_somewhere(site):
    pages = {path: Links(path) for path in site.rglob("*.html")}
    assert len(pages) > 60
    for path, page in pages.items():
        for link in page.to:
            url = urllib.parse.urlsplit(link)
            if url.scheme:
                assert url.scheme in ("https", "data"), (path.name, link)
                continue
            target = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
            assert target.exists(), (path.name, link)
            if url.fragment and target in pages and target.name not in ("search.html", "genindex.html"):
                assert urllib.parse.unquote(url.fragment) in pages[target].places, (path.name, link)


def test_nothing_is_fetched_from_elsewhere(site):
    for path in site.rglob("*.html"):
        text = path.read_text()
        assert 'src="http' not in text
        assert '<link rel="stylesheet" href="http' not in text


def test_every_algorithm_has_a_card_with_a_picture(site):
    from paceline.algorithms import registry

    for name in registry:
        text = (site / "cards" / f"{name}.html").read_text()
        assert '<svg class="figure"' in text
        assert "Not to be confused with" in text


@pytest.fixture(scope="module")
def shown(site, tmp_path_factory):
    pages = sorted(path for path in site.rglob("*.html") if path.name not in ("search.html", "genindex.html"))
    return pages_shown(pages, tmp_path_factory.mktemp("browser"))


@pytest.mark.parametrize("screen", SCREENS, ids=str)
def test_pages_in_a_browser(shown, screen):
    said, seen = shown
    assert not said, said
    pages = [one for one in seen if tuple(one["screen"]) == screen]
    assert len(pages) > 30
    for page in pages:
        assert page["heading"], page
        assert page["scroll_width"] <= screen[0], page
        assert not page["broken_images"], page
        light = sum(map(int, page["background"][4:-1].split(",")[:3])) > 3 * 128
        assert light == (screen[1] == "light"), page


# What readers ask, and where it is answered.
QUESTIONS = {
    "four unequal machines": "which_algorithm.html",
    "resume after a crash": "failures.html",
    "staleness counted": "concepts/staleness.html",
    "add an algorithm": "write_an_algorithm.html",
    "hogwild lost update": "concepts/memory.html",
    "per-batch schedule": "faq.html",
    "place model unequal workers": "placement.html",
    "codec slow network": "slow_network.html",
    "batch size by worker speed": "concepts/epochs.html",
}


def test_search_works_offline_and_answers_what_readers_ask(site, tmp_path):
    said, found = search_found(site / "search.html", QUESTIONS, tmp_path)
    assert not said, said
    for question, page in QUESTIONS.items():
        assert any(page in link for link in found[question][:6]), (question, found[question][:8])


class Article(html.parser.HTMLParser):
    """A page's sentences, without the navigation around them and the drawings between them."""

    def __init__(self, path):
        super().__init__()
        self._inside, self._left_out, self._said = False, 0, []
        self.feed(path.read_text())
        self.text = " ".join(" ".join(self._said).replace("\N{PILCROW SIGN}", " ").split())

    def handle_starttag(self, tag, attrs):
        """Begins the article, or what is none of its text."""
        self._inside |= tag == "article"
        self._left_out += tag in ("script", "style", "svg")

    def handle_endtag(self, tag):
        """Ends it."""
        self._inside &= tag != "article"
        self._left_out -= tag in ("script", "style", "svg")

    def handle_data(self, data):
        """Collects."""
        if self._inside and not self._left_out:
            self._said.append(data)


WORDS_PER_S, OPENING_S, TRIAL_S = 230 / 60, 5.0, 120.0
# A reader's way from the first page: page, heading that its link names, and the last words that the answer needs.
TRIALS = {
    "which algorithm for four unequal machines": [
        ("index.html", "", "Choose an algorithm"),
        ("which_algorithm.html", "", "-- train.py"),
    ],
    "how to resume after a crash": [
        ("index.html", "", "Fault tolerance"),
        ("failures.html", "Resume after a crash started by", "are restored from the checkpoint"),
    ],
    "what staleness is, and how it is counted": [
        ("index.html", "", "how it is counted Staleness"),
        ("concepts/staleness.html", "", "so its staleness is"),
    ],
    "how to add an algorithm": [
        ("index.html", "", "Write an algorithm"),
        ("write_an_algorithm.html", "", "The docstring's headings are those of the cards"),
    ],
    "why hogwild lost an update": [
        ("index.html", "", "hogwild lost an update"),
        ("concepts/memory.html", "Why hogwild lost an update", "many times slower"),
    ],
    "what to do about a per-batch schedule": [
        ("index.html", "", "first entry"),
        ("faq.html", "", "# the one new line"),
    ],
    "when placing over two unequal workers helps": [
        ("index.html", "", "among unequal devices Placement"),
        ("placement.html", "", "simpler and scales further"),
    ],
    "which codec for 100 Mbit/s, and which never": [
        ("index.html", "", "Run on a slow network"),
        ("slow_network.html", "", "coding takes longer than it saves"),
    ],
    "how batch sizes follow the workers' speeds": [
        ("index.html", "", "smaller batches Epochs and batches"),
        ("concepts/epochs.html", "Batch sizes by worker speed", "measures again"),
    ],
}


@pytest.mark.parametrize("question", TRIALS)
def test_a_reader_has_the_answer_within_two_minutes(question, site):
    """All that stands before an answer is read, at 230 words a minute; a page takes five seconds to open."""
    spent_s = 0.0
    for page, begin, end in TRIALS[question]:
        text = Article(site / page).text
        assert text.count(end) >= 1, (page, end, text)
        first = text.index(begin)
        words = text[first : text.index(end, first) + len(end)].split()
        spent_s += OPENING_S + len(words) / WORDS_PER_S
    assert spent_s < TRIAL_S, (question, spent_s)
