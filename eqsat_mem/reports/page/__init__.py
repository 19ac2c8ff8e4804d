"""A plan as one self-contained page of HTML."""

from eqsat_mem.reports.page.document import page

__all__ = ["page"]
