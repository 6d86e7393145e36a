"""Live changes: settings that a person may change while a run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE_NAME = "control.json"


class Control:
    """Reads ``control.json`` of a run directory when it has changed.

    It holds one JSON object of dotted keys: ``{"agent.learning_rate": 1e-4}``.
    """

    def __init__(self, run_dir: Path | None) -> None:
        """Nothing is read yet; without a run directory there is nothing to read."""
        self._path = None if run_dir is None else run_dir / FILE_NAME
        self._text = ""

    def poll(self) -> dict[str, Any]:
        """What the file asks for, once each time that it changes.

        Raises:
            ValueError: what it holds is no JSON object.
        """
        try:
            text = self._path.read_text() if self._path is not None else ""
        except FileNotFoundError:
            text = ""
        if text == self._text:
            return {}
        self._text = text
        wanted = json.loads(text or "{}")
        if not isinstance(wanted, dict):
            raise ValueError("a JSON object is needed")
        return wanted
