"""What environments may be, and how they are spoken to."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from actorlearner.contracts import (
    ActorLearnerError,
    ArraySpec,
    BadInput,
    SettingError,
    UnsupportedSpace,
)
from actorlearner.envs import (
    EnvAdapter,
    EnvSettings,
    GymEnvFactory,
    SeparateEnvs,
    VectorEnvs,
    adapt,
    make_envs,
)
from tests.environments import Places


class Spaces(gymnasium.Env):
    """An environment of any spaces, whose observations and rewards are told it."""

    def __init__(self, observation_space: Any, action_space: Any = None) -> None:
        self.observation_space = observation_space
        self.action_space = action_space or spaces.Discrete(2)
        self.observation = observation_space.sample()
        self.outcome: tuple[Any, Any, Any] = (0.0, False, False)
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observation, {}

    def step(self, action: Any) -> Any:
        self.actions.append(action)
        return self.observation, *self.outcome, {}


def adapted(observation_space: Any, action_space: Any = None) -> tuple[Spaces, EnvAdapter]:
    env = Spaces(observation_space, action_space)
    return env, EnvAdapter(env, "Spaces")


# ------------------------------------------------------------------------------ observations

BOX = spaces.Box(0, 255, (2, 3), np.uint8)


@pytest.mark.parametrize(
    ("space", "specs"),
    [
        (BOX, {"observation": ArraySpec((2, 3), "uint8")}),
        (spaces.Box(-1, 1, (), np.float16), {"observation": ArraySpec((), "float16")}),
        (spaces.Discrete(4, start=2), {"observation": ArraySpec((), "int64", (4,))}),
        (spaces.MultiDiscrete([2, 5]), {"observation": ArraySpec((2,), "int64", (2, 5))}),
        (
            spaces.MultiDiscrete([[2, 5], [3, 4]]),
            {"observation": ArraySpec((2, 2), "int64", (2, 5, 3, 4))},
        ),
        (spaces.MultiBinary(3), {"observation": ArraySpec((3,), "int8", (2, 2, 2))}),
        (
            spaces.Dict(
                image=BOX,
                vector=spaces.Box(-1, 1, (3,), np.float32),
                kind=spaces.Discrete(4),
                deep=spaces.Tuple([spaces.MultiBinary(2), spaces.Dict(on=spaces.Discrete(2))]),
            ),
            {
                "image": ArraySpec((2, 3), "uint8"),
                "vector": ArraySpec((3,), "float32"),
                "kind": ArraySpec((), "int64", (4,)),
                "deep.0": ArraySpec((2,), "int8", (2, 2)),
                "deep.1.on": ArraySpec((), "int64", (2,)),
            },
        ),
        (
            spaces.Tuple([spaces.Discrete(32), spaces.Discrete(11), spaces.Discrete(2)]),
            {str(i): ArraySpec((), "int64", (n,)) for i, n in enumerate((32, 11, 2))},
        ),
    ],
    ids=str,
)
def test_observation_specs(space, specs):
    env, adapter = adapted(space)
    assert adapter.spec.observation == specs
    assert adapter.spec.observation_space == str(space)
    for seed in range(5):
        space.seed(seed)
        env.observation = space.sample()
        for observation in (adapter.reset(None), adapter.step(np.int64(0))[0]):
            assert observation.keys() == specs.keys()
            for key, spec in specs.items():
                leaf = env.observation
                for part in key.split(".") if key != "observation" else ():
                    leaf = leaf[int(part) if part.isdigit() else part]
                start = 2 if isinstance(space, spaces.Discrete) else 0
                assert np.array_equal(observation[key], leaf - start if start else leaf)
                assert np.shape(observation[key]) == spec.shape


def test_observations_count_from_zero():
    space = spaces.Dict(
        one=spaces.Discrete(3, start=-1), many=spaces.MultiDiscrete([3, 2], start=[-1, 5])
    )
    env, adapter = adapted(space)
    env.observation = {"one": -1, "many": np.array([1, 5])}
    observation = adapter.reset(None)
    assert observation["one"] == 0
    assert observation["many"].tolist() == [2, 0]
    assert env.observation["many"].tolist() == [1, 5]  # theirs stays as it is
    env.observation = {"one": np.int64(1), "many": np.array([-1, 6])}
    observation = adapter.step(np.int64(0))[0]
    assert observation["one"] == 2
    assert observation["many"].tolist() == [0, 1]


class OldGymBox:
    """As of the package that came before Gymnasium."""

    def sample(self) -> Any:
        return np.zeros(2)


OldGymBox.__module__ = "gym.spaces.box"


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Text(10), "Spaces: observation is Text"),
        (spaces.Sequence(BOX), "Spaces: observation is Sequence"),
        (spaces.Graph(BOX, None), "Spaces: observation is Graph"),
        (spaces.Dict(a=BOX, b=spaces.Dict(c=spaces.Text(3))), r"Spaces: b\.c is Text"),
        (spaces.Tuple([BOX, spaces.Text(3)]), "Spaces: 1 is Text"),
        (spaces.Dict(), "holds nothing"),
        (OldGymBox(), r"gym\.spaces\.box\.OldGymBox.* gymnasium's are needed"),
        (
            spaces.Dict({"a": spaces.Dict({"b": BOX}), "a.b": BOX}),
            r"Spaces: two parts .* are called a\.b",
        ),
    ],
    ids=str,
)
def test_refused_observation_spaces(space, words):
    with pytest.raises(UnsupportedSpace, match=words):
        adapted(space)


def test_refused_action_space():
    with pytest.raises(UnsupportedSpace, match="Spaces: its action space is Text"):
        adapted(BOX, spaces.Text(3))
    with pytest.raises(UnsupportedSpace, match="Box, Discrete, MultiDiscrete, MultiBinary"):
        adapted(BOX, spaces.Dict(a=BOX))


@pytest.mark.parametrize("wrong", [np.zeros((3, 2), "u1"), np.zeros((1, 3), "u1"), np.uint8(0)])
def test_observation_of_another_shape(wrong):
    """Also where NumPy would fill the array with what fits by broadcasting."""
    env, adapter = adapted(BOX)
    env.observation = wrong
    promise = r"observation of shape .*; its observation space promises \(2, 3\)"
    with pytest.raises(BadInput, match=f"Spaces: reset gave {promise}"):
        adapter.reset(None)
    with pytest.raises(BadInput, match=f"Spaces: step gave {promise}"):
        adapter.step(np.int64(0))


# ----------------------------------------------------------------------------------- actions


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3),
        spaces.Discrete(3, start=-1),
        spaces.MultiDiscrete([3, 2, 4]),
        spaces.MultiDiscrete([3, 2], start=[-1, 7]),
        spaces.MultiBinary(4),
        spaces.Box(-1, 1, (3,), np.float32),
        spaces.Box(-1, 1, (2, 2), np.float64),
        spaces.Box(-1, 1, (), np.float32),
        spaces.Box(0, 9, (3,), np.int32),
        spaces.Box(0, 1, (3,), np.bool_),
    ],
    ids=str,
)
def test_the_environment_sees_actions_of_its_space(space):
    env, adapter = adapted(BOX, space)
    spec = adapter.spec.action
    space.seed(0)
    row = spec.zeros(2)  # actions arrive as views of an unroll, which must not get out
    start = getattr(space, "start", None)
    for _ in range(10):
        wanted = space.sample()
        row[1] = wanted if start is None else wanted - start
        adapter.step(row[1])
    given = list(env.actions)
    row[:] = 0
    space.seed(0)
    for action in given:
        assert space.contains(action), action
        assert type(action) is int or action.dtype == space.dtype
        assert np.array_equal(action, space.sample())
    assert spec.is_discrete == isinstance(space, spaces.Discrete)


# ------------------------------------------------------------------------- rewards and flags


@pytest.mark.parametrize(
    "reward",
    [1, 1.0, True, np.float32(1), np.int64(1), np.array(1.0), np.array([1.0], "f4")],
    ids=repr,
)
@pytest.mark.parametrize("flag", [True, np.True_, 1], ids=repr)
def test_reward_and_flags_become_plain(reward, flag):
    env, adapter = adapted(BOX)
    env.outcome = reward, flag, type(flag)(0)
    _, number, terminated, truncated, _ = adapter.step(np.int64(0))
    assert type(number) is float
    assert number == 1.0
    assert terminated is True
    assert truncated is False


def test_reward_of_many_numbers():
    env, adapter = adapted(BOX)
    env.outcome = np.zeros(2), False, False
    with pytest.raises(BadInput, match=r"Spaces: step gave the reward array\(\[0\., 0\.\]\)"):
        adapter.step(np.int64(0))


# ------------------------------------------------------------------------------------- lives


class Lives(gymnasium.Env):
    """Draws how many lives there are, when one is lost, and when the episode ends.

    What was drawn last can be seen.
    """

    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._lives = int(self.np_random.integers(1, 5))
        return self._observe(0), {"lives": self._lives}

    def _observe(self, action: int) -> Any:
        self._drawn = self.np_random.random(2, np.float32)
        return self._drawn / (1 + action)

    def step(self, action: Any) -> Any:
        self._lives -= int(self._drawn[0] < 0.25)
        truncated = bool(self._drawn[1] < 0.1)
        seen = self._observe(action)
        return seen, float(self._drawn[0]), self._lives == 0, truncated, {"lives": self._lives}


class Told(Spaces):
    """Has as many lives as it is told."""

    lives: Any = 3

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observation, {"lives": self.lives}

    def step(self, action: Any) -> Any:
        return self.observation, *self.outcome, {"lives": self.lives}


def test_a_lost_life():
    """Where fewer are left than before, and the episode goes on."""
    env = Told(BOX)
    adapter = EnvAdapter(env, "Told", tells_lives=True)
    adapter.reset(None)

    def lost_life(lives: int, terminated: bool = False, truncated: bool = False) -> bool:
        env.lives, env.outcome = lives, (0.0, terminated, truncated)
        *_, step_terminated, step_truncated, lost = adapter.step(np.int64(0))
        assert (step_terminated, step_truncated) == (terminated, truncated)
        return lost

    told = {3: False, 2: True, 1: True, 0: True, 5: False, 4: True}
    assert {lives: lost_life(lives) for lives in told} == told
    assert not lost_life(4)
    assert not lost_life(3, terminated=True)
    env.lives = 7
    adapter.reset(None)
    assert not lost_life(7)
    assert not lost_life(6, truncated=True)


def test_lives_that_are_not_told():
    env, _ = adapted(BOX)
    adapter = EnvAdapter(env, "Spaces", tells_lives=True)
    with pytest.raises(BadInput, match="Spaces: info has no lives, so terminal_on_life_loss"):
        adapter.reset(None)
    told = Told(BOX)
    adapter = EnvAdapter(told, "Told")
    adapter.reset(None)
    told.lives = 2  # nobody asks
    assert not adapter.step(np.int64(0))[4]


# --------------------------------------------------------------------------- many of them


class SyncEnvs(SyncVectorEnv):
    """Gymnasium's, which takes the seeds in an array."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset(seed=seed.tolist(), options=options)


