"""Reading the state of PyTorch's generator in several threads: no deadlock, the same state, and one module that reads it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paceline
from paceline.system.torch_random import cuda_state, torch_state, torch_undisturbed

SOURCE = Path(paceline.__file__).parent
# Finalizers that let other threads run, in collections that start wherever an object is made. The timer needs no GIL.
PROGRAM = """
import faulthandler, gc, sys, threading, time
import torch
from paceline.system.torch_random import torch_state

class Cyclic:
    def __init__(self):
        self.own = self

    def __del__(self):
        time.sleep(0)

def work():
    for _ in range(1000):
        state = torch_state()
        Cyclic()
        torch.set_rng_state(state)

faulthandler.dump_traceback_later(60, exit=True)
gc.set_threshold(20)
sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_that_read_the_state_while_finalizers_run_end() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_state_is_that_of_the_generator_and_restores_it() -> None:
    with torch_undisturbed():
        torch.randn(3)
        state = torch_state()
        assert torch.equal(state, torch.get_rng_state())
        drawn = torch.rand(2)
        torch.set_rng_state(state)
        assert torch.equal(drawn, torch.rand(2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_state_of_a_gpu_is_that_of_its_generator() -> None:
    torch.cuda.init()
    assert torch.equal(cuda_state(), torch.cuda.get_rng_state())
    assert torch.equal(cuda_state(torch.device("cuda:0")), torch.cuda.get_rng_state(0))


def test_errors_inside_leave_the_state_as_it_was() -> None:
    state = torch_state()
    with pytest.raises(RuntimeError, match="size"), torch_undisturbed():
        torch.rand(2) @ torch.rand(3)
    assert torch.equal(state, torch_state())


def test_no_other_module_reads_the_state() -> None:
    files = [path for path in SOURCE.rglob("*.py") if path.name != "torch_random.py"]
    assert not [
        path for path in files if re.search(r"get_rng_state|fork_rng|default_generator\.get_", path.read_text())
    ]
