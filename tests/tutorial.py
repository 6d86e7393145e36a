"""Does what docs/tutorial.md says, word for word, in a copy of the checkout (``make tutorial``).

Blocks marked ``bash`` are run in order by one shell, those of a second terminal beside it; blocks
with a title that is a file's name are saved. It takes minutes and needs a package index.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[1]


class Block(NamedTuple):
    """A fenced block: its language, its title ("" for none) and its text."""

    language: str
    title: str
    text: str


def blocks(markdown: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    fence = r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```$'
    return [Block(*found) for found in re.findall(fence, markdown, re.M | re.S)]


def as_script(page: list[Block]) -> str:
    """One shell script of all blocks; it stops at the first command that fails."""
    lines = ["set -e"]
    for block in page:
        if block.language == "python" and block.title:
            lines.append(f"cat > {block.title} <<'END_OF_FILE'\n{block.text}END_OF_FILE")
        elif block.language == "bash":
            lines.append(
                "\n".join(f"echo {shlex.quote('$ ' + x)}" for x in block.text.splitlines())
            )
            if block.title:
                script = shlex.quote(__file__)
                lines.append(f"{block.text.strip()} > second_terminal 2>&1 & second=$!")
                lines.append(f"python {script} second_terminal\nkill $second")
            else:
                lines.append(block.text)
    return "\n".join(lines)


def wait_for_tensorboard(log: Path, deadline_s: float = 120) -> None:
    """Until the TensorBoard that writes ``log`` answers with the first run."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        address = re.search(r"http://localhost:\d+/", log.read_text())
        with suppress(OSError):
            if address and b"first" in urlopen(f"{address[0]}data/runs", timeout=10).read():
                sys.stdout.write(f"{address[0]} shows the run\n")
                return
        time.sleep(0.5)
    raise SystemExit(f"TensorBoard does not show the run:\n{log.read_text()}")


def main() -> int:
    """The exit code of the tutorial's script."""
    script = as_script(blocks((ROOT / "docs" / "tutorial.md").read_text()))
    with tempfile.TemporaryDirectory(prefix="tutorial") as directory:
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in names.split("\0"):
            if (ROOT / name).is_file():
                copy = Path(directory, name)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes((ROOT / name).read_bytes())
        began = time.monotonic()
        shell = subprocess.Popen(["bash", "-c", script], cwd=directory, start_new_session=True)
        try:
            code = shell.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)  # what a failure or Ctrl-C leaves
    took = time.monotonic() - began
    sys.stdout.write(f"\nThe tutorial {'failed' if code else 'works'}; it took {took:.0f} s.\n")
    return code


if __name__ == "__main__":
    if len(sys.argv) > 1:
        wait_for_tensorboard(Path(sys.argv[1]))
    else:
        sys.exit(main())
