"""The errors that users see. Each message says what happened, usually why, and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eqsat_mem.units import count, format_bytes

SMALL = 1000
"""A tensor of less than this part of a sum has no line of its own in a list."""
Tensor = tuple[str, int, str | None]
"""A tensor named in a message: its description, its size in bytes, and the user's file and line if known."""


class EqsatMemError(Exception):
    """The base class of all errors of this package."""


class OptionError(EqsatMemError, ValueError):
    """An argument, an environment variable or a command-line option has an invalid value."""


class RuleError(EqsatMemError):
    """A rule file cannot be loaded, or one of its rules does something that rules must not do."""


class UserFileError(EqsatMemError):
    """A file named on the command line cannot be loaded, lacks the named function, or that function raises."""


class StableHLOError(EqsatMemError):
    """A module of StableHLO cannot be read, or a plan cannot be written as one."""


class PlanningError(EqsatMemError):
    """Planning a function of a script failed, and ``eqsat-mem run --strict`` refuses to run it unplanned."""

    def __init__(self, function: str, reason: str) -> None:
        super().__init__(function, reason)  # as `args`, so that the error can be pickled
        self.function = function
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.function} could not be planned: {self.reason}\nWithout --strict it runs as written."


class DeviceCompilerError(EqsatMemError):
    """The compiler for a device that this machine lacks is not installed, or cannot compile for that device."""


class DeviceError(EqsatMemError, RuntimeError):
    """A plan made for one device was run on another."""


class PlanMismatchError(EqsatMemError, RuntimeError):
    """The processes of a job have not planned the same, so that their devices would run different programs.

    Attributes:
        function: the name of the function that this process plans.
        processes: the numbers of the two processes that differ.
        reason: how they differ.
        told: what each of the two says of what differs; empty where one has said nothing.
    """

    def __init__(self, function: str, processes: tuple[int, int], reason: str, told: tuple[dict[str, object], ...] = ()) -> None:
        super().__init__(function, processes, reason, told)  # as `args`, so that the error can be pickled
        self.function, self.processes, self.reason, self.told = function, processes, reason, told

    def __str__(self) -> str:
        one, other = self.processes
        texts = [
            f"\nprocess {p}: {', '.join(f'{name} {value}' for name, value in told.items())}" for p, told in zip((one, other), self.told)
        ]
        return f"processes {one} and {other} do not plan {self.function} alike: {self.reason}.{''.join(texts)}"


