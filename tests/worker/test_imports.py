"""What a program that only attaches has to wait for."""

import subprocess
import sys
import textwrap

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


# What each loads of which those before it in the same process have nothing, on a line of its own.
PROGRAMS = [
    "import torch",
    "import paceline as pl; pl.attach",
    "x = torch.ones(2, requires_grad=True); x.sum().backward(); torch.optim.SGD([x], lr=0.1).step()",
    textwrap.dedent(LOOP),
]
TELL = "print(*{*sys.modules} - before); before = {*sys.modules}"


def test_slow_packages_are_left_out():
    """Numba takes 0.7 s, sympy and torch.distributed.tensor 0.5 s; PyTorch's optimizers themselves import those two."""
    program = "\n".join(["import sys; before = set()", *(f"{one}\n{TELL}" for one in PROGRAMS)])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    _, imported, _, loop = map(str.split, done.stdout.splitlines())
    assert "paceline.worker.attach" in imported
    added = {*imported, *loop}
    assert not [name for name in added if name.startswith("paceline.model_parallel")]
    assert not {"numba", "scipy", "sympy", "sklearn", "plotly", "torch.distributed.tensor"} & added