@dataclass(frozen=True)
class VectorFactory(GymEnvFactory):
    """Steps many of its environments as one."""

    autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP

    def vector(self, num_envs: int) -> Any:
        return SyncEnvs([self] * num_envs, autoreset_mode=self.autoreset_mode)


def zeros(spec: Any, count: int) -> Any:
    return {key: array.zeros(count) for key, array in spec.observation.items()}


@pytest.mark.parametrize("tells_lives", [False, True])
def test_vector_and_separate_environments_are_alike(tells_lives):
    """Observations, rewards, flags and lives, over many episodes of three columns."""
    factory = replace(VectorFactory.of(Lives), terminal_on_life_loss=tells_lives)
    spec = adapt(factory).spec
    both = [make_envs(factory, spec, 3, seeded) for seeded in (False, True)]
    assert [type(envs) for envs in both] == [VectorEnvs, SeparateEnvs]
    seen = [zeros(spec, 3) for _ in both]
    for envs, into in zip(both, seen, strict=True):
        envs.begin(np.array([5, 5, 7]), into)
    resting, counts = np.zeros(3, np.bool_), np.zeros(3, int)
    generator = np.random.default_rng(0)
    for _ in range(300):
        assert np.array_equal(seen[0]["observation"], seen[1]["observation"])
        action = generator.integers(3, size=3)
        vector, separate = (
            envs.step(action, resting, into) for envs, into in zip(both, seen, strict=True)
        )
        for got, wanted in zip(vector, separate, strict=True):
            np.testing.assert_allclose(got, wanted)
        assert not any(flags[resting].any() for flags in separate)
        for column in np.flatnonzero(resting).tolist():
            for envs, into in zip(both, seen, strict=True):
                envs.restart(column, None, into)
        resting = separate.terminated | separate.truncated
        counts += [flags.sum() for flags in separate[1:]]
    assert (counts[:2] > 10).all()
    assert counts[2] > 10 if tells_lives else counts[2] == 0
    for envs in both:
        envs.close()


