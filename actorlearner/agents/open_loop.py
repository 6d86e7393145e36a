"""Open-loop predictions as people see them: what was, what the model said, and the error.

Legend of the suffixes: T pictures, L rows of a sequence, K sequences, C channels, H and W pixels,
D numbers.
"""

from __future__ import annotations

import colorsys
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.floating[Any]]

CONTEXT = 5
"""Rows that the model sees before it predicts."""

_SEEN, _PREDICTED = (0.0, 0.8, 0.2), (0.9, 0.1, 0.1)
_GAP = 0.5
_SMALLEST_RANGE = 1e-2
"""Of a number; what hardly moves is not blown up."""


def film(truth: Floats, model: Floats, context: int) -> NDArray[np.uint8]:
    """Truth above model above error, the sequences side by side.

    The line over each sequence is green over rows that the model has seen, and red over those that
    it predicts. The error is grey where there is none, lighter where the model says too much.

    Args:
        truth: pixels ``[L, K, C, H, W]`` within ``[0, 1]``, or numbers ``[L, K, D]``.
        model: likewise.
        context: rows that the model has seen.

    Returns:
        uint8 ``[T, height, width, 3]``. Of pixels a picture for each row. Of numbers one picture,
        in which the rows go from left to right and the numbers from top to bottom, each shaded
        within the range that it has in ``truth``.
    """
    seen_L = np.arange(len(truth)) < context
    if truth.ndim == 3:
        parts, seen_TW = _shaded(truth, model), seen_L[None]
    else:
        parts, seen_TW = (truth, model), np.repeat(seen_L[:, None], truth.shape[-1], 1)
    true, said = (_coloured(part) for part in parts)
    error: Floats = (said - true + 1) / 2
    bands = [_side_by_side(band, seen_TW) for band in (true, said, error)]
    pictures: NDArray[np.uint8] = np.rint(255 * np.concatenate(bands, 1)).astype(np.uint8)
    return pictures


def _shaded(truth: Floats, model: Floats) -> tuple[Floats, Floats]:
    """Numbers ``[L, K, D]`` as one picture of each sequence, ``[1, K, 1, H, L]``."""
    low_D, high_D = truth.min((0, 1)), truth.max((0, 1))
    middle_D, range_D = (low_D + high_D) / 2, np.maximum(high_D - low_D, _SMALLEST_RANGE)
    rows, sequences, size = truth.shape
    height = max(1, rows * sequences // (3 * size))  # of a number, so that all is about square

    def shade(numbers: Floats) -> Floats:
        shades = ((numbers - middle_D) / range_D + 0.5).clip(0, 1)
        pictures: Floats = shades.transpose(1, 2, 0).repeat(height, 1)[None, :, None]
        return pictures

    return shade(truth), shade(model)


def _coloured(pixels: Floats) -> Floats:
    """``[T, K, H, W, 3]`` of ``[T, K, C, H, W]``: three channels are red, green and blue.

    Of another number each has a colour of its own; one alone is white.
    """
    channels = pixels.shape[2]
    colours = (colorsys.hsv_to_rgb(c / channels, float(channels > 1), 1) for c in range(channels))
    colours_C3 = np.array(list(colours), np.float32)
    coloured: Floats = (pixels[..., None] * colours_C3[:, None, None]).max(2)
    return coloured


def _side_by_side(pictures: Floats, seen_TW: NDArray[np.bool_]) -> Floats:
    """``[T, H + 1, K * (W + 1), 3]`` of ``[T, K, H, W, 3]``: with a line above and a gap beside."""
    line_TW3 = np.where(seen_TW[..., None], _SEEN, _PREDICTED)
    line = np.broadcast_to(line_TW3[:, None, None], (*pictures.shape[:2], 1, *pictures.shape[3:]))
    cells = np.concatenate([line, pictures], 2)
    cells = np.pad(cells, ((0, 0), (0, 0), (0, 0), (0, 1), (0, 0)), constant_values=_GAP)
    return np.concatenate(list(cells.swapaxes(0, 1)), 2)
