"""What environments may be: recipes of ids, classes and functions."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial, wraps
from types import ModuleType
from typing import Any

import cloudpickle
import gymnasium
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from actorlearner.contracts import ActorLearnerError, BadInput, EnvFactory, SettingError
from actorlearner.envs import EnvSettings, GymEnvFactory
from tests.environments import Places
from tests.unit.test_adapter import Spaces


@pytest.mark.parametrize("bad", [0, 256])
def test_frame_stack_out_of_bounds(bad):
    """A byte holds how old a frame is."""
    with pytest.raises(SettingError, match=rf"^env\.frame_stack={bad}: must be at"):
        EnvSettings.make({"frame_stack": bad})
    assert EnvSettings.make({"frame_stack": 3}).factory().frame_stack == 3


# ----------------------------------------------------------------------------------------- recipes


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


def test_a_recipe_of_ones_own_is_taken_as_it_is():
    class Recipe:
        name, frame_stack, terminal_on_life_loss, info_metrics = "Mine", 4, True, ("score",)

        def __call__(self, render_mode: str | None = None) -> Any:
            return Places()

        def vector(self, num_envs: int, seed: int = 0) -> None:
            return None

    for recipe in (Recipe(), GymEnvFactory.of(Places)):
        assert GymEnvFactory.of(recipe) is recipe
        for more in ({"kwargs": {"size": 3}}, {"imports": ("sys",)}, {"vector": SyncVectorEnv},
                     {"info_metrics": ("score",)}):  # fmt: skip
            with pytest.raises(BadInput, match=f"env={recipe.name}: a recipe is taken as it is"):
                GymEnvFactory.of(recipe, **more)
    assert isinstance(GymEnvFactory.of(Recipe), GymEnvFactory), "a class is called"


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


class OldGymEnv:
    """As of the package that came before Gymnasium."""


OldGymEnv.__module__ = "gym.core"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (OldGymEnv, r"returned .*, but of the old gym package; gymnasium is needed"),
        (
            lambda: SyncVectorEnv([Places]),
            r"but a vector environment; .* GymEnvFactory\.of\(make_env, vector=make_vector_env\)",
        ),
    ],
    ids=["old gym", "vector"],
)
def test_hints_where_the_wrong_thing_is_made(make, words):
    with pytest.raises(BadInput, match=words):
        GymEnvFactory.of(make)()


def test_a_vector_environment_object_is_refused():
    vector = SyncVectorEnv([Places])
    with pytest.raises(BadInput, match="an environment object can't be copied to workers"):
        GymEnvFactory.of(vector)  # type: ignore[arg-type]
    vector.close()


def test_metrics_of_info_may_be_named():
    assert GymEnvFactory.of(Places).info_metrics == ("success", "is_success")
    assert GymEnvFactory.of(Places, info_metrics=["caught"]).info_metrics == ("caught",)
    named = EnvSettings.make({"info_metrics": ["caught", "lost"]}).factory()
    assert named.info_metrics == ("caught", "lost")


# ---------------------------------------------------------------------------------- wrappers


class Twice(gymnasium.ActionWrapper[Any, Any, Any]):
    """Lets nobody but ``factor`` times the action through."""

    def __init__(self, env: Any, factor: int = 2) -> None:
        super().__init__(env)
        self.factor = factor

    def action(self, action: Any) -> Any:
        return self.factor * action


STACKED = {"target": "gymnasium.wrappers:FrameStackObservation", "stack_size": 3}
FLAT = "gymnasium.wrappers:FlattenObservation"


def test_wrappers_go_around_in_order():
    """The innermost first; they travel with the recipe."""
    settings = EnvSettings.make({"wrappers": [STACKED, FLAT]})
    env = cloudpickle.loads(cloudpickle.dumps(settings.factory()))()
    assert env.observation_space.shape == (12,)
    assert type(env).__name__ == "FlattenObservation"
    assert type(env.env).__name__ == "FrameStackObservation"
    env.close()
    other = EnvSettings.make({"wrappers": [FLAT, STACKED]}).factory()()
    assert other.observation_space.shape == (3, 4)
    other.close()


def test_a_wrapper_of_another_package_needs_trust():
    settings = EnvSettings.make({"wrappers": [{"target": f"{__name__}:Twice", "factor": 3}]})
    with pytest.raises(SettingError, match=r"env\.wrappers\[0\]: .*; add trust=\[tests\] if you"):
        settings.factory()
    env = settings.factory(trust=("tests",))()
    assert isinstance(env, Twice)
    assert env.factor == 3
    env.close()


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [
        ("gymnasium.wrappers:Nope", r"env\.wrappers\[1\]: target='gymnasium.*no attribute 'Nope'"),
        ("gymnasium.nope:Nope", r"env\.wrappers\[1\]: .*gymnasium is not trusted"),
        ("gymnasium.wrappers_of_a_stranger:Nope", "gymnasium is not trusted"),
        ("gymnasium.wrappers:RecordVideo", "gymnasium is not trusted"),
        ("os:system", "os is not trusted"),
        ("gymnasium.wrappers.vector:ClipReward", "must be a subclass of gymnasium.Wrapper"),
        ("gymnasium.wrappers.utils:RunningMeanStd", "must be a subclass of gymnasium.Wrapper"),
        ("actorlearner.agents.dqn:DQN", "must be a subclass of gymnasium.Wrapper"),
        ("FrameStackObservation", r"env\.wrappers\[1\]: target=.*must read package\.module:Name"),
        ({"stack_size": 3}, r"env\.wrappers\[1\]={'stack_size': 3}: must name its target"),
        ({**STACKED, "stock_size": 3}, r"\[1\]=gym.*unexpected keyword argument 'stock_size'"),
        ("gymnasium.wrappers:FrameStackObservation", r"missing a required argument: 'stack_size'"),
    ],
    ids=str,
)  # fmt: skip
def test_wrappers_that_are_none(wrapper, words):
    """In one line that names the key, before anything starts."""
    settings = EnvSettings.make({"wrappers": [FLAT, wrapper]})
    with pytest.raises(SettingError, match=words):
        settings.factory()


@pytest.mark.parametrize("wrappers", ["gymnasium.wrappers:FlattenObservation", [3], {"a": 1}])
def test_wrappers_that_are_no_list(wrappers):
    with pytest.raises(SettingError, match=r"^env\.wrappers=.*needed"):
        EnvSettings.make({"wrappers": wrappers})


def test_a_wrapper_that_can_not_be_put_around():
    """Its arguments are bad, or its environment does not suit it; that one is closed."""
    closed = []

    class Env(Places):
        def close(self) -> None:
            closed.append(self)

    settings = EnvSettings.make({"wrappers": [{**STACKED, "stack_size": -3}]})
    factory = replace(GymEnvFactory.of(Env), wrappings=settings.wrappings(()))
    words = r"^env\.wrappers\[0\]=gymnasium\.wrappers:FrameStackObservation: \w+Error: .*-3"
    with pytest.raises(BadInput, match=words):
        factory()
    assert len(closed) == 1


# ------------------------------------------------------------------------ vector environments


class NativePlaces(SyncVectorEnv):
    """A vector environment whose mode can be asked for, as a registered id has it."""

    def __init__(self, num_envs: int, autoreset_mode: Any = AutoresetMode.DISABLED) -> None:
        super().__init__([Places] * num_envs, autoreset_mode=autoreset_mode)


def test_the_mode_of_a_native_vector_environment_is_asked_for():
    name = "actorlearner-tests/Native-v0"
    gymnasium.register(name, Places, vector_entry_point=NativePlaces)
    try:
        factory = EnvSettings.make({"id": name, "vector": True}).factory()
    finally:
        del gymnasium.registry[name]
    env = cloudpickle.loads(cloudpickle.dumps(factory)).vector(3)
    assert env.num_envs == 3
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    env.close()


def test_kwargs_reach_a_native_vector_environment():
    given = {"vector": True, "kwargs": {"sutton_barto_reward": True}}
    env = EnvSettings.make(given).factory().vector(2)
    assert env is not None
    assert env.unwrapped._sutton_barto_reward is True  # type: ignore[attr-defined]
    env.close()


class SeededWhenMade(SyncVectorEnv):
    """As EnvPool: a seed is taken when it is made, and none when it is reset."""

    def __init__(self, num_envs: int, seed: int = 42) -> None:
        super().__init__([Places] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)
        self.made_with = seed


def test_a_vector_environment_that_takes_a_seed_is_made_with_it():
    """Or all workers would see the same episodes."""
    name = "actorlearner-tests/Seeded-v0"
    gymnasium.register(name, Places, vector_entry_point=SeededWhenMade)
    try:
        factories = [
            EnvSettings.make({"id": name, "vector": True}).factory(),
            GymEnvFactory.of(Places, vector=SeededWhenMade),
        ]
    finally:
        del gymnasium.registry[name]
    for factory in factories:
        assert seed_of(factory) == 5


def seed_of(factory: EnvFactory) -> int:
    """That of its vector environment, told 5."""
    env = factory.vector(3, seed=5)
    assert isinstance(env, SeededWhenMade)
    env.close()
    return env.made_with


def test_a_seed_that_the_user_chose_stays():
    name, other = "actorlearner-tests/Seeded-v0", "actorlearner-tests/SeededToo-v0"
    gymnasium.register(name, Places, vector_entry_point=SeededWhenMade)
    gymnasium.register(other, Places, vector_entry_point=SeededWhenMade, kwargs={"seed": 8})
    try:
        given = {"id": name, "vector": True, "kwargs": {"seed": 7}}
        assert seed_of(EnvSettings.make(given).factory()) == 7
        assert seed_of(EnvSettings.make({"id": other, "vector": True}).factory()) == 8
    finally:
        del gymnasium.registry[name], gymnasium.registry[other]
    assert seed_of(GymEnvFactory.of(Places, vector=partial(SeededWhenMade, seed=9))) == 9


def test_makers_that_take_no_seed_by_its_name():
    def positional(num_envs: int, seed: int = 6, /) -> SeededWhenMade:
        return SeededWhenMade(num_envs, seed)

    @wraps(SeededWhenMade)
    def wrapped(num_envs: int) -> SeededWhenMade:
        return SeededWhenMade(num_envs)

    assert seed_of(GymEnvFactory.of(Places, vector=positional)) == 6
    assert seed_of(GymEnvFactory.of(Places, vector=wrapped)) == 42
    assert seed_of(GymEnvFactory.of(Places, vector=lambda n, **more: SeededWhenMade(n))) == 42


def test_an_id_without_a_vector_environment():
    settings = EnvSettings.make({"id": "Acrobot-v1", "vector": True})
    with pytest.raises(BadInput, match=r"env\.vector=True: Acrobot-v1 has no vector environment"):
        settings.factory()


def test_a_vector_environment_has_no_place_for_wrappers():
    with pytest.raises(SettingError, match=r"env\.vector=True: .* leave env\.wrappers empty"):
        EnvSettings.make({"vector": True, "wrappers": [FLAT]})
