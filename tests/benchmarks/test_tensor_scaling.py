"""The page on 1-D, 2-D and 2.5-D: times of small meshes by hand, controls, and that it is what the script prints."""

import importlib
import math
from pathlib import Path

import pytest

from paceline.model_parallel import Grid, Line

FIDELITY = Path(__file__).parents[2] / "benchmarks" / "fidelity"
HIDDEN, BATCH = 256, 8


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FIDELITY))
    return importlib.import_module("tensor_scaling")


def machine(script, **others):
    """Computing, and links of one class, that cost nothing where nothing else is said."""
    given = {"flops_per_s": 1e40, "inside_bytes_per_s": math.inf, "network_bytes_per_s": math.inf, "latency_s": 0.0}
    return script.Machine(**{**given, **others})


def test_a_line_of_two_waits_for_four_sums_of_all_activations(script):
    slow = machine(script, inside_bytes_per_s=1e6, latency_s=1e-3)
    elements = BATCH * script.SEQUENCE * HIDDEN  # a ring of two: each sends half, and then the other half
    one_s = 2 * 1e-3 + script.ELEMENT_BYTES * elements / 1e6
    assert script.line_layer_s(Line(2), BATCH, HIDDEN, slow) == pytest.approx(4 * one_s)
    assert script.line_layer_s(Line(1), BATCH, HIDDEN, slow) < 1e-20


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 64])
def test_where_only_bytes_cost_a_lines_time_is_that_of_its_elements(workers, script):
    slow = machine(script, inside_bytes_per_s=1e9, network_bytes_per_s=1e9)
    sent = script.ELEMENT_BYTES * float(Line(workers).layer_elements(BATCH, script.SEQUENCE, HIDDEN))
    assert script.line_layer_s(Line(workers), BATCH, HIDDEN, slow) == pytest.approx(sent / 1e9)


def test_a_lines_sums_in_the_backward_pass_are_hidden_by_a_weights_gradient_and_those_of_the_forward_pass_are_not(
    script,
):
    tokens, seconds = BATCH * script.SEQUENCE, 1e9  # FLOP/s
    products_s = [2 * tokens * n * HIDDEN**2 / 2 / seconds for n in (3, 1, 4, 4)]
    attention_s = 3 * 4 * tokens * script.SEQUENCE * HIDDEN / 2 / seconds
    busy_s = 3 * sum(products_s) + attention_s
    sum_s = 0.5 * products_s[0]  # shorter than the products of the two layers whose outputs are cut
    bytes_per_s = script.ELEMENT_BYTES * tokens * HIDDEN / sum_s
    found = script.line_layer_s(
        Line(2), BATCH, HIDDEN, machine(script, flops_per_s=seconds, inside_bytes_per_s=bytes_per_s)
    )
    assert found == pytest.approx(busy_s + 2 * sum_s)


def test_a_square_of_two_by_hand(script):
    """Links within a node only: each product's loop has two steps, of which the first waits for its blocks."""
    rate, seconds = 1e9, 1e12
    slow = machine(script, flops_per_s=seconds, inside_bytes_per_s=rate)
    tokens, expected = BATCH * script.SEQUENCE / 2, 0.0
    for inputs, outputs in ((1, 3), (1, 1), (1, 4), (4, 1)):
        x = script.ELEMENT_BYTES * tokens * inputs * HIDDEN / 2 / rate
        weight = script.ELEMENT_BYTES * inputs * outputs * HIDDEN**2 / 4 / rate
        compute = 2 * tokens * inputs * outputs * HIDDEN**2 / 4 / seconds
        slower = max(x, weight)
        expected += slower + max(slower, compute) + compute  # forward: both blocks come, over channels of their own
        for comes, leaves in ((weight, x), (x, weight)):  # gX and gW: a block comes, a sum leaves
            computed = comes + max(comes, compute) + compute
            first_left = comes + compute + leaves
            expected += max(computed, first_left) + leaves
    expected += 3 * 4 * tokens * script.SEQUENCE * HIDDEN / 2 / seconds
    assert script.summa.layer_s(Grid(2), BATCH, HIDDEN, slow) == pytest.approx(expected)


@pytest.mark.parametrize("depth", [2, 3])
def test_the_depth_adds_one_ring_of_the_gradients_over_the_network(depth, script):
    network = machine(script, network_bytes_per_s=4e9, latency_s=1e-4)  # 1 GB/s for each of a node's four rings
    batch, grid = 12, Grid(2, depth)
    gradients = 12 * HIDDEN**2 / 4 + 13 * HIDDEN / 2
    ring_s = 2 * (depth - 1) * 1e-4 + script.ELEMENT_BYTES * 2 * (depth - 1) / depth * gradients / 1e9
    assert ring_s == pytest.approx(script.ring_s(gradients, 4, depth, network))
    with_it, without = (script.summa.layer_s(grid, batch, HIDDEN, network, sums_depth=sums) for sums in (True, False))
    assert with_it - without == pytest.approx(ring_s)


def test_a_step_is_all_layers_and_free_links_make_all_meshes_alike(script):
    plain, free = script.Machine(), machine(script, flops_per_s=1e14)
    for workers in script.WORKERS:
        for model in script.MODELS:
            took = [script.step_s(mesh, model, free) for mesh in script.meshes(workers)]
            assert took == pytest.approx([took[0]] * len(took))
            for mesh in script.meshes(workers):
                one = script.Model(1, model.hidden, model.batch)
                assert script.step_s(mesh, model, plain) == pytest.approx(24 * script.step_s(mesh, one, plain))
                assert script.compute_s(mesh, model, plain) < script.step_s(mesh, model, plain)


def test_meshes_of_so_many_workers(script):
    assert script.meshes(64) == [Line(64), Grid(8), Grid(4, 4), Grid(2, 16)]
    assert script.meshes(128) == [Line(128), Grid(8, 2), Grid(4, 8), Grid(2, 32)]
    assert not script.divides(Line(128), script.Model(1, 4096, 64)), "64 heads"
    assert script.divides(Line(64), script.Model(1, 4096, 64))
    assert not script.divides(Grid(2, 16), script.Model(1, 4096, 16)), "32 parts of a batch of 16"


def test_the_page_is_what_the_script_prints(script):
    assert FIDELITY.joinpath("tensor_scaling.md").read_text() == "\n".join(script.page()) + "\n"
