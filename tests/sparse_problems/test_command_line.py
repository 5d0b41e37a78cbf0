"""`paceline sparse`, as typed."""

import json

import numpy as np
import pytest
from scipy import sparse
from sklearn.datasets import dump_svmlight_file
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.specs import bounds


@pytest.fixture
def run():
    def invoke(*arguments):
        result = CliRunner().invoke(app, ["sparse", *map(str, arguments)], prog_name="paceline")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    X = sparse.random(3000, 400, density=0.1, format="csr", random_state=0)
    y = np.where(X @ rng.standard_normal(400) > 0, 1, -1)
    dump_svmlight_file(X, y, str(tmp_path / "data.svm"))
    return tmp_path / "data.svm"


def test_fit_reports_and_predict_uses_the_model(run, data, tmp_path):
    model = tmp_path / "model.npz"
    fitted = run("fit", data, "--loss", "logistic", "--n-jobs", 2, "--passes", 30, "--json", "--model", model)
    assert fitted.exit_code == 0
    report = json.loads(fitted.stdout.splitlines()[-1])
    assert report["accuracy"] > 0.9
    assert 0 < report["loss"] < 0.3
    assert report["threads"] == 2
    assert report["speed_up"] > 0
    assert report["discipline"] == "copies"
    assert report["omega"] == max(line.count(":") for line in data.read_text().splitlines())
    assert 0 < report["delta"] < 1
    assert report["delta"] <= report["rho"] <= 1
    assert "Threads" in report["verdict"]
    assert "Pass 30 of 30" in fitted.stderr

    lines = run("predict", model, data).stdout.split()
    labels = [line.split()[0] for line in data.read_text().splitlines()]
    assert np.mean([one == other for one, other in zip(lines, labels, strict=True)]) == pytest.approx(
        report["accuracy"]
    )
    chances = run("predict", model, data, "--probabilities", "--out", tmp_path / "p.txt")
    assert chances.exit_code == 0
    assert np.loadtxt(tmp_path / "p.txt").sum(axis=1) == pytest.approx(1, abs=1e-5)


def test_ratings(run, tmp_path):
    rng = np.random.default_rng(0)
    truth = 3 + rng.standard_normal((40, 1)) @ rng.standard_normal((1, 30))
    rows = [f"u{u},i{i},{truth[u, i]:.4f}" for u in range(40) for i in range(30) if rng.random() < 0.7]
    (tmp_path / "ratings.csv").write_text("user,item,rating\n" + "\n".join(rows) + "\n")
    options = ("--rank", 2, "--eta0", 0.1, "--alpha", 0.1, "--passes", 40, "--json", "--model", tmp_path / "m.npz")
    report = json.loads(run("fit", tmp_path / "ratings.csv", *options).stdout.splitlines()[-1])
    assert report["rmse"] < 0.1
    assert (report["users"], report["items"], report["ratings"]) == (40, 30, len(rows))
    pairs = [row.split(",")[:2] for row in rows]  # a rating meets those of its user and those of its item
    met = [sum(u == user or i == item for u, i in pairs) for user, item in pairs]
    assert report["omega"] == 4
    assert report["delta"] == max(sum(v in pair for pair in pairs) for pair in pairs for v in pair) / len(rows)
    assert report["rho"] == max(met) / len(rows)
    assert report["meeting"] == pytest.approx(np.mean(met) / len(rows))
    assert (report["discipline"], report["speed_up"]) == ("shared", None)  # one thread: so few ratings
    first = run("predict", tmp_path / "m.npz", tmp_path / "ratings.csv").stdout.splitlines()[0].split(",")
    assert float(first[2]) == pytest.approx(truth[int(first[0][1:]), int(first[1][1:])], abs=0.3)


def test_a_matrix_in_npz(run, tmp_path):
    X = sparse.csr_matrix(np.eye(4))
    parts = {"data": X.data, "indices": X.indices, "indptr": X.indptr, "shape": X.shape}
    np.savez(tmp_path / "data.npz", y=[0, 1, 0, 1], **parts)
    options = ("--loss", "hinge", "--passes", 50, "--json")
    assert json.loads(run("fit", tmp_path / "data.npz", *options).stdout.splitlines()[-1])["accuracy"] == 1.0