def test_columns_that_rest_are_left_alone():
    """Neither stepped nor written to, until they are restarted."""
    envs = SeparateEnvs([EnvAdapter(Lives(), "Lives") for _ in range(2)])
    into = zeros(envs.adapters[0].spec, 2)
    envs.begin(np.array([1, 2]), into)
    before = into["observation"].copy()
    steps = envs.step(np.array([1, 1]), np.array([False, True]), into)
    assert (into["observation"][1] == before[1]).all()
    assert (into["observation"][0] != before[0]).all()
    assert steps.reward[0] > steps.reward[1] == 0
    envs.restart(1, 2, into)
    assert (into["observation"][1] == before[1]).all()
    envs.close()


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_other_autoreset_modes_are_refused(mode, monkeypatch):
    """With the words that set the right one; what was made is closed."""
    closed = []
    monkeypatch.setattr(SyncEnvs, "close_extras", lambda self, **_: closed.append(self))
    factory = replace(VectorFactory.of(Lives), autoreset_mode=mode)
    words = (
        f"Lives: .*NEXT_STEP, .*{mode.name}.*make it with autoreset_mode=AutoresetMode.NEXT_STEP"
    )
    with pytest.raises(BadInput, match=words):
        make_envs(factory, adapt(factory).spec, 2, seeded=False)
    assert len(closed) == 1


