"""A pickle that runs code while it is read: it makes a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Evil:
    """Makes `marker` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self._marker,)
