"""Meshes and shardings as users give them: read from options, from arrays and from JAX's own settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from eqsat_mem.errors import OptionError
from eqsat_mem.ir.mesh import Devices, Names, Placement, Spec

AnyMesh = Mesh | AbstractMesh


@dataclass(frozen=True)
class Lying:
    """The place where a function runs, and the shardings of the arrays that it is called with; None where an array has none.

    ``mesh`` is JAX's. Functions that are called with arrays that lie otherwise are traced and planned apart.
    """

    mesh: AnyMesh
    arguments: tuple[PartitionSpec | None, ...]


@dataclass(frozen=True)
class Shardings:
    """The options that place a function on a mesh, as they were given."""

    mesh: AnyMesh | None = None
    arguments: Any = None
    results: Any = None

    def __post_init__(self) -> None:
        if self.mesh is not None and not isinstance(self.mesh, AnyMesh):
            raise OptionError(f"mesh must be a jax.sharding.Mesh or AbstractMesh, not {self.mesh!r}.")
        for name, tree in (("in_shardings", self.arguments), ("out_shardings", self.results)):
            for leaf in _leaves(tree):
                if not isinstance(leaf, PartitionSpec | NamedSharding):
                    raise OptionError(f"{name} must hold jax.sharding.PartitionSpec or NamedSharding, not {leaf!r}.")
                if self.mesh is not None:
                    _spec_on(leaf, self.mesh, name)

    @property
    def given(self) -> bool:
        """Whether anything was said."""
        return not (self.mesh is None and self.arguments is None and self.results is None)

    def lying(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lying | None:
        """The mesh and the shardings of the arrays of a call; None where there is no mesh, so that one device runs the function.

        ``in_shardings`` is a prefix of the positional arguments, which are those that JAX traces.
        """
        leaves = jax.tree.leaves((args, kwargs))
        found = [sharding_of(leaf) for leaf in leaves]
        mesh = self.mesh or _mesh_of([*_leaves(self.arguments), *_leaves(self.results)]) or _mesh_of(found) or _mesh_around()
        if jax.sharding.get_abstract_mesh().manual_axes:
            if self.given:
                raise NotImplementedError(INSIDE)
            return None
        if self.given and explicit_mesh(leaves) is not None:
            raise NotImplementedError(EXPLICIT)
        if mesh is None or mesh.size == 1:
            if self.arguments is not None or self.results is not None:
                _must_have(mesh)
            return None
        said = [*spread_prefix(self.arguments, args, "in_shardings"), *[None] * len(jax.tree.leaves(kwargs))]
        specs = [spec if spec is not None else spec_on(own, mesh) for spec, own in zip(said, found, strict=True)]
        return Lying(mesh, tuple(specs))


def placed_shapes(
    lying: Lying, args: tuple[Any, ...], kwargs: dict[str, Any], positions: Collection[int], names: Collection[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, less the static ones at ``positions`` and of ``names``, with descriptions of arrays told where they lie.

    JAX finds out by itself where arguments lie that a program reads, and takes others for whole on every device.
    """
    specs = iter(lying.arguments)

    def told(leaf: Any) -> Any:
        spec = next(specs)
        if spec is None or not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is not None or not isinstance(lying.mesh, Mesh):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(lying.mesh, spec), weak_type=leaf.weak_type)

    fixed = [k in positions or k - len(args) in positions for k in range(len(args))]
    placed = tuple(arg if is_static else jax.tree.map(told, arg) for arg, is_static in zip(args, fixed))
    return placed, {name: arg if name in names else jax.tree.map(told, arg) for name, arg in sorted(kwargs.items())}


def given_to_jit(options: dict[str, Any]) -> Shardings:
    """The shardings among the options of ``jax.jit``.

    Raises:
        OptionError: if they are of a kind that :func:`eqsat_mem.optimize` does not take.
    """

    def given(name: str) -> Any:
        return jax.tree.map(
            lambda leaf: None if type(leaf).__name__ == "UnspecifiedValue" else leaf, options.get(name), is_leaf=_is_sharding
        )

    return Shardings(None, given("in_shardings"), given("out_shardings"))


INSIDE = (
    "an optimised function inside shard_map is planned for one shard, and cannot have a mesh of its own: drop mesh=, in_shardings= and "
    "out_shardings=, or the outer shard_map."
)


EXPLICIT = (
    "on a mesh whose axes are of type Explicit, types say how the arguments and results of an optimised function lie: leave out mesh=, "
    "in_shardings= and out_shardings=, or make the mesh with jax.make_mesh(..., axis_types=(AxisType.Auto,) * n)."
)
IN_TYPES = (
    "an optimised function is planned without shardings in types, and this one needs them: pass the arrays that it closes over as "
    "arguments, and leave out_sharding= to functions around it, or make the mesh with jax.make_mesh(..., axis_types=(AxisType.Auto,) * n)."
)


