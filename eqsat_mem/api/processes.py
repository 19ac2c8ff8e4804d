"""The same plan in every process of a job.

Devices run one program only if all processes have made the same. They tell each other of it through the store of ``jax.distributed``, never
by collectives: nothing is sent that other programs of the job could be mixed up with.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import numpy as np
from jax._src.distributed import global_state  # its store of keys and values has no public form
from jax.extend.core import ClosedJaxpr

from eqsat_mem import __version__
from eqsat_mem.backends.choose import backend_for
from eqsat_mem.backends.profiles import as_json, from_json
from eqsat_mem.errors import PlanMismatchError
from eqsat_mem.ir.mesh import Placement
from eqsat_mem.options import Options
from eqsat_mem.schedule.backend import Backend

PATIENCE_S = 600
"""How many seconds a process waits for another to plan the same function."""
COMPARED = tuple(f.name for f in fields(Options) if f.name not in ("rules", "operations", "device"))
"""The options that processes compare; files have paths and operations addresses that may differ, and what they do is in the plan."""

_rounds: Counter[str] = Counter()
_lock = threading.Lock()


@dataclass(frozen=True)
class Job:
    """One function that the processes of a mesh are planning.

    Attributes:
        processes: their numbers, the first one's device profile is that of all.
        own: the number of this one.
        key: the name of this round in the store.
        function: the function's name.
    """

    processes: tuple[int, ...]
    own: int
    key: str
    function: str

    def backend(self, jaxpr: ClosedJaxpr, options: Options, placement: Placement) -> Backend:
        """The target that all of them plan for: of the profile that the first process has, unless the user names a device.

        Raises:
            PlanMismatchError: if they are not planning the same.
        """
        backend = backend_for(options.device)
        told = {
            "function": self.function,
            "program": _digest(jaxpr),
            "shardings": str((placement.arguments, placement.results)),
            **{name: _text(getattr(options, name)) for name in COMPARED},
            "device": options.device is not None,
            "versions": [__version__, jax.__version__, jax.lib.__version__],
        }
        profile = as_json(backend.device)
        every = self._exchange("asked", {"told": told, "profile": profile})
        profiles = [other["profile"] for other in every]
        self._compare([other["told"] for other in every], _asked)
        if options.device is not None:
            self._compare(profiles, lambda names: f"the profiles of their device= differ in {', '.join(names)}")
            return backend
        return replace(backend, device=from_json(profiles[0], type(backend.device)))

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Tell the others of an error in this context, so that they do not wait for this process."""
        try:
            yield
        except Exception as error:
            self._tell("planned", {"program": f"{type(error).__name__}: {error}"})
            raise

    def compare_programs(self, source: str) -> None:
        """Compare what all have planned.

        Raises:
            PlanMismatchError: if the programs differ, or a process has found none.
        """
        every = self._exchange("planned", {"program": _short(source)})
        self._compare(every, lambda names: "they were asked for the same and have planned different programs")

    def _compare(self, every: Sequence[dict[str, Any]], why: Callable[[Sequence[str]], str]) -> None:
        for process, other in zip(self.processes, every, strict=True):
            differing = [name for name, value in every[0].items() if other.get(name) != value]
            if differing:
                both = ({name: told[name] for name in differing} for told in (every[0], other))
                raise PlanMismatchError(self.function, (self.processes[0], process), why(differing), tuple(both))

    def _exchange(self, stage: str, told: dict[str, Any]) -> list[dict[str, Any]]:
        """Tell the others something, and return the messages of all at this stage, in the order of the processes."""
        self._tell(stage, told)
        every = []
        for process in self.processes:
            try:
                text = _store().blocking_key_value_get(f"{self.key}/{stage}/{process}", PATIENCE_S * 1000)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                why = f"process {process} has not planned it within {PATIENCE_S} seconds"
                raise PlanMismatchError(self.function, (self.own, process), why) from error
            every.append(json.loads(text))
        return every

    def _tell(self, stage: str, told: dict[str, Any]) -> None:
        _store().key_value_set(f"{self.key}/{stage}/{self.own}", json.dumps(told))


def job(function: str, placement: Placement | None) -> Job | None:
    """The round in which the processes of a mesh plan a function; None where one process has all its devices."""
    mesh = None if placement is None else placement.mesh
    if mesh is None or global_state.client is None:
        return None
    processes = tuple(dict.fromkeys(device.process_index for device in mesh.devices.flat))
    if len(processes) == 1 or jax.process_index() not in processes:
        return None
    name = f"eqsat_mem/{_short(str((mesh.shape, [device.id for device in mesh.devices.flat])))}"
    with _lock:
        _rounds[name] += 1
        return Job(processes, jax.process_index(), f"{name}/{_rounds[name]}", function)


def _store() -> Any:
    return global_state.client


def _asked(names: Sequence[str]) -> str:
    if "function" in names or "program" in names:
        return "all processes plan the same functions of the same shapes in the same order, .plan() and .lower() included"
    return f"they differ in {', '.join(names)}"


def _digest(jaxpr: ClosedJaxpr) -> str:
    """A short text that is the same for the same program in every process: of its equations, and of constants that are here."""
    here = [np.asarray(x).tobytes().hex() for x in jaxpr.consts if getattr(x, "is_fully_addressable", True)]
    return _short(_text(jaxpr.jaxpr) + "".join(here))


def _text(value: Any) -> str:
    """A value as text, without addresses of objects."""
    return re.sub(r"0x[0-9a-f]+", "", str(value))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
