"""Data sets are read from files in the formats that they are published in, and synthetic ones have the shape that they replace."""

import gzip
import struct

import numpy as np
import pytest

from paper_repro import knn, sgpr
from paper_repro.datasets import load_points, load_regression, read_idx, standardised, synthetic_regression

IMAGES = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)


def idx_bytes(array, code=8):
    head = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_images_become_rows_and_test_images_queries(tmp_path, ending):
    opened = gzip.open if ending else open
    for name, images in (("train-images-idx3-ubyte", IMAGES), ("t10k-images-idx3-ubyte", IMAGES[:2] + 1)):
        with opened(tmp_path / f"{name}{ending}", "wb") as file:
            file.write(idx_bytes(images))
    points, queries = load_points(tmp_path / f"train-images-idx3-ubyte{ending}")
    assert points.dtype == queries.dtype == np.float32
    np.testing.assert_array_equal(points, IMAGES.reshape(5, 12))
    np.testing.assert_array_equal(queries, IMAGES[:2].reshape(2, 12) + 1)


def test_idx_of_wider_numbers_is_big_endian(tmp_path):
    values = np.array([[1, -2], [70_000, 4]], np.int32)
    (tmp_path / "numbers").write_bytes(idx_bytes(values, code=12))
    np.testing.assert_array_equal(read_idx(tmp_path / "numbers"), values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no idx", "is not in IDX format: it should start with two zero bytes"),
        (b"\0\0", "is not in IDX format"),
        (idx_bytes(IMAGES)[:-1], r"is cut short: it has 59 elements, and its header says \(5, 4, 3\)"),
    ],
)
def test_what_is_not_idx_is_refused(tmp_path, content, message):
    (tmp_path / "images").write_bytes(content)
    with pytest.raises(SystemExit, match=message):
        load_points(tmp_path / "images")


def test_glove_lines_may_have_words_with_spaces(tmp_path):
    path = tmp_path / "glove.6B.3d.txt"
    path.write_text("the 0.5 -1 2\n. . . 1e-3 4 5\n", encoding="utf-8")
    points, queries = load_points(path)
    assert queries is None
    np.testing.assert_array_equal(points, np.array([[0.5, -1, 2], [1e-3, 4, 5]], np.float32))
    path.write_text("the 0.5 -1 2\nof 1 2\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"line 2 of .* is no word with 3 numbers"):
        load_points(path)


def test_ann_benchmarks_files_have_points_and_queries(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "glove-3-angular.hdf5", "w") as file:
        file["train"], file["test"] = np.eye(3), np.ones((2, 3))
    points, queries = load_points(tmp_path / "glove-3-angular.hdf5")
    np.testing.assert_array_equal(points, np.eye(3))
    np.testing.assert_array_equal(queries, np.ones((2, 3)))
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["points"] = np.eye(3)
    with pytest.raises(SystemExit, match="has no data set `train`"):
        load_points(tmp_path / "other.h5")


def test_files_that_are_not_there():
    with pytest.raises(SystemExit, match=r"there is no file missing\.txt"):
        load_points("missing.txt")
    with pytest.raises(SystemExit, match=r"there is no file missing\.csv"):
        load_regression("missing.csv")


def test_a_file_takes_the_place_of_random_points(tmp_path):
    path = tmp_path / "images"
    path.write_bytes(idx_bytes(IMAGES))
    points, queries = knn.data({"data": "MNIST", "file": str(path), "n": 100, "d": 784, "m": 3})
    assert points.shape == (5, 12)
    assert queries.shape == (3, 12)
    assert {tuple(row) for row in queries} <= {tuple(row) for row in points}
    options = knn.EXPERIMENT.parse(["--scale", "tiny", "--data", f"MNIST={path}"])
    assert {point["file"] for point in knn.grid(options) if point["data"] == "MNIST"} == {str(path)}
    row = {"data": "MNIST", "file": ""}
    assert knn._origin(row) == "MNIST (synthetic)"
    assert knn._origin(row | {"file": str(path)}) == "MNIST"


@pytest.mark.parametrize("wrong", ["MNIST", "Iris=x", "MNIST="])
def test_data_wants_a_name_and_a_file(wrong, capsys):
    with pytest.raises(SystemExit):
        knn.EXPERIMENT.parse(["--data", wrong])
    assert "is not NAME=FILE with a NAME among MNIST, Fashion" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "1,2,3\n4,5,6\n",
        "a;b;target\n1;2;3\n4;5;6\n",
        "date,a,b,y\n01/01/2007,1,2,3\n02/01/2007,?,9,9\n03/01/2007,4,5,6\n",
        "1 2 3\n4 5 6\n",
    ],
)
def test_text_tables(tmp_path, text):
    (tmp_path / "table.csv").write_text(text)
    x, y = load_regression(tmp_path / "table.csv")
    np.testing.assert_array_equal(x, [[1.0, 2.0], [4.0, 5.0]])
    np.testing.assert_array_equal(y, [3.0, 6.0])


@pytest.mark.parametrize("text", ["", "words\nonly\n", "1\n2\n"])
def test_text_without_a_table_is_refused(tmp_path, text):
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(SystemExit, match="has no table of numbers with a target in its last column"):
        load_regression(tmp_path / "table.csv")


@pytest.mark.parametrize("name", ["data", "X"])
def test_matlab_files(tmp_path, name):
    savemat = pytest.importorskip("scipy.io").savemat
    savemat(tmp_path / "table.mat", {name: np.arange(12.0).reshape(4, 3)})
    x, y = load_regression(tmp_path / "table.mat")
    np.testing.assert_array_equal(y, [2.0, 5.0, 8.0, 11.0])
    assert x.shape == (4, 2)
    point = {"file": str(tmp_path / "table.mat"), "seed": 1, "n": 0, "d": 0}
    assert sgpr.load(point)["x"].shape == (2, 2)


def test_synthetic_data_is_noisy_and_repeatable():
    x, y = synthetic_regression(5000, 3, seed=1)
    again, _ = synthetic_regression(5000, 3, seed=1)
    assert x.shape == (5000, 3)
    np.testing.assert_array_equal(x, again)
    assert 0.5 < np.std(y) < 1.5


def test_training_data_is_standardised_and_apart_from_test_data():
    x = np.arange(300.0).reshape(100, 3)
    x[:, 2] = 7.0  # a column that does not vary
    data = standardised(x, x[:, 0] * 2, seed=3)
    assert {name: len(values) for name, values in data.items()} == {"x": 67, "y": 67, "x_test": 33, "y_test": 33}
    np.testing.assert_allclose(data["x"].mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(data["x"].std(0), [1, 1, 0])
    assert not set(data["x"][:, 0]) & set(data["x_test"][:, 0])
    assert np.std(data["y"]) == pytest.approx(1)
