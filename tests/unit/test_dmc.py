"""dm_control's suite as environments: what they show, what ends them, and what seeds decide."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from actorlearner import dmc
from actorlearner.adapter import EnvAdapter
from actorlearner.contracts import BadInput, EnvSpec, SettingError
from actorlearner.dmc import PIXELS, ControlEnv, DMCSettings
from actorlearner.launch.local import LocalLauncher
from actorlearner.worker import probe

pytest.importorskip("dm_control")

Episode = list[tuple[Any, ...]]


def make(**settings: Any) -> ControlEnv:
    env = DMCSettings.make(settings).factory()()
    assert isinstance(env, ControlEnv)
    return env


@pytest.fixture
def painter() -> None:
    """Skips where there is no OpenGL."""
    try:
        make(observation=PIXELS).close()
    except BadInput as error:
        pytest.skip(str(error))


def physics(env: ControlEnv) -> Any:
    return env._env.physics


def episode(env: ControlEnv, seed: int, steps: int = 12) -> Episode:
    """The first observation of an episode, then the first steps of it, by the same actions."""
    generator = np.random.default_rng(0)
    shape = env.action_space.shape
    assert shape is not None
    begin = env.reset(seed=seed)
    return [begin, *(env.step(generator.uniform(-1, 1, shape)) for _ in range(steps))]


def same(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return np.array_equal(one, two)


# ------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("repeat", [2, 3])
def test_steps_equal_the_suites(repeat: int) -> None:
    """A whole episode: rewards of the repetition add up, and its end cuts it short."""
    env, twin = make(action_repeat=repeat), dmc._suite().load("cartpole", "swingup")
    observation, _ = env.reset(seed=3)
    twin.reset()
    with twin.physics.reset_context():
        twin.physics.set_state(physics(env).get_state())
    generator = np.random.default_rng(0)
    for count in range(-(-1_000 // repeat)):
        action = generator.uniform(-1, 1, 1).astype(np.float32)
        observation, reward, terminated, truncated, _ = env.step(action)
        steps = [twin.step(action) for _ in range(min(repeat, 1_000 - count * repeat))]
        assert reward == pytest.approx(sum(step.reward for step in steps), abs=1e-12)
        for name, vector in steps[-1].observation.items():
            assert np.array_equal(observation[name], vector.astype(np.float32))
        assert not terminated
        assert truncated == steps[-1].last()
    assert truncated


def test_a_time_limit_truncates_and_a_goal_terminates() -> None:
    """Of the suite only lqr has a goal: to come to rest; the repetition stops there."""
    env = make(id="lqr-lqr_2_1", action_repeat=5)
    env.reset(seed=0)
    assert env.step(np.zeros(1, np.float32))[2:4] == (False, False)
    with physics(env).reset_context():
        physics(env).set_state(np.zeros(4))
    _, reward, terminated, truncated, _ = env.step(np.zeros(1, np.float32))
    assert (terminated, truncated) == (True, False)
    assert reward == pytest.approx(1)  # of one control step
    assert type(terminated) is type(truncated) is bool


def test_actions_are_scaled() -> None:
    """To the bounds of the task; without such (lqr) they are taken as they are."""
    env = make(id="quadruped-walk")
    spec = env._env.action_spec()
    assert spec.maximum.max() != 1
    env.reset(seed=0)
    for action, control in (
        (1, spec.maximum),
        (-1, spec.minimum),
        (0, (spec.minimum + spec.maximum) / 2),
    ):
        env.step(np.full(spec.shape, action, np.float32))
        assert np.allclose(physics(env).control(), control)
    env = make(id="lqr-lqr_2_1")
    env.reset(seed=0)
    env.step(np.full(1, 0.5, np.float32))
    assert physics(env).control().tolist() == [0.5]


# ------------------------------------------------------------------------------------- seeds


@pytest.mark.parametrize(
    "name",
    ["cartpole-swingup", "finger-turn_hard", "lqr-lqr_6_2", "point_mass-hard", "swimmer-swimmer6"],
)
def test_seeded_episodes_repeat_whatever_came_before(name: str) -> None:
    """Also where a task changes its own model: targets, gears; or draws it when it is made."""
    used, fresh = make(id=name), make(id=name)
    other = episode(used, seed=5)
    wanted = episode(fresh, seed=3)
    assert same(episode(used, seed=3), wanted)
    assert not same(other, wanted)
    following, again = used.reset()[0], fresh.reset()[0]
    assert same(following, again)
    assert not same(following, wanted[0][0])


@pytest.mark.slow
def test_seeded_episodes_of_every_task_repeat() -> None:
    names = [f"{d}-{t}" for d, tasks in dmc._suite().TASKS_BY_DOMAIN.items() for t in tasks]
    assert len(names) >= 51
    for name in names:
        used, fresh = make(id=name), make(id=name)
        episode(used, seed=5)
        assert same(episode(used, seed=3), episode(fresh, seed=3)), name
        used.close()
        fresh.close()


def test_unseeded_episodes_differ() -> None:
    assert not same(make().reset(), make().reset())


# ------------------------------------------------------------------------------ observations


@pytest.mark.parametrize(
    ("name", "vectors", "actions"),
    [
        ("cartpole-swingup", {"position": 3, "velocity": 2}, 1),
        ("walker-walk", {"orientations": 14, "height": 1, "velocity": 9}, 6),  # 24 and 6
        (
            "manipulator-bring_ball",
            {"arm_pos": 16, "arm_vel": 8, "hand_pos": 4, "object_pos": 4, "object_vel": 3,
             "target_pos": 4, "touch": 5},
            5,
        ),
    ],
)  # fmt: skip
def test_vectors(name: str, vectors: dict[str, int], actions: int) -> None:
    """Under their own names, flat, scalars too."""
    spec = probe(DMCSettings(id=name).factory())
    assert {key: array.shape for key, array in spec.observation.items()} == {
        key: (size,) for key, size in vectors.items()
    }
    assert {array.dtype for array in spec.observation.values()} == {"float32"}
    assert (spec.action.shape, spec.action.low) == ((actions,), (-1.0,) * actions)
    env = make(id=name)
    assert env.observation_space.contains(env.reset(seed=0)[0])


@pytest.mark.usefixtures("painter")
def test_pictures() -> None:
    """Alone, or beside the vectors; by the camera that is asked for."""
    env = make(observation=PIXELS, screen_size=32)
    assert isinstance(env.observation_space, spaces.Box)
    picture, _ = env.reset(seed=0)
    assert env.observation_space.contains(picture)
    assert np.array_equal(picture, physics(env).render(32, 32, camera_id=0))
    moved, *_ = env.step(np.ones(1, np.float32))
    assert not np.array_equal(moved, picture)
    assert np.array_equal(moved, physics(env).render(32, 32, camera_id=0))
    both = make(observation="both", screen_size=32, camera=1)
    seen, _ = both.reset(seed=0)
    assert both.observation_space.contains(seen)
    assert seen.keys() == {"position", "velocity", PIXELS}
    assert np.array_equal(seen[PIXELS], physics(both).render(32, 32, camera_id=1))
    assert not np.array_equal(seen[PIXELS], picture)
    env.close()
    both.close()


@pytest.mark.usefixtures("painter")
def test_the_camera_of_a_quadruped() -> None:
    """Dreamer's: its first one does not see much of it."""
    env = make(id="quadruped-walk", observation=PIXELS, screen_size=16)
    picture, _ = env.reset(seed=0)
    assert np.array_equal(picture, physics(env).render(16, 16, camera_id=2))
    assert not np.array_equal(picture, physics(env).render(16, 16, camera_id=0))
    env.close()


