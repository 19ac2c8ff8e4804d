"""Random JAX programs as source text, made of the operations and shapes that plans change; their results mean nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

EXTENTS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 17, 24, 31)
LARGEST = 6_000
"""Elements of the largest value."""
HEAD = "import jax\nimport jax.numpy as jnp\nimport numpy as np\nfrom jax import lax\n\n\n"


@dataclass(frozen=True)
class Sample:
    """A program: source that defines ``f``, and shapes and dtypes of its arguments."""

    seed: int
    source: str
    arguments: tuple[tuple[str, tuple[int, ...], str], ...]

    def function(self) -> Callable[..., Any]:
        namespace: dict[str, Any] = {}
        exec(compile(self.source, f"<sample {self.seed}>", "exec"), namespace)
        return namespace["f"]

    def values(self) -> list[Any]:
        return [value_of(shape, dtype, self.seed + 1000 * k) for k, (_, shape, dtype) in enumerate(self.arguments)]


def value_of(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Numbers of moderate size of any dtype."""
    rng = np.random.RandomState(seed % 2**31)
    plain = rng.standard_normal(shape)
    match dtype:
        case "bool":
            return np.asarray(plain > 0)
        case "int32" | "uint8" | "int16":
            return np.asarray(rng.randint(0, 7, shape)).astype(dtype)
        case "complex64" | "complex128":
            return np.asarray(plain + 1j * rng.standard_normal(shape)).astype(dtype)
    return np.asarray(plain).astype(jnp.dtype(dtype))


def sample(seed: int, extents: Sequence[int] = EXTENTS) -> Sample:
    """The program of a seed; 64-bit types must be on (``jax.enable_x64``)."""
    return _Writer(seed, extents).program()


