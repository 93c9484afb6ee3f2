"""The terminal that tables are printed on: as wide as it is, wide enough in a pipe."""
from __future__ import annotations

from rich.console import Console

WIDTH_IN_A_PIPE = 120


def console() -> Console:
    """Return a console for stdout."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDTH_IN_A_PIPE)
