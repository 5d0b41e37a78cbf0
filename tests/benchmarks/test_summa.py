"""The page on SUMMA2.5-LM: its schedule, its controls, and that it is what the script prints."""

import importlib
from pathlib import Path

import pytest

from paceline.model_parallel import Grid, block_traffic

FIDELITY = Path(__file__).parents[2] / "benchmarks" / "fidelity"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FIDELITY))
    return importlib.import_module("summa")


def test_a_loop_is_as_long_as_what_it_waits_for(script):
    assert script.loop_s(4, (1.0,), 0.0) == 4.0
    assert script.loop_s(4, (1.0, 0.5), 2.0) == 1.0 + 4 * 2.0, "after the first block, computing hides the rest"
    assert script.loop_s(4, (3.0,), 1.0) == 4 * 3.0 + 1.0
    assert script.loop_s(4, (0.0,), 1.0, 2.0) == 1.0 + 4 * 2.0
    assert script.loop_s(1, (1.0,), 2.0, 3.0) == 6.0


def test_free_links_make_no_mesh_better_and_gradients_apart_make_the_deep_one_too_good(script):
    free = script.Machine(inside_bytes_per_s=1e30, network_bytes_per_s=1e30, latency_s=0.0)
    for batch in script.BATCHES:
        for width in script.WIDTHS:
            flat, deep = (script.layer_s(grid, batch, width, free) for grid in (script.FLAT, script.DEEP))
            assert flat == pytest.approx(deep)
            one = script.Machine()
            assert script.layer_s(script.DEEP, batch, width, one, sums_depth=False) < script.layer_s(
                script.DEEP, batch, width, one
            )


def test_where_computing_costs_nothing_the_time_is_that_of_the_elements(script):
    """Blocks of rows and of columns come side by side, so that the larger ones, activations, take nearly all of the time."""
    machine = script.Machine(1e40, inside_bytes_per_s=1e9, network_bytes_per_s=4e9, latency_s=0.0)
    grid, batch, hidden = Grid(4), 64, 2048
    sent = block_traffic(grid, batch, script.SEQUENCE, hidden, mode="summa")
    activations = sum(float(sent["column", kind].elements) for kind in ("broadcast", "reduce"))
    received_s = (
        script.ELEMENT_BYTES * activations / 1e9 * grid.q / (grid.q - 1)
    )  # a loop waits for its own block's turn, too
    assert received_s < script.layer_s(grid, batch, hidden, machine) < 1.03 * received_s


def test_the_page_is_what_the_script_prints(script):
    assert FIDELITY.joinpath("summa.md").read_text() == "\n".join(script.page()) + "\n"