BAD = {
    "1 1:1 2:x\n": "line 1: '2:x' is not index:value",
    "1 1:1\n-1 3:1 2:1\n": "line 2: index 2 is unsorted",
    "1 1:1\n-1 3:1 3:1\n": "line 2: index 3 is twice",
    "1 1:1\nspam 3:1\n": "line 2: the label 'spam' is not a number",
    "1 1:1\n1 2:1\n": "Labels of one class only",
    "1 1:nan\n-1 2:1\n": "values that are NaN",
    "1 1:1\n-1 99999999999999999999:1\n": "line 2: index 99999999999999999999 is too large",
    "1 2000000000:1\n-1 1:1\n": "number the features without gaps",
    "0.5 1:1\n1 2:1\n": "labels that are not classes, such as 0.5",
    "": "is empty",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_files_are_refused_in_a_sentence(run, tmp_path, text, monkeypatch):
    monkeypatch.setattr(bounds, "available_bytes", lambda **which: 2**30)
    (tmp_path / "bad.svm").write_text(text)
    result = run("fit", tmp_path / "bad.svm")
    assert result.exit_code == 2
    assert BAD[text] in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--loss nonsense", "Unknown loss 'nonsense'"),
        ("--n-jobs -2", "n_jobs must be 1 or more"),
        ("--n-jobs 0", "n_jobs must be 1 or more"),
        ("--alpha -1", "alpha must be"),
        ("--penalty l3", "penalty must be one of"),
        ("--learning-rate fast", "learning_rate must be one of"),
        ("--passes 0", "--passes must be 1 or more"),
        ("--model nowhere/m.npz", "there is no folder nowhere; make it first"),
        ("--seed -1", "--seed must be 0 or more"),
        ("--discipline polite", "discipline must be one of copies, shared"),
        ("--rank 3", "--rank is for ratings"),
        ("--loss squared --learning-rate constant --eta0 1e6", "The fit diverged"),
        ("--eta0 0.1", "--eta0 has no effect with --learning-rate optimal"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(run, data, options, words):
    result = run("fit", data, *options.split())
    assert result.exit_code == (1 if "diverged" in words else 2)
    assert words in result.stderr


def test_results_have_a_place_before_the_work_begins(run, data, tmp_path):
    (tmp_path / "folder.npz").mkdir()
    for option in (("fit", data, "--model"), ("predict", data, data, "--out")):
        refused = run(*option, tmp_path / "folder.npz")
        assert refused.exit_code == 2
        assert "is a folder" in refused.stderr
        assert "Pass 1" not in refused.stderr


def test_a_test_file_must_have_the_data_s_labels_and_features(run, data, tmp_path):
    for text, words in (("7 1:1\n", "labels that"), ("1 900:1\n", "900 features")):
        (tmp_path / "test.svm").write_text(text)
        refused = run("fit", data, "--test", tmp_path / "test.svm")
        assert refused.exit_code == 2
        assert words in refused.stderr
        assert "Pass 1" not in refused.stderr  # said before the work is done


def test_options_of_linear_models_are_refused_for_ratings(run, tmp_path):
    (tmp_path / "ratings.csv").write_text("1,2,3\n")
    for option in ("--loss hinge", "--penalty l1", "--learning-rate constant", "--discipline shared"):
        refused = run("fit", tmp_path / "ratings.csv", *option.split())
        assert refused.exit_code == 2
        assert f"{option.split()[0]} is for linear models" in refused.stderr


def test_labels_are_written_as_they_were_read(run, tmp_path):
    (tmp_path / "data.svm").write_text("12345678 1:1\n-0.0 2:1\n" * 20)
    assert run("fit", tmp_path / "data.svm", "--model", tmp_path / "m.npz").exit_code == 0
    assert run("predict", tmp_path / "m.npz", tmp_path / "data.svm").stdout.split()[:2] == ["12345678", "0"]


def test_other_bad_files(run, tmp_path, monkeypatch):
    assert "is not a file" in run("fit", tmp_path / "missing.svm").stderr
    (tmp_path / "bad.csv").write_text("1,2,3\n1,3\n")
    assert "line 2: '1,3' is not user,item,rating" in run("fit", tmp_path / "bad.csv").stderr
    (tmp_path / "bad.npz").write_text("text")
    assert "is not a readable NPZ file" in run("fit", tmp_path / "bad.npz").stderr
    np.savez(tmp_path / "bad.npz", X=np.eye(2), y=[1, 2, 3])
    assert "y in" in run("fit", tmp_path / "bad.npz").stderr
    np.savez(tmp_path / "bad.npz", data=[1.0], indices=[5], indptr=[0, 1], shape=(1, 2), y=[1])
    assert "damaged" in run("fit", tmp_path / "bad.npz").stderr
    for X, y, words in (
        (np.array([["a"], ["b"]]), [0, 1], "must hold real numbers"),
        (np.ones((2, 1), complex), [0, 1], "must hold real numbers, not complex128"),
        (np.zeros((0, 3)), [], "0 examples of 3 features"),
        (np.zeros((2, 0)), [0, 1], "2 examples of 0 features"),
        (np.ones((2, 1)), ["ham", "spam"], "not numbers, such as 'ham'"),
    ):
        np.savez(tmp_path / "bad2.npz", X=X, y=y)
        refused = run("fit", tmp_path / "bad2.npz", "--loss", "squared")
        assert refused.exit_code == 2
        assert words in refused.stderr
    assert "is not a model" in run("predict", tmp_path / "bad.npz", tmp_path / "bad.npz").stderr
    np.savez(tmp_path / "part.npz", coef=np.ones((1, 2)))
    assert "is not a model" in run("predict", tmp_path / "part.npz", tmp_path / "bad.npz").stderr
    (tmp_path / "large.svm").write_text("1 1:1\n")
    monkeypatch.setattr(bounds, "available_bytes", lambda **which: 5)
    assert "of memory are needed" in run("fit", tmp_path / "large.svm").stderr


def test_files_larger_than_memory_are_refused_with_what_they_need(run, tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "large.npz", X=np.zeros((2000, 2000)), y=np.zeros(2000))  # small on disk
    (tmp_path / "large.svm").write_text("1 1:1 2:1\n-1 1:1\n" * 500_000)
    (tmp_path / "large.csv").write_text("1,2,3\n" * 500_000)
    monkeypatch.setattr(bounds, "available_bytes", lambda **which: 2**24)
    for name in ("large.npz", "large.svm", "large.csv"):
        result = run("fit", tmp_path / name)
        assert result.exit_code == 2
        assert "of memory are needed, but only 16.0 MiB are available" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