@pytest.mark.parametrize("bad", [-1, 3])
def test_actions_out_of_range_are_refused(bad):
    """Natively they may hang; nothing is stepped."""
    factory = VectorFactory.of(Lives)
    spec = adapt(factory).spec
    envs = make_envs(factory, spec, 2, seeded=False)
    into = zeros(spec, 2)
    envs.begin(np.array([1, 2]), into)
    before = into["observation"].copy()
    with pytest.raises(ValueError, match=rf"action=\[ ?0 +{bad}\]: must be in \[0, 3\)"):
        envs.step(np.array([0, bad]), np.zeros(2, np.bool_), into)
    assert (into["observation"] == before).all()
    envs.close()


@pytest.mark.parametrize("bad", [0, 256])
def test_frame_stack_out_of_bounds(bad):
    """A byte holds how old a frame is."""
    with pytest.raises(SettingError, match=rf"^env\.frame_stack={bad}: must be at"):
        EnvSettings.make({"frame_stack": bad})
    assert EnvSettings.make({"frame_stack": 3}).factory().frame_stack == 3


# ----------------------------------------------------------------------------------- recipes


def test_factory_of_an_id():
    factory = GymEnvFactory.of("CartPole-v1", {"sutton_barto_reward": True})
    assert factory.name == "CartPole-v1"
    env = cloudpickle.loads(cloudpickle.dumps(factory))()
    assert env.unwrapped._sutton_barto_reward is True
    assert env.spec.max_episode_steps == 500  # the wrappers of its spec are there
    assert GymEnvFactory.of(factory) is factory
    env.close()


