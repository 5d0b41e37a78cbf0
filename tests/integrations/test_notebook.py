"""Notebooks: functions that they define are launched, progress and report are in their cells; the real kernel runs one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import paceline as pl
from forked import AGAINST_HANGS_S
from paceline.integrations.notebook import CellReport

nbformat = pytest.importorskip("nbformat", reason="needs pip install nbclient ipykernel")
nbclient = pytest.importorskip("nbclient", reason="needs pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="needs pip install nbclient ipykernel")
pytest.importorskip("cloudpickle", reason="needs the extra: pip install 'paceline[notebook]'")

pytestmark = pytest.mark.filterwarnings("default")
FIRST_STEPS = Path(__file__).parents[2] / "examples" / "first_steps.ipynb"

#: At a prompt, or with -c, the main module has no file. What the function uses goes along: a class, a global, a partial.
BY_VALUE = """
import functools, torch, paceline as pl
SIZE = 3
class Own(torch.nn.Linear):
    pass
def train(path, size):
    model = Own(size, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.attach(model, optimizer) as worker:
        for x in worker.batches([torch.ones(1, SIZE)] * 10):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    open(path + str(worker.worker_id), "w").close()
run = pl.launch(functools.partial(train, {path!r}, SIZE), workers=2, algorithm="hogwild")
print(run.result["outcome"], run.result["steps"])
"""


def executed(notebook, folder):
    nbclient.NotebookClient(
        notebook, timeout=AGAINST_HANGS_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return outputs(notebook)


def outputs(notebook):
    """Of the cells that train, show the report, and say the accuracy."""
    _, _, training, report, accuracy = (one for one in notebook.cells if one.cell_type == "code")
    (progress,) = (one["data"]["text/html"] for one in training.outputs if one.output_type == "display_data")
    (shown,) = (one["data"]["text/html"] for one in report.outputs)
    (said,) = (one["text"] for one in accuracy.outputs)
    return progress, shown, said


def check(progress, shown, said):
    assert re.search(r"hogwild, 2 workers", progress)
    assert progress.count("running") == 2
    assert "540" in shown
    assert "<polyline" in shown
    assert "<script" not in shown
    assert int(re.fullmatch(r"accuracy (\d+) %\n", said)[1]) > 80


def test_the_first_steps_run_in_a_kernel(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # by which a kernel captures less
    check(*executed(nbformat.read(FIRST_STEPS, as_version=4), tmp_path))
    assert (tmp_path / "digits.pt").is_file()


def test_the_notebook_has_its_outputs_and_names_no_place():
    check(*outputs(nbformat.read(FIRST_STEPS, as_version=4)))
    text = FIRST_STEPS.read_text()
    assert not re.search(r"/(work|home|root|tmp)/", text)
    assert len(text) < 60_000


def test_what_a_prompt_defines_goes_by_value(tmp_path):
    code = BY_VALUE.format(path=str(tmp_path / "done-"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=AGAINST_HANGS_S)
    assert done.stdout == "stopped 10\n", done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done-0", "done-1"]


def test_a_report_is_of_any_run():
    run = pl.simulate_task(pl.TrainConfig(algorithm="hogwild", epochs=1), cluster=pl.Cluster(workers=2))
    assert "<polyline" in CellReport(run)._repr_html_()
    assert repr(CellReport(run)).startswith("digits-mlp, hogwild: stopped, ")
    assert "<polyline" not in CellReport(pl.RunData(run.config, run.result))._repr_html_()
