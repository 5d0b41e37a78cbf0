"""The report in a real browser: every figure drawn, no script error, nothing wider than a phone."""

import pytest

from chromium import SCREENS, look_at
from paceline.observe.report import write_report

from .synthetic import METHODS, make_run

HOSTILE = "x<img src=x onerror=document.documentElement.dataset.errors='ran'></script>&amp;"


@pytest.fixture(scope="module")
def screens(tmp_path_factory, plotly):
    folder = tmp_path_factory.mktemp("chromium")
    runs = [make_run(method, slow=2, steps=150) for method in METHODS]
    runs += [make_run("hogwild(step_size=0.5)", diverged_at=80, steps=150), make_run(HOSTILE, steps=60)]
    write_report(runs, folder / "report.html", title=HOSTILE, command=HOSTILE)
    return look_at(folder / "report.html", "lanes", folder)


@pytest.mark.parametrize("screen", SCREENS, ids=str)
def test_every_figure_is_drawn_without_an_error(screens, screen):
    seen = screens[screen]
    assert seen["errors"] == ""
    assert len(seen["drawn"]) == 6
    assert all(count >= 2 for count in seen["drawn"])  # plotly draws each figure in layers
    assert seen["points"] > 500


@pytest.mark.parametrize("screen", SCREENS, ids=str)
def test_nothing_overflows_sideways(screens, screen):
    seen = screens[screen]
    assert seen["width"] == screen[0]
    assert seen["scroll_width"] <= screen[0]
    assert seen["too_wide"] == []


def test_pages_and_figures_are_dark_where_the_reader_prefers_it(screens):
    assert screens[1280, "light"]["background"] == screens[390, "light"]["background"] == "rgb(255, 255, 255)"
    assert screens[1280, "dark"]["background"] == screens[390, "dark"]["background"] == "rgb(21, 23, 26)"
    assert screens[1280, "light"]["text"] == "rgb(29, 31, 33)"
    assert screens[1280, "dark"]["text"] == "rgb(230, 229, 225)"


def test_text_from_users_stays_text(screens):
    seen = screens[1280, "light"]
    assert seen["images"] == 0
    assert seen["heading"] == HOSTILE


def test_every_figure_offers_its_data(screens):
    names = [
        "loss-against-time",
        "loss-against-samples",
        "accuracy-against-time",
        "staleness",
        "time-per-worker",
        "lanes",
    ]
    assert screens[1280, "light"]["tables"] == [f"{name}.csv blob:" for name in names]