@pytest.mark.usefixtures("painter")
def test_films() -> None:
    """As fast as the world; nothing is painted that nobody asked for."""
    env = DMCSettings().factory()("rgb_array")
    assert isinstance(env, ControlEnv)
    adapter = EnvAdapter(env, "cartpole")
    adapter.reset(seed=0)
    assert adapter.fps == pytest.approx(50)  # control steps of 0.01 s, two each
    assert adapter.render().shape == (240, 240, 3)
    adapter.close()
    adapter.close()
    assert not physics(env)._contexts  # what OpenGL keeps for it
    unseen = make()
    unseen.reset(seed=0)
    assert unseen.render() is None
    assert not physics(unseen)._contexts


@pytest.mark.usefixtures("painter")
def test_worker_processes_paint_too() -> None:
    """The recipe travels, and OpenGL starts in the child."""
    launcher = LocalLauncher()
    spec = launcher.probe(DMCSettings(observation=PIXELS).factory())
    assert isinstance(spec, EnvSpec)
    assert spec.observation["observation"].shape == (64, 64, 3)
    launcher.close()


# ------------------------------------------------------------------------------------ refusals


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dm_control.suite", None)
    words = r'^env=dmc: dm_control\.suite can.t be imported .*"actorlearner\[dmc\]"$'
    with pytest.raises(BadInput, match=words):
        DMCSettings().factory()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cartpole-swing", "they read cartpole-balance, .*cartpole-swingup,"),
        ("cartpole_swingup", "domain-task, with a domain of acrobot, .*walker$"),
        ("CartPole-v1", "domain-task"),
    ],
)
def test_refused_ids(name: str, words: str) -> None:
    with pytest.raises(BadInput, match=rf"^env\.id={name}: is no task of .*{words}"):
        DMCSettings(id=name).factory()


def test_refused_cameras() -> None:
    """Where one is needed."""
    make(camera=2).close()
    with pytest.raises(SettingError, match=r"^env\.camera=2: must be at most 1 in cartpole-sw"):
        make(camera=2, observation=PIXELS)


def test_no_pictures_can_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors can; for the rest it is said how."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("no device")

    monkeypatch.setattr(ControlEnv, "_picture", fails)
    make().close()
    for render_mode, observation in ((None, PIXELS), ("rgb_array", "state")):
        factory = DMCSettings.make({"observation": observation}).factory()
        with pytest.raises(BadInput, match=r"no pictures .*\(no device\): .*MUJOCO_GL=egl"):
            factory(render_mode)


def test_there_is_no_opengl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import is tried again without, unless somebody has said how to paint."""
    calls = []

    def imports(*_: Any) -> Any:
        calls.append(os.environ.get("MUJOCO_GL"))
        if calls[-1] != "disabled":
            raise AttributeError("'NoneType' object has no attribute 'eglQueryString'")
        return "suite"

    monkeypatch.setattr(dmc, "optional_library", imports)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(BadInput, match=r"^env=dmc: dm_control can't start .*eglQueryString.*egl"):
        dmc._suite()
    monkeypatch.delenv("MUJOCO_GL")
    assert dmc._suite() == "suite"
    assert calls == ["egl", None, "disabled"]


@pytest.mark.filterwarnings("default")
def test_without_a_display_another_way_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """GLFW would only warn, and fail when it has to paint."""

    def imports(*_: Any) -> Any:
        try:
            warnings.warn_explicit("no display", UserWarning, "x.py", 1, module="glfw")
        except UserWarning:
            return "EGL"
        return "GLFW"

    monkeypatch.setattr(dmc, "optional_library", imports)
    assert dmc._suite() == "EGL"