def explicit_mesh(leaves: Sequence[Any]) -> AbstractMesh | None:
    """The mesh with axes of type Explicit by which JAX traces with shardings as part of types: that of the context, or of arrays."""
    around = jax.sharding.get_abstract_mesh()
    meshes = [around, *(jax.typeof(leaf).sharding.mesh for leaf in leaves if isinstance(leaf, Tracer))]
    return next((mesh for mesh in meshes if _is_explicit(mesh)), None)


def _is_explicit(mesh: AnyMesh) -> bool:
    return AxisType.Explicit in (mesh.axis_types or ())


def without_types(fun: Callable[..., Any], bound: Callable[[Any], Callable[..., Any]], inputs: Sequence[Any], mesh: AbstractMesh) -> Any:
    """Return the results of a function of values of which shardings are part of their types, computed where they are not.

    Args:
        fun: the function, as the user wrote it.
        bound: for the shardings of its results, a pytree, returns a function of the same inputs that computes the same.
        inputs: the values.
        mesh: the mesh that their types name.

    Raises:
        NotImplementedError: if the function cannot be traced without shardings in types.
    """
    typed, results = jax.make_jaxpr(fun, return_shape=True)(*inputs)
    outs = jax.tree.unflatten(jax.tree.structure(results), [NamedSharding(mesh, aval.sharding.spec) for aval in typed.out_avals])
    axes = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit)
    without = partial(jax.sharding.auto_axes, axes=axes, out_sharding=outs)
    try:
        return without(bound(outs))(*inputs)
    except Exception as error:
        try:
            jax.eval_shape(without(fun), *inputs)
        except Exception:
            raise NotImplementedError(IN_TYPES) from error
        raise


def _must_have(mesh: AnyMesh | None) -> None:
    if mesh is None:
        raise OptionError("in_shardings and out_shardings need a mesh: pass mesh=, or NamedSharding, or call within jax.set_mesh(mesh).")


def spec_on(sharding: NamedSharding | None, mesh: AnyMesh) -> PartitionSpec | None:
    """The spec of an array on a mesh; None if it has none.

    Raises:
        OptionError: if it lies on another mesh.
    """
    if sharding is None:
        return None
    if tuple(sharding.mesh.shape.items()) != tuple(mesh.shape.items()):
        raise OptionError(f"the function runs on the mesh {_text(mesh)}, and an argument lies on another, {_text(sharding.mesh)}.")
    return sharding.spec


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=_is_sharding)


def _is_sharding(x: Any) -> bool:
    return isinstance(x, PartitionSpec | jax.sharding.Sharding)


def sharding_of(leaf: Any) -> NamedSharding | None:
    """The sharding of an array; None for one that lies on one device or nowhere, as it seems to while JAX traces, unless types say."""
    sharding = getattr(jax.typeof(leaf) if isinstance(leaf, Tracer) else leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1 or (isinstance(leaf, Tracer) and not _is_explicit(sharding.mesh)):
        return None
    return sharding


def _mesh_of(shardings: Sequence[Any]) -> AnyMesh | None:
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding) and s.mesh.size > 1]
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), meshes[0] if meshes else None)


def _mesh_around() -> AnyMesh | None:
    """The mesh of ``jax.set_mesh``; none inside ``shard_map``, where every device runs a program of its own."""
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.axis_names or abstract.manual_axes:
        return None
    try:
        mesh: AnyMesh = jax.sharding.get_mesh()
        return mesh if mesh.axis_names else abstract
    except ValueError:  # JAX traces something
        return abstract


def _text(mesh: AnyMesh) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items())


def spread_prefix(prefix: Any, tree: Any, name: str) -> list[PartitionSpec | None]:
    """Spread a pytree of shardings, a prefix of another pytree, over the leaves of that; None where it says nothing of a leaf.

    Raises:
        OptionError: if it is no prefix.
    """
    if prefix is None:
        return [None] * len(jax.tree.leaves(tree))
    try:
        whole = jax.tree.broadcast(prefix, tree, is_leaf=lambda x: x is None or _is_sharding(x))
    except ValueError as error:
        told = str(error).replace(" broadcast_prefix prefix_tree", f" {name}")  # which JAX calls by its own function's argument
        raise OptionError(f"{name} must be a prefix of the structure that it is for: {told}") from None
    leaves = jax.tree.leaves(whole, is_leaf=lambda x: x is None or _is_sharding(x))
    return [leaf.spec if isinstance(leaf, NamedSharding) else leaf for leaf in leaves]


