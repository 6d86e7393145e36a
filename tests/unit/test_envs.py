"""What environments may be, and how they are spoken to."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from actorlearner.contracts import ActorLearnerError, ArraySpec, BadInput, UnsupportedSpace
from actorlearner.envs import EnvAdapter, EnvSettings, GymEnvFactory
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
    _, number, terminated, truncated = adapter.step(np.int64(0))
    assert type(number) is float
    assert number == 1.0
    assert terminated is True
    assert truncated is False


def test_reward_of_many_numbers():
    env, adapter = adapted(BOX)
    env.outcome = np.zeros(2), False, False
    with pytest.raises(BadInput, match=r"Spaces: step gave the reward array\(\[0\., 0\.\]\)"):
        adapter.step(np.int64(0))


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
