"""What a program that only attaches has to wait for."""

import subprocess
import sys
import textwrap

import pytest

LOOP = """
    import torch
    import paceline as pl

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.attach(model, optimizer) as worker:
        for x in worker.batches([torch.ones(3, 2)] * 4):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
"""


def modules_added(before, program):
    """What a program loads of which one that came before it in the same process has nothing."""
    program = f"{before}\nimport sys; before = {{*sys.modules}}\n{textwrap.dedent(program)}\nprint(*{{*sys.modules}} - before)"
    return {*subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()}


@pytest.mark.parametrize("program", ["import paceline as pl; pl.attach", LOOP], ids=["import", "lone loop"])
def test_slow_packages_are_left_out(program):
    """Numba takes 0.7 s, sympy and torch.distributed.tensor 0.5 s; PyTorch's optimizers themselves import those two."""
    steps = (
        "import torch; x = torch.ones(2, requires_grad=True); x.sum().backward(); torch.optim.SGD([x], lr=0.1).step()"
    )
    added = modules_added(steps if program == LOOP else "import torch", program)
    assert "paceline.worker.attach" in added
    assert not [name for name in added if name.startswith("paceline.model_parallel")]
    assert not {"numba", "scipy", "sympy", "sklearn", "plotly", "torch.distributed.tensor"} & added