class _Writer:
    """Lines of a program, each checked by its abstract values."""

    def __init__(self, seed: int, extents: Sequence[int]) -> None:
        self.seed = seed
        self.rng = np.random.RandomState(seed)
        self.lines: list[str] = []
        self.avals: dict[str, Any] = {}
        self.extents = [int(n) for n in self.rng.choice(extents, 3)]
        self.mixed = self.rng.rand() < 0.3
        self.dtype = "float32" if self.rng.rand() < 0.2 else "float64"

    # the whole

    def program(self) -> Sample:
        arguments = [self.argument(name) for name in "abcd"[: self.rng.randint(1, 5)]]
        self.avals = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, shape, dtype in arguments}
        wanted = self.rng.randint(2, 11)
        for _ in range(8 * wanted):
            if len(self.lines) >= wanted:
                break
            self.step()
        body = "".join(f"    {line}\n" for line in self.lines)
        names = [name for name, _, _ in arguments]
        source = f"{HEAD}def f({', '.join(names)}):\n{body}    return {', '.join(self.results())},\n"
        return Sample(self.seed, *self.transformed(source, arguments))

    def argument(self, name: str) -> tuple[str, tuple[int, ...], str]:
        rank = int(self.rng.choice([0, 1, 1, 2, 2, 2, 2, 3]))
        shape = tuple(int(self.rng.choice(self.extents)) for _ in range(rank))
        if self.rng.rand() < 0.02 and rank:
            shape = (0, *shape[1:])
        while math.prod(shape) > LARGEST:
            shape = shape[1:]
        dtype = self.dtype
        if self.mixed:
            dtype = str(self.rng.choice([self.dtype, "float32", "bfloat16", "float16", "int32", "bool", "complex64", "uint8"]))
        return name, shape, dtype

    def results(self) -> list[str]:
        made = [name for name in self.avals if name.startswith("v")] or list(self.avals)
        count = min(len(made), self.rng.randint(1, 4))
        chosen = [made[-1], *(made[k] for k in self.rng.choice(len(made), count - 1, replace=False))]
        if self.rng.rand() < 0.08:
            chosen.append("a")
        if self.rng.rand() < 0.05:
            chosen.append(chosen[0])
        if self.rng.rand() < 0.05:
            chosen.append("jnp.arange(3.0)")
        if self.rng.rand() < 0.05:
            chosen.append("2.5")
        return chosen

    def transformed(self, source: str, arguments: Any) -> tuple[str, Any]:
        """Sometimes the gradient, sometimes the batched program."""
        kind, names = self.rng.rand(), ", ".join(name for name, _, _ in arguments)
        floating = tuple(k for k, (_, _, dtype) in enumerate(arguments) if jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
        plain = source, tuple(arguments)
        if kind < 0.3 and floating:
            loss = (
                f"def loss({names}):\n    parts = [o for o in map(jnp.asarray, g({names})) if jnp.issubdtype(o.dtype, jnp.floating)]\n"
                "    return sum(jnp.sum(jnp.tanh(o / 3)).astype(float) for o in parts) + 0.0\n"
            )
            transform = self.choose("grad", "value_and_grad")
            changed = f"{source.replace('def f(', 'def g(')}\n\n{loss}\n\nf = jax.{transform}(loss, {floating})\n"
            return (changed, tuple(arguments)) if self.valid(changed, arguments) else plain
        if kind < 0.4 and arguments:
            axes = tuple(None if self.rng.rand() < 0.4 else 0 for _ in arguments)
            if axes == (None,) * len(axes):
                return plain
            batched = tuple((name, shape if axis is None else (3, *shape), dtype) for (name, shape, dtype), axis in zip(arguments, axes))
            changed = f"{source.replace('def f(', 'def g(')}\n\nf = jax.vmap(g, {axes})\n"
            return (changed, batched) if self.valid(changed, batched) else plain
        return plain

    def valid(self, source: str, arguments: Any) -> bool:
        try:
            jax.eval_shape(Sample(0, source, arguments).function(), *(jax.ShapeDtypeStruct(s, jnp.dtype(d)) for _, s, d in arguments))
        except (TypeError, ValueError, NotImplementedError, IndexError):
            return False
        return True

    # one line

    def step(self) -> None:
        line = STEPS[self.rng.choice(len(STEPS), p=WEIGHTS)](self)
        if line is None:
            return
        names = list(self.avals)
        code = eval(f"lambda {', '.join(names)}: {line}", {"jax": jax, "jnp": jnp, "np": np, "lax": lax})
        try:
            made = jax.eval_shape(code, *self.avals.values())
        except (TypeError, ValueError, NotImplementedError, IndexError, AssertionError, ZeroDivisionError):
            return
        if not isinstance(made, jax.ShapeDtypeStruct) or math.prod(made.shape) > LARGEST or len(made.shape) > 5:
            return
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {line}")
        self.avals[name] = made

    def pick(self, rank: tuple[int, int] = (0, 9), kind: str = "") -> str | None:
        """A value, later ones more often, of a rank in a range and of a kind of dtype (``f``: floating, of full precision)."""
        found = [
            name
            for name, aval in self.avals.items()
            if rank[0] <= len(aval.shape) <= rank[1] and (not kind or (np.dtype(aval.dtype).kind in kind and 0 not in aval.shape))
        ]
        if not found:
            return None
        weights = np.arange(1, len(found) + 1) ** 1.5
        return str(self.rng.choice(found, p=weights / weights.sum()))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.avals[name].shape

    def axis(self, name: str) -> int:
        return int(self.rng.randint(len(self.shape(name))))

    def choose(self, *options: str) -> str:
        return str(self.rng.choice(options))


# --- kinds of lines: an expression, or None where the values at hand do not allow it ------------------


def unary(w: _Writer) -> str | None:
    x = w.pick(kind="f")
    return x and w.choose("jnp.tanh({0})", "jnp.exp(-jnp.abs({0}))", "jnp.sin(jnp.tanh({0}))", "jnp.sqrt(jnp.abs({0}) + 1)",
                          "{0} ** 2", "-{0}", "jax.nn.relu({0})",
                          "jnp.log1p(jnp.abs({0}))", "jnp.clip({0}, -1, 1)", "jax.nn.sigmoid({0})", "0.5 * {0}", "jnp.abs({0})",
                          "jnp.floor({0} + 0.3173)",
                          "1 / (1 + {0} ** 2)", "jnp.exp(-0.5 * {0} ** 2)", "jax.checkpoint(jnp.tanh)({0})").format(x)  # fmt: skip


def binary(w: _Writer) -> str | None:
    x, y = w.pick(), w.pick()
    return f"{x} {w.choose('+', '-', '*')} {y}" if x and y else None


def outer(w: _Writer) -> str | None:
    x, y = w.pick((1, 2)), w.pick((1, 2))
    if not x or not y:
        return None
    op = w.choose("{0} + {1}", "{0} - {1}", "{0} * {1}", "jnp.maximum({0}, {1})", "({0} > {1} + 0.3173).astype(float)", "({0} - {1}) ** 2")
    forms = {
        (1, 1): ("[:, None]", "[None]"),
        (2, 2): ("[:, None]", "[None]"),
        (1, 2): ("[:, None, None]", "[None]"),
        (2, 1): ("[:, :, None]", ""),
    }
    left, right = forms[len(w.shape(x)), len(w.shape(y))]
    return op.format(x + left, y + right)


def distance(w: _Writer) -> str | None:
    x, y = w.pick((2, 2), "f"), w.pick((2, 2), "f")
    return x and y and w.choose(
        "jnp.sum(({0}[:, None] - {1}[None]) ** 2, -1)", "jnp.exp(-0.5 * jnp.sum(({0}[:, None] - {0}[None]) ** 2, -1))",
        "jnp.exp(-0.1 * jnp.sum(({0}[:, None] - {1}[None]) ** 2, -1)) @ {1}", "jnp.sum(jnp.abs({0}[:, None] - {1}[None]), 2)",
        "jnp.linalg.norm({0}[:, None] - {1}[None], axis=-1) ** 2").format(x, y)  # fmt: skip


def product(w: _Writer) -> str | None:
    x, y = w.pick((1, 3), "fi"), w.pick((1, 3), "fi")
    return x and y and w.choose("{0} @ {1}", "{0} @ {0}.T", "{0}.T @ {0}", "{0} @ {1}.T", "jnp.tanh({0} @ {1})", "jnp.outer({0}, {1})",
                                "jnp.dot({0}, {1}, preferred_element_type=jnp.float64)").format(x, y)  # fmt: skip


def einsum(w: _Writer) -> str | None:
    x, y = w.pick((1, 3), "fc"), w.pick((1, 3), "fc")
    if not x or not y:
        return None
    letters: dict[str, int] = {}

    def label(n: int, taken: str) -> str:
        same = [c for c, extent in letters.items() if extent == n and c not in taken]
        if same and w.rng.rand() < 0.75:
            return w.choose(*same)
        new = "ijklmnop"[len(letters)]
        letters[new] = n
        return new

    left = right = ""
    for n in w.shape(x):
        left += label(n, left)
    for n in w.shape(y):
        right += label(n, right)
    if w.rng.rand() < 0.1 and len(left) > 1 and w.shape(x)[0] == w.shape(x)[1]:
        left = left[0] * 2 + left[2:]
    used = sorted(set(left + right))
    out = "".join(c for c in w.rng.permutation(used) if w.rng.rand() < 0.6)
    return f'jnp.einsum("{left},{right}->{out}", {x}, {y})'


def reduction(w: _Writer) -> str | None:
    x = w.pick((1, 9), "f")
    if not x:
        return None
    keep = w.choose("", "", ", keepdims=True")
    axis = w.choose(str(w.axis(x)), str(w.axis(x)), "-1", "None" if not keep else "0", "(0, -1)")
    form = w.choose("jnp.sum({0}, {1}{2})", "jnp.sum({0}, {1}{2})", "jnp.mean({0}, {1}{2})", "jnp.max({0}, {1}{2})", "jnp.min({0}, {1}{2})",
                    "jnp.prod(jnp.tanh({0}), {1}{2})", "jnp.any({0} > 0.3173, {1}{2})", "jnp.all({0} > -1.7173, {1}{2})",
                    "jax.nn.logsumexp({0}, {1}{2})",
                    "jnp.var({0}, {1}{2})")  # fmt: skip
    return form.format(x, axis, keep.replace("keepdims", "keepdims"))


def search(w: _Writer) -> str | None:
    x = w.pick((1, 9), "f")
    return x and w.choose("jnp.argmax({2}, {1})", "jnp.argmin({2}, {1})", "jnp.sort({0}, {1})", "jnp.argsort({2}, {1})",
                          "jnp.cumsum({0}, {1})",
                          "lax.cummax({0}, {1}, reverse=True)", "lax.top_k({0}, 2)[0]", "lax.top_k(-{2}, 2)[1]", "jnp.flip({0}, {1})",
                          "lax.cumprod(jnp.tanh({0}), {1})").format(x, w.axis(x), rounded(x))  # fmt: skip


def rounded(x: str) -> str:
    """Values among which those that are equal but for rounding are equal, so that their order does not depend on a plan."""
    return f"jnp.round(jnp.tanh({x}) * 997.3)"


def normalised(w: _Writer) -> str | None:
    x = w.pick((1, 9), "f")
    return x and w.choose("jax.nn.softmax({0}, {1})", "{0} - jnp.mean({0}, {1}, keepdims=True)",
                          "{0} / (1 + jnp.sum({0} ** 2, {1}, keepdims=True))",
                          "jax.nn.softmax({0} @ {0}.T, -1) @ {0}", "{0} - jnp.max({0}, {1}, keepdims=True)",
                          "jnp.where({2} == jnp.max({2}, {1}, keepdims=True), 1, {0})").format(x, w.axis(x), rounded(x))  # fmt: skip


def layout(w: _Writer) -> str | None:
    x = w.pick((1, 9))
    if not x:
        return None
    shape = w.shape(x)
    factor = next((p for p in (2, 3, 4) if shape and shape[0] % p == 0 and shape[0] > p), 1)
    return w.choose("{0}.T", "jnp.swapaxes({0}, 0, -1)", "{0}.reshape(-1)", f"{{0}}.reshape({factor}, -1, *{shape[1:]})", "{0}[None]",
                    f"{{0}}.reshape(-1, *{shape[2:]})", "jnp.squeeze({0})", "{0}[..., None]", f"jnp.broadcast_to({{0}}, (3, *{shape}))",
                    "{0} + {0}.T", "jnp.moveaxis({0}, 0, 1)", f"{{0}}.T.reshape({shape})").format(x)  # fmt: skip


def masks(w: _Writer) -> str | None:
    x, y = w.pick((1, 4), "f"), w.pick((1, 4))
    if not x or not y:
        return None
    n, m = w.shape(x)[0], w.shape(x)[-1]
    return w.choose("jnp.where({0} > 0.3173, {0}, {1})", "jnp.tril({0})",
                    f"jnp.where(jnp.arange({n})[:, None] >= jnp.arange({m})[None], {{0}}, -1.0)",
                    f"{{0}} * jnp.arange({m})", f"{{0}} + jnp.eye({n})", f"jnp.where(jnp.eye({n}, dtype=bool), {{0}}, 0)",
                    "jnp.diag({0})", "jnp.trace({0})",
                    "jnp.where({1}.astype(bool), {0}, 0)", f"jax.nn.one_hot(jnp.argmax({rounded(x)}, 0), {n})", "jnp.diagonal({0})",
                    f"jnp.eye({n}) @ {{0}}").format(x, y)  # fmt: skip


def moves(w: _Writer) -> str | None:
    x, y = w.pick((1, 4)), w.pick((1, 4))
    if not x or not y:
        return None
    a, n = w.axis(x), w.shape(x)[0]
    at = [int(k) for k in w.rng.randint(0, max(n, 1), 3)]
    return w.choose("jnp.concatenate([{0}, {1}], 0)", "jnp.stack([{0}, {0}], {2})", "jnp.pad({0}, 1)", "{0}[1:]", "{0}[::2]",
                    "{0}[::-1]", "jnp.roll({0}, 1, {2})",
                    f"{{0}}[np.array({at})]", f"jnp.take({{0}}, jnp.argmax({rounded(f'jnp.real({y})')}, 0) % {max(n, 1)}, 0)",
                    "jnp.repeat({0}, 2, {2})", "jnp.tile({0}, 2)",
                    "{0}[0]", "{0}[..., -1]", f"{{0}}.at[{at[0]}].set(1)", f"{{0}}.at[np.array({at})].add(2)",
                    f"jnp.take_along_axis({{0}}, jnp.argsort({rounded(x)}, 0), 0)", f"jax.ops.segment_sum({{0}}, jnp.arange({n}) % 2, 2)",
                    "lax.dynamic_slice_in_dim({0}, 1, 1)", "jnp.convolve({0}, jnp.ones(3), 'same')",
                    f"jax.vmap(lambda i: {{0}}[i])(jnp.arange({n}) // 2)").format(x, y, a)  # fmt: skip


def algebra(w: _Writer) -> str | None:
    x, y = w.pick((2, 2), "f"), w.pick((2, 2), "f")
    if not x or not y:
        return None
    n = w.shape(x)[0]
    x, y = f"{x}.astype(float)", f"{y}.astype(float)"
    chol = f"jnp.linalg.cholesky(jnp.tanh({x}) @ jnp.tanh({x}).T + {n + 1} * jnp.eye({n}))"
    return w.choose(chol, f"jax.scipy.linalg.solve_triangular({chol}, {x}, lower=True)", f"jax.scipy.linalg.cho_solve(({chol}, True), {y})",
                    f"jnp.linalg.slogdet({x} @ {x}.T + jnp.eye({n}))[1]", f"jnp.fft.rfft({x}).real",
                    f"jnp.sum(jnp.log(jnp.diag({chol})))")  # fmt: skip


def control(w: _Writer) -> str | None:
    x, y = w.pick((1, 3), "f"), w.pick((0, 3), "f")
    return x and y and w.choose(
        "lax.scan(lambda c, r: (jnp.tanh(c + jnp.sum(r)), c * r), jnp.zeros((), {0}.dtype), {0})[1]",
        "lax.scan(lambda c, r: (jnp.tanh(c + r), jnp.sum(c)), {0}[0], {0}, reverse=True)[0]",
        "lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c + i * {0}), {0})",
        "lax.while_loop(lambda c: jnp.sum(c) > 1.3173, lambda c: c / 2, jnp.abs(jnp.tanh({0})))",
        "lax.cond(jnp.sum({1}) > 0.3173, lambda z: jnp.sin(z), lambda z: -z, {0})",
        "lax.map(lambda r: jnp.sum(r) * {1}, {0})", "jax.vmap(lambda r: jnp.dot(r, r))({0})", "lax.associative_scan(jnp.add, {0})",
        "lax.scan(lambda c, r: (c, r @ {0}.T), 0, {0})[1]").format(x, y)  # fmt: skip


def recurrences(w: _Writer) -> str | None:
    """Scans whose carries are rows, over rows, columns or both, each of a batch on its own or not."""
    x, y = w.pick((2, 3), "f"), w.pick((1, 2), "f")
    return x and y and w.choose(
        "lax.scan(lambda c, r: (0.5 * c + jnp.tanh(r), c * r), jnp.zeros_like({0}[0]), {0})[1]",
        "lax.scan(lambda c, r: (jnp.tanh(c + r), jnp.max(c) + r), {0}[0], {0} * 2, reverse=True)[1]",
        "jax.vmap(lambda s: lax.scan(lambda c, r: (jnp.tanh(c + r), c - r), s[0], s)[1])({0})",
        "jax.vmap(lambda s: lax.scan(lambda c, r: (0.9 * c + r, None), jnp.zeros_like(s[0]), s)[0], 1)({0})",
        "lax.scan(lambda c, r: (jnp.tanh(c @ {0} + r), c), jnp.zeros_like({0}[0]), {0})[1]",
        "lax.scan(lambda c, r: (c + jnp.outer(r, r), jnp.sum(c, 0)), jnp.zeros(({0}.shape[-1],) * 2, {0}.dtype), {0})[1]",
        "lax.scan(lambda c, r: (c + r.astype(c.dtype), r * {1}), jnp.zeros_like({0}[0]), {0})[1].sum(0)",
        "lax.scan(lambda c, k: (jnp.tanh(c + {0}[k]), c.sum()), {0}[0], jnp.arange({0}.shape[0]))[1]",
        "lax.scan(lambda c, r: (jnp.where(r.sum() > 0.3173, c + r, c), lax.cond(c.sum() > 1, jnp.sin, jnp.cos, r)), {0}[0], {0})[1]",
        "lax.fori_loop(0, 2, lambda i, c: 0.5 * c + jnp.tanh(c @ c.T) @ c, {0})",
        "lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (jnp.tanh({0}), {0}))[1]",
        "lax.map(lambda r: jax.nn.softmax({0} @ r), {0})", "lax.map(jax.checkpoint(lambda r: jnp.exp(-jnp.abs(r - {0}).sum(-1))), {0})",
    ).format(x, y)  # fmt: skip


def windows(w: _Writer) -> str | None:
    """Neighbours along an axis, side by side or one at a time."""
    x = w.pick((1, 3), "f")
    return x and w.choose(
        "jnp.diff({0}, axis={1})", "jnp.roll({0}, 1, {1}) - {0}", "jnp.pad({0}, 1, mode='edge')", "jnp.pad({0}, 1, mode='wrap')",
        "jnp.stack([{0}[k:{0}.shape[0] - 2 + k] for k in range(3)])", "{0}[2:] - 2 * {0}[1:-1] + {0}[:-2]",
        "jnp.concatenate([{0}, jnp.tanh({0})], {1}).sum({1})", "jnp.concatenate([{0}[1:], {0}[:1] ** 2], 0)",
        "jnp.max(jnp.stack([{0}, jnp.roll({0}, 2, {1})]), 0)",
        "lax.reduce_window({0}, -jnp.inf, lax.max, (2,) * {0}.ndim, (1,) * {0}.ndim, 'SAME')",
        "jnp.concatenate([{0}, {0} ** 2], {1}) @ jnp.concatenate([{0}, {0}], {1}).T", "jnp.cumsum({0}, {1}) - {0}",
        "lax.cumlogsumexp({0}, {1})", "jnp.gradient({0}, axis={1})").format(x, w.axis(x))  # fmt: skip


def ranked(w: _Writer) -> str | None:
    """Elements at places of what is sorted, and places among them."""
    x, y = w.pick((1, 2), "f"), w.pick((1, 2), "f")
    return x and y and w.choose(
        "jnp.median({0}, {1})", "jnp.quantile({0}, 0.3, {1})", "jnp.sort({0}, None)[1]", "jnp.sort({0}, {1})[0]",
        "jnp.quantile({0}, jnp.array([0.1, 0.9]))", "jnp.searchsorted(jnp.sort({3}, None), {2})",
        "jnp.interp({0}, jnp.arange(5.0), jnp.array([0, 1, 0, 2, 1.0]))", "jnp.histogram({2}, bins=4, range=(-900, 900))[0]",
        "jnp.bincount(jnp.abs({2}).astype(int).ravel() % 5, length=5)", "jnp.percentile({0} - {0}.T, 70)",
        "{0}[jnp.argsort({2}, 0)[..., 0] if {0}.ndim > 1 else jnp.argsort({2})]").format(
            x, w.axis(x), rounded(x), rounded(y))  # fmt: skip


def conversion(w: _Writer) -> str | None:
    x = w.pick(kind="" if w.mixed else "biu")
    return x and w.choose("{0}.astype(jnp.float32)", "{0}.astype(jnp.int32)", "{0}.astype(bool)", "{0}.astype(jnp.float64)",
                          "{0}.astype(jnp.bfloat16)",
                          "jnp.real({0})", "{0}.astype(jnp.complex64)", "{0} > 0.3173", "jnp.sum({0}, 0)", "jnp.cumsum({0})",
                          "jnp.bitwise_xor({0}, 3)", "{0} // 2",
                          "jnp.max({0}, -1)", "jnp.any({0})").format(x)  # fmt: skip


_TABLE: list[tuple[Callable[[_Writer], str | None], float]] = [
    (unary, 3), (binary, 3), (outer, 2), (distance, 1.5), (product, 2), (einsum, 3), (reduction, 4), (search, 1.2), (normalised, 1.5),
        (layout, 2.5),
    (masks, 1.5), (moves, 2), (algebra, 0.6), (control, 0.8), (conversion, 0.8),
    (recurrences, 0.7), (windows, 0.8), (ranked, 0.4),
]  # fmt: skip
STEPS = [step for step, _ in _TABLE]
WEIGHTS = np.array([weight for _, weight in _TABLE]) / sum(weight for _, weight in _TABLE)
