"""Starts with a long TMPDIR, in pools of processes, from standard input, and on a machine without loopback."""

import concurrent.futures
import multiprocessing
import os
import socket
import subprocess
import sys

import pytest

import paceline as pl
from paceline.membership.join_point import JoinPoint, JoinPointLostError

ALGORITHMS = ["leashed", "all-reduce", "ad-psgd", "parameter-server"]
PROGRAM = """
import sys
from functools import partial
import torch
import paceline as pl

def loop(algorithm):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {*sys.modules}
    with pl.attach(model, optimizer, algorithm=algorithm) as worker:
        for x in worker.batches([torch.ones(2, 2) for _ in range(4)]):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    ours = [name for name in {*sys.modules} - before if name.startswith("paceline")]
    if ours:
        print("the fork server has not loaded", ours)

if __name__ == "__main__":
    for algorithm in sys.argv[1:]:
        print(pl.launch(partial(loop, algorithm), workers=2).result["outcome"])
"""


def run(*words, tmpdir, **how):
    environment = {**os.environ, "TMPDIR": str(tmpdir), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True, timeout=200, **how
    )


def test_temporary_files_may_have_a_long_path_and_the_fork_server_loads_what_workers_need(tmp_path):
    """They would import it two thirds of a second long each."""
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = run(tmp_path / "program.py", *ALGORITHMS, tmpdir=folder)
    assert (ran.returncode, ran.stdout) == (0, "stopped\n" * len(ALGORITHMS)), ran.stderr


def test_a_program_from_standard_input_is_refused(tmp_path):
    ran = run("-", "leashed", tmpdir=tmp_path, input=PROGRAM)
    assert ran.returncode == 2
    assert ran.stderr.startswith("paceline: ")
    assert ran.stderr.endswith("there is no file <stdin>: save it in a file, or use backend='threads'.\n")
    assert ran.stderr.count("\n") == 1


def refusal():
    try:
        pl.launch(print, workers=2)
    except pl.UsageError as error:
        return str(error)
    return ""


def test_a_pool_that_cannot_start_workers_is_refused(monkeypatch):
    says = "use backend='threads', or concurrent.futures.ProcessPoolExecutor"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert says in pool.apply(refusal)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "loky")  # as in a process of joblib's
    assert says in refusal()


def test_the_pool_that_the_refusal_names_can_start_workers():
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(trained).result() == "stopped"


def trained():
    return pl.train(pl.TrainConfig(algorithm="leashed", workers=2, steps=2)).result["outcome"]


def test_an_address_that_cannot_be_reached_is_not_blamed_on_the_key(monkeypatch):
    def unreachable(*_, **__):
        raise OSError(101, os.strerror(101))

    monkeypatch.setattr("paceline.membership.join_point.JoinPoint.check", refuse_all)
    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(
        pl.UsageError, match=r"cannot be reached \(Network is unreachable\): start the network interface"
    ):
        JoinPoint("127.0.0.1:0", None, 1.0, role="holder")


def refuse_all(*_):
    raise JoinPointLostError("127.0.0.1:1")
