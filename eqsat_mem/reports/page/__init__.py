"""A plan as a self-contained HTML page."""

from eqsat_mem.reports.page.document import page

__all__ = ["page"]
