"""The user's source with bytes per line: what each line makes, and what of it is held at the peaks."""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from eqsat_mem.reports.page.chart import Panel
from eqsat_mem.reports.parts import HeldPart
from eqsat_mem.units import format_bytes

AROUND = 2
"""The lines shown around one that makes something."""

Place = tuple[str, int]
"""A file and a line in it."""


@dataclass(frozen=True)
class LineBytes:
    """Bytes per line, and those of no line: each column adds up.

    Attributes:
        lines: for each place, the bytes of each column.
        others: for each kind of what has no line, the same.
        functions: the user's function at each place.
    """

    lines: Mapping[Place, tuple[int, ...]]
    others: Mapping[str, tuple[int, ...]]
    functions: Mapping[Place, str]

    @property
    def total(self) -> tuple[int, ...]:
        """The sum of each column."""
        return tuple(map(sum, zip(*self.lines.values(), *self.others.values(), strict=True)))


def columns_of(written: Panel, panels: Sequence[Panel]) -> LineBytes:
    """The columns of the page: the bytes that a line makes in the program as written, then those held at the peak of each panel."""
    every = [_made(written), *(list(panel.parts[panel.peak]) for panel in panels)]
    lines, others, functions = [Counter[Place]() for _ in every], [Counter[str]() for _ in every], dict[Place, str]()
    for k, parts in enumerate(every):
        for part in parts:
            if part.source is None:
                others[k][part.role if part.role in ("arguments", "gradients", "scratch") else "values of no line"] += part.nbytes
            else:
                place = part.source.file, part.source.line
                lines[k][place] += part.nbytes
                functions[place] = part.source.function
    return LineBytes(
        {place: tuple(column[place] for column in lines) for place in sorted(functions)},
        {name: tuple(column[name] for column in others) for name in dict.fromkeys(name for column in others for name in column)},
        functions,
    )


def _made(panel: Panel) -> list[HeldPart]:
    """The values that the steps of a program make."""
    return [part for point, parts in zip(panel.points, panel.parts, strict=True) for part in parts if part.term in point.terms]


def lines_html(columns: LineBytes, titles: Sequence[str]) -> str:
    """Return one table per file, in which lines that make nothing are omitted but for a few, and one of what has no line."""
    files = dict.fromkeys(file for file, _ in columns.lines)
    highest = max((max(found[1:], default=0) for found in columns.lines.values()), default=0)
    head = "".join(f'<th class="number">{title}</th>' for title in titles)
    tables = []
    for file in files:
        numbers = sorted(line for name, line in columns.lines if name == file)
        rows = "\n".join(_rows(columns, file, numbers, highest))
        tables.append(
            f'<figure class="wide"><figcaption>{escape(file)}</figcaption><table class="lines">'
            f'<thead><tr>{head}<th class="number">line</th><th>code</th></tr></thead><tbody>\n{rows}</tbody></table></figure>'
        )
    others = "".join(f"<tr>{_cells(found, 0)}<td></td><td>{escape(name)}</td></tr>\n" for name, found in columns.others.items())
    total = f"<tr>{_cells(columns.total, 0)}<td></td><td>altogether</td></tr>" if columns.lines or columns.others else ""
    rest = (
        f'<figure class="wide"><figcaption>of no line</figcaption><table class="lines"><thead><tr>{head}'
        f'<th class="number"></th><th></th></tr></thead><tbody>{others}</tbody><tfoot>{total}</tfoot></table></figure>'
    )
    return "\n".join([*tables, rest])


def _rows(columns: LineBytes, file: str, numbers: Sequence[int], highest: int) -> Iterator[str]:
    """The rows of a file, as far as it can be read."""
    text = linecache.getlines(file)
    near = {other for line in numbers for other in range(line - AROUND, line + AROUND + 1) if 0 < other <= len(text)}
    shown = {line for line in near if text[line - 1].strip()}.union(numbers)
    before = 0
    for line in sorted(shown):
        if before and line > before + AROUND:
            yield f'<tr class="gap"><td colspan="{len(columns.total) + 2}">...</td></tr>'
        before = line
        found = columns.lines.get((file, line), (0,) * len(columns.total))
        code = text[line - 1].rstrip("\n") if line <= len(text) else f"({columns.functions[file, line]})"
        yield f'<tr>{_cells(found, highest)}<td class="number">{line}</td><td><code>{escape(code) or " "}</code></td></tr>'


def _cells(found: Sequence[int], highest: int) -> str:
    """Cells of sizes, with bars of one scale behind those of the peaks; nothing where there is nothing."""
    cells = []
    for k, nbytes in enumerate(found):
        share = nbytes / highest if highest and k else 0
        bar = f' style="--share: {100 * share:.1f}%"' if share else ""
        text = f'<data value="{nbytes}">{format_bytes(nbytes)}</data>' if nbytes else ""
        cells.append(f'<td class="number bytes"{bar}>{text}</td>')
    return "".join(cells)
