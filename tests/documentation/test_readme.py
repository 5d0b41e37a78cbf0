"""Every code block of the README does what the README says."""

import inspect
import json
import re
import shlex
import subprocess

import pytest

from paceline.integrations import sklearn as sklearn_estimators
from paceline.tasks.load import BUILT_IN

from .conftest import ROOT

TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)
PYTHON = [code for language, code in BLOCKS if language == "python"]
CONSOLE = [code for language, code in BLOCKS if language == "console"]
SESSIONS = [
    (command, output)
    for block in CONSOLE
    for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, flags=re.MULTILINE)
]
FIRST = next(command for command, _ in SESSIONS if command.startswith("paceline "))


def masked(text):
    """Lines without their numbers, units and spacing, which differ from run to run."""
    return [" ".join(re.sub(r"\d[\d,.]*( [mu]?s\b)?", "#", line).split()) for line in text.splitlines() if line.strip()]


def test_masked():
    assert masked("training time   0.284 s\n\nper worker 619, 1,181") == ["training time #", "per worker # #"]


@pytest.mark.parametrize(("command", "output"), SESSIONS, ids=[command[:50] for command, _ in SESSIONS])
def test_console(command, output, shell):
    words = shlex.split(command, comments=True)
    if words[0] == "make":  # what it would do; the commands themselves are what CI runs
        done = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout
        return
    if words[0] == "pip":
        assert (
            (ROOT / words[words.index("--constraint") + 1]).exists() if "--constraint" in words else "torch" in words[2]
        )
        return
    if "my_task" in command:
        return  # test_examples runs it
    printed = shell(command, expect=2 if output.startswith("paceline: ") else 0, anew=command == FIRST)
    assert not set(masked(output)) - set(masked(printed)), printed


@pytest.mark.parametrize("code", PYTHON, ids=[str(number) for number in range(len(PYTHON))])
def test_python(code, shell):
    (shell.folder / "block.py").write_text(code)
    printed = shell("python block.py")
    assert "Warning" not in printed
    if "SIGKILL" in code:
        assert printed.split()[:2] == ["stopped", "[1]"]
        assert 190 <= int(printed.split()[2]) <= 200  # a dead worker's batch is lost
    elif "simulate" in code:
        virtual_s = dict(re.findall(r"^(\S+) ([\d.]+) s of virtual time$", printed, flags=re.MULTILINE))
        assert float(virtual_s["lockstep"]) > 5 * float(virtual_s["ad-psgd"]), printed
    elif "paceline.sklearn" in code:  # it asserts what it says
        assert not printed
    elif "attach" in code:
        samples_per_s, staleness = map(float, printed.split())
        assert samples_per_s > 0 <= staleness
    else:
        outcome, accuracy, _ = printed.split()
        assert (outcome, float(accuracy) > 0.5) == ("stopped", True)


def test_the_diff_is_the_loop_shown_below():
    (diff,) = (code for language, code in BLOCKS if language == "diff")
    added = [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]
    assert len(added) == 2
    assert all(line in PYTHON[0] for line in added)


def test_the_measured_table_is_the_benchmark_s():
    shown = TEXT[TEXT.index("<!-- which_algorithm: begin -->") : TEXT.index("<!-- which_algorithm: end -->")]
    measured = (ROOT / "benchmarks" / "results" / "which_algorithm.md").read_text()
    rows = [line for line in measured.splitlines() if line.startswith("|")]
    assert len(rows) > 6
    assert all(row in shown for row in rows)


def test_the_first_picture_and_what_is_said_of_it_are_the_head_to_head_s(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from contest import picture, results, tables

    folder = ROOT / "benchmarks" / "results"
    records = [json.loads(line) for line in (folder / "head_to_head.jsonl").read_text().splitlines()]
    target = records[0]["target"]
    said = results.summary(records, target)
    shown = TEXT[TEXT.index("<!-- head_to_head: begin -->") : TEXT.index("<!-- head_to_head: end -->")]
    assert shown.split()[4:] == said.split()
    page = (folder / "head_to_head.md").read_text()
    assert said in " ".join(page.split())
    for scene in tables.SCENES:
        if tables.of(records, scene=scene):
            assert "\n".join(tables.table(records, scene, target)) in page
    for theme, text in picture.pictures(records, target).items():
        assert (ROOT / "docs" / f"head-to-head-{theme}.svg").read_text() == text


def test_the_sparse_default_is_told_from_the_paper_s_hogwild_with_the_benchmark_s_figures():
    page = (ROOT / "benchmarks" / "results" / "sparse.md").read_text()
    gains = {
        (data, how): re.search(rf"^\| {data}: 2 threads, {how}, .*?\*\*([\d.]+)\*\*", page, re.MULTILINE)[1]
        for data in ("skewed data", "no hot features")
        for how in ("copies merged", "all shared")
    }
    assert len(gains) == 4
    for text in (TEXT, sklearn_estimators.__doc__):
        about = text[text.index("Differences from the Hogwild! paper") :][:900]
        assert all(gain in about for gain in gains.values()), gains
        assert 'discipline="shared"' in about
    assert inspect.signature(sklearn_estimators.HogwildClassifier).parameters["discipline"].default == "copies"


def test_links_and_names_exist():
    for target in re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", TEXT):
        path = "".join(target)
        assert path.startswith("https://") or (ROOT / path).exists(), path
    assert all(f"`{name}`" in TEXT for name in BUILT_IN)


def test_every_field_that_is_explained_exists(shell):
    path = shell.folder / "runs" / "one" / "result.json"  # of the README's first command, if that has run
    if not path.exists():
        shell("paceline train --algorithm leashed --epochs 1 --out runs/one")
    served = '"parameter-server(average=0.9)" --inject-staleness 2'
    shell(f"paceline train --algorithm {served} --epochs 1 --out runs/served")
    result = path.read_text() + (shell.folder / "runs" / "served" / "result.json").read_text()
    section = TEXT[TEXT.index("| field | meaning |") : TEXT.index("## Faults")]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    for field in re.findall(r"`(\w+)`", " ".join(first_cells)):
        assert f'"{field}"' in result, field
