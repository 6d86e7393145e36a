"""What mkdocs does to pages besides Markdown."""

from __future__ import annotations

from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings announce code with two colons, as reStructuredText wants them; show one."""
    return html.replace("::</p>", ":</p>")
