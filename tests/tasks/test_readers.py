import gzip

import numpy as np
import pytest

from paceline.errors import UsageError
from paceline.tasks import load_task
from paceline.tasks.readers import read_idx, read_npz


def idx(array):
    return b"\x00\x00\x08" + bytes([array.ndim]) + np.array(array.shape, dtype=">u4").tobytes() + array.tobytes()


IMAGES = np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 28, 28)
LABELS = np.array([3, 9], dtype=np.uint8)


def write_mnist(folder, suffix=""):
    folder.mkdir(exist_ok=True)
    for part in ("train", "t10k"):
        for name, array in (("images-idx3", IMAGES), ("labels-idx1", LABELS)):
            content = gzip.compress(idx(array)) if suffix else idx(array)
            (folder / f"{part}-{name}-ubyte{suffix}").write_bytes(content)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("below", ["mnist", "."])
@pytest.mark.parametrize(("name", "shape"), [("mnist-mlp", (2, 784)), ("mnist-cnn", (2, 1, 28, 28))])
def test_mnist_in_every_place(tmp_path, monkeypatch, suffix, below, name, shape):
    write_mnist(tmp_path / below, suffix)
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    train, test = load_task(name).load()
    for inputs, targets in (train.tensors, test.tensors):
        assert tuple(inputs.shape) == shape
        assert np.allclose(inputs.numpy().ravel(), IMAGES.ravel() / 255)
        assert targets.tolist() == [3, 9]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not an IDX file"),
        (b"<html>", "not an IDX file"),
        (idx(IMAGES)[:7], "ends within"),
        (idx(IMAGES)[:-1], "announces 1584"),
        (idx(IMAGES) + b"x", "holds 1585 bytes"),
        (b"\x00\x00\x08\x02" + b"\xff" * 8, "announces 18446744065119617037"),
    ],
)
def test_corrupt_idx(tmp_path, content, says):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UsageError, match=says):
        read_idx(tmp_path / "file")


def test_truncated_gzip(tmp_path):
    compressed = gzip.compress(idx(IMAGES))
    for content in (compressed[:-20], b"plain", compressed[:30] + b"\x00\xff" + compressed[32:]):
        (tmp_path / "file.gz").write_bytes(content)
        with pytest.raises(UsageError, match="again"):
            read_idx(tmp_path / "file.gz")


def test_labels_must_match_images(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(LABELS[:1]))
    with pytest.raises(UsageError, match="2 images, 1 labels"):
        load_task("mnist-mlp").load(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(IMAGES))
    with pytest.raises(UsageError, match="shape"):
        load_task("mnist-mlp").load(tmp_path)


def test_corrupt_npz(tmp_path):
    path = tmp_path / "file.npz"
    shapes = {"images": (4,)}
    np.savez(path, images=np.zeros((2, 4)))
    assert read_npz(path, shapes)["images"].shape == (2, 4)
    whole = path.read_bytes()
    np.savez(path, labels=np.zeros(2))
    with pytest.raises(UsageError, match="no array 'images'"):
        read_npz(path, shapes)
    np.savez(path, images=np.zeros((2, 5)))
    with pytest.raises(UsageError, match="expected"):
        read_npz(path, shapes)
    np.savez(path, images=np.array([{}, {}], dtype=object))
    with pytest.raises(UsageError, match="not a readable NPZ"):
        read_npz(path, shapes)
    for content in (b"", b"text", whole[: len(whole) // 2], whole.replace(b"\x93NUMPY", b"\x93NUMPX")):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="not a readable NPZ"):
            read_npz(path, shapes)


@pytest.mark.parametrize(("name", "file"), [("mnist-mlp", "train-images-idx3"), ("cifar10-cnn", "cifar10_12k.npz")])
def test_missing_data_says_which_files_and_where_to_get_them(tmp_path, monkeypatch, name, file):
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    with pytest.raises(UsageError, match="--data DIR or set PACELINE_DATA"):
        load_task(name).load()
    with pytest.raises(UsageError, match=file):
        load_task(name).load(tmp_path)
