"""The package's rooms: no circle among them, nothing in the hallway, each named in the map."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

import paceline

from .conftest import ROOT

PACKAGE = Path(paceline.__file__).parent
HALLWAY = {"__init__", "__main__", "errors", "sklearn"}


def rooms():
    return {folder.parent.name for folder in PACKAGE.glob("*/__init__.py")}


def test_no_room_imports_one_that_imports_it():
    graph = grimp.build_graph("paceline", cache_dir=None)
    for room in rooms():
        graph.squash_module(f"paceline.{room}")
    root = {"paceline"}  # the public names, which are imported when they are used
    imports = {one: graph.find_modules_directly_imported_by(one) - root - {one} for one in graph.modules - root}
    assert sum(map(len, imports.values())) > 100, "the graph is there"
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_the_root_holds_nothing_that_belongs_into_a_room():
    assert {file.stem for file in PACKAGE.glob("*.py")} == HALLWAY


def test_every_room_says_what_it_is_and_is_on_the_map():
    house = (ROOT / "DESIGN.md").read_text().split("## The house")[1].split("\n## ")[0]
    on_the_map = {line.split("/")[0].strip() for line in house.splitlines() if line.startswith("  ")}
    assert rooms() <= on_the_map
    for room in rooms():
        assert ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())), room


def test_no_room_is_called_like_a_public_function():
    """Importing `paceline.attach`, the room, would replace `paceline.attach`, the function."""
    assert not rooms() & set(paceline.__all__)
