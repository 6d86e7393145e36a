"""Pictures of open-loop predictions, pixel by pixel."""

from __future__ import annotations

import numpy as np
import pytest

from actorlearner.agents.open_loop import film

GREEN, RED, GAP = (0, 204, 51), (230, 26, 26), (128, 128, 128)


def test_pixels_have_a_picture_for_each_row() -> None:
    """Two sequences of 1 x 2 pixels: truth, model, error, each under its line."""
    truth = np.zeros((3, 2, 3, 1, 2), np.float32)
    model = truth.copy()
    truth[:, 0, 0] = 1  # red, of which the model knows nothing
    model[2, 1, :, 0, 1] = 0.2
    found = film(truth, model, 1)
    assert found.shape == (3, 3 * (1 + 1), 2 * (2 + 1), 3)
    black, grey = (0, 0, 0), (128, 128, 128)
    for t, picture in enumerate(found.tolist()):
        rows = [[tuple(pixel) for pixel in row] for row in picture]
        line = GREEN if t < 1 else RED
        assert rows[0] == rows[2] == rows[4] == [line, line, GAP] * 2
        late = (51, 51, 51) if t == 2 else black
        assert rows[1] == [(255, 0, 0)] * 2 + [GAP] + [black] * 2 + [GAP]
        assert rows[3] == [black] * 2 + [GAP, black, late, GAP]
        too_much = (153, 153, 153) if t == 2 else grey
        assert rows[5] == [(0, 128, 128)] * 2 + [GAP, grey, too_much, GAP]


def test_numbers_have_one_picture() -> None:
    """Rows to the right, numbers down, each within its own range in the truth."""
    truth = np.zeros((4, 2, 2), np.float32)
    truth[:, 0, 0] = [-5, -2.5, 0, 5]
    truth[:, :, 1] = 7  # always the same
    model = truth.copy()
    model[3, 0, 0] = 0
    model[3, 1, 0] = 99
    model[0, 0, 1] = 7.0025  # a small error stays small
    (picture,) = film(truth, model, 3)
    assert picture.shape == (3 * (1 + 2), 2 * (4 + 1), 3)
    line = [GREEN] * 3 + [RED, GAP]
    for band in (0, 3, 6):
        assert [tuple(pixel) for pixel in picture[band].tolist()] == line * 2
    shades = picture[:, :, 0].tolist()
    assert shades[1] == [0, 64, 128, 255, 128, *[128] * 4, 128]
    assert shades[4] == [0, 64, 128, 128, 128, *[128] * 3, 255, 128]
    assert shades[7] == [128, 128, 128, 64, 128, *[128] * 3, 191, 128]
    assert shades[2] == [128] * 10
    assert shades[5] == [191, *[128] * 9]
    assert shades[8] == [159, *[128] * 9]


@pytest.mark.parametrize(("channels", "colours"), [(1, 1), (2, 2), (10, 10)])
def test_planes_have_colours(channels: int, colours: int) -> None:
    truth = np.eye(channels, dtype=np.float32).reshape(1, 1, channels, 1, channels)
    (picture,) = film(truth, truth, 0)
    assert len({tuple(pixel) for pixel in picture[1, :-1].tolist()}) == colours
    assert channels > 1 or picture[1, 0].tolist() == [255, 255, 255]


def test_a_few_numbers_are_shown_large() -> None:
    truth = np.random.default_rng(0).normal(size=(60, 3, 4)).astype(np.float32)
    (picture,) = film(truth, truth, 5)
    assert picture.shape == (3 * (1 + 4 * 15), 3 * 61, 3)
    (picture,) = film(truth.repeat(50, 2), truth.repeat(50, 2), 5)
    assert picture.shape == (3 * (1 + 200), 3 * 61, 3)
