"""The kernel of a fold of pairs, in Mosaic GPU: functions that emitted source carries with it.

Threads of a block keep one partial result for each element of a tile of rows x columns, and fold over columns once, when all have passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def folded_columns(state: Any, columns: int, combine: Callable[[Any, Any], Any]) -> Any:
    """Tiles of rows x columns, folded over columns: halves of them down to the eight that threads share, and these one by one."""
    from jax import lax
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def column(part: Any, place: int) -> Any:
        """One column of a tile, bit by bit."""
        here = plgpu.broadcasted_iota(jnp.int32, part.shape, 1, layout=plgpu.Layout.WGMMA) == place
        bits = jnp.sum(jnp.where(here, lax.bitcast_convert_type(part, jnp.int32), 0), axis=1)
        return lax.bitcast_convert_type(bits, part.dtype)

    while columns > 8:
        columns //= 2
        state = combine(*(jax.tree.map(lambda part, own=own: part[:, own], state) for own in (slice(columns), slice(columns, None))))
    parts = [jax.tree.map(lambda part, place=place: column(part, place), state) for place in range(columns)]
    while len(parts) > 1:
        parts = [combine(*parts[k : k + 2]) for k in range(0, len(parts), 2)]
    return parts[0]


def loaded_tile(ref: Any, read: str, at: dict[str, Any], lengths: dict[str, int]) -> Any:
    """The tile of an array where its indices are at these places, or a tuple of tiles; ``lengths`` are the tile's own, by index."""
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    unrolled = [axis for axis, index in enumerate(read) if index not in at]
    if unrolled:
        index = read[unrolled[0]]
        return tuple(loaded_tile(ref, read, {**at, index: place}, lengths) for place in range(ref.shape[unrolled[0]]))
    along = [axis for axis, index in enumerate(lengths) if index in read]
    place = tuple(pl.ds(at[index], lengths[index]) if index in lengths else at[index] for index in read)
    if not along:
        return ref[place]
    tile = plgpu.Layout.WGMMA
    line = plgpu.load(ref.at[place], layout=tile.reduce(1 - along[0]), optimized=False)  # type: ignore[call-arg]  # in JAX 0.10
    return plgpu.layout_cast(lax.broadcast_in_dim(line, tuple(lengths.values()), (along[0],)), tile)


def raised_level(top: Any, elements: Any) -> tuple[Any, Any, Any]:
    """Of the largest number of each row and a tile of further ones: the largest of all, the factor that sums of exponentials less it have
    then, and what is subtracted, which is zero where it is not finite."""

    def subtracted(top: Any) -> Any:
        return jnp.where(jnp.abs(top) < jnp.inf, top, 0.0)

    new = jnp.maximum(top, jnp.max(elements, axis=1))
    return new, jnp.exp(jnp.minimum(subtracted(top) - subtracted(new), 0)), subtracted(new)


def folded_pairs(
    spec: str,
    over: str,
    pair: Callable[..., Any],
    fold: Sequence[Any],
    block: tuple[int, int],
    approximate: bool,
    *arrays: Any,
    streams: bool = False,
) -> Any:
    """``pair`` of arrays, folded over an index, as one Mosaic GPU kernel.

    ``spec`` names the indices of each array and of results as einsum does: the results' last one is cut into blocks of rows, ``over``
    into blocks of columns. ``pair`` takes the numbers of columns, and tiles of rows x columns: for each index that is neither a tuple of
    them. ``fold`` is the state of no pairs, its dtype and the function that combines two states; where what ``pair`` returns is no
    state, also the function that takes it into one, and that which makes results of a state. A state is a number or a tuple of them; a
    tuple of numbers among the results is an array with one more axis.

    Where it ``streams``, ``pair`` returns a number whose maximum is the first result, and a function that takes what is subtracted from
    exponents, the largest number so far if that is finite, to the elements of sums.
    """
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    *reads, result = spec.replace("->", ",").split(",")
    sizes = {index: size for read, array in zip(reads, arrays) for index, size in zip(read, array.shape)}
    row, (nothing, dtypes, combine) = result[-1], fold[:3]
    takes_in, finish = fold[3:] or (combine, lambda state: state)
    tile, lengths = plgpu.Layout.WGMMA, {row: block[0], over: block[1]}

    def ends(top: Any, state: Any) -> Any:
        return (top, *finish(state)) if streams else finish(state)

    def kernel(*refs: Any) -> None:
        at = {index: lax.axis_index(index) for index in result}
        at[row] = jnp.minimum(at[row] * block[0], sizes[row] - block[0])  # the last block may begin inside the one before

        def turn(start: Any, carry: Any, first: Any = None) -> Any:
            top, state = carry
            columns = start + plgpu.broadcasted_iota(jnp.int32, block, 1, layout=tile)
            new = pair(columns, *(loaded_tile(ref, read, {**at, over: start}, lengths) for ref, read in zip(refs, reads)))
            if streams:
                top, *lines = raised_level(top, new[0])
                factor, level = (plgpu.layout_cast(lax.broadcast_in_dim(line, block, (0,)), tile) for line in lines)
                state, new = jax.tree.map(lambda part: part * factor, state), new[1](level)
            new = takes_in(state, new)
            if first is not None:
                new = jax.tree.map(lambda old, new: jnp.where(columns >= first, new, old), state, new)  # columns before it have passed
            return top, new

        count, rest = divmod(sizes[over], block[1])
        state = jax.tree.map(lambda number, dtype: plgpu.layout_cast(jnp.full(block, number, dtype), tile), nothing, dtypes)
        top = plgpu.layout_cast(jnp.full(block[:1], -jnp.inf, jnp.float32), tile.reduce(1)) if streams else ()
        top, state = lax.fori_loop(0, count, lambda t, carry: turn(t * block[1], carry), (top, state))
        if rest:
            top, state = turn(sizes[over] - block[1], (top, state), count * block[1])
        place = *(at[index] for index in result[:-1]), pl.ds(at[row], block[0])
        results = ends(top, folded_columns(state, block[1], combine))
        for ref, numbers in zip(refs[len(arrays) :], results if isinstance(results, tuple) else (results,)):
            if isinstance(numbers, tuple):
                for k, number in enumerate(numbers):
                    ref[(*place, k)] = number
            else:
                ref[place] = numbers

    def array(of: Any) -> Any:
        """The shape and dtype of a result, of which a block has one number, or a tuple of them, for each row."""
        axes = tuple(sizes[index] for index in result)
        return jax.ShapeDtypeStruct((*axes, len(of)), of[0].dtype) if isinstance(of, tuple) else jax.ShapeDtypeStruct(axes, of.dtype)

    told = jax.eval_shape(ends, *jax.tree.map(lambda dtype: jax.ShapeDtypeStruct((), dtype), (jnp.float32, dtypes)))
    run = plgpu.kernel(
        kernel,
        out_type=tuple(map(array, told)) if isinstance(told, tuple) else array(told),
        grid=tuple(-(-sizes[index] // lengths.get(index, 1)) for index in result),
        grid_names=tuple(result),
        compiler_params=plgpu.CompilerParams(approx_math=approximate),
    )
    return run(*arrays)


HELPERS = (folded_pairs, folded_columns, loaded_tile, raised_level)
"""The function that source calls, and those that it calls."""
