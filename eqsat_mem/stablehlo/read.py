"""``from_stablehlo``: a module of StableHLO as a function that JAX can trace."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
from jax.export import Exported
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.extend.mlir import ir

from eqsat_mem.errors import StableHLOError
from eqsat_mem.ir.jaxprs import holds_64_bits
from eqsat_mem.stablehlo.modules import Module, module_of
from eqsat_mem.stablehlo.reading import Reading


def from_stablehlo(module: Module) -> ModuleFunction:
    """A module of StableHLO as a JAX function, which ``optimize`` plans like any other.

    Each operation becomes the primitive of JAX that it is. One that JAX has no primitive for is kept as it stands, as one opaque
    operation that plans compute whole; ``kept`` names those.

    Args:
        module: the text or the bytecode of a module, what ``jax.export`` serialises, a ``jax.export.Exported``, or the path of
            a file with any of these: a ``pathlib.Path``, or text with the ending of one.

    Returns:
        A function of the module's arguments: of arrays one by one, and for an export of the pytrees that its function took. It returns
        the module's results: the only one or a tuple, and for an export what its function returned. ``args`` and ``kwargs`` are the
        shapes and dtypes that it is called with.

    Raises:
        StableHLOError: if it is not StableHLO, is for several devices, has shapes that are not numbers, or says what no JAX program can.

    >>> import jax.numpy as jnp
    >>> f = from_stablehlo('''
    ... func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
    ...   %y = stablehlo.add %x, %x : tensor<3xf32>
    ...   return %y : tensor<3xf32>
    ... }''')
    >>> f(jnp.arange(3.0)).tolist()
    [0.0, 2.0, 4.0]
    """
    parsed, exported, file = module_of(module)
    with parsed.context, jax.enable_x64(True):  # what a module computes inside may be of 64 bits, whatever it takes and returns
        return ModuleFunction(parsed, exported, file)


class ModuleFunction:
    """A function that was read from a module of StableHLO.

    Attributes:
        args: the positional arguments that it takes, pytrees of ``jax.ShapeDtypeStruct``.
        kwargs: the keyword arguments that it takes, likewise.
        donation: ``donate_argnums`` and ``donate_argnames`` for ``optimize`` and ``jax.jit``, where the module says of arguments that
            results may take their memory; of none it is empty.
        kept: the operations that JAX has no primitive for, with their places.
        platform: JAX's name of the platform that the module was exported for, or None where it does not say.
    """

    def __init__(self, module: Any, exported: Exported | None, file: str) -> None:
        reading = Reading(module, file)
        main = reading.main()
        _refuse_devices(module, exported, file)
        self.platform, platforms = _platform(exported)
        every = reading.avals(main.arguments)
        chosen = {k: platforms.index(self.platform) for k in _platform_indices(main) if self.platform is not None}
        avals = [aval for k, aval in enumerate(every) if k not in chosen]
        names = [_name(argument.location, k) for k, argument in enumerate(main.arguments) if k not in chosen]

        def run(*values: Any) -> list[Any]:
            given = iter(values)
            return reading.call(
                main.name.value,
                [np.asarray(chosen[k], aval.dtype) if k in chosen else next(given) for k, aval in enumerate(every)],
            )

        gone = _donated(main)
        donated: list[bool | None] = [k in gone for k in range(len(every)) if k not in chosen]
        self.jaxpr: ClosedJaxpr = jax.make_jaxpr(run)(*avals)
        self.kept = tuple(reading.kept)
        self.is_wide = holds_64_bits(self.jaxpr.jaxpr)
        self.__name__ = _identifier(exported.fun_name if exported is not None else _symbol(module, main))
        self._exported = exported
        if exported is None:
            self._tree: Any = jax.tree.structure((tuple(avals), {}))
            leaves: Sequence[Any] = avals
        else:
            self._tree = exported.in_tree
            leaves = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
            kept = exported.module_kept_var_idx
            names = [names[kept.index(k)] if k in kept else f"arg{k}" for k in range(len(leaves))]
            donated = [donated[kept.index(k)] if k in kept else None for k in range(len(leaves))]
        self._leaves, self._names = leaves, names
        self.args, self.kwargs = jax.tree.unflatten(self._tree, leaves)
        self.donation = _donation(jax.tree.unflatten(self._tree, donated))
        self.__signature__ = _signature(self.args, self.kwargs, jax.tree.unflatten(self._tree, names))

    def __repr__(self) -> str:
        return f"<{self.__name__} of StableHLO{self.__signature__}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.__signature__.bind(*args, **kwargs)
        leaves, tree = jax.tree.flatten((bound.args, bound.kwargs))
        if tree != self._tree:
            raise TypeError(f"{self.__name__} takes arguments of the structure {self._tree}, not {tree}.")
        for name, leaf, wanted in zip(self._names, leaves, self._leaves, strict=True):
            self._check(name, leaf, wanted)
        exported = self._exported
        if exported is not None:
            leaves = [_data(leaves[k]) for k in exported.module_kept_var_idx]
        with jax.enable_x64(True) if self.is_wide else nullcontext():
            out = jaxpr_as_fun(self.jaxpr)(*leaves)
        if exported is None:
            return out[0] if len(out) == 1 else tuple(out)
        typed = [_as_keys(x, aval) for x, aval in zip(out, exported.out_avals, strict=True)]
        return jax.tree.unflatten(exported.out_tree, typed)

    def _check(self, name: str, leaf: Any, wanted: Any) -> None:
        """Raise ``TypeError`` for an argument of another shape or dtype than the module's."""
        given = jax.typeof(leaf)
        if (given.shape, given.dtype) != (wanted.shape, wanted.dtype):
            cure = ""
            if self.is_wide and np.dtype(wanted.dtype).itemsize >= 8 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
                cure = " JAX has 64 bits where jax_enable_x64 is on."
            raise TypeError(
                f"{self.__name__} takes {name} of shape {wanted.shape} and dtype {wanted.dtype}, not {given.shape} and {given.dtype}.{cure}"
            )


