"""Atari and MinAtar: what their settings do, and that both ways to step Atari games are one."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import cycle
from typing import Any, ClassVar

import ale_py
import cv2
import numpy as np
import pytest

from actorlearner.columns import SeparateEnvs, VectorEnvs, make_envs
from actorlearner.contracts import (
    BadInput,
    EnvSpec,
    EvaluationRequest,
    SettingError,
    Snapshot,
    Unroll,
    WorkerSpec,
)
from actorlearner.streams import stream_seed
from actorlearner.suites import AtariSettings, MinAtarSettings
from actorlearner.worker import EnvWorker, probe

NOTHING, FIRE, RIGHT, LEFT = range(4)
"""Actions of Breakout."""


class Acts:
    """A policy that takes ``actions`` in turn, or any at random."""

    extras_spec: ClassVar[dict[str, Any]] = {}

    def __init__(self, actions: Sequence[int]) -> None:
        self._actions = cycle(actions) if actions else None

    def __call__(self, env_spec: EnvSpec, *rest: Any) -> Acts:
        self._num_actions = env_spec.action.categories[0]
        return self

    def load(self, snapshot: Snapshot) -> None:
        pass

    def act(self, observation: Any, generator: np.random.Generator) -> Any:
        count = len(observation["observation"])
        if self._actions is None:
            return generator.integers(self._num_actions, size=count), {}
        return np.full(count, next(self._actions)), {}


SPECS: dict[Any, EnvSpec] = {}
"""Each looked for once, as it takes a while to build a game."""


def atari(
    streams: int = 1, actions: Sequence[int] = (), seed: int = 3, **changes: Any
) -> EnvWorker:
    """A worker of Atari games that begin without no-ops, not open."""
    factory = AtariSettings.make({"noop_max": 0, **changes}).factory()
    names = ("id", "screen_size", "grayscale", "full_action_space")
    key = tuple(getattr(factory.settings, name) for name in names)
    if key not in SPECS:
        SPECS[key] = probe(factory)
    return EnvWorker(
        WorkerSpec(
            index=0,
            streams=tuple(range(streams)),
            num_streams=streams,
            seed=seed,
            unroll_length=25,
            env_factory=factory,
            policy_factory=Acts(actions),
            env_spec=SPECS[key],
        )
    )


def rows(worker: EnvWorker, count: int) -> list[Unroll]:
    """Unrolls of ``count`` rows, all that the worker makes."""
    worker.open()
    unrolls = []
    for _ in range(count // worker.spec.unroll_length):
        arrays = {name: spec.zeros() for name, spec in worker.spec.unroll_layout.items()}
        unrolls.append(Unroll.from_arrays(0, worker.spec.streams, arrays))
        worker.collect(Snapshot(0, {}), unrolls[-1])
    worker.close()
    return unrolls


def together(unrolls: list[Unroll], name: str) -> Any:
    """A field of all rows."""
    if name == "observation":
        return np.concatenate([unroll.observation[name][:-1] for unroll in unrolls])
    return np.concatenate([getattr(unroll, name) for unroll in unrolls])


# ------------------------------------------------------------------------------- both ways

PONG = {"id": "ALE/Pong-v5"}
FREEWAY = {"id": "ALE/Freeway-v5"}
SMALL = {"screen_size": 30, "grayscale": False}


@pytest.mark.parametrize(
    ("num_rows", "ends", "changes"),
    [
        (550, {"game", "life"}, {}),
        (125, {"life"}, {"fire_on_reset": True, "full_action_space": True}),
        (250, {"game"}, {"terminal_on_life_loss": False, "fire_on_reset": True}),
        (125, {"limit"}, {**PONG, "max_frames": 400}),
        (100, set(), {**PONG, "fire_on_reset": True}),
        (125, {"life", "limit"}, {**SMALL, "frame_skip": 3, "max_frames": 302}),
        (125, {"life", "limit"}, {"frame_skip": 1, "screen_size": 50, "max_frames": 110}),
        (100, {"limit"}, {**FREEWAY, "fire_on_reset": True, "max_frames": 200}),
    ],
    ids=["lives", "fire", "no lives", "Pong", "Pong, fire", "small RGB", "every frame", "no FIRE"],
)
def test_both_ways_are_one(num_rows, ends, changes):
    """Every number, over whole games: pixels, rewards, flags, scores."""
    streams = 2 if num_rows > 500 else 1
    vector = rows(atari(streams, **changes), num_rows)
    separate = rows(atari(streams, vector=False, **changes), num_rows)
    for one, two in zip(vector, separate, strict=True):
        assert np.array_equal(one.observation["observation"], two.observation["observation"])
        for name in ("action", "reward", "terminated", "truncated", "valid", "first"):
            assert np.array_equal(getattr(one, name), getattr(two, name)), name
        assert one.episodes == two.episodes
        assert one.lives == two.lives
    terminated, valid = together(vector, "terminated")[:-1], together(vector, "valid")[1:]
    seen = {
        "game": (terminated & ~valid).any(),
        "life": (terminated & valid).any(),
        "limit": together(vector, "truncated").any(),
    }
    assert {name for name, happened in seen.items() if happened} == ends


def test_lives_and_scores():
    """A life lost is terminated, and the game goes on; its score is that of all its lives, raw."""
    unrolls = rows(atari(2, fire_on_reset=True), 700)
    flags = {name: together(unrolls, name) for name in ("terminated", "valid", "first", "reward")}
    for stream in range(2):
        games = [e for unroll in unrolls for e in unroll.episodes if e.stream == stream]
        lives = [e for unroll in unrolls for e in unroll.lives if e.stream == stream]
        assert len(games) >= 3
        terminated, valid, first, reward = (flags[name][:, stream] for name in flags)
        # A random player loses its lives one by one: five to a game.
        assert len(lives) == np.count_nonzero(terminated) >= 5 * len(games)
        assert np.count_nonzero(~valid) == np.count_nonzero(first) - 1
        for number, game in enumerate(games):
            own = lives[5 * number : 5 * number + 5]
            assert game.ret == sum(life.ret for life in own)
            assert game.length == sum(life.length for life in own)
        ends = np.flatnonzero(terminated)
        assert np.count_nonzero(valid[ends[:-1] + 1]) >= 4 * len(games)
        whole = games[0].length
        assert games[0].ret == reward[:whole].sum() > 0
        assert not valid[whole]
        assert first[whole + 1]


@pytest.mark.parametrize("vector", [True, False])
def test_rewards_are_raw(vector):
    """What Ms. Pac-Man eats pays 10 and more."""
    unrolls = rows(atari(id="ALE/MsPacman-v5", screen_size=30, vector=vector), 100)
    assert together(unrolls, "reward").max() >= 10


@pytest.mark.parametrize("vector", [True, False])
def test_preprocessing_equals_the_twin(vector):
    """By the bare emulator: repeat the action, maximum of the last two gray screens, areas, scale.

    A game of four-frame steps up to its end, and the first screen of the next one.
    """
    unrolls = rows(atari(actions=[FIRE], vector=vector), 225)
    emulator = ale_py.ALEInterface()
    emulator.setFloat("repeat_action_probability", 0.0)
    emulator.loadROM(ale_py.roms.get_rom_path("breakout"))
    emulator.reset_game()
    actions = emulator.getMinimalActionSet()

    def scaled(screen: Any) -> Any:
        return cv2.resize(screen, (84, 84), interpolation=cv2.INTER_AREA)

    first = scaled(emulator.getScreenGrayscale())
    wanted, rewards, lives = [first], [], []
    while not emulator.game_over():
        screens, reward = [], 0
        for _ in range(4):
            reward += emulator.act(actions[FIRE])
            screens.append(emulator.getScreenGrayscale())
        wanted.append(scaled(np.maximum(screens[-1], screens[-2])))
        rewards.append(reward)
        lives.append(emulator.lives())
    length = len(rewards)
    assert length < 220
    observation = together(unrolls, "observation")[:, 0]
    # The screen with which a game ends is that of before.
    assert np.array_equal(observation[:length], wanted[:-1])
    assert np.array_equal(observation[length + 1], first)
    assert together(unrolls, "reward")[:length, 0].tolist() == rewards
    losses = np.flatnonzero(np.diff([5, *lives])).tolist()
    assert np.flatnonzero(together(unrolls, "terminated")[: length + 1, 0]).tolist() == losses
    assert together(unrolls, "valid")[:, 0].tolist().index(False) == length


# ----------------------------------------------------------------------------------- chance


@pytest.mark.parametrize("vector", [True, False])
def test_no_ops_differ_between_streams(vector):
    """So that not all of them play the same game (P7); the same seed plays the same ones again."""

    def begins() -> list[bytes]:
        worker = atari(2, [NOTHING], noop_max=30, screen_size=30, vector=vector, **FREEWAY)
        (unroll,) = rows(worker, 25)
        return [screen.tobytes() for screen in unroll.observation["observation"][0]]

    first = begins()
    assert first[0] != first[1]  # cars move in every frame
    assert begins() == first


@pytest.mark.parametrize("vector", [True, False])
def test_sticky_actions(vector):
    """What the same actions lead to depends on the seed, and on nothing else."""

    def seen(seed: int) -> Any:
        changes = {"frame_skip": 1, "screen_size": 50, "vector": vector, "sticky_actions": 0.25}
        worker = atari(actions=[RIGHT, LEFT, LEFT], seed=seed, **changes)
        return together(rows(worker, 50), "observation")

    first = seen(3)
    assert np.array_equal(first, seen(3))
    assert not np.array_equal(first, seen(4))


def test_which_way_is_taken():
    """A vector environment can't be told the seed of every episode, as lockstep needs."""
    for vector, seeded, kind in (
        (True, False, VectorEnvs), (True, True, SeparateEnvs), (False, False, SeparateEnvs)
    ):  # fmt: skip
        spec = atari(vector=vector).spec
        envs = make_envs(spec.env_factory, spec.env_spec, 1, seeded)
        assert type(envs) is kind
        envs.close()
    assert spec.env_spec.observation["observation"].stacked_shape == (4, 84, 84)


