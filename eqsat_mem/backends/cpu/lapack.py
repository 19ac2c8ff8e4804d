"""What LAPACK allocates while it works on matrices: XLA:CPU does not report it."""

from __future__ import annotations

# A routine's own workspace, measured as growth of resident memory in a second run, against the bytes of k x k for a matrix whose lesser
# extent is k = 512 to 1024 (jaxlib 0.10, f64; f32 and complex numbers differ by a tenth where nothing else is said):
#
#   eigh                                     2.0
#   svd: square; 8 k rows or columns         2.7; 3.8
#   svd by QR steps: square; 8 k rows        0; 1.0
#   eig, with vectors on one side, on both   1.0; 2.1; 3.1     complex: 0; 0.2
#   cholesky, lu, qr, schur, hessenberg, tridiagonal, triangular_solve      0
#
# Matrices of a batch are worked on one by one, and so are calls.
WORKSPACE = {"syevd": (2.0, 0.0), "heevd": (2.0, 0.0), "gesdd": (0.0, 4.0), "gesvd": (0.0, 1.0), "geev": (1.0, 1.0)}
"""By routine: what it holds, and what it holds besides for each set of vectors that is wanted, in squares of the lesser extent.
Measured: benchmarks/calibration/lapack_workspaces.py."""


def workspace(routine: str, extent: int, vectors: int) -> float:
    """Elements that LAPACK allocates for one matrix whose lesser extent is given.

    >>> workspace("geev", 10, vectors=2)
    300.0
    >>> workspace("potrf", 10, vectors=0)
    0.0
    """
    always, each = WORKSPACE.get(routine, (0.0, 0.0))
    return (always + each * vectors) * extent**2
