"""The page of advice in a real browser: both figures drawn, values on hovering, no error, nothing wider than a phone."""

import re

import pytest

from chromium import SCREENS, look_at
from paceline.advice.answer import Circumstances, Target
from paceline.advice.report import write_report

from .made_up import made_up

FIGURES = ["curves", "arrivals"]


@pytest.fixture(scope="module")
def screens(tmp_path_factory, plotly):
    folder = tmp_path_factory.mktemp("chromium")
    long_name = "a-program-whose-name-is-longer-than-a-phone-is-wide-and-has-no-spaces.toml"
    given = Circumstances(slow={0: 4.0}, kills_per_s=1 / 3600, cluster=long_name)
    advice = made_up(Target(loss=0.1, deadline_s=3.0), circumstances=given)
    return look_at(write_report(advice, folder / "advice.html", command="paceline advise ..."), "curves", folder)


@pytest.mark.parametrize("screen", SCREENS, ids=str)
def test_both_figures_are_drawn_without_an_error_and_fit(screens, screen):
    seen = screens[screen]
    assert seen["errors"] == ""
    assert len(seen["drawn"]) == len(FIGURES)
    assert all(count >= 2 for count in seen["drawn"])
    assert seen["points"] > 100
    assert all(re.search(r"\d", shown) for shown in seen["hovered"]), "hovering shows values"
    assert seen["width"] == screen[0]
    assert seen["scroll_width"] <= screen[0]
    assert seen["too_wide"] == []
    assert seen["tables"] == [f"{name}.csv blob:" for name in FIGURES]


def test_it_is_dark_where_the_reader_prefers_it(screens):
    assert screens[390, "light"]["background"] == "rgb(255, 255, 255)"
    assert screens[1280, "dark"]["background"] == "rgb(21, 23, 26)"
    assert screens[1280, "dark"]["text"] == "rgb(230, 229, 225)"
