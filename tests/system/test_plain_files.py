"""Files of strangers: what is wrong with them is one sentence, and what is wrong with us stays a traceback."""

import gc
import io
import struct
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from paceline.errors import UsageError
from paceline.system import plain_files
from paceline.system.plain_files import read_npz

HEADER = "{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}"
PLAIN = HEADER.format(descr="<f8", shape=(2, 3))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "arrays.npz"


def write(path, header, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("X.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + b"\0" * 48)


@pytest.mark.parametrize(
    "header",
    [
        PLAIN[:-1],
        "[" * 5000,
        PLAIN.replace("<f8", "<08"),
        PLAIN.replace("'<f8'", "<08"),
        PLAIN.replace("'<f8'", "08"),
        HEADER.format(descr="O", shape=(6,)),
        HEADER.format(descr=5, shape=(6,)),
        HEADER.format(descr="<f8", shape=(True, 6)),
        HEADER.format(descr="<f8", shape=(-2, -3)),
        HEADER.format(descr="<f8", shape=(6.0,)),
        HEADER.format(descr="|S0", shape=(0, 10**30)),
        HEADER.format(descr="<f8", shape=(10**30,)),
        HEADER.format(descr="<f8", shape=(1,) * 66 + (6,)),
    ],
)
def test_a_damaged_header_is_one_sentence(path, header):
    write(path, header)
    with pytest.raises(UsageError, match=r"is not a readable NPZ file of plain arrays \(.*\); get it again\.$"):
        read_npz(path, "get it again")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_any_damaged_byte_is_one_sentence_or_harmless(path, compression):
    write(path, PLAIN, compression)
    assert np.array_equal(read_npz(path, "get it again")["X"], np.zeros((2, 3)))
    whole = path.read_bytes()
    refused = 0
    for at in range(len(whole)):
        for flip in (1, 0x20, 0xFF):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
            try:
                read_npz(path, "get it again")
            except UsageError:
                refused += 1
    assert refused > len(whole)


def test_an_error_of_our_own_is_not_called_a_damaged_file(path, monkeypatch):
    write(path, PLAIN)
    monkeypatch.setattr(plain_files, "check_memory", lambda *_: {}["a fault of ours"])
    with pytest.raises(KeyError, match="a fault of ours"):
        read_npz(path, "get it again")


def test_threads_read_beside_each_other(path):
    # Threads that switch as often as they can, and a collector that runs as often, with something to run Python for: before
    # Python 3.11.8 four of five such runs lost a read.
    np.savez(path, X=np.ones((2, 3)), y=np.zeros(2))
    data = path.read_bytes()

    class Cycle:
        def __init__(self):
            self.me = self

        def __del__(self):
            sum(range(200))

    def read_often(_):
        for _ in range(1500):
            Cycle()
            assert read_npz(io.BytesIO(data), "get it again").keys() == {"X", "y"}

    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(1)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(read_often, range(4)))
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
