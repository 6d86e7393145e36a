"""Films: what a GIF holds, and the films that an evaluation makes."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from PIL import Image

from actorlearner.contracts import Array, BadInput, EvaluationRequest
from actorlearner.envs import GymEnvFactory
from actorlearner.suites import AtariSettings, MinAtarSettings
from actorlearner.video import Film
from actorlearner.worker import EnvWorker, probe
from tests.environments import Pictured, Places, snapshot, worker_specs


def frame(value: int, height: int = 8, width: int = 8) -> Array:
    """A red pixel at place ``value``, on a ground of stripes."""
    picture = np.zeros((height, width, 3), np.uint8)
    picture[:, 1::2] = 0, 80, 160
    picture[value // width % height, value % width] = 255, 0, 0
    return picture


def film_of(*frames: Array, fps: float = 10, limit: int = 10_000) -> Film:
    film = Film(fps, limit)
    for each in frames:
        film.add(each)
    return film


def watch(gif: bytes) -> tuple[list[Array], list[int]]:
    """The pictures of ``gif``, uint8 ``[H, W, 3]``, and the milliseconds that each stays."""
    pictures, stays = [], []
    with Image.open(io.BytesIO(gif)) as image:
        assert (image.format, image.info["loop"]) == ("GIF", 0)
        for index in range(image.n_frames):  # type: ignore[attr-defined]
            image.seek(index)
            pictures.append(np.array(image.convert("RGB")))
            stays.append(int(image.info["duration"]))
    return pictures, stays


# -------------------------------------------------------------------------------------- a film


def test_a_film_shows_every_picture_as_it_was() -> None:
    frames = [frame(value) for value in range(10)]
    pictures, stays = watch(film_of(*frames).gif())
    enlarged = [each.repeat(40, 0).repeat(40, 1) for each in frames]
    assert all(np.array_equal(a, b) for a, b in zip(pictures, enlarged, strict=True))
    assert stays == [100] * 9 + [1_000], "and the last one longer"


def test_an_array_that_is_used_again_does_no_harm() -> None:
    film, picture = Film(10, 10), frame(0)
    film.add(picture)
    picture[:] = 99
    film.add(picture)
    assert watch(film.gif())[0][0][0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("fps", [3, 7.5, 15, 30, 50, 60, 125])
def test_a_film_keeps_its_speed(fps: float) -> None:
    """Each picture shown comes at its time, to 5 ms; where that is too fast, some are left out."""
    count = 40
    pictures, stays = watch(film_of(*map(frame, range(count)), fps=fps).gif())
    shown = [int(picture[::40, ::40, 0].argmax()) for picture in pictures]
    begins = np.cumsum([0, *stays[:-1]])
    assert begins == pytest.approx(np.array(shown) * 1_000 / fps, abs=5)
    assert min(stays) >= 20
    assert (len(shown) == count) == (fps <= 50)
    assert shown[0] == 0


def test_a_film_has_a_bound() -> None:
    film = film_of(*map(frame, range(5)), limit=3)
    assert film.is_full
    assert len(watch(film.gif())[0]) == 3


def test_a_still_is_a_film() -> None:
    pictures, stays = watch(film_of(*[frame(0)] * 3).gif())
    assert (len(pictures), stays) == (1, [1_200])


@pytest.mark.parametrize(
    ("height", "width", "shape"),
    [(400, 600, (200, 300)), (210, 160, (210, 160)), (1, 1000, (1, 250)), (84, 84, (252, 252))],
)
def test_pictures_are_of_a_handy_size(height: int, width: int, shape: tuple[int, int]) -> None:
    assert watch(film_of(frame(1, height, width)).gif())[0][0].shape == (*shape, 3)


def test_a_picture_of_another_size_is_fitted() -> None:
    pictures, _ = watch(film_of(frame(0, 300, 300), frame(1, 200, 100)).gif())
    assert {picture.shape for picture in pictures} == {(300, 300, 3)}


def test_a_rare_colour_stays() -> None:
    """A ball of one pixel, before 250 colours of a sky."""
    picture = np.zeros((250, 320, 3), np.uint8)
    picture[..., 2] = np.arange(250)[:, None]
    picture[0, 0] = 40, 0, 0
    (seen,), _ = watch(film_of(picture).gif())
    assert seen[0, 0].tolist() == [40, 0, 0]


def test_many_colours_become_near_ones() -> None:
    ramp = np.linspace(0, 255, 300).astype(np.uint8)
    picture = np.stack(np.broadcast_arrays(ramp[:, None], ramp[None, :], np.uint8(9)), -1)
    (seen,), _ = watch(film_of(picture).gif())
    assert np.abs(seen.astype(int) - picture).max() < 40


def test_there_is_no_film_without_a_picture() -> None:
    with pytest.raises(ValueError, match="needs a picture"):
        Film(10, 5).gif()


# ------------------------------------------------------------------------------ of evaluations


REQUEST = EvaluationRequest(episodes=11, step_limit=5, seed=5, films=3, film_frames=4)


def test_films_are_of_the_first_episodes_and_change_nothing() -> None:
    Pictured.made.clear()
    (spec,) = worker_specs(GymEnvFactory.of(Pictured))
    worker = EnvWorker(spec)
    unfilmed = worker.evaluate(snapshot(0), REQUEST._replace(films=0))
    assert unfilmed.films == ()
    results = [worker.evaluate(snapshot(0), REQUEST) for _ in range(2)]
    worker.close()
    assert Pictured.made == [None] * 8 + ["rgb_array"] * 3 + [None] * 5, "made once for all films"
    for result in results:
        assert result._replace(films=()) == unfilmed
        grays = [[int(p[0, 0, 0]) for p in watch(film)[0]] for film in result.films]
        expected = [[20 * step for step in range(min(4, n + 1))] for n in unfilmed.lengths[:3]]
        assert grays == expected, "from the reset to the end, or as far as the bound"
        assert min(map(len, grays)) < 4 == max(map(len, grays))
        assert {stay for film in result.films for stay in watch(film)[1][:-1]} == {200}


def test_no_more_films_than_episodes() -> None:
    (spec,) = worker_specs(GymEnvFactory.of(Pictured))
    assert len(EnvWorker(spec).evaluate(snapshot(0), REQUEST._replace(episodes=2)).films) == 2


class Always(Pictured):
    """Shows itself without being asked, as fractions, and takes no argument."""

    def __init__(self) -> None:
        super().__init__("rgb_array")

    def render(self) -> Any:
        return super().render() / 255


def test_an_environment_that_takes_no_render_mode_may_show_itself() -> None:
    (spec,) = worker_specs(GymEnvFactory.of(Always))
    (film, *_) = EnvWorker(spec).evaluate(snapshot(0), REQUEST._replace(film_frames=99)).films
    assert [int(picture[0, 0, 0]) for picture in watch(film)[0]][:2] == [0, 20]


def gives(what: Any) -> type[Places]:
    class Gives(Places):
        def render(self) -> Any:
            if isinstance(what, Exception):
                raise what
            return what

    return Gives


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (Places, "can't be filmed: it has no render"),
        (gives(gymnasium.error.DependencyNotInstalled("pygame")), "can't be filmed: pygame"),
        (gives(None), "it gave None"),
        (gives(np.zeros((4, 4), np.uint8)), r"it gave an array uint8 \(4, 4\)"),
        (gives(np.zeros((4, 4, 3), int)), r"it gave an array int64 \(4, 4, 3\)"),
    ],
)
def test_what_shows_no_pictures_is_told_before_training(env: Callable[..., Any], told: str) -> None:
    factory = GymEnvFactory.of(env)
    probe(factory)
    with pytest.raises(BadInput, match=f"evaluation.video=true: .*{told}"):
        probe(factory, "rgb_array")


class Idle:
    """A policy that does nothing."""

    extras_spec: ClassVar[dict[str, Any]] = {}

    def __init__(self, *_: Any) -> None:
        pass

    def load(self, snapshot: Any) -> None:
        pass

    def act(self, observation: Any, generator: np.random.Generator) -> Any:
        return np.zeros(len(next(iter(observation.values()))), int), {}


@pytest.mark.parametrize(
    ("settings", "package", "shape", "ms"),
    [
        (AtariSettings(frame_skip=3), "ale_py", (210, 160, 3), 50),
        (MinAtarSettings(), "minatar", (320, 320, 3), 35),
    ],
)
def test_games_are_filmed_as_people_see_them(
    settings: Any, package: str, shape: tuple[int, ...], ms: float
) -> None:
    """One picture per env step: ``frame_skip`` of 60 frames a second, of an Atari."""
    pytest.importorskip(package)
    factory = settings.factory()
    (spec,) = worker_specs(factory, env_spec=probe(factory, "rgb_array"), policy_factory=Idle)
    request = EvaluationRequest(episodes=1, step_limit=8, seed=0, films=1, film_frames=99)
    worker = EnvWorker(spec)
    (film,) = worker.evaluate(snapshot(0), request).films
    worker.close()
    pictures, stays = watch(film)
    assert pictures[0].shape == shape
    assert len(np.unique(pictures[0].reshape(-1, 3), axis=0)) > 2
    assert sum(stays[:-1]) + stays[-1] == pytest.approx(8 * ms + 1_000, abs=40)
