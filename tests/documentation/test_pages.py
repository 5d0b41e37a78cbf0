"""The site's pages do what they say: every block runs, or is at least a command that there is."""

import ast
import inspect
import json
import re
import tomllib

import pytest

import paceline
from paceline.integrations import sklearn as sklearn_estimators
from paceline.simulator.cluster import Cluster
from paceline.study.study_file import read_study
from paceline.tasks.load import BUILT_IN

from . import sample_sentences
from .conftest import ROOT
from .snippets import NOT_RUN, blocks, parse_command, python_blocks, run_python, run_session, sessions

DOCS = ROOT / "docs"
PAGES = sorted(
    path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] not in ("cards", "generated", "measured")
)
TEXTS = {path.relative_to(DOCS).as_posix(): path.read_text() for path in PAGES}
# What a fragment takes for granted.
BEFORE = {
    "your_loop.md": "import torch\nmodel = torch.nn.Linear(2, 1)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nloader = [(torch.zeros(1, 2), torch.zeros(1))]\n",
}
PYTHON = [(page, number, *block) for page, text in TEXTS.items() for number, block in enumerate(python_blocks(text))]
SESSIONS = [(page, *session) for page, text in TEXTS.items() for session in sessions(text)]
COMMANDS = [
    (page, line)
    for page, text in TEXTS.items()
    for block in blocks(text, "sh")
    for line in block.splitlines()
    if line and not line.startswith("#")
]


