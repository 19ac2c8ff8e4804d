"""A reader of compiled programs: the instructions of XLA's optimised HLO.

XLA provides a compiled program in two forms: as a serialised ``HloModuleProto``, in which every field has a type and a number
that never changes, and as text. :func:`read` uses the message if the installed jaxlib provides one, and the text otherwise; both
are read into the same :class:`Module`, so that no other module depends on the form. (The Python objects ``HloComputation`` and
``HloInstruction`` give no attributes, and give shapes only since jaxlib 0.12.) Field numbers and the names of attributes are those
of XLA's ``xla/service/hlo.proto``, ``xla/xla_data.proto`` and ``hlo_instruction.cc``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

Attribute = str | tuple[int, ...]
UNREAD = "unread"
"""The operation of an instruction that could not be read."""


@dataclass(frozen=True)
class Instruction:
    """One HLO instruction.

    Attributes:
        name: its name, unique within its computation.
        op: HLO's name of the operation, such as ``dot``, ``reduce`` or ``custom-call``.
        type: HLO's name of the element type, such as ``f32`` or ``pred``; ``tuple`` for several values.
        shape: the extents of the result; empty for scalars and tuples.
        operands: the names of the instructions that it reads, in order.
        called: the names of the computations that it calls: the body of a fusion, the combiner of a reduction.
        attributes: its attributes among :data:`ATTRIBUTES` that are not empty: sets of axes as tuples of numbers, all others as text.
        computation: the name of the computation that contains it.
        is_root: whether its result is that of the computation.
    """

    name: str
    op: str
    type: str
    shape: tuple[int, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    attributes: Mapping[str, Attribute]
    computation: str
    is_root: bool

    @property
    def nbytes(self) -> int:
        """The bytes of the result; zero for a tuple."""
        return 0 if self.type == "tuple" else math.prod(self.shape) * itemsize(self.type)

    def axes(self, name: str) -> tuple[int, ...]:
        """Return an attribute that is a set of axes; empty if the instruction lacks it."""
        value = self.attributes.get(name, ())
        return value if isinstance(value, tuple) else ()

    def text(self, name: str) -> str:
        """Return an attribute that is text; empty if the instruction lacks it."""
        value = self.attributes.get(name, "")
        return value if isinstance(value, str) else ""


@dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
        instructions: all instructions, grouped by computation.
        unread: the names or the first characters of the instructions that could not be read; empty if all were read.
    """

    instructions: tuple[Instruction, ...]
    unread: tuple[str, ...] = ()

    @cached_property
    def computations(self) -> Mapping[str, Mapping[str, Instruction]]:
        """For each computation by name, its instructions by name."""
        found: dict[str, dict[str, Instruction]] = {}
        for instruction in self.instructions:
            found.setdefault(instruction.computation, {})[instruction.name] = instruction
        return found


