"""Passes: rewrites of programs that are no rules of the e-graph, each with a card as a rule has.

A rule says that one small term equals another, and extraction chooses. A pass is what cannot be said so: it needs an algorithm over the
whole program (the order of a long product), a program of another shape (a scan that computes what stood around it), or the operation
as JAX has it, before there are terms. Options name passes as they name rules, by their own names or all together as ``passes``.

Primitives that JAX itself defines by others (``log2``, ``custom_linear_solve``, a ``while`` of a batch) are read as their definitions, as
calls are read as their bodies: that is no pass.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

FILE = "passes"
"""The name that options give to all passes together, as to the rules of a file."""


@dataclass(frozen=True)
class Card:
    """The description by which a reader judges a rule or a pass.

    Attributes:
        name: unique among all rules and passes.
        equation: its left and right side, or its statement in words.
        sound: "bitwise", "reassociate", "real", "guarded" or "approx".
        why: why it is sound, and where not.
        memory: its effect on memory.
        place: where it stands: file and line of a rule, the module of a pass.
    """

    name: str
    equation: str
    sound: str
    why: str
    memory: str
    place: str

    def __str__(self) -> str:
        return f"{self.name} [{self.sound}]: {self.equation} ({self.place})"


@dataclass(frozen=True)
class Pass(Card):
    """A pass with its card; ``ruleset`` is where rules have theirs, ``told`` what a plan says of what it did, besides its loops."""

    ruleset: str = "pass"
    told: str = ""
    file = FILE


SEARCHES = Pass(
    "search-by-folds",
    "argmin_k a = the first place along k where a is min_k a, or is not a number: two folds and a comparison",
    "bitwise",
    "a place is no rounded number; positions are counted in a dtype that holds each",
    "a search fuses and is done in chunks, where XLA's holds extremes beside their places",
    "frontend/decompose.py",
)
DRAWS = Pass(
    "draws-by-position",
    "random_bits(key)[i] = the hash of key and i, for large draws of Threefry",
    "bitwise",
    "the bits that JAX draws with jax_threefry_partitionable are defined so",
    "random numbers are made where they are needed: a mask is never whole",
    "frontend/decompose.py",
)
DIAGONALS = Pass(
    "diagonal-by-mask",
    "x[i, i] = sum_j where(i == j, x[i, j], 0), and x.at[i, i].add(u) = where(i == j, x + u, x)",
    "real",
    "a sum with zeros; a zero that is read may lose its sign",
    "the computation of x need not stop at its diagonal",
    "frontend/diagonal_gathers.py",
)
ROWS = Pass(
    "rows-by-mask",
    "x[i, p[i]] = sum_j where(j == p[i], x[i, j], 0), and x.at[i, p[i]].add(u) = where(j == p[i], x + u, x), where x is computed",
    "real",
    "a sum with zeros; a zero that is read may lose its sign",
    "x is computed in chunks of both axes",
    "frontend/row_gathers.py",
)
ORDER = Pass(
    "order-of-products",
    "the product of four or more factors = the same product in the order with the fewest multiplications",
    "reassociate",
    "contractions associate; the e-graph holds all orders of a few factors, dynamic programming finds the best of many",
    "intermediate results are smaller",
    "transforms/contraction_order.py",
)
SCANS = Pass(
    "slices-in-scans",
    "a scan over f(x) = a scan over x whose steps compute f; results that another scan reads are computed again by it",
    "bitwise",
    "each element is computed as before; what rules do not split stays whole, and folds accumulate in a carry where rules let them",
    "a step's slices instead of what is stacked for all steps; carries only at checkpoints",
    "transforms/scan_rewrite.py",
    told="loops keep what goes from step to step; what else a backward pass needs of a step, it computes again",
)

SUMS = Pass(
    "sums-of-steps",
    "f(sum_t d[t]) = sum_t f(d[t]) for a linear f, of a sum that a scan carries",
    "reassociate",
    "sums over steps and over what f folds are taken together; f is applied to the summand of each step",
    "a sum such as the gradient of a matrix of distances is never whole where only smaller values are made of it",
    "transforms/step_sums.py",
    told="sums that loops carry are read by each step, part by part, where only smaller sums are made of them",
)

AT_ONCE = Pass(
    "steps-at-once",
    "scan of (h, x) -> f(h, x w), and of s -> s + a b', = scan of (h, y) -> f(h, y) with y = x w of all steps, and sum_t a[t] b[t]'",
    "reassociate",
    "the same products and sums of each step, as products and sums of all steps",
    "what steps read and add to is read and added to once; what they read and stack for that is held for all steps",
    "transforms/steps_at_once.py",
    told="what steps compute apart from what they carry is computed for all of them at once",
)

PREFIXES = Pass(
    "prefix-sums-by-blocks",
    "sum_{s <= t} a[s] = sum_s [s <= t] a[s], over the block of t, + sum_s a[s], over the blocks before",
    "guarded",
    "sums are taken in another order; what is multiplied by zero, and a product that is moved before a sum, has to be finite",
    "where a product is summed and its sums are contracted, neither is ever whole: a matrix for each block, and a sum for each",
    "transforms/prefix_blocks.py",
    told="prefix sums are contractions inside blocks of positions, and prefix sums over the blocks",
)

UPDATES = Pass(
    "equal-updates",
    "f(a1, b1), f(a2, b2), ... = calls of one operation f, for elementwise results on which nothing else depends",
    "bitwise",
    "the same operations on the same operands in the same order",
    "none: a training step's updates of all parameters are a few operations to plan and to read",
    "frontend/equal_updates.py",
)

ROLLS = Pass(
    "equal-blocks-as-loops",
    "f(... f(f(x, w1), w2) ..., wn) = a scan of f over w1 ... wn, side by side",
    "bitwise",
    "the same operations on the same operands in the same order; what blocks read and make is copied into and out of arrays",
    "a loop is planned once for all blocks, and its steps are computed again or kept by the same decisions",
    "frontend/equal_blocks.py",
    told="equal blocks, such as layers, run as one loop",
)

PARTS = Pass(
    "sums-of-parts",
    "sum_k f([a, b][k]) g[k] = sum_p f(a[p]) g[p] + sum_q f(b[q]) g[n + q]",
    "reassociate",
    "a sum over the parts of an axis, one after the other; what acts on each position alone does not mix them",
    "parts of a concatenation are never side by side; each is computed in chunks, or taken apart where it is a product",
    "frontend/concatenations.py",
)

RANKS = Pass(
    "ranks-by-counting",
    "sort(a)[p] = the largest number, found bit by bit, below which at most p elements of a lie",
    "real",
    "elements are compared as sorts compare them; a zero may lose its sign, and what is not a number its bits",
    "what is sorted is never whole: a median of all distances is counts of distances, one for each bit",
    "transforms/ranks.py",
    told="elements of sorted values are found by counting, bit by bit",
)

SHIFTS = Pass(
    "shifts-by-position",
    "x[1:][i] = x[i + 1], [a, b][i] = where(i < n, a[i], b[i - n]), and a padding likewise",
    "bitwise",
    "each element is the one that is copied otherwise; what is read at a position outside is not used",
    "differences of neighbours, rolls and stencils are made in chunks of rows",
    "frontend/shifts.py",
)

TILES = Pass(
    "overlapping-tiles",
    "conv(x, w)[t] = conv(x[t and the rows beside it], w), where rows outside of x are its padding",
    "reassociate",
    "windows of a tile lie in the tile and what is beside it; sums over rows are sums over tiles",
    "one image through many convolutions is made strip by strip; what lies beside a strip is computed again",
    "transforms/overlapping_tiles.py",
    told="what has windows (convolutions, pooling) runs in tiles that overlap",
)

ELEMENTS = Pass(
    "elements-apart",
    "(a + b)[..., k] = a[..., k] + b[..., k], and so for all that is elementwise",
    "bitwise",
    "each element is computed by the same operations from the same numbers",
    "coordinates that pairs have are no arrays of all coordinates, which XLA writes to memory where several slices read them",
    "frontend/elements.py",
)

COMPONENTS = Pass(
    "components-apart",
    "sum_k pad(a)[..., k] b[..., k] = a b[..., 0] + ..., and so for all that is computed of few components",
    "reassociate",
    "each component is computed by the same operations from the same numbers, and folds over components in their order",
    "cotangents of single components, and of products over components, are never padded to all components",
    "frontend/components.py",
)

OF_ELEMENTS = (ELEMENTS, COMPONENTS)
"""The passes that compute single elements of values which the program as written makes whole."""

SCATTERS = Pass(
    "scatters-by-position",
    "x.at[p, q].add(u)[i] = x[i].at[p - i, q].add(u), where what is written outside of row i is dropped",
    "bitwise",
    "each element takes the same updates in the same order; every chunk of rows goes through all of them",
    "a matrix of counts, edges or ratings that is made of lists is made in chunks of rows",
    "frontend/scatters.py",
    told="what is scattered is made in chunks of rows, each of which goes through all updates",
)

EVERY = (
    *(SEARCHES, DRAWS, DIAGONALS, ROWS, UPDATES, ELEMENTS, COMPONENTS, ROLLS, PARTS, TILES, SHIFTS, SCATTERS, RANKS, ORDER, PREFIXES),
    *(AT_ONCE, SCANS, SUMS),
)
"""All passes, in the order in which a program meets them."""


def named(names: Collection[str]) -> tuple[Pass, ...]:
    """The passes of these names."""
    return tuple(known for known in EVERY if known.name in names)