@pytest.mark.parametrize("kind", [AtariSettings, MinAtarSettings])
def test_wrappers_go_around_everything(kind):
    """Of Atari around its preprocessing; its vector environment has no place for them."""
    resize = {"target": "gymnasium.wrappers:TransformObservation"}
    with pytest.raises(SettingError, match=r"env\.wrappers\[0\]=.*missing a required argument"):
        kind.make({"wrappers": [resize]}).factory()
    named = {"wrappers": ["gymnasium.wrappers:FlattenObservation"], "info_metrics": ["lives"]}
    factory = kind.make(named).factory()
    size = 84 * 84 if kind is AtariSettings else 10 * 10 * 4
    assert probe(factory).observation["observation"].shape == (size,)
    assert factory.vector(2) is None
    assert factory.info_metrics == ("lives",)


def test_seeded_games_repeat_whatever_came_before():
    """Also with no-ops and sticky actions."""
    factory = AtariSettings.make({"sticky_actions": 0.5, "screen_size": 40}).factory()
    env, fresh = factory(), factory()
    env.reset(seed=1)
    for _ in range(30):
        env.step(2)
    assert np.array_equal(env.reset(seed=2)[0], fresh.reset(seed=2)[0])
    for action in np.random.default_rng(0).integers(4, size=40).tolist():
        assert np.array_equal(env.step(action)[0], fresh.step(action)[0])
    env.close()
    fresh.close()


