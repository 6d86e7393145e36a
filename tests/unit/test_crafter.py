"""Crafter as an environment: what ends an episode, what it tells, and that seeds decide it."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import crafter
import numpy as np
import pytest

from actorlearner.adapter import EnvAdapter, info_metrics
from actorlearner.contracts import BadInput
from actorlearner.crafter import ACHIEVEMENTS, CrafterEnv, CrafterSettings
from actorlearner.worker import probe

NOTHING = 0


def make(render_mode: str | None = None, **settings: Any) -> CrafterEnv:
    env = CrafterSettings.make(settings).factory()(render_mode)
    assert isinstance(env, CrafterEnv)
    return env


@pytest.fixture
def meadow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worlds of grass: to make a real one takes half a second."""

    def grow(world: Any, _: Any) -> None:
        for place in np.ndindex(world.area):
            world[place] = "grass"

    monkeypatch.setattr(crafter.worldgen, "generate_world", grow)


def player(env: CrafterEnv) -> Any:
    return env._world._player


def episode(env: CrafterEnv, seed: int, steps: int) -> list[Any]:
    """Pictures, rewards and where everything stands, of the first steps."""
    seen = [env.reset(seed=seed)[0]]
    for action in np.random.default_rng(0).integers(17, size=steps).tolist():
        picture, reward, terminated, truncated, _ = env.step(action)
        seen += [picture, reward, env._world._world._obj_map.copy()]
        if terminated or truncated:
            break
    return seen


def same(one: list[Any], two: list[Any]) -> bool:
    return len(one) == len(two) and all(map(np.array_equal, one, two))


def test_seeded_episodes_repeat_whatever_came_before() -> None:
    used, fresh = make(), make()
    other, wanted = episode(used, 5, 30), episode(fresh, 3, 30)
    assert same(episode(used, 3, 30), wanted)
    assert not np.array_equal(other[0], wanted[0])


@pytest.mark.usefixtures("meadow")
def test_episodes_without_a_seed() -> None:
    """They go on with the environment's own numbers, which differ."""

    def number(env: CrafterEnv, seed: int | None = None) -> Any:
        env.reset(seed=seed)
        return env._world._world.random.randint(1 << 30)

    used, fresh = make(), make()
    assert number(used) != number(fresh)
    first = number(used, 3)
    assert number(fresh, 3) == first
    assert number(used) == number(fresh) != first


@pytest.mark.usefixtures("meadow")
def test_memory_addresses_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package keeps creatures in sets, whose order is that of addresses: here of other ones."""

    def with_addresses(salt: int) -> list[Any]:
        count = itertools.count()

        def address(creature: Any) -> int:
            if not hasattr(creature, "address"):
                creature.address = hash((salt, next(count)))
            return int(creature.address)

        monkeypatch.setattr(crafter.objects.Object, "__hash__", address)
        env = make(screen_size=18)
        env.reset(seed=0)
        maps = []
        for _ in range(100):
            env.step(NOTHING)
            maps.append(env._world._world._obj_map.copy())
        return maps

    assert same(with_addresses(1), with_addresses(2))


@pytest.mark.usefixtures("meadow")
def test_the_end_of_the_time_truncates() -> None:
    env = make(max_steps=3)
    env.reset(seed=0)
    ends = [env.step(NOTHING)[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]


@pytest.mark.usefixtures("meadow")
@pytest.mark.parametrize("max_steps", [1, 100])
def test_death_terminates(max_steps: int) -> None:
    """Even in the last moment."""
    env = make(max_steps=max_steps)
    env.reset(seed=0)
    player(env).health = 0
    _, reward, terminated, truncated, _ = env.step(NOTHING)
    assert (terminated, truncated) == (True, False)
    assert reward == pytest.approx(-0.9)


@pytest.mark.usefixtures("meadow")
@pytest.mark.parametrize(("name", "paid"), [("CrafterReward-v1", 1.0), ("CrafterNoReward-v1", 0)])
def test_achievements_pay_and_are_told(name: str, paid: float) -> None:
    """At the end, all that there were."""
    assert set(ACHIEVEMENTS) == set(crafter.constants.achievements)
    env = make(id=name, max_steps=2)
    env.reset(seed=0)
    player(env).achievements["eat_cow"] = 3
    _, reward, *_, info = env.step(NOTHING)
    assert (reward, info) == (paid, {})
    *_, info = env.step(NOTHING)
    told = dict(info_metrics(info, CrafterSettings().info_metrics))
    assert told == {name: 0 for name in ACHIEVEMENTS} | {"achievements": 1, "eat_cow": 1}


@pytest.mark.usefixtures("meadow")
def test_spaces_and_sizes() -> None:
    spec = probe(CrafterSettings(screen_size=48).factory())
    (picture,) = spec.observation.values()
    assert (picture.shape, picture.dtype) == ((48, 48, 3), "uint8")
    assert spec.action.categories == (len(crafter.constants.actions),)


@pytest.mark.usefixtures("meadow")
def test_films_change_nothing() -> None:
    """At night every picture that is painted takes random numbers from the world."""
    plain, filmed = make(max_steps=1_000), EnvAdapter(make("rgb_array"), "crafter")
    env = filmed.env
    assert isinstance(env, CrafterEnv)
    plain.reset(seed=1)
    filmed.reset(seed=1)
    for other in (plain, env):
        other._world._step = 210  # dark
    for _ in range(5):
        assert np.array_equal(filmed.render(), env._picture)
        assert np.array_equal(plain.step(NOTHING)[0], filmed.env.step(NOTHING)[0])
    assert plain._world._world.daylight < 0.3
    assert plain.render() is None


def test_refused_ids() -> None:
    with pytest.raises(BadInput, match=r"^env\.id=Crafter: must be one of CrafterReward-v1, C"):
        CrafterSettings(id="Crafter").factory()


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from actorlearner.crafter import _repeatable

    _repeatable.cache_clear()
    monkeypatch.setitem(sys.modules, "crafter", None)
    with pytest.raises(BadInput, match=r'^env=crafter: crafter can.t .*"actorlearner\[crafter\]"$'):
        CrafterSettings().factory()
