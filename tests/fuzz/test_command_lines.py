"""Wrong input, the cases that were found by hand and a thousand that are drawn: one sentence, exit code 2, nothing left."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections import Counter

import pytest

import soak_results
from fuzz import template
from fuzz.judge import wrongs
from fuzz.lines import Line, lines, verbs
from fuzz.sandbox import LIMIT_S, Ended, Sandbox

SEED = int(os.environ.get("FUZZ_SEED", "20260713"))
SOAK_LINES = 1000
SOAK_LIMIT_S = 30.0

LONG = 20 * "9"
NESTED = 3000 * "["
NAMED = [
    ("train --out /dev/null/x", "--out /dev/null/x cannot be made: /dev/null is not a folder"),
    (f"train --workers {LONG}", "--workers must be at most 1,000,000,000,000,000"),
    ("train --workers 100000", "workers must be at most 32,766, not 100000"),
    ("train --workers 30000", "For 30,000 workers"),  # memory, or on a machine that has 1.1 TiB, file descriptors
    (f"train --seed {LONG}", "generators take 63 bits"),
    ("train --batch-size 100000000000000000000000", "--batch-size must be at most 2,147,483,647"),
    ("train --algorithm parameter-server(shards=1000000)", "shards of ParameterServer must be at most 32,766"),
    ("train --algorithm parameter-server(shards=30000) --backend processes", "and 30,000 servers"),
    ("train --algorithm d-psgd(deadline_s=-1)", "deadline_s of DPSGD must be a number above 0, not -1.0."),
    ("train --algorithm leashed(backoff=constant(base=1e308))", "base of ConstantBackoff must be at most 1e6"),
    (f"train --algorithm {3000 * 'a(b='}", "parentheses are nested more than 16 deep"),
    (f"train --algorithm hogwild(reads={5000 * '9'})", "a whole number has at most 1000 digits"),
    ("train --optimizer muon --backend threads", "ptimizer 'muon'"),  # for matrices only, or older PyTorch has none
    ("train --task tiny.py:empty", "its test set is empty; give it at least one sample"),
    ("train --task tiny.py:fails", "ValueError: \\x1b[31mred."),
    ("train --task pipe.py:make", "Task file pipe.py is not a file"),
    (f"train --data {300 * 'x'}", "File name too long; choose another place."),
    ("compare --repeats 1000000", "--repeats must be at most 10,000, not 1000000"),
    ("compare --repeats 10000 --workers 1,2", "The number of runs must be at most 10,000, not 60000"),
    ("compare --out /proc/x", "cannot be made"),
    ("simulate --workers 999999999", "workers of Cluster must be at most 10,000,000, not 999999999"),
    ("simulate --workers 9999999", "9,999,999 simulated workers and servers, about "),
    ("simulate --cluster deep.json", "deep.json is not valid JSON: "),
    ("simulate --cluster deep.toml", "deep.toml is not valid TOML: "),
    ("simulate --cluster odd.toml", "unknown name 'wor\\x1b[31mkers'. Did you mean 'workers'?"),
    ("simulate --timing-only --parameters 1000000000000000", "--parameters must be at most 1,000,000,000,000"),
    ("launch script.py:go --limit 1e308", "--limit must be at most 1e9, not 1e+308: that is 30 years"),
    ("study run drawn.toml --dry-run", "seeds must be at most 100,000, not 99999999999"),
    ("study run negative.toml --dry-run", "negative.toml: cluster: workers must be 1 or more, not -1."),
    ("study run nested.toml --dry-run", "is nested more than 40 deep"),
    ("study run grid.toml --dry-run", "The number of combinations of all levels must be at most"),
    ("sparse fit cut.svm.gz", "cut.svm.gz is damaged or cut short"),
    ("sparse fit bomb.npz", "X.npy claims 40,000,000,000,000 bytes of numbers and holds 0"),
    (
        "sparse fit ratings.csv --rank 1000000000",
        "For factors of rank 1,000,000,000, about 268.2 GiB of memory are needed",
    ),
    (f"sparse fit data.svm --seed {LONG}", "--seed must be at most 4,294,967,295"),
    (f"sparse fit data.svm --passes {LONG}", "--passes must be at most 1,000,000,000"),
    ("sparse predict bomb.npz data.svm", "claims 40,000,000,000,000 bytes"),
    (
        "sparse predict odd-model.npz data.svm",
        "is not a model: its intercept is not 3 numbers, one for each row of coef; fit it again.",
    ),
    ("advise layers --flops-per-s inf", "--flops-per-s must be at most 1e21, not inf"),
    ("advise backups --cluster cluster.toml --workers 10000000", "--workers must be at most 100,000"),
    (f"advise script.py:go --target-loss 0.1 --max-workers {LONG}", "--max-workers must be at most 100,000"),
    ("advise script.py:go --target-loss 0.1 --budget 1e300h", "that is 30 years"),
    ("key folder", "The key file folder is a folder; name a file in it."),
]
FILES = {
    "drawn.toml": 'task = "tiny.py:make"\nbackend = "simulator"\nseeds = 99999999999\n',
    "negative.toml": 'task = "tiny.py:make"\nbackend = "simulator"\n[cluster]\nworkers = -1\n',
    "nested.toml": "factors." + 3000 * "a." + "a = 1\n",
    "grid.toml": 'task = "tiny.py:make"\nbackend = "simulator"\n[factors]\n'
    + "".join(f"{name} = {{ from = 1, to = 1000, step = 1 }}\n" for name in ("workers", "batch_size", "restarts")),
}


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    template.make(folder / "template")
    with Sandbox(folder / "boxes", folder / "template") as box:
        template.add_runs(box, folder / "template")
        yield box


@pytest.mark.parametrize(("line", "says"), NAMED, ids=[line[:60] for line, _ in NAMED])
def test_what_was_found_by_hand(sandbox, line, says):
    words = line.split()
    if words[0] in ("train", "compare", "simulate") and "--task" not in words:
        words += ["--task", "tiny.py:make", "--steps", "1"]
    ended = sandbox.run(*words, files=FILES)
    assert ended.code == 2, ended
    assert says in ended.err
    assert not wrongs(ended)


def test_a_working_folder_that_is_gone(tmp_path):
    (tmp_path / "gone").mkdir()
    command = ["sh", "-c", f'rmdir "$PWD"; exec {shlex.quote(sys.executable)} -m paceline algorithms']
    ended = subprocess.run(command, cwd=tmp_path / "gone", capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.endswith("cd into an existing folder.\n")


def test_names_and_labels_of_files_control_no_terminal(sandbox):
    fitted = sandbox.run("sparse", "fit", "odd.csv", "--passes", "1", "--model", "[x].npz")
    assert fitted.code == 0
    assert not wrongs(fitted)
    assert "[x].npz" in fitted.out
    predicted = sandbox.run("sparse", "predict", "ratings-model.npz", "odd.csv")
    assert predicted.out.splitlines() == ['a\\x1b[31m,"i\\nx",nan', "b,[/red],nan"]


def test_every_verb_is_drawn():
    paths = {verb.path for verb in verbs()} - {("advise", "training")}  # which is called without its name
    assert paths <= {line.words[: len(path)] for line in lines(SEED, 1000) for path in paths}


def test_drawn_lines(sandbox):
    found = [_told(line, ended) for line in lines(SEED, 10) if wrongs(ended := _run(sandbox, line))]
    assert not found, "\n\n".join(found)


@pytest.mark.soak
def test_a_thousand_drawn_lines(sandbox):
    """Writes to PACELINE_SOAK_RESULTS how they ended; FUZZ_SEED draws others."""
    begun_s = time.monotonic()
    drawn = list(lines(SEED, SOAK_LINES))
    ended = [_run(sandbox, line, SOAK_LIMIT_S) for line in drawn]
    found = [_told(line, one) for line, one in zip(drawn, ended, strict=True) if wrongs(one)]
    figures = {
        "lines": len(ended),
        "exit_codes": dict(sorted(Counter(str(one.code) for one in ended).items())),
        "wrong": len(found),
        "stopped_at_30_s": sum(bool(one.stopped) for one in ended),
        "leftovers": sum(len(one.left) for one in ended),
        "longest_s": round(max(one.took_s for one in ended), 1),
        "took_s": round(time.monotonic() - begun_s, 1),
    }
    soak_results.keep("soak_command_lines", f"seed {SEED}", figures)
    assert not found, "\n\n".join(found)


def _run(sandbox: Sandbox, line: Line, limit_s: float = LIMIT_S) -> Ended:
    return sandbox.run(*line.words, files=line.files, limit_s=limit_s)


def _told(line: Line, ended: Ended) -> str:
    return f"{wrongs(ended)}: {shlex.join(line.words)[:500]!r}, files {line.files}: {ended.err[-1500:]}"
