"""Bad input is refused before any work, in one sentence with a remedy, on stderr, with exit code 2."""

import pytest

BAD = [
    ("--workers 0", "--workers must be 1 or more, not 0"),
    ("--steps 0", "--steps must be 1 or more"),
    ("--batch-size -3", "--batch-size must be 1 or more, not -3"),
    ("--epochs -1", "--epochs must be a number above 0, not -1"),
    ("--epochs nan", "--epochs must be a number above 0"),
    ("--learning-rate -0.1", "--learning-rate must be a number above 0"),
    ("--learning-rate inf", "--learning-rate must be a number above 0"),
    ("--momentum 1", "--momentum must be from 0 to below 1"),
    ("--restarts -1", "--restarts must be 0 or more"),
    ("--min-workers 0", "--min-workers must be 1 or more"),
    ("--seed -1", "--seed must be 0 or more"),
    ("--target-accuracy 97", "write 0.95 for 95 %"),
    ("--target-loss nan", "--target-loss must be a number"),
    ("--epochs 1 --steps 5", "--epochs and --steps exclude each other"),
    ("--target-loss 1 --target-accuracy 0.5", "--target-loss and --target-accuracy exclude each other"),
    ("--data missing", "--data missing is not a folder"),
    ("--out full", "--out full is not empty; choose another folder."),
    ("--out old", "--out old is not empty; choose another folder, or continue that run: --resume old"),
    ("--out file", "--out file is a file"),
    ("--task missing.py:make", "missing.py does not exist"),
    ("--task digits", "Did you mean 'digits-mlp'?"),
    ("--algorithm hogwildd", "Did you mean 'hogwild'?"),
    ("--algorithm hogwild(copy=true", "never closed"),
    ("--algorithm hogwild(copies=true)", "Did you mean 'copy'?"),
    ("--optimizer adamm", "Did you mean 'adam'?"),
    ("--optimizer adam --momentum 0.9", "no momentum"),
    ("--partition dynamite", "Did you mean 'dynamic'?"),
    ("--partition skewed(alpha=0)", "alpha of Skewed must be a number above 0"),
    ("--placement second-touch", "Did you mean 'first-touch'?"),
]


@pytest.fixture
def folders(training, tmp_path):
    for name, file in (("full", "notes.txt"), ("old", "config.json"), ("done", "config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    (tmp_path / "file").write_text("")
    return training


@pytest.mark.parametrize("verb", ["train", "compare"])
@pytest.mark.parametrize(("options", "says"), BAD, ids=[options for options, _ in BAD])
def test_refused(run, folders, verb, options, says):
    if verb == "compare" and "--algorithm" not in options:
        options += " --algorithm hogwild"
    result = run(verb, *options.split())
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.startswith("paceline: ")
    assert result.stderr.count("\n") == 1
    assert not result.stdout
    assert not folders.trained


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--resume missing", "not a run's folder"),
        ("--resume old", "no checkpoint"),
        ("--resume old --workers 0", "--workers must be 1"),
    ],
)
def test_what_cannot_be_resumed(run, folders, options, says):
    result = run("train", *options.split())
    assert (result.exit_code, folders.trained) == (2, [])
    assert says in result.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--algorithm hogwild,,hogwild", "empty entry"),
        ("--workers 2,x", "'x' is not one"),
        ("--workers 2,0", "--workers must be 1"),
        ("--repeats 0", "--repeats must be 1"),
    ],
)
def test_compare_refuses(run, folders, options, says):
    result = run("compare", *options.split())
    assert (result.exit_code, folders.trained) == (2, [])
    assert says in result.stderr


def test_unknown_options_and_words_for_numbers(run, training):
    for arguments in (["train", "--wrokers", "2"], ["train", "--workers", "two"], ["trian"], ["train", "extra"]):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "Traceback" not in result.output


def test_a_placement_needs_sockets_to_place_on(run):
    result = run("simulate", "--placement", "interleave", "--timing-only", "--steps", "1")
    assert result.exit_code == 2
    assert (
        result.stderr == "paceline: --placement needs a machine with sockets: "
        "add [sockets] to a cluster file and pass it with --cluster FILE.\n"
    )