# --- devices, platforms and names --------------------------------------------------------------------


def _refuse_devices(module: Any, exported: Exported | None, file: str) -> None:
    """Raise ``StableHLOError`` for a module that several devices run together."""
    counts = [module.operation.attributes[name].value for name in _COUNTS if name in module.operation.attributes]
    if max([*counts, exported.nr_devices if exported is not None else 1], default=1) > 1:
        raise StableHLOError(f"{file} is for several devices: export the function for one, and plan that with --mesh or mesh=.")


_COUNTS = ("mhlo.num_partitions", "mhlo.num_replicas")


def _platform(exported: Exported | None) -> tuple[str | None, Sequence[str]]:
    """The platform that an export is read for, the one in use if it is among them, and all that it has."""
    if exported is None:
        return None, ()
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    return (here if here in exported.platforms else exported.platforms[0]), exported.platforms


def _platform_indices(main: Any) -> list[int]:
    """The positions of the arguments that are the number of the platform: JAX adds it to exports for several."""
    attributes = main.operation.attributes.get("arg_attrs", ())
    name = "jax.global_constant"
    return [k for k, one in enumerate(attributes) if name in one and one[name].value == "_platform_index"]


def _donated(main: Any) -> set[int]:
    """The positions of the arguments whose memory results may take, those that name a result and those that leave it to the compiler."""
    attributes = main.operation.attributes.get("arg_attrs", ())
    return {k for k, one in enumerate(attributes) if any(name in one for name in ("tf.aliasing_output", "jax.buffer_donor"))}


def _donation(donated: Any) -> dict[str, Any]:
    """The arguments of which all leaves are donated, as ``jax.jit`` takes them: of leaves that the module leaves out nothing is known."""

    def whole(argument: Any) -> bool:
        leaves = jax.tree.leaves(argument)  # None is no leaf
        return bool(leaves) and all(leaves)

    args, kwargs = donated
    positions = tuple(k for k, argument in enumerate(args) if whole(argument))
    names = tuple(name for name, argument in kwargs.items() if whole(argument))
    return {"donate_argnums": positions, "donate_argnames": names} if positions or names else {}


def _symbol(module: Any, main: Any) -> str:
    """The name of a module, as JAX names it after a function; or that of its own function, where it has none."""
    attributes = module.operation.attributes
    return str(attributes["sym_name"].value).removeprefix("jit_") if "sym_name" in attributes else str(main.name.value)


def _name(location: Any, k: int) -> str:
    """The name of an argument in a module, or its number."""
    return str(location.name_str) if isinstance(location, ir.NameLoc) else f"arg{k}"


def _identifier(text: str) -> str:
    word = re.sub(r"\W+", "_", text).strip("_")
    return word if word.isidentifier() and not keyword.iskeyword(word) else f"module_{word}".rstrip("_")


def _signature(args: Any, kwargs: Any, names: Any) -> inspect.Signature:
    """Parameters called as the leaves of their arguments are, up to the path within the argument."""
    words = []
    for k, named in enumerate(names[0]):
        found = {re.split(r"[\[.]", leaf)[0] for leaf in jax.tree.leaves(named)}
        words.append(_identifier(found.pop()) if len(found) == 1 else f"arg{k}")
    if len({*words, *kwargs}) < len(words) + len(kwargs):
        words = [f"arg{k}" for k in range(len(words))]
    kinds = [*((word, inspect.Parameter.POSITIONAL_ONLY) for word in words), *((word, inspect.Parameter.KEYWORD_ONLY) for word in kwargs)]
    return inspect.Signature([inspect.Parameter(word, kind) for word, kind in kinds])


def _data(leaf: Any) -> Any:
    """A value as a module has it: of random keys their bits."""
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.prng_key) else leaf


def _as_keys(value: Any, aval: Any) -> Any:
    if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return value
    return jax.random.wrap_key_data(value, impl=str(aval.dtype._impl.name))
