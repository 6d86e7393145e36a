"""Films of episodes, as GIFs: they play in browsers, in documents and in TensorBoard."""

from __future__ import annotations

import io
import os
import sys
import zlib
from itertools import pairwise

import numpy as np
from PIL import Image

from actorlearner.contracts import Array

RENDER_MODE = "rgb_array"
"""What Gymnasium calls an environment that gives pictures."""

_SIDE = 320
"""Pixels that the longer side has at most; a small picture is enlarged towards it."""
_SHORTEST = 2
"""Hundredths of a second that a picture stays; browsers play shorter ones slowly."""
_LAST = 100
"""Hundredths of a second that the last picture stays, before the film begins anew."""
_COLOURS_FROM = 32
"""Pictures that the colours are chosen from."""


class Film:
    """What one episode looked like.

    Pictures are kept compressed and small, so that a film of a thousand takes a few megabytes.
    Example::

        film = Film(fps=30, limit=1_000)
        film.add(env.render())
        Path("episode.gif").write_bytes(film.gif())

    Args:
        fps: pictures per second.
        limit: pictures that it holds; more are not taken.
    """

    def __init__(self, fps: float, limit: int) -> None:
        self._fps = fps
        self._limit = limit
        self._size = (0, 0)
        self._pictures: list[bytes] = []

    @property
    def is_full(self) -> bool:
        """Whether `add` takes no more."""
        return len(self._pictures) >= self._limit

    def add(self, frame: Array) -> None:
        """Take the next picture, uint8 ``[H, W, 3]``, unless the film is full."""
        if self.is_full:
            return
        picture = _fitted(Image.fromarray(frame))
        if not self._pictures:
            self._size = picture.size
        elif picture.size != self._size:
            picture = picture.resize(self._size)
        self._pictures.append(zlib.compress(picture.tobytes(), 1))

    def gif(self) -> bytes:
        """The film as a GIF that begins anew after its end.

        A GIF has 256 colours, here the same in every picture, and counts hundredths of a second:
        a film of more than 50 pictures a second leaves some out, and keeps its speed.

        Raises:
            ValueError: there is no picture.
        """
        if not self._pictures:
            raise ValueError("a film needs a picture")
        shown, hundredths = _timing(len(self._pictures), self._fps)
        colours = self._colours()
        pictures = (
            self._picture(index).quantize(palette=colours, dither=Image.Dither.NONE)
            for index in shown
        )
        file = io.BytesIO()
        next(pictures).save(
            file,
            "GIF",
            save_all=True,
            append_images=pictures,
            duration=[10 * each for each in hundredths],
            loop=0,
            optimize=False,  # it would look for unused colours in every picture
        )
        return file.getvalue()

    def _picture(self, index: int) -> Image.Image:
        return Image.frombytes("RGB", self._size, zlib.decompress(self._pictures[index]))

    def _colours(self) -> Image.Image:
        """A picture with the palette of the film."""
        chosen = self._pictures[:: -(-len(self._pictures) // _COLOURS_FROM)]
        width, height = self._size
        stacked = b"".join(map(zlib.decompress, chosen))
        return Image.frombytes("RGB", (width, height * len(chosen)), stacked).quantize(256)


def do_without_display() -> None:
    """Keep pygame, which draws in memory, from saying that there is no display."""
    if sys.platform == "linux" and not os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def _fitted(picture: Image.Image) -> Image.Image:
    """``picture`` made smaller or larger by a whole factor, so that pixels stay even."""
    side = max(picture.size)
    if side > _SIDE:
        return picture.reduce(-(-side // _SIDE))
    factor = _SIDE // side
    return picture.resize(
        (factor * picture.width, factor * picture.height), Image.Resampling.NEAREST
    )


def _timing(count: int, fps: float) -> tuple[list[int], list[int]]:
    """Which of ``count`` pictures are shown, and for how many hundredths of a second each."""
    starts = np.rint(100 / fps * np.arange(count)).astype(int).tolist()
    shown = [0]
    for index in range(1, count):
        if starts[index] - starts[shown[-1]] >= _SHORTEST:
            shown.append(index)
    stays = [after - before for before, after in pairwise(starts[index] for index in shown)]
    return shown, [*stays, _LAST]
