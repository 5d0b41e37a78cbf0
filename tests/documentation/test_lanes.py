"""The README's picture of workers' lanes is a valid one, as wide as it says."""

import importlib.util
import xml.etree.ElementTree as ElementTree

import pytest

from observe.synthetic import empty, make_run
from observe.test_report import BARE
from paceline.records.run_data import RunData

from .conftest import ROOT


@pytest.fixture(scope="module")
def lanes_svg():
    described = importlib.util.spec_from_file_location("lanes", ROOT / "docs" / "lanes.py")
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module.lanes_svg


@pytest.mark.parametrize("dark", [False, True])
def test_lanes_are_a_valid_picture(lanes_svg, dark):
    runs = [make_run("lockstep", slow=2), make_run(slow=2), BARE]
    text = lanes_svg(runs, dark=dark)
    picture = ElementTree.fromstring(text)
    texts = [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert any("slower" in one for one in texts)
    assert "lockstep" in texts
    assert "time (ms)" in texts
    assert any("gradients applied in" in one for one in texts)
    width = float(picture.get("width", 0))
    for element in picture.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(element.get("x", 0)) + float(element.get("width", 0)) <= width


def test_lanes_without_records_or_with_a_given_duration(lanes_svg):
    ElementTree.fromstring(lanes_svg([]))
    ElementTree.fromstring(lanes_svg([RunData(records={0: empty()})]))
    assert "time (s)" in lanes_svg([make_run()], duration_s=3.0)
