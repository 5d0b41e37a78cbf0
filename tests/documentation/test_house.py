"""The package's rooms: no circle among them, nothing in the hallway, each named in the map."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

import paceline

from .conftest import ROOT

PACKAGE = Path(paceline.__file__).parent
HALLWAY = {"__init__", "__main__", "errors", "sklearn", "spark"}


def rooms():
    return {folder.parent.name for folder in PACKAGE.glob("*/__init__.py")}


def check_no_cycle(graph):
    """Also of imports within functions and of those for type annotations only."""
    root = {"paceline"}  # the public names, which are imported when they are used
    imports = {one: graph.find_modules_directly_imported_by(one) - root - {one} for one in graph.modules - root}
    assert sum(map(len, imports.values())) > 100, "the graph is there"
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the cycle


def test_no_room_imports_one_that_imports_it():
    graph = grimp.build_graph("paceline", cache_dir=None)
    for room in rooms():
        graph.squash_module(f"paceline.{room}")
    check_no_cycle(graph)


def test_no_file_imports_one_that_imports_it():
    graph = grimp.build_graph("paceline", cache_dir=None)
    check_no_cycle(graph)


def test_the_root_holds_nothing_that_belongs_into_a_room():
    assert {file.stem for file in PACKAGE.glob("*.py")} == HALLWAY


def test_no_file_is_longer_than_a_reader_holds_in_mind():
    lengths = {file.relative_to(PACKAGE): len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.py")}
    assert not {file: length for file, length in lengths.items() if length > 400}


def test_every_room_says_what_it_is_and_is_on_the_map():
    house = (ROOT / "DESIGN.md").read_text().split("## The house")[1].split("\n## ")[0]
    on_the_map = {line.split("/")[0].strip() for line in house.splitlines() if line.startswith("  ")}
    assert rooms() <= on_the_map
    for room in rooms():
        assert ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())), room


def test_no_room_is_called_like_a_public_function():
    """Importing `paceline.attach`, the room, would replace `paceline.attach`, the function."""
    assert not rooms() & set(paceline.__all__)


#: What a loop under `attach` goes through, whichever way its run was started.
LOOPS_SIDE = [
    *(PACKAGE / "loop").glob("*.py"),
    *(
        PACKAGE / "worker" / f"{name}.py"
        for name in ("arguments", "attach", "batches", "gathering", "storage", "whole_run", "worker")
    ),
    *(PACKAGE / "worker" / "memberships").glob("*.py"),
]
KINDS = ("Environment", "Membership", "Invitation", "JoinedRun", "LaunchedRun", "SimulatedRun")


def questions_of_kind(tree):
    """Where code asks how its run was started: by type, by an attribute of one kind only, or by whether there is one."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, asked]):
                is_asked = any(kind in ast.unparse(asked) for kind in KINDS)
            case ast.MatchClass(cls=asked):
                is_asked = ast.unparse(asked).endswith(KINDS)
            case ast.Attribute(attr=name):
                is_asked = name in ("supervised", "simulation", "joined", "invitation")
            case ast.Compare(left=asked, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
                is_asked = ast.unparse(asked).endswith(("environment", "membership", "session"))
            case _:
                is_asked = False
        if is_asked:
            yield ast.unparse(node)


def test_no_loop_asks_how_its_run_was_started():
    """`entry.py` alone does; the rest asks its membership for what it needs."""
    found = {file.name: [*questions_of_kind(ast.parse(file.read_text()))] for file in LOOPS_SIDE}
    assert len(found.pop("entry.py")) == 7, "in three functions, one case for each"
    assert {name: asked for name, asked in found.items() if asked} == {}


def test_nothing_stands_for_what_it_is_not():
    assert [file for file in PACKAGE.rglob("*.py") if "SimpleNamespace" in file.read_text()] == []


def test_what_a_worker_knows_of_its_run_is_frozen_and_typed():
    tree = ast.parse((PACKAGE / "membership" / "environment.py").read_text())
    public = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    assert len(public) == 4
    for node in public:
        assert "frozen=True" in ast.unparse(node.decorator_list[0])
        assert "Any" not in ast.unparse(node)
