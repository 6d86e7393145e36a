"""What ``control.json`` asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from actorlearner.control import FILE_NAME, Control


def test_each_change_is_told_once(tmp_path: Path) -> None:
    control = Control(tmp_path)
    assert control.poll() == {}
    path = tmp_path / FILE_NAME
    path.write_text('{"agent.learning_rate": 1e-4}')
    assert control.poll() == {"agent.learning_rate": 1e-4}
    assert control.poll() == {}
    path.write_text('{"agent.learning_rate": 5e-5, "trainer.gradient_clip_val": null}')
    assert control.poll() == {"agent.learning_rate": 5e-5, "trainer.gradient_clip_val": None}
    path.unlink()
    assert control.poll() == {}


@pytest.mark.parametrize("text", ["{", "[1]", "1e-4", '{"a": 1'])
def test_what_is_no_object_is_an_error_once(text: str, tmp_path: Path) -> None:
    control = Control(tmp_path)
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ValueError):  # noqa: PT011 - JSON's own, or ours
        control.poll()
    assert control.poll() == {}


def test_without_a_run_directory() -> None:
    assert Control(None).poll() == {}
