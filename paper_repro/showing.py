"""Rows as Markdown tables and as lines in pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.plots import legend_below, log_axes, style
from eqsat_mem.units import format_bytes
from paper_repro.experiment import Row


def grid_table(
    rows: Sequence[Row], heads: dict[str, str], column: str, cell: Callable[[Row], str], label: Callable[[str], str] = str
) -> str:
    """A Markdown table: a line for each combination of the keys in ``heads`` (key to heading), a column for each value of ``column``."""
    columns = list(dict.fromkeys(row[column] for row in rows))
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        cells.setdefault(tuple(row[key] for key in heads), {})[row[column]] = cell(row)
    lines = [[*heads.values(), *map(label, columns)], ["---:"] * (len(heads) + len(columns))]
    lines += [[*map(whole, head), *(found.get(name, "") for name in columns)] for head, found in cells.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def whole(text: str) -> str:
    """A number with its thousands set apart; any other text as it is."""
    return f"{int(text):,}" if text.isdecimal() else text


def seconds(row: Row) -> str:
    """Seconds of a run to three digits, or why there are none."""
    return f"{float(row['seconds']):.3g}{origin(row)}" if row["seconds"] else row["status"]


def origin(row: Row) -> str:
    """A note on a plan that is the program as it was written: what differs from plain JAX then is noise."""
    return " (as written)" if row.get("as_written") else ""


def memory(row: Row) -> str:
    """MB that the compiled program holds, where it was compiled, and in parentheses MB that the process grew by, where it ran."""
    held = f"{float(row['held_bytes']) / 1e6:,.1f} MB" if row["held_bytes"] else ""
    resident = f"({float(row['resident_bytes']) / 1e6:,.1f} MB)" if row["resident_bytes"] else ""
    return " ".join(filter(None, [held, resident]))


def size(text: str) -> str:
    """Bytes as text, with a unit of 1024."""
    return format_bytes(int(float(text)))


def limit_label(column: str) -> str:
    """The heading of a column: a limit, plain JAX, or another program's name."""
    names = {
        "plain": "plain JAX",
        "chunked": "chunked by hand",
        "keops": "KeOps",
        "sklearn": "scikit-learn",
        "faiss": "faiss",
        "best order": "best order",
        "none": "no limit",
    }
    return names.get(column, f"limit {column}")


def device_line(rows: Sequence[Row]) -> str:
    """A sentence that names the device or devices of these rows."""
    names = dict.fromkeys(row["device_name"] for row in rows if row["device_name"])
    return f"Measured on {'; '.join(names) or 'nothing'}."


def picture_label(column: str) -> str:
    """The name of a line: another program's, or ours with its limit."""
    name = limit_label(column)
    return f"eqsat_mem, {name}" if column == "none" or name.startswith("limit ") else name


def lines(
    rows: Sequence[Row],
    axes: Any,
    x: str,
    y: str,
    y_label: str,
    scale: float = 1.0,
    *,
    x_label: str = "",
    name: Callable[[Row], str] = lambda row: picture_label(row["column"]),
) -> None:
    """Draw ``y`` against ``x``, a line for each ``name`` of a row, from the rows that ran; ``y`` is logarithmic where it is positive."""
    ran = [row for row in rows if row["status"] == "ok" and row[y]]
    for position, label in enumerate(dict.fromkeys(map(name, rows))):
        chosen = sorted((row for row in ran if name(row) == label), key=lambda row: float(row[x]))
        if chosen:
            axes.plot([float(r[x]) for r in chosen], [float(r[y]) * scale for r in chosen], **style(label, position))
    axes.set_xlabel(x_label or x)
    axes.set_ylabel(y_label)
    if ran:
        axes.set_xscale("log")
        axes.set_yscale("log" if min(float(row[y]) for row in ran) > 0 else "linear")
        log_axes(axes, [float(row[x]) for row in ran])


def memory_and_time(x: str, x_label: str) -> Callable[[Sequence[Row], Any], None]:
    """A picture of two parts: memory and seconds against ``x``."""

    def draw(rows: Sequence[Row], figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        lines(rows, left, x, "resident_bytes", "MB resident", 1e-6, x_label=x_label)
        lines(rows, right, x, "seconds", "seconds", x_label=x_label)
        legend_below(figure)

    return draw
