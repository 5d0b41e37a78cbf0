"""What a study file says, and what is said where it says nothing sensible."""

import tomllib
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.study.parts import Range
from paceline.study.study_file import Design, Limits, Study, read_study, study_from_table

SHIPPED = sorted((Path(__file__).parents[2] / "studies").glob("*.toml"))

FULL = """
question = "which \\"one\\"?"
backend = "simulator"
repetitions = 2
targets = [50, 2.5]
target = 50
keep_events = false

[limits]
epochs = 0.5
seconds = 10

[factors]
algorithm = ["locked", "leashed"]
"algorithm.persistence" = ["none", 0]
optimizer.weight_decay = [0.0, 0.1]
workers = { from = 2, to = 8, factor = 2 }
learning_rate = { from = 0.01, to = 0.1, log = true }

[settings]
batch_size = 8

[design]
kind = "random"
trials = 4

[cluster]
compute_s = 0.5
slow = { 0 = 10.0 }
"""


@pytest.fixture
def written(tmp_path):
    def write(text, name="mine.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_file_is_read(written):
    study = read_study(written(FULL))
    assert study == Study(
        name="mine",
        question='which "one"?',
        backend="simulator",
        seeds=(0, 1),
        targets=(50.0, 2.5),
        target=50.0,
        keep_events=False,
        limits=Limits(epochs=0.5, seconds=10),
        factors={
            "algorithm": ("locked", "leashed"),
            "algorithm.persistence": ("none", 0),
            "optimizer.weight_decay": (0.0, 0.1),
            "workers": (2, 4, 8),
            "learning_rate": Range(low=0.01, high=0.1, log=True),
        },
        settings={"batch_size": 8},
        design=Design(kind="random", trials=4),
        cluster={"compute_s": 0.5, "slow": {"0": 10.0}},
    )
    assert read_study(written(study.as_text(), "again.toml")) == study


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_shipped_studies_can_be_run(path):
    from paceline.study.design import plan_trials

    study = read_study(path)
    assert study.question
    assert plan_trials(study).trials
    assert study_from_table(tomllib.loads(study.as_text())) == study


def test_a_python_file(written):
    text = "from paceline.study import Study\ndef study():\n    return Study(name='p', factors={'workers': (1, 2)})\n"
    assert read_study(written(text, "p.py")).factors == {"workers": (1, 2)}
    with pytest.raises(UsageError, match=r"failed at line 2: ZeroDivisionError"):
        read_study(written("x = 1\nx / 0\n", "q.py"))
    with pytest.raises(UsageError, match="must define study"):
        read_study(written("study = 3\n", "r.py"))


WRONG = {
    "wrokers = 2": "unknown name 'wrokers'",
    "[factors]\nwrokers = [1]": r"\[factors\] has an unknown name 'wrokers'. Did you mean 'workers'",
    "[factors]\nseed = [1]": "as seeds; move it",
    "[factors]\nworkers = []": "'workers' needs different levels",
    "[factors]\nworkers = [1, 1]": "'workers' needs different levels",
    "[factors]\nworkers = [[1]]": "must be a list such as",
    "[factors]\nworkers = { from = 4, to = 1 }": "from a smaller number to a larger",
    "[factors]\nworkers = { from = 1, to = 4, by = 1 }": "no 'by'",
    "[factors]\nworkers = { from = 1, to = 4 }": "grid design cannot try: add step or factor",
    "[factors]\nworkers = [1]\n[settings]\nworkers = 2": "both in",
    "[factors]\nbackoff = ['none']\n'algorithm.backoff' = ['linear']": "'algorithm.backoff' is given twice",
    "data = 3": "data of Study must be of the kind Path or None, not 3",
    "repetitions = 0": "The number of seeds must be 1 or more",
    "seeds = [[0]]": "Each of the seeds must be a whole number",
    "seeds = [1, 1]": "different whole numbers",
    "targets = [200]": "between 0 and 100",
    "target = 3": "not one of the targets",
    "timing_only = true": "simulated workers",
    "[limits]\nepochs = 1\nsteps = 2": r"\[limits\]: give either",
    "[limits]\nhours = 1": r"\[limits\] has an unknown name 'hours'",
    "[design]\nkind = 'gird'": "kind of Design must be 'grid' or .*, not 'gird'. Did you mean 'grid'",
    "[design]\nkind = 'random'": "add trials = 20",
    "[design]\nkind = 'optuna'\ntrials = 3": "add measure",
    "[design]\nkind = 'optuna'\ntrials = 3\nmeasure = 'time_to_7_s'": "none of the targets 75, 50",
    "backend = 'simulator'\ntiming_only = true\nparameters = 0": "parameters of Study must be 1 or more",
    "[baseline]\nworkers = 1": "'workers' is not a factor",
    "name = ": "not valid TOML",
    "backend = 'simulator'\ncluster = 'nowhere.toml'": "does not exist",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_said_in_one_sentence_with_the_place(written, text):
    with pytest.raises(UsageError, match=WRONG[text]) as raised:
        read_study(written(text))
    assert "mine.toml" in str(raised.value)
    assert "\n" not in str(raised.value).strip() or "TOML" in str(raised.value)


def test_the_study_of_the_guide_is_one():
    from paceline.study.design import plan_trials

    page = (Path(__file__).parents[2] / "docs" / "studies.md").read_text()
    shown = page.partition("```toml\n")[2].partition("```")[0]
    assert shown.startswith('question = "Which persistence')
    study = study_from_table({"name": "guide", **tomllib.loads(shown)})
    assert len(plan_trials(study).trials) == 8 * 5
