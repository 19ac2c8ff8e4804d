"""Data sets from local files in the formats that they are published in, and synthetic ones of the same shape."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

# --- points and queries -------------------------------------------------------------------------------


def load_points(path: str | Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Points and, where the file has them, queries: float32 arrays of shapes (n, d) and (m, d).

    The ending tells the format: ``.hdf5`` (ann-benchmarks: ``train`` and ``test``), ``.txt`` (GloVe: a word and its vector per line), and
    anything else is IDX (MNIST, Fashion-MNIST), which may be compressed (``.gz``). Beside a file ``train-images*`` in IDX format, queries
    come from ``t10k-images*``.

    Raises:
        SystemExit: if the file is missing or is not what its ending says.
    """
    path = Path(path)
    if not path.is_file():
        raise SystemExit(f"there is no file {path}: pass the file of one data set, as it is published.")
    if path.suffix in (".hdf5", ".h5"):
        return _hdf5(path)
    if path.suffix == ".txt":
        return read_glove(path), None
    tests = path.with_name(path.name.replace("train-images", "t10k-images"))
    queries = read_idx(tests) if tests != path and tests.is_file() else None
    return _flat(read_idx(path)), None if queries is None else _flat(queries)


IDX_DTYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def read_idx(path: Path) -> np.ndarray:
    """An array in IDX format: two zero bytes, a byte for the dtype, one for the rank, extents and elements, all big-endian."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        head = file.read(4)
        if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in IDX_DTYPES:
            raise SystemExit(f"{path} is not in IDX format: it should start with two zero bytes and the code of a dtype.")
        shape = tuple(int.from_bytes(file.read(4), "big") for _ in range(head[3]))
        values = np.frombuffer(file.read(), IDX_DTYPES[head[2]])
    if values.size != np.prod(shape, dtype=int):
        raise SystemExit(f"{path} is cut short: it has {values.size} elements, and its header says {shape}.")
    return values.reshape(shape)


def read_glove(path: Path) -> np.ndarray:
    """Word vectors, of shape (words, d): each line has a word and the numbers of its vector. Words may contain spaces."""
    with path.open(encoding="utf-8") as file:
        width = len(file.readline().split()) - 1
    return np.stack([*_glove_vectors(path, width)])


def _glove_vectors(path: Path, width: int) -> Iterator[np.ndarray]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                vector = np.array(line.rstrip().rsplit(" ", width)[1:], dtype=np.float32)
            except ValueError:
                vector = np.empty(0)
            if vector.size != width:
                raise SystemExit(f"line {number} of {path} is no word with {width} numbers.")
            yield vector


def _hdf5(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    try:
        import h5py
    except ImportError:
        raise SystemExit(f"{path} needs h5py: pip install 'eqsat-mem[repro]'.") from None
    with h5py.File(path) as file:
        if "train" not in file:
            raise SystemExit(f"{path} has no data set `train`: it should be a file of ann-benchmarks.")
        queries = np.asarray(file["test"], np.float32) if "test" in file else None
        return np.asarray(file["train"], np.float32), queries


def _flat(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), -1).astype(np.float32)


# --- regression ---------------------------------------------------------------------------------------


def load_regression(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of shape (n, d) and targets of shape (n,), float64, from a UCI file: the last column is the target.

    ``.mat`` files hold one matrix, by the name ``data`` or any other. Anything else is text with commas, semicolons or blanks between
    columns; a line of headings, and columns that are no numbers (dates), are left out; so are rows with missing values.

    Raises:
        SystemExit: if the file is missing, or no numbers are in it.
    """
    path = Path(path)
    if not path.is_file():
        raise SystemExit(f"there is no file {path}: pass a UCI data set as CSV or MAT.")
    table = _mat(path) if path.suffix == ".mat" else _text(path)
    table = table[np.isfinite(table).all(1)]
    if table.ndim != 2 or table.shape[1] < 2 or not len(table):
        raise SystemExit(f"{path} has no table of numbers with a target in its last column.")
    return table[:, :-1], table[:, -1]


def _mat(path: Path) -> np.ndarray:
    from scipy.io import loadmat

    matrices = {name: value for name, value in loadmat(path).items() if not name.startswith("__") and np.ndim(value) == 2}
    if not matrices:
        raise SystemExit(f"{path} holds no matrix.")
    return np.asarray(matrices.get("data", next(iter(matrices.values()))), np.float64)


def _text(path: Path) -> np.ndarray:
    lines = path.read_text(encoding="utf-8").splitlines() or ["nothing"]
    separator = next((mark for mark in ",;" if mark in lines[-1]), None)
    cells = np.genfromtxt(lines, delimiter=separator, dtype=np.float64, missing_values="?")
    cells = cells.reshape(len(lines), -1)
    return cells[:, np.isfinite(cells).any(0)]


def synthetic_regression(n: int, d: int, seed: int, features: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Inputs in the unit cube and noisy values of a function drawn, nearly, from a Gaussian process with a Matern-3/2 kernel.

    The spectral density of that kernel is a multivariate t distribution of three degrees of freedom, from which the frequencies of random
    Fourier features are drawn.
    """
    rng = np.random.default_rng(seed)
    x = rng.uniform(size=(n, d))
    frequencies = rng.standard_normal((d, features)) / np.sqrt(rng.chisquare(3, features) / 3) / (0.3 * np.sqrt(d))
    phases = rng.uniform(0, 2 * np.pi, features)
    f = np.concatenate([np.cos(rows @ frequencies + phases).sum(1) for rows in np.array_split(x, max(1, n // 4096))])
    return x, np.sqrt(2 / features) * f + 0.1 * rng.standard_normal(n)


def standardised(x: np.ndarray, y: np.ndarray, seed: int, share: float = 0.67) -> dict[str, Any]:
    """Inputs and targets split at random for training (``share``) and testing, scaled by mean and deviation of the former."""
    order = np.random.default_rng(seed).permutation(len(x))
    cut = int(share * len(x))
    train, test = order[:cut], order[cut:]
    scale = np.where(x[train].std(0) > 0, x[train].std(0), 1.0)
    inputs, targets = (x - x[train].mean(0)) / scale, (y - y[train].mean()) / y[train].std()
    return {"x": inputs[train], "y": targets[train], "x_test": inputs[test], "y_test": targets[test]}