def test_factory_of_what_is_registered_only_here():
    class Local(Places):
        pass

    gymnasium.register("actorlearner-tests/Local-v0", Local, max_episode_steps=3)
    factory = cloudpickle.dumps(GymEnvFactory.of("actorlearner-tests/Local-v0"))
    del gymnasium.registry["actorlearner-tests/Local-v0"]
    env = cloudpickle.loads(factory)()
    assert isinstance(env.unwrapped, Places)
    assert env.get_wrapper_attr("_max_episode_steps") == 3


@pytest.mark.parametrize("name", ["Later-v0", "actorlearner-tests/Later-v0"])
def test_factory_of_an_id_in_a_module(tmp_path, monkeypatch, name):
    """``module:Id`` imports the module, which registers the id."""
    (tmp_path / "registers_later.py").write_text(
        "import gymnasium\n"
        "from tests.environments import Places\n"
        f"gymnasium.register({name!r}, Places)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        factory = GymEnvFactory.of(f"registers_later:{name}")
        assert isinstance(factory().unwrapped, Places)
        assert isinstance(EnvSettings.make({"id": f"registers_later:{name}"}).factory()(), object)
    finally:
        sys.modules.pop("registers_later", None)
        gymnasium.registry.pop(name, None)


def test_factory_of_a_spec_a_class_and_functions():
    assert GymEnvFactory.of(gymnasium.spec("CartPole-v1")).name == "CartPole-v1"
    assert isinstance(GymEnvFactory.of(Places)(), Places)
    assert GymEnvFactory.of(Places).name == "Places"
    made = GymEnvFactory.of(lambda size: Spaces(spaces.Discrete(size)), {"size": 7})()
    assert made.observation_space == spaces.Discrete(7)


def test_a_factory_may_bear_a_name():
    class Recipe:
        name = "Mine"

        def __call__(self) -> Any:
            return Places()

    class Named(Places):
        @property
        def name(self) -> str:
            return "of an environment, not of its class"

    assert GymEnvFactory.of(Recipe()).name == "Mine"
    assert GymEnvFactory.of(Named).name == "Named"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("NoSuchThing-v0", r"env\.id=NoSuchThing-v0: .*module:Id"),
        ("no_such_module:Thing-v0", r"env\.id=no_such_module: can't be imported"),
        ("CartPole-v77", r"env\.id=CartPole-v77: .*v77"),
        ("not an id", r"env\.id=not an id: "),
        (Places(), "an environment object can't be copied to workers; give its class"),
        (7, "env=7: give a Gymnasium id, a spec, an Env class or a callable"),
    ],
    ids=["id", "module", "version", "malformed", "object", "number"],
)
def test_refused_environments(env, words):
    with pytest.raises(BadInput, match=words):
        GymEnvFactory.of(env)


def test_refused_imports():
    with pytest.raises(BadInput, match="imports=no_such_module: can't be imported"):
        GymEnvFactory.of("CartPole-v1", imports=("no_such_module",))


def test_imports_come_before_the_environment(monkeypatch):
    monkeypatch.setitem(sys.modules, "imported_first", ModuleType("imported_first"))
    factory = GymEnvFactory.of(Places, imports=("imported_first",))
    monkeypatch.delitem(sys.modules, "imported_first")
    with pytest.raises(ModuleNotFoundError):
        factory()


@pytest.mark.parametrize("result", [None, 3], ids=repr)
def test_factory_that_returns_no_environment(result):
    def make_it() -> Any:
        return result

    with pytest.raises(ActorLearnerError, match=f"env factory make_it returned {result}, not a"):
        GymEnvFactory.of(make_it)()