def itemsize(hlo_type: str) -> int:
    """Return the bytes of one element of an HLO type.

    >>> [itemsize(name) for name in ("f32", "bf16", "pred", "c128", "f8e4m3fn", "s4")]
    [4, 2, 1, 16, 1, 1]
    """
    width = re.match(r"[a-z]+(\d+)", hlo_type)
    return max(int(width[1]) // 8, 1) if width else 1


def read(compiled: Any, closed: Callable[[Instruction], bool] = lambda _: False) -> Module:
    """Read a compiled program.

    Args:
        compiled: the value of ``jax.jit(...).lower(...).compile()``.
        closed: says of an instruction that nobody asks what is in the computations that it calls: they may be left out.

    Returns:
        The program from its message, or from its text if fewer instructions remain unread that way; a module whose only entry is an
        unread whole program if neither form is available.
    """
    found = []
    message = message_of(compiled)
    if message is not None:
        found.append(from_message(message, closed))
    if not found or found[0].unread:
        text = compiled.as_text() if hasattr(compiled, "as_text") else None
        found.append(from_text(text) if text else Module((), ("the program as a whole",)))
    return min(found, key=lambda module: len(module.unread))


def message_of(compiled: Any) -> bytes | None:
    """Return the program as a serialised ``HloModuleProto``.

    Returns:
        The message; None if this jaxlib provides none, or the program is too large for one (2 GiB).
    """
    try:
        (module,) = compiled.runtime_executable().hlo_modules()
        return bytes(module.as_serialized_hlo_module_proto())
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return None


def _closed(instructions: Sequence[Instruction], unread: Sequence[str]) -> Module:
    """Return a module in which every operand is an instruction: missing ones are added as unread."""
    known = {(i.computation, i.name) for i in instructions}
    wanted = dict.fromkeys((i.computation, name) for i in instructions for name in i.operands)
    missing = [key for key in wanted if key not in known]
    placeholders = [_unread(name, computation) for computation, name in missing]
    return Module((*instructions, *placeholders), (*unread, *(name for _, name in missing)))


def _unread(name: str, computation: str) -> Instruction:
    return Instruction(name, UNREAD, "", (), (), (), {}, computation, is_root=False)


# --- messages -----------------------------------------------------------------------------------------

TYPES = {
    1: "pred", 2: "s8", 3: "s16", 4: "s32", 5: "s64", 6: "u8", 7: "u16", 8: "u32", 9: "u64", 10: "f16", 11: "f32", 12: "f64",
    13: "tuple", 14: "opaque", 15: "c64", 16: "bf16", 17: "token", 18: "c128", 19: "f8e5m2", 20: "f8e4m3fn", 21: "s4", 22: "u4",
    23: "f8e4m3b11fnuz", 24: "f8e5m2fnuz", 25: "f8e4m3fnuz", 26: "s2", 27: "u2", 28: "f8e4m3", 29: "f8e3m4", 30: "s1", 31: "u1",
    32: "f4e2m1fn", 33: "f8e8m0fnu",
}  # fmt: skip
"""The names of XLA's ``PrimitiveType`` by number."""
TEXTS = {11: "kind", 28: "custom_call_target", 43: "backend_config"}
DOT, DOT_AXES = 30, {1: "lhs_contracting_dims", 2: "rhs_contracting_dims", 3: "lhs_batch_dims", 4: "rhs_batch_dims"}
WINDOW, WINDOW_FIELDS = 15, (1, 3, 4, 6)
"""Of each axis: the size of the window, the padding before and behind, and how far apart the elements of the operand lie."""
LABELS, KERNEL_OUTPUT, INPUT_SPATIAL = 16, 4, 11
GROUPS = 50
ATTRIBUTES = frozenset({"dimensions", "window", "dim_labels", "feature_group_count", *TEXTS.values(), *DOT_AXES.values()})
"""The attributes that are read. ``window`` has four numbers for each axis of the window; ``dim_labels`` of a convolution are the axis of
the results in the kernel, and the spatial axes of the operand."""

Fields = Mapping[int, Sequence[int | bytes]]


def from_message(data: bytes, closed: Callable[[Instruction], bool] = lambda _: False) -> Module:
    """Read a program from a serialised ``HloModuleProto``; any other data gives a module that is unread as a whole.

    Computations that only ``closed`` instructions call are left out: in long programs most instructions are in fusions.
    """
    try:
        module = _fields(data)
        computations = {_text(c, 1): c for c in map(_fields, _submessages(module, 3))}
        called = {_number(c, 5): name for name, c in computations.items()}
        blocks: dict[str, list[Instruction]] = {}
        waiting = [_text(module, 2)]
        while waiting:
            name = waiting.pop()
            if name not in blocks:
                blocks[name] = _block(name, computations[name], called)
                waiting += [further for i in blocks[name] if not closed(i) for further in i.called]
        instructions = [i for name in computations for i in blocks.get(name, ())]
        unread = [i.name for i in instructions if i.op == UNREAD]
    except (IndexError, KeyError, ValueError) as error:
        return Module((), (f"a message of {len(data)} bytes ({type(error).__name__})",))
    return _closed(instructions, unread) if instructions else Module((), (f"a message of {len(data)} bytes",))


def _block(name: str, computation: Fields, called: Mapping[int, str]) -> list[Instruction]:
    """Return the instructions of a computation; ``called`` has the names of all computations."""
    own = [_fields(i) for i in _submessages(computation, 2)]
    names = {_number(i, 35): _text(i, 1) for i in own}
    return [_from_fields(i, names, called, name, _number(i, 35) == _number(computation, 6)) for i in own]


def _from_fields(fields: Fields, names: Mapping[int, str], called: Mapping[int, str], computation: str, is_root: bool) -> Instruction:
    (data,) = _submessages(fields, 3)
    number, shape = _typed(data)
    hlo_type = TYPES.get(number)
    further = tuple(called[n] for n in _numbers(fields, 38))
    if hlo_type is None:
        return replace(_unread(_text(fields, 1), computation), called=further)
    attributes: dict[str, Attribute] = {name: _text(fields, number) for number, name in TEXTS.items()}
    attributes["dimensions"] = _numbers(fields, 14)
    for dot in map(_fields, _submessages(fields, DOT)):
        attributes |= {name: _numbers(dot, number) for number, name in DOT_AXES.items()}
    for axis in (_fields(axis) for window in _submessages(fields, WINDOW) for axis in _submessages(_fields(window), 1)):
        size, low, high, apart = (_signed(_number(axis, number)) for number in WINDOW_FIELDS)
        attributes["window"] = (*attributes.get("window", ()), size, low, high, max(apart, 1))
    for labels in map(_fields, _submessages(fields, LABELS)):
        attributes["dim_labels"] = (_number(labels, KERNEL_OUTPUT), *_numbers(labels, INPUT_SPATIAL))
    if (groups := _number(fields, GROUPS)) > 1:
        attributes["feature_group_count"] = (groups,)
    return Instruction(
        _text(fields, 1),
        _text(fields, 2),
        hlo_type,
        shape,
        tuple(names[n] for n in _numbers(fields, 36)),
        further,
        {name: value for name, value in attributes.items() if value},
        computation,
        is_root,
    )


@lru_cache(maxsize=4096)
def _typed(data: bytes) -> tuple[int, tuple[int, ...]]:
    """Return the number of the type, and the shape, that a message describes: a program has few that differ."""
    fields = _fields(data)
    return _number(fields, 2), _numbers(fields, 3)


def _fields(data: bytes) -> Fields:
    """Return the fields of a message in protocol buffers' wire format by their numbers: varints as integers, all others as bytes."""
    found: dict[int, list[int | bytes]] = {}
    at, end = 0, len(data)
    while at < end:
        key, at = (data[at], at + 1) if data[at] < 128 else _varint(data, at)  # as most are
        kind = key & 7
        value: int | bytes
        if kind == 0:
            value, at = (data[at], at + 1) if data[at] < 128 else _varint(data, at)
        else:
            if kind == 2:
                length, at = (data[at], at + 1) if data[at] < 128 else _varint(data, at)
            else:
                length = {1: 8, 5: 4}[kind]
            if at + length > end:
                raise ValueError("a field that is longer than its message")
            value, at = data[at : at + length], at + length
        found.setdefault(key >> 3, []).append(value)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at a position, and the position after it."""
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7


def _submessages(fields: Fields, number: int) -> list[bytes]:
    return [value for value in fields.get(number, ()) if isinstance(value, bytes)]


def _text(fields: Fields, number: int) -> str:
    values = _submessages(fields, number)
    return str(values[-1], "utf-8") if values else ""


def _number(fields: Fields, number: int) -> int:
    numbers = _numbers(fields, number)
    return numbers[-1] if numbers else 0


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _numbers(fields: Fields, number: int) -> tuple[int, ...]:
    """Return the values of a repeated number, packed or not."""
    found: list[int] = []
    for value in fields.get(number, ()):
        if isinstance(value, int):
            found.append(value)
        elif value.isascii():  # each is a byte
            found.extend(value)
        else:
            at = 0
            while at < len(value):
                one, at = _varint(value, at)
                found.append(one)
    return tuple(found)


# --- text ---------------------------------------------------------------------------------------------

_COMPUTATION = re.compile(r"(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_HEAD = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
_ARRAY = re.compile(r"(?P<type>\w+)\[(?P<shape>[\d,<=]*)\]\S* ")
_OP = re.compile(r"\s*(?P<op>[\w\-]+)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')
_CALLS = frozenset({"calls", "to_apply", "body", "condition", "called_computations", "branch_computations",
                    "true_computation", "false_computation", "select", "scatter"})  # fmt: skip
_ALSO = {"iota_dimension": "dimensions"}
"""The attributes of the text that have another name in the message."""


def from_text(text: str) -> Module:
    """Read a program from its HLO text; lines inside a computation that cannot be read as instructions are unread."""
    instructions: list[Instruction] = []
    unread: list[str] = []
    computation = ""
    for line in text.splitlines():
        if not line[:1].isspace():
            head = _COMPUTATION.match(line)
            computation = head["name"] if head else ""
        elif computation and line.strip():
            made = _from_line(line, computation)
            instructions.append(made)
            if made.op == UNREAD:
                unread.append(line.strip()[:60])
    return _closed(instructions, unread) if instructions else Module((), (f"a text of {len(text)} characters",))


def _from_line(line: str, computation: str) -> Instruction:
    head = _HEAD.match(line)
    if head is None:
        return _unread(line.strip(), computation)
    at = head.end()
    array = _ARRAY.match(line, at)
    if array is None and line[at : at + 1] != "(":
        return _unread(head["name"], computation)
    op = _OP.match(line, array.end() if array else _behind(line, at))
    if op is None:
        return _unread(head["name"], computation)
    end = _behind(line, op.end() - 1)
    named = [part.partition("=") for part in _parts(line[end:])]
    return Instruction(
        head["name"],
        op["op"],
        array["type"] if array else "tuple",
        tuple(int(extent.lstrip("<=")) for extent in array["shape"].split(",") if extent) if array else (),
        tuple(_NAME.findall(line[op.end() : end])),
        tuple(name for key, _, value in named if key in _CALLS for name in _NAME.findall(value)),
        {
            name: read
            for key, _, value in named
            if (name := _ALSO.get(key, key)) in ATTRIBUTES and (read := _value(name, value)) not in ("", ())
        },
        computation,
        head["root"] is not None,
    )


def _value(name: str, text: str) -> Attribute:
    """Return an attribute in the form that the message has: axes as numbers, text without quotes."""
    if name in TEXTS.values():
        return re.sub(r"\\(.)", r"\1", text[1:-1]) if text.startswith('"') else text
    if name == "window":
        return _window(dict(part.split("=") for part in text.strip("{}").split() if "=" in part))
    if name == "dim_labels":
        operand, kernel, _ = re.split(r"_|->", text)
        return (kernel.index("o"), *(operand.index(digit) for digit in sorted(set(operand) - set("bf?"))))
    return tuple(int(axis) for axis in re.findall(r"\d+", text))


def _window(parts: Mapping[str, str]) -> tuple[int, ...]:
    sizes = parts["size"].split("x") if "size" in parts else []
    pads = parts.get("pad", "x".join(["0_0"] * len(sizes))).split("x")
    apart = parts.get("lhs_dilate", "x".join("1" * len(sizes))).split("x")
    return tuple(int(n) for size, pad, far in zip(sizes, pads, apart, strict=True) for n in (size, *pad.split("_"), far))


def _behind(text: str, at: int) -> int:
    """Return the position after the bracket that closes the one at ``at``."""
    depth = 0
    for mark in _MARK.finditer(text, at):
        depth += (mark[0] in "({[") - (mark[0] in ")}]")
        if not depth:
            return mark.end()
    return len(text)


def _parts(text: str) -> Iterator[str]:
    """Split a text at commas outside of brackets and quotes."""
    depth = start = 0
    for mark in _MARK.finditer(text):
        depth += (mark[0] in "({[") - (mark[0] in ")}]")
        if mark[0] == "," and not depth:
            yield text[start : mark.start()].strip()
            start = mark.end()
    yield text[start:].strip()