# ------------------------------------------------------------------------------- evaluation


def test_evaluations_play_whole_games():
    """A life lost ends nothing; training games are not touched."""
    worker = atari(actions=[FIRE], screen_size=30)
    result = worker.evaluate(Snapshot(0, {}), EvaluationRequest(2, None, seed=5))
    env = worker.spec.env_factory()
    for game in range(2):
        env.reset(seed=stream_seed(5, 0, game, evaluation=True))
        rewards, lost, lives, is_over = [], 0, 5, False
        while not is_over:
            _, reward, is_over, _, info = env.step(FIRE)
            rewards.append(reward)
            lost, lives = lost + (info["lives"] < lives), info["lives"]
        assert (result.returns[game], result.lengths[game]) == (sum(rewards), len(rewards))
        assert lost == 5
    assert result.cut == 0
    env.close()
    worker.close()


def test_evaluation_of_who_never_fires_ends():
    """At its step limit (X8)."""
    worker = atari(actions=[NOTHING], screen_size=30)
    result = worker.evaluate(Snapshot(0, {}), EvaluationRequest(1, 40, seed=5))
    assert (result.returns, result.lengths, result.cut) == ((0.0,), (40,), 1)
    worker.close()


# --------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "missing", "extra"),
    [
        (AtariSettings(), "ale_py", "atari"),
        (AtariSettings(), "cv2", "atari"),
        (MinAtarSettings(), "minatar.gym", "minatar"),
    ],
)
def test_missing_packages(settings, missing, extra, monkeypatch):
    """One line says which, and how it is installed."""
    monkeypatch.setitem(sys.modules, missing, None)
    words = rf'^env={extra}: {missing} can.t be imported .*; pip install "actorlearner\[{extra}\]"$'
    with pytest.raises(BadInput, match=words):
        settings.factory()


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (AtariSettings, "CartPole-v1", "is no game of ale-py; .* ALE/Breakout-v5"),
        (AtariSettings, "MinAtar/Breakout-v0", "is no game of ale-py"),
        (AtariSettings, "ALE/Brakeout-v5", ".*Brakeout"),
        (MinAtarSettings, "CartPole-v1", "is no game of MinAtar; .*MinAtar/Breakout-v0"),
        (MinAtarSettings, "MinAtar/Pong-v0", ".*Pong"),
    ],
)
def test_refused_ids(kind, name, words):
    MinAtarSettings().factory()  # registers its ids
    with pytest.raises(BadInput, match=rf"env\.id={re.escape(name)}: {words}"):
        kind.make({"id": name}).factory()


