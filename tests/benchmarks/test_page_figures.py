"""Pages with committed raw runs are what their data give: every number in them, also in prose."""

import difflib
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


@pytest.fixture(scope="module")
def pages():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS / "fidelity"))
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("pages")


def differences(shown, made):
    """Lines of a page that its data do not give, with their numbers that no line of the data has."""
    lines = [line[2:] for line in difflib.ndiff(made.splitlines(), shown.splitlines()) if line.startswith("+ ")]
    return {line: sorted(set(NUMBER.findall(line)) - set(NUMBER.findall(made))) for line in lines}


def test_every_page_is_what_its_data_give(pages):
    for name, page in pages.PAGES.items():
        for path, made in page.texts().items():
            shown = path.read_text(encoding="utf-8")
            assert shown == made, (f"python benchmarks/pages.py {name}", path.name, differences(shown, made))


def test_every_committed_data_file_has_a_page(pages):
    known = {page.source for page in pages.PAGES.values()} - {None}
    found = {path for folder in ("results", "fidelity") for kind in ("json", "jsonl")
             for path in (BENCHMARKS / folder).glob(f"*.{kind}") if not path.name.startswith("soak_")}  # fmt: skip
    assert found == known


def test_a_changed_number_is_named():
    assert differences("It took 12 s.\nAll of 3 runs.", "It took 11 s.\nAll of 3 runs.") == {"It took 12 s.": ["12"]}


def test_a_part_of_a_page_is_replaced(pages):
    text = "before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter\n"
    assert pages.replaced(text, "a", "new\n") == text.replace("old", "new")


SCALED = {"slow_network": ("curve", "step_s", "sent_bytes"), "head_to_head": ("time_to_target_s", "wall_s", "goodput")}


@pytest.mark.parametrize("name", SCALED)
def test_no_measured_number_is_written_into_a_script(pages, name):
    """With other times and bytes, no number with a decimal point in the first paragraph stays as it was."""

    def scaled(value):
        if isinstance(value, list):
            return [(step, 1.37 * at_s, accuracy) for step, at_s, accuracy in value]
        return 1.37 * value if value is not None else None

    page = pages.PAGES[name]
    runs = page.runs()
    other = [{key: scaled(value) if key in SCALED[name] else value for key, value in one.items()} for one in runs]
    before, after = (re.findall(r"\d+\.\d", page.make(records).split("\n\n")[1]) for records in (runs, other))
    assert len(before) == len(after) > 5
    stayed = [one for one, changed in zip(before, after, strict=True) if one == changed]
    assert not stayed, (name, stayed)


@pytest.mark.parametrize("file", ["README.md", "docs/slow_network.md", "docs/which_algorithm.md", "docs/spark.md"])
def test_seconds_and_ratios_in_the_documentation_are_those_of_a_measured_page(file):
    """Outside of code; a whole number, such as "ten times" in figures, can be a setting and is left out."""
    prose = re.sub(r"```.*?```", "", (ROOT / file).read_text(encoding="utf-8"), flags=re.DOTALL)
    measured = " ".join(path.read_text(encoding="utf-8") for folder in ("results", "fidelity")
                        for path in (BENCHMARKS / folder).glob("*.md"))  # fmt: skip
    known = set(re.findall(r"\d+\.\d+", measured))
    said = re.findall(r"(\d+\.\d+)(?= (?:to \d+\.\d+ )?(?:s|MB|times)\b)", prose)
    assert [one for one in said if one not in known] == []
