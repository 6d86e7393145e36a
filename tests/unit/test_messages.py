"""Where messages go, with and without a logging configuration of the user's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest

from actorlearner.messages import Messages

PACKAGE = logging.getLogger("actorlearner")
INSIDE = logging.getLogger("actorlearner.somewhere")


class Kept(logging.Handler):
    """Keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def unconfigured() -> Iterator[None]:
    """Logging as in a script: pytest and the command line have left their marks in this process."""
    before = logging.root.handlers, logging.root.level, PACKAGE.level
    logging.root.handlers = []
    logging.root.setLevel(logging.WARNING)
    PACKAGE.setLevel(logging.NOTSET)
    try:
        yield
    finally:
        logging.root.handlers = before[0]
        logging.root.setLevel(before[1])
        PACKAGE.setLevel(before[2])


def say() -> None:
    INSIDE.debug("debug")
    INSIDE.info("info")
    INSIDE.warning("warning")


@unconfigured()
def test_a_script_sees_messages_and_its_file_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Messages(console=True) as messages:
        INSIDE.info("early")
        messages.to_file(tmp_path / "run.log")
        say()
    say()
    assert capsys.readouterr().err.splitlines() == ["early", "info", "warning", "warning"]
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO early", "INFO info", "WARNING warning",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("level", "wanted"),
    [("WARNING", ["warning"]), ("INFO", ["info", "warning"]), ("ERROR", [])],
)
@unconfigured()
def test_what_the_user_configured_stands(
    level: str, wanted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Kept()
    logging.root.addHandler(kept)
    logging.root.setLevel(level)
    with Messages(console=True) as messages:
        messages.to_file(tmp_path / "run.log")
        say()
    assert kept.texts == wanted
    assert capsys.readouterr().err == ""
    assert len((tmp_path / "run.log").read_text().splitlines()) == 2, "the file has them anyway"
    assert logging.root.level == logging.getLevelName(level)


@unconfigured()
def test_a_level_of_the_package_s_own_stands(tmp_path: Path) -> None:
    kept = Kept()
    logging.root.addHandler(kept)
    PACKAGE.setLevel(logging.ERROR)
    with Messages(console=True) as messages:
        messages.to_file(tmp_path / "run.log")
        say()
        INSIDE.error("error")
    assert kept.texts == ["error"]
    assert len((tmp_path / "run.log").read_text().splitlines()) == 1


@unconfigured()
def test_without_a_console_only_warnings_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with Messages(console=False):
        say()
    assert capsys.readouterr().err.splitlines() == ["warning"], "as Python does by default"


@unconfigured()
def test_everything_is_put_back(tmp_path: Path) -> None:
    handlers = list(PACKAGE.handlers)
    for _ in range(2):
        with suppress(KeyboardInterrupt), Messages(console=True) as messages:
            messages.to_file(tmp_path / "run.log")
            raise KeyboardInterrupt
    assert PACKAGE.handlers == handlers
    assert (PACKAGE.level, PACKAGE.propagate) == (logging.NOTSET, True)


@unconfigured()
def test_without_a_file_nothing_is_kept() -> None:
    with Messages(console=False) as messages:
        say()
        messages.to_file(None)
        assert not any(isinstance(handler, MemoryHandler) for handler in PACKAGE.handlers)