@pytest.mark.parametrize(
    ("name", "bad"),
    [("frame_skip", 0), ("frame_stack", 256), ("noop_max", -1), ("sticky_actions", 1.5)],
)
def test_out_of_bounds(name, bad):
    with pytest.raises(SettingError, match=rf"^env\.{name}={bad}: must be at"):
        AtariSettings.make({name: bad})


@pytest.mark.parametrize("vector", [True, False])
def test_the_emulator_says_nothing(vector, capfd):
    """It would write its banner for every environment."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Info)
    rows(atari(screen_size=30, vector=vector), 25)
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------------------------- MinAtar


@pytest.mark.parametrize("game", ["Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders"])
def test_minatar_games(game):
    """Seeded episodes repeat, whatever came before; ``-v1`` has the actions that the game uses."""
    factory = MinAtarSettings.make({"id": f"MinAtar/{game}-v1", "sticky_actions": 0.5}).factory()
    env, fresh = factory(), factory()
    few = {"Asterix": 5, "Breakout": 3, "Freeway": 3, "Seaquest": 6, "SpaceInvaders": 4}
    assert probe(factory).action.categories == (few[game],)
    assert probe(
        MinAtarSettings.make({"id": f"MinAtar/{game}-v0"}).factory()
    ).action.categories == (6,)
    (spec,) = probe(factory).observation.values()
    assert (spec.shape[:2], spec.dtype, spec.stack) == ((10, 10), "bool", 1)
    generator = np.random.default_rng(0)
    for seed in range(20):
        env.reset(seed=100 + seed)
        for action in generator.integers(few[game], size=9).tolist():
            env.step(action)
        fresh = factory()
        assert np.array_equal(env.reset(seed=seed)[0], fresh.reset(seed=seed)[0])
        for action in generator.integers(few[game], size=30).tolist():
            one, two = env.step(action), fresh.step(action)
            assert np.array_equal(one[0], two[0])
            assert one[1:] == two[1:]
            if one[2]:
                break


@pytest.mark.parametrize(("sticky", "ramping"), [(0.0, False), (0.25, True)])
def test_minatar_settings_reach_the_game(sticky, ramping):
    settings = {"sticky_actions": sticky, "difficulty_ramping": ramping}
    game = (
        MinAtarSettings.make({"id": "MinAtar/SpaceInvaders-v0", **settings})
        .factory()()
        .unwrapped.game
    )
    assert (game.sticky_action_prob, game.env.ramping) == (sticky, ramping)