class MemoryLimitError(EqsatMemError):
    """No plan was found whose peak fits the memory limit.

    Attributes:
        limit_bytes: the limit, in bytes.
        smallest_bytes: the smallest peak of all plans that were found, in bytes.
        tensors: ``(description, bytes, source)`` of each tensor that the plan with the smallest peak holds at that peak, largest first;
            ``source`` is the user's file and line, or None.
        function: the name of the user's function.
        fixed_bytes: the part of the peak that is arguments and outputs, in bytes, or None if unknown.
        restrictions: a sentence for each of the user's options that keeps tensors from being split.
        shared_bytes: bytes of the outputs that reuse the memory of donated arguments; the other figures count them once, while
            ``tensors`` lists both the argument and the output.
        devices: how many devices run the program, each of which the figures are for.
        with_more: a sentence about the peak on more devices; empty where that is not known.
    """

    def __init__(
        self,
        limit_bytes: int,
        smallest_bytes: int,
        tensors: Sequence[Tensor] = (),
        function: str = "the program",
        fixed_bytes: int | None = None,
        restrictions: Sequence[str] = (),
        shared_bytes: int = 0,
        devices: int = 1,
        with_more: str = "",
    ) -> None:
        # as `args`, so that the error can be pickled
        super().__init__(limit_bytes, smallest_bytes, tensors, function, fixed_bytes, restrictions, shared_bytes, devices, with_more)
        self.limit_bytes = limit_bytes
        self.smallest_bytes = smallest_bytes
        self.tensors = sorted(tensors, key=lambda tensor: -tensor[1])
        self.function = function
        self.fixed_bytes = fixed_bytes
        self.restrictions = tuple(restrictions)
        self.shared_bytes = shared_bytes
        self.devices = devices
        self.with_more = with_more

    def __str__(self) -> str:
        limit, smallest = _distinct(self.limit_bytes, self.smallest_bytes)
        each = f" on each of {self.devices} devices" if self.devices > 1 else ""
        lines = [f"no plan of {self.function} fits memory_limit = {limit}{each}: the smallest peak found is {smallest}."]
        if self.tensors:
            lines += ["It holds at that peak:", *tensor_lines(self.tensors, self.smallest_bytes + self.shared_bytes)]
            if self.shared_bytes:
                lines.append(
                    f"Of this, outputs of {format_bytes(self.shared_bytes)} take the memory of donated arguments: both count once."
                )
        restrictions = () if self._no_room() else self.restrictions
        return "\n".join([*lines, self._why(), *restrictions, self._advice(), *filter(None, [self.with_more])])

    def _no_room(self) -> bool:
        return self.fixed_bytes is not None and self.fixed_bytes >= self.limit_bytes

    def _why(self) -> str:
        if self._no_room():
            assert self.fixed_bytes is not None
            return (
                f"Arguments and outputs count towards the limit and stay whole: they alone take {format_bytes(self.fixed_bytes)}, "
                "and every plan needs some temporaries besides."
            )
        return (
            "A tensor is made in chunks only along an axis that every operation from its making to its use treats slice by slice "
            "or folds; arguments, outputs and what an operation needs whole stay whole."
        )

    def _advice(self) -> str:
        enough = format_bytes(self.smallest_bytes, round_up=True)
        if self._no_room():
            other = "pass and return less at a time (fewer rows, a narrower dtype)"
        else:
            other = "make these tensors smaller (fewer rows, a narrower dtype), or let those lines work on one slice at a time"
        return f"Raise memory_limit (or EQSAT_MEM_LIMIT) to {enough}, or {other}."


def tensor_lines(tensors: Sequence[Tensor], total_bytes: int, most: int = 12, other: str = "smaller tensor") -> list[str]:
    """Return one line for each of the first tensors: its size, its description, and the user's file and line if known.

    Those alike in description and line are counted in one.

    Args:
        tensors: tensors that are held at once, largest first.
        total_bytes: what is held at that point altogether, in bytes. What the tensors do not add up to is listed as scratch.
        most: how many tensors are listed at most. The others, and those below a thousandth of all, are added up in one line.
        other: what each of the others is.
    """
    alike = sorted(_alike(tensors), key=lambda group: -group[0][1] * len(group))
    large = [k for k, group in enumerate(alike[:most]) if group[0][1] * len(group) >= total_bytes / SMALL]
    shown, others = [_together(alike[k]) for k in large], [tensor for k, group in enumerate(alike) if k not in large for tensor in group]
    if len(others) == 1:
        shown, others = [*shown, *others], []
    if others:
        shown.append((f"in {count(len(others), other)}", sum(nbytes for _, nbytes, _ in others), None))
    scratch = total_bytes - sum(nbytes for _, nbytes, _ in tensors)
    if scratch > 0:
        shown.append(("scratch of operations", scratch, None))
    sizes = [format_bytes(nbytes) for _, nbytes, _ in shown]
    width = max(map(len, sizes), default=0)
    return [
        f"  {size:>{width}}  {description}" + (f"  at {source}" if source else "")
        for size, (description, _, source) in zip(sizes, shown, strict=True)
    ]


def _alike(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Tensors of the same size, description and line together."""
    groups: dict[Tensor, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor, []).append(tensor)
    return groups.values()


def _together(alike: Sequence[Tensor]) -> Tensor:
    description, nbytes, source = alike[0]
    return (f"{len(alike)} x {description}" if len(alike) > 1 else description), nbytes * len(alike), source


def _distinct(limit: int, smallest: int) -> tuple[str, str]:
    """Return both sizes as text, in bytes if rounding would make them look equal."""
    texts = format_bytes(limit), format_bytes(smallest)
    return texts if texts[0] != texts[1] else (f"{limit} B", f"{smallest} B")