def _spec_on(leaf: PartitionSpec | NamedSharding, mesh: AnyMesh, name: str, of: str = "") -> None:
    """Check the axes that a spec names."""
    spec = leaf.spec if isinstance(leaf, NamedSharding) else leaf
    named = [axis for entry in spec for axis in _entry(entry)]
    unknown = [axis for axis in named if axis not in mesh.axis_names]
    whose = f"{name}{f' of {of}' if of else ''}"
    if unknown:
        raise OptionError(f"{whose} names axis {unknown[0]!r}; the mesh has {_text(mesh)}.")
    twice = [axis for axis in named if named.count(axis) > 1]
    if twice:
        raise OptionError(f"{whose} names axis {twice[0]!r} twice in {spec}: an array lies along a mesh axis once.")


def _entry(entry: Any) -> Names:
    """The mesh axes of one entry of a spec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def written_out(spec: PartitionSpec | None, shape: Sequence[int], mesh: AnyMesh, name: str, of: str) -> Spec | None:
    """A spec for every axis of an array, axes of one device left out.

    Raises:
        OptionError: if it names an axis that the mesh lacks, or one twice, or has more entries than the array has axes, or a mesh axis does
            not divide the array's.
    """
    if spec is None:
        return None
    _spec_on(spec, mesh, name, of)
    if len(spec) > len(shape):
        raise OptionError(f"{name} of {of} has {len(spec)} entries in {spec}; the array has {len(shape)} axes.")
    found: list[Names] = []
    for extent, entry in zip(shape, (*spec, *[None] * (len(shape) - len(spec))), strict=True):
        names = tuple(axis for axis in _entry(entry) if mesh.shape[axis] > 1)
        count = int(np.prod([mesh.shape[axis] for axis in names]))
        if extent % count:
            raise OptionError(
                f"{name} of {of} deals out {extent} positions to {count} devices along {', '.join(map(repr, names))}, which does not go "
                "evenly: pad the array, or leave that axis of it whole."
            )
        found.append(names)
    return tuple(found)


def placement(
    lying: Lying, jaxpr: ClosedJaxpr, names: Sequence[str], captured: Sequence[Any], results: Sequence[PartitionSpec | None]
) -> Placement:
    """The specs of the arguments of a traced function, captured arrays first, and of its results."""
    mesh, outs = lying.mesh, jaxpr.out_avals
    specs = [*(spec_on(sharding_of(x), mesh) for x in captured), *lying.arguments]
    arguments = [written_out(s, a.shape, mesh, "in_shardings", of) for s, a, of in zip(specs, jaxpr.in_avals, names, strict=True)]
    wanted = [written_out(s, a.shape, mesh, "out_shardings", f"result {k}") for k, (s, a) in enumerate(zip(results, outs, strict=True))]
    return Placement(described(mesh), tuple(arguments), tuple(wanted), compiled_for(mesh), isinstance(mesh, AbstractMesh))


def mesh_of_text(text: str) -> AbstractMesh:
    """The mesh that the command line names: ``x=64``, or ``data=4,model=2``.

    Raises:
        OptionError: if the text is something else.
    """
    axes = [part.partition("=") for part in text.split(",")]
    names = [name.strip() for name, _, _ in axes]
    if not all(name.isidentifier() and size.strip().isdigit() and int(size) for name, (_, _, size) in zip(names, axes, strict=True)):
        raise OptionError(f"a mesh is written x=8, or data=4,model=2: names of axes with numbers of devices, not {text!r}.")
    if len(set(names)) < len(names):
        raise OptionError(f"the axes of a mesh have different names, not {text!r}.")
    return AbstractMesh(tuple(int(size) for _, _, size in axes), tuple(names))


def described(mesh: AnyMesh) -> Devices:
    """A mesh as plans see it; an axis is far if its devices are not all in one process."""
    axes = tuple((name, size) for name, size in mesh.shape.items() if size > 1)
    return Devices(axes, frozenset(name for name, _ in axes if isinstance(mesh, Mesh) and _crosses(mesh, name)))


def _crosses(mesh: Mesh, name: str) -> bool:
    processes = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    along = np.moveaxis(processes, mesh.axis_names.index(name), 0)
    return bool((along != along[:1]).any())


def compiled_for(mesh: AnyMesh) -> Mesh | None:
    """A mesh to compile for: the given one, with shardings outside of types, or as many of the devices that are here."""
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names)
    if mesh.size > jax.device_count():
        return None
    return Mesh(np.array(jax.devices()[: mesh.size]).reshape(mesh.axis_sizes), mesh.axis_names)


ANYWHERE = Shardings()
"""Nothing is said: a function runs where its arguments lie."""
