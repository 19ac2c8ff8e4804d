"""Fourier transforms along several axes, one of which lies in shares, as transforms along one axis after the other.

A transform needs its axis whole. Of one along two axes no share could be computed; along one axis at a time each device has shares of the
other, and devices exchange shares of one axis for shares of the other between the two. Transforms along axes that are whole come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Axes, Block, Call, Program, axes_mask, mask_of
from eqsat_mem.ir.mesh import Names, Placement
from eqsat_mem.mesh.spreading import at_rest


def one_axis_at_a_time(ex: Extraction, placement: Placement) -> Extraction:
    """A program in which transforms of axes in shares are along one axis each; the same where there are none."""
    if not any(_axes(term) > 1 for term in map(ex.program.terms.__getitem__, ex.program.reachable())):
        return ex
    writer = _Transforms(ex, at_rest(ex.program, placement))
    new, ids = ex.program.rewritten(writer.rewritten)
    return ex.onto(new, ids, writer.splits) if writer.splits else ex


def _axes(term: object) -> int:
    """The number of axes that a term transforms."""
    return len(term.call.params["fft_lengths"]) if isinstance(term, Block) and term.call.prim.name == "fft" else 0


class _Transforms:
    """The program while it is written anew; ``rest`` has the mesh axes of indices that lie in shares."""

    def __init__(self, ex: Extraction, rest: Mapping[int, Names]) -> None:
        self.old, self.rest = ex.program, mask_of(rest)
        self.splits: dict[int, int] = {}
        self._calls: dict[tuple[int, int], Call] = {}

    def rewritten(self, new: Program, t: int, ids: Mapping[int, int]) -> int | None:
        term = self.old.on(t, ids)
        count = _axes(term)
        if count < 2 or not isinstance(term, Block):
            return None
        (layout,), (after,) = term.call.in_axes, term.call.out_axes
        bound = axes_mask(layout[-count:]) | axes_mask(after[-count:])
        steps = self._steps(layout[-count:], after[-count:], str(getattr(term.call.params["fft_type"], "name", "")))
        if not bound & self.rest or not steps or not _are_apart(layout, after, count, steps):
            return None
        value = term.args[0]
        for step, (k, kind) in enumerate(steps):
            call, layout = self._call(term, step, k, kind, layout, new)
            value = new.add(Block(call.out_dtypes[0], call, (value,), 0), self.old.source.get(t))
            self.splits[value] = call.pointwise & new.free[value]
        return value

    def _steps(self, read: Axes, made: Axes, kind: str) -> list[tuple[int, str]]:
        """The axes that are transformed, counted from the first that is, and how each is: those last that arrive in shares, and those first
        that lie in shares afterwards, so that shares are exchanged once where a transform has its inverse after it.

        What is real is so along the last axis, which makes it complex before all others, or real again after them.
        """
        arrives, leaves = ([bool(axes_mask((axis,)) & self.rest) for axis in side] for side in (read, made))
        order = sorted(range(len(read)), key=lambda k: (arrives[k] - leaves[k], k if leaves[k] and not arrives[k] else -k))
        last = len(read) - 1
        others = [k for k in order if k != last]
        if kind == "RFFT":
            return [(last, "RFFT"), *((k, "FFT") for k in others)]
        if kind == "IRFFT":
            return [*((k, "IFFT") for k in others), (last, "IRFFT")]
        return [(k, kind) for k in order] if kind in ("FFT", "IFFT") else []

    def _call(self, term: Block, step: int, k: int, kind: str, layout: Axes, new: Program) -> tuple[Call, Axes]:
        """The transform of one axis, which stands last in what is read and made, and the axes of the whole result in their old order."""
        count = _axes(term)
        first = len(layout) - count
        a = first + k
        (after,) = term.call.out_axes
        others = (*layout[:a], *layout[a + 1 :])
        if (key := (id(term.call), step)) not in self._calls:
            params = {**term.call.params, "fft_lengths": term.call.params["fft_lengths"][k : k + 1]}
            params["fft_type"] = type(term.call.params["fft_type"])[kind]
            dtype = np.dtype(term.dtype)
            made = dtype if kind == "IRFFT" else np.result_type(dtype, np.complex64)
            pointwise = mask_of(axis[0] for axis in others if len(axis) == 1)
            ins, outs = ((*others, layout[a]),), ((*others, after[a]),)
            self._calls[key] = replace(term.call, params=params, in_axes=ins, out_axes=outs, out_dtypes=(made,), pointwise=pointwise)
        return self._calls[key], (*layout[:a], after[a], *layout[a + 1 :])


def _are_apart(layout: Axes, after: Axes, count: int, steps: list[tuple[int, str]]) -> bool:
    """Whether no value between the transforms has an index twice, and each transformed axis is one index or none."""
    first = len(layout) - count
    for k, _ in steps:
        a = first + k
        others = axes_mask((*layout[:a], *layout[a + 1 :]))
        if max(len(layout[a]), len(after[a])) > 1 or others & (axes_mask((layout[a],)) | axes_mask((after[a],))):
            return False
        layout = (*layout[:a], after[a], *layout[a + 1 :])
    return True
