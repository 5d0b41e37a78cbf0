"""What a notebook's cell shows; and what is said where there is no notebook, or no cloudpickle."""

import subprocess
import sys

import pytest

import paceline as pl
from forked import AGAINST_HANGS_S
from paceline.integrations.notebook import CellProgress
from paceline.observe.in_page import progress_html
from paceline.observe.progress import Progress, WorkerProgress

AT_A_PROMPT = """
import sys
sys.modules["cloudpickle"] = None
import paceline as pl
def train():
    pass
try:
    pl.launch(train, workers=2)
except pl.UsageError as error:
    print(error)
"""


def test_the_table_of_a_cell_has_what_a_terminal_shows():
    progress = Progress(elapsed_s=2, version=412, loss=0.5, workers=(WorkerProgress(0, steps=3), WorkerProgress(1)))
    shown = progress_html(progress, "<b>hogwild", ["Worker 1 <lost>."])
    assert shown.startswith("<pre")
    assert all(one in shown for one in ("412", "0.5", "&lt;b&gt;hogwild", "Worker 1 &lt;lost&gt;."))
    assert shown.count("running") == 2


def test_outside_a_notebook_one_sentence_says_what_to_do_instead():
    with pytest.raises(pl.UsageError, match="this is not a notebook: leave it out"):
        CellProgress()


def test_without_cloudpickle_a_prompts_function_is_refused_with_the_extra():
    done = subprocess.run([sys.executable, "-c", AT_A_PROMPT], capture_output=True, text=True, timeout=AGAINST_HANGS_S)
    assert "pip install 'paceline[notebook]', which sends it by value" in done.stdout, done.stderr
    assert done.stderr == ""
