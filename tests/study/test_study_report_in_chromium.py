"""A study's report in a real browser: every figure drawn, no script error, nothing wider than a phone."""

import re

import pytest

from chromium import SCREENS, look_at
from paceline.study.report import study_page

from .made_up import make_table

FIGURES = [
    "time-to-target",
    "updates-to-target",
    "arrivals",
    "efficiency",
    "speed-up",
    "staleness",
    "outcomes",
    "waiting",
]


@pytest.fixture(scope="module")
def screens(tmp_path_factory, plotly):
    folder = tmp_path_factory.mktemp("chromium")
    (folder / "study.toml").write_text('name = "A study whose-name-is-longer-than-a-phone-is-wide-and-has-no-spaces"\n')
    return look_at(study_page(make_table(seeds=2), folder), "staleness", folder)


@pytest.mark.parametrize("screen", SCREENS, ids=str)
def test_every_figure_is_drawn_without_an_error_and_fits(screens, screen):
    seen = screens[screen]
    assert seen["errors"] == ""
    assert len(seen["drawn"]) == len(FIGURES)
    assert all(count >= 2 for count in seen["drawn"])
    assert seen["points"] > 200
    assert all(re.search(r"\d", shown) for shown in seen["hovered"]), "hovering shows values"
    assert seen["width"] == screen[0]
    assert seen["scroll_width"] <= screen[0]
    assert seen["too_wide"] == []
    assert seen["tables"] == [f"{name}.csv blob:" for name in FIGURES]


def test_it_is_dark_where_the_reader_prefers_it(screens):
    assert screens[390, "light"]["background"] == "rgb(255, 255, 255)"
    assert screens[1280, "dark"]["background"] == "rgb(21, 23, 26)"
    assert screens[1280, "dark"]["text"] == "rgb(230, 229, 225)"
