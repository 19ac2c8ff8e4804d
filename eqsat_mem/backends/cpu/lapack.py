"""The workspaces that LAPACK's routines allocate, which XLA:CPU does not report."""

from __future__ import annotations

# The workspace of a routine, measured as growth of resident memory in a second run, in units of the bytes of k x k elements for a matrix
# whose smaller extent is k = 512 to 1024 (jaxlib 0.10, f64; f32 and complex numbers differ by a tenth unless noted):
#
#   eigh                                     2.0
#   svd: square; 8 k rows or columns         2.7; 3.8
#   svd by QR steps: square; 8 k rows        0; 1.0
#   eig, with vectors on one side, on both   1.0; 2.1; 3.1     complex: 0; 0.2
#   cholesky, lu, qr, schur, hessenberg, tridiagonal, triangular_solve      0
#
# The matrices of a batch are processed one by one, and so are calls.
WORKSPACE = {"syevd": (2.0, 0.0), "heevd": (2.0, 0.0), "gesdd": (0.0, 4.0), "gesvd": (0.0, 1.0), "geev": (1.0, 1.0)}
"""By routine: the elements that it always holds, and those that it holds in addition for each requested set of vectors, both in
squares of the smaller extent. Measured: benchmarks/calibration/lapack_workspaces.py."""


def workspace(routine: str, extent: int, vectors: int) -> float:
    """Return the number of elements that LAPACK allocates for one matrix.

    Args:
        routine: the name of the routine without the letter of its dtype.
        extent: the smaller extent of the matrix.
        vectors: the number of sets of vectors that are requested.

    >>> workspace("geev", 10, vectors=2)
    300.0
    >>> workspace("potrf", 10, vectors=0)
    0.0
    """
    always, each = WORKSPACE.get(routine, (0.0, 0.0))
    return (always + each * vectors) * extent**2