def blocks_of_directive(text, name):
    return re.findall(rf"^```\{{{name}\}}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def section(text, title):
    """A page's section of the second level."""
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def done():
    """Commands that have run: pages share them, and their folders."""
    return set()


@pytest.mark.parametrize(("page", "number", "code", "output"), PYTHON, ids=[f"{one[0]}-{one[1]}" for one in PYTHON])
def test_python(page, number, code, output, shell):
    run_python(BEFORE.get(page, "") + code, shell, output)


@pytest.mark.parametrize(("page", "command", "output"), SESSIONS, ids=[f"{one[0]}-{one[1][:50]}" for one in SESSIONS])
def test_console(page, command, output, shell, done):
    if "--cluster cluster.toml" in command:
        (shell.folder / "cluster.toml").write_text(blocks(TEXTS[page], "toml")[0])
    if page == "sparse.md":
        (shell.folder / "block.py").write_text(python_blocks(TEXTS[page])[1][0])
        shell("python block.py")
    if command not in done:
        run_session(command, output, shell)
        done.add(command)


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{one[0]}-{one[1][:50]}" for one in COMMANDS])
def test_commands_for_several_machines_have_options_that_there_are(page, line):
    assert parse_command(line) or re.match(r"[A-Z_=:.\d ]*\S+ .*python train\.py|PACELINE_\w+=", line), line


def test_every_block_is_of_a_kind_that_is_tested():
    kinds = {kind for text in TEXTS.values() for kind in re.findall(r"^```([a-z]\w*)$", text, re.MULTILINE)}
    assert kinds <= {"python", "console", "sh", "toml", "text", "diff"}


def test_files_in_toml_are_read(tmp_path):
    (cluster,) = blocks(TEXTS["simulate.md"], "toml")
    (tmp_path / "cluster.toml").write_text(cluster)
    assert Cluster.load(tmp_path / "cluster.toml").factor(0) == 10
    (study,) = blocks(TEXTS["studies.md"], "toml")
    (tmp_path / "study.toml").write_text(study)
    assert read_study(tmp_path / "study.toml").question == tomllib.loads(study)["question"]


def test_the_diff_is_the_loop_of_the_first_page():
    (diff,) = blocks(TEXTS["index.md"], "diff")
    added = [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]
    assert len(added) == 4, "two lines for the loop, two to save the model in one worker"
    shown = next(code for code, _ in python_blocks(TEXTS["start.md"]) if "pl.launch(" in code)
    assert all(line in shown for line in added)
    assert (ROOT / "README.md").read_text().count(diff) == 1


def test_the_measured_table_is_the_benchmark_s():
    text = TEXTS["which_algorithm.md"]
    shown = text[text.index("<!-- which_algorithm: begin -->") : text.index("<!-- which_algorithm: end -->")]
    measured = (ROOT / "benchmarks" / "results" / "which_algorithm.md").read_text()
    rows = [line for line in measured.splitlines() if line.startswith("|")]
    assert len(rows) > 6
    assert all(row in shown for row in rows)


def test_the_table_of_a_slow_machine_is_the_simulation_s():
    text = TEXTS["which_algorithm.md"]
    measured = (ROOT / "benchmarks" / "fidelity" / "slow_worker.md").read_text()
    for slower in ("2x", "10x", "100x"):
        first = re.search(rf"^\| {slower} \| (.*) \|$", measured, re.MULTILINE)[1].split(" | ")
        assert f"| {slower} | {first[0]} | {first[1]} | {first[3]} | {first[4]} |" in text


def test_the_first_picture_is_the_head_to_head_s(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from contest import picture

    folder = ROOT / "benchmarks" / "results"
    records = [json.loads(line) for line in (folder / "head_to_head.jsonl").read_text().splitlines()]
    for theme, drawn in picture.pictures(records, records[0]["target"]).items():
        assert (DOCS / f"head-to-head-{theme}.svg").read_text() == drawn


def test_the_sparse_default_is_told_from_the_paper_s_hogwild_with_the_benchmark_s_figures():
    page = (ROOT / "benchmarks" / "results" / "sparse.md").read_text()
    gains = {
        (data, how): re.search(rf"^\| {data}: 2 threads, {how}, .*?\*\*([\d.]+)\*\*", page, re.MULTILINE)[1]
        for data in ("skewed data", "no hot features")
        for how in ("copies merged", "all shared")
    }
    assert len(gains) == 4
    for text in (TEXTS["sparse.md"], sklearn_estimators.__doc__):
        about = text[text.index("Differences from the Hogwild! paper") :][:900]
        assert all(gain in about for gain in gains.values()), gains
        assert 'discipline="shared"' in about
    assert inspect.signature(sklearn_estimators.HogwildClassifier).parameters["discipline"].default == "copies"


def test_files_that_pages_name_exist():
    named = {(page, file) for page, text in TEXTS.items() for file in re.findall(r"`([\w/]+/\w+\.py)`", text)}
    assert len(named) > 40
    for page, file in named:
        assert (ROOT / file).exists() or (ROOT / "src" / "paceline" / file).exists(), (page, file)


def test_commands_that_another_test_runs_are_its_own():
    text = (ROOT / "tests" / "documentation" / "test_examples.py").read_text()
    assert f'"{NOT_RUN[1]}"' in text
    assert NOT_RUN[0] in (ROOT / "examples" / "my_task.py").read_text()


def test_tasks_that_come_along_are_named():
    assert all(f"`{name}`" in TEXTS["command_line.md"] for name in BUILT_IN)


def test_every_field_that_is_explained_exists(shell, done):
    shell("paceline train --algorithm leashed --epochs 1 --out runs/before")
    shell("paceline train --algorithm leashed --epochs 2 --resume runs/before --out runs/resumed")
    served = '"parameter-server(average=0.9)" --inject-staleness 2'
    shell(f"paceline train --algorithm {served} --epochs 1 --out runs/served")
    shell('paceline train --algorithm "lockstep(shares=auto)" --epochs 1 --out runs/by-speed')
    shell("paceline train --algorithm da-sgd --epochs 1 --out runs/late")
    shell("paceline simulate --timing-only --steps 20 --out runs/timed")
    shell('paceline train --algorithm "parameter-server(mode=rennala(gradients=auto))" --epochs 1 --out runs/chosen')
    names = ("resumed", "served", "by-speed", "late", "timed", "chosen")
    paths = [shell.folder / "runs" / name / "result.json" for name in names]
    result = "".join(one.read_text() for one in paths)
    first_cells = [
        line.split("|")[1] for line in section(TEXTS["files.md"], "result.json").splitlines() if line.startswith("| `")
    ]
    fields = re.findall(r"`(\w+)`", " ".join(first_cells))
    assert len(fields) > 40
    assert [field for field in fields if f'"{field}"' not in result] == []
    for one in paths:
        assert [key for key in json.loads(one.read_text()) if key not in fields] == []


def test_messages_that_are_explained_are_those_of_the_code():
    said = [
        "\0".join(part.value if isinstance(part, ast.Constant) else "" for part in parts)
        for file in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        for parts in ([node] if isinstance(node, ast.Constant) and isinstance(node.value, str) else [],
                      node.values if isinstance(node, ast.JoinedStr) else [])
        if parts
    ]  # fmt: skip
    messages = [
        heading for heading in re.findall(r"^## (.*)$", TEXTS["faq.md"], re.MULTILINE) if not heading.endswith("?")
    ]
    assert len(messages) > 12
    for message in messages:
        pieces = [piece for piece in message.split("...") if len(piece) > 3]
        assert any(all(piece in one for piece in pieces) for one in said), message


def test_terms_that_a_page_introduces_are_in_the_glossary():
    rows = [line for line in TEXTS["glossary.md"].splitlines() if line.startswith("| ")][1:]
    terms = {term for row in rows for term in row.split(" | ")[0][2:].split(", ")}
    assert len(terms) > 50
    assert len(TEXTS["glossary.md"].splitlines()) <= 120
    for page, text in TEXTS.items():
        if page.startswith("concepts/"):
            plain = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
            for word in re.findall(r"(?<![*\w])\*([a-z-]+(?: [a-z-]+)?)\*(?!\*)", plain):
                assert word in terms or word.removesuffix("s") in terms, (page, word)


def test_the_navigation_is_short_and_grouped():
    trees = blocks_of_directive(TEXTS["index.md"], "toctree")
    entries = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    assert all(":caption:" in tree for tree in trees)
    assert len(entries) <= 25
    nested = [line for page, text in TEXTS.items() if page != "index.md" for tree in blocks_of_directive(text, "toctree")
              for line in tree.splitlines() if line and not line.startswith(":")]  # fmt: skip
    linked = {*entries, *nested, *(f"concepts/{one}" for one in nested)}
    assert {page.removesuffix(".md") for page in TEXTS} - {"index"} <= linked


def test_sentences_are_drawn_from_every_place_without_code():
    docstrings, errors = sample_sentences.of_code()
    for texts in (sample_sentences.of_page(ROOT / "README.md"), sample_sentences.of_page(PAGES[0]), docstrings, errors):
        found = [*sample_sentences.sentences(texts)]
        assert len(found) > 10
        assert not [one for one in found if "```" in one]


def test_versions_and_exports_are_named():
    named = TEXTS["api.md"]
    for name in (
        "attach",
        "launch",
        "simulate",
        "train",
        "simulate_task",
        "Cluster",
        "Faults",
        "RunData",
        "TrainConfig",
    ):
        assert name in paceline.__all__
        assert f":: {name}\n" in named


def test_at_100_mbit_s_every_codec_still_pays():
    """As slow_network.md says, and that two of them stop paying first."""
    table = (ROOT / "benchmarks" / "results" / "codecs.md").read_text()
    pays_below = {name: float(cells.split("|")[-2].replace(",", ""))
                  for name, cells in re.findall(r"^\| `([^`]+)` (\|.*\|)$", table, re.MULTILINE)
                  if cells.split("|")[-2].strip()}  # fmt: skip
    assert min(pays_below.values()) > 100
    assert sorted(pays_below, key=pays_below.get)[:2] == ["ternary(clip=2.5)", "sign"]
