"""A stand-in for the assembler of a CUDA toolkit: programs that are compiled to be looked at need no machine code.

XLA turns every kernel into text (PTX) and runs ``ptxas`` on it, which the compiler's wheels lack and which takes as long as
everything before it. What a program holds and launches is settled earlier. So XLA is given a folder that looks like a toolkit, whose
programs write nothing of use, and whose library of functions is empty.
"""

from __future__ import annotations

import atexit
import subprocess
import tempfile
import threading
from pathlib import Path

VERSION = "Cuda compilation tools, release 13.0, V13.0.88"
"""What the stand-in says when XLA asks for its version: one that knows all cards of the table."""
PROGRAM = f"""#!/bin/sh
if [ "$1" = --version ]; then echo "{VERSION}"; exit; fi
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then echo none > "$2"; fi
  shift
done
"""
PROGRAMS = ("ptxas", "nvlink")
LIBRARY = "nvvm/libdevice/libdevice.10.bc"

_lock = threading.Lock()
_made: list[tuple[str, bool]] = []
"""Folders, and whether programs in them can be run."""


def toolkit() -> str | None:
    """Return a folder that XLA takes for a CUDA toolkit; None where nothing in the folder for temporary files can be run.

    Made when it is first asked for, and removed when Python ends. Thread-safe.
    """
    with _lock:
        if not _made or not Path(_made[-1][0], LIBRARY).exists():  # temporary files may be cleared away meanwhile
            folder = tempfile.TemporaryDirectory(prefix="eqsat-mem-", ignore_cleanup_errors=True)
            atexit.register(folder.cleanup)
            _write(Path(folder.name))
            _made.append((folder.name, _runs(Path(folder.name))))
        name, runs = _made[-1]
        return name if runs else None


def _write(folder: Path) -> None:
    (folder / "bin").mkdir()
    for name in PROGRAMS:
        program = folder / "bin" / name
        program.write_text(PROGRAM, encoding="utf-8")
        program.chmod(0o700)
    library = folder / LIBRARY
    library.parent.mkdir(parents=True)
    library.write_text("; no functions\n", encoding="utf-8")


def _runs(folder: Path) -> bool:
    try:
        return subprocess.run([folder / "bin" / PROGRAMS[0], "--version"], check=False, capture_output=True).returncode == 0
    except OSError:
        return False
