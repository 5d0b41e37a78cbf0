"""Kernels are compiled also if Numba's cache cannot be used."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

UNWRITABLE = "caching._CacheLocator.ensure_cache_path = fail"  # as in a read-only installation without a home
FULL = "caching.IndexDataCacheFile.save = fail"
DAMAGED = "caching.IndexDataCacheFile._load_index = damaged"

USE_EACH = """
import errno, os, pickle
import numpy as np
from numba.core import caching

def fail(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def damaged(*_):
    raise EOFError("Ran out of input")

{circumstance}
from paceline.memory.atomics import fetch_add, load
from paceline.compression.kernels import largest
from paceline.sparse.linear import all_finite
word = np.zeros(1, np.int64)
fetch_add(word.ctypes.data, 3)
scales = np.zeros(1, np.uint32)
assert largest(np.array([1.0, -2.0], np.float32).view(np.uint32), 2, scales)
print(load(word.ctypes.data), scales.view(np.float32)[0], all_finite(np.array([1.0, np.inf])))
"""


def run(program, **variables):
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize("circumstance", [UNWRITABLE, FULL, DAMAGED])
def test_kernels_of_every_package_work(tmp_path, circumstance):
    ran = run(USE_EACH.format(circumstance=circumstance), NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["3", "2.0", "False"]


@pytest.mark.parametrize(
    "module", ["paceline.memory.atomics", "paceline.compression.kernels", "paceline.sparse.instructions"]
)
def test_numba_that_does_not_compile_is_refused(module):
    ran = run(f"import {module}", NUMBA_DISABLE_JIT="1")
    assert ran.returncode == 1
    assert ran.stderr.rstrip().endswith("work only when they are compiled: unset it.")


def test_no_other_module_compiles():
    root = Path(paceline.__file__).parent
    files = {path.relative_to(root) for path in root.rglob("*.py") if re.search(r"\bnjit\b", path.read_text())}
    assert files == {Path("system/compilation.py")}
