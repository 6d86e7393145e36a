"""What a run waits for follows from where its time went."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, ClassVar, get_args

import pytest

from actorlearner.config import dotted
from actorlearner.run import _unresolved, compose
from actorlearner.verdict import Layout, Part, TimeSpent, Verdict, diagnose, shares

SEVERAL = Layout(workers=4, cores=8)
INLINE = Layout(workers=0, cores=8)


def spent(
    learner: dict[str, float], workers: dict[str, float], updates: int = 50, **more: Any
) -> TimeSpent:
    """A stretch of 200 env steps on cores that were mostly idle."""
    rest: dict[str, Any] = {"learner_ran": 100.0, "busy_cores": 1.0, "cores": 8.0} | more
    return TimeSpent(learner, workers, env_steps=200, updates=updates, **rest)


def verdict(
    learner: dict[str, float], workers: dict[str, float], layout: Layout = SEVERAL, **more: Any
) -> Verdict:
    found = diagnose(spent(learner, workers, **more), layout)
    assert found is not None
    return found


# Of a run in which one side waits for the other.
WAITING = {"gather": 6.0, "update": 3.0, "sample": 1.0}
LEARNING = {"gather": 1.0, "update": 7.0, "sample": 1.5, "other": 0.5}
ACTING = {"env": 28.0, "policy": 11.0, "slots": 1.0, "limiter": 0.0}
HELD = {"env": 8.0, "policy": 4.0, "slots": 4.0, "limiter": 24.0}


class TestWorkersAreSlow:
    def test_environments(self) -> None:
        assert verdict(WAITING, ACTING) == (
            "env",
            "Environments took 70% of the workers' time, and the learner waited for rows 60% of "
            "its own: more workers (workers=) would help.",
        )

    def test_the_policy(self) -> None:
        assert verdict(WAITING, {**ACTING, "env": 10.0, "policy": 29.0}) == (
            "policy",
            "The policy took 72% of the workers' time, and the learner waited for rows 60% of its "
            "own: more environments that share a forward pass (envs_per_worker=) or more workers "
            "(workers=) would help.",
        )

    @pytest.mark.parametrize(
        ("env", "policy", "helps"),
        [(28.0, 11.0, "a faster environment"), (11.0, 28.0, "(envs_per_worker=)")],
    )
    def test_where_they_outnumber_the_cores_more_of_them_are_no_help(
        self, env: float, policy: float, helps: str
    ) -> None:
        acting = {**ACTING, "env": env, "policy": policy}
        layout = dataclasses.replace(SEVERAL, cores=2)
        busy = {"busy_cores": 19.0, "cores": 20.0}
        part, sentence = verdict(WAITING, acting, layout, **busy)
        assert part == ("env" if env > policy else "policy")
        assert "all 2 cores were busy, so" in sentence
        assert helps in sentence
        assert sentence.endswith("would help, and more workers hardly.")
        idle = {"busy_cores": 16.0, "cores": 20.0}
        assert "busy" not in verdict(WAITING, acting, layout, **idle).sentence
        room = dataclasses.replace(layout, cores=5)  # the learner and four workers are fewer
        more = verdict(WAITING, acting, room, **busy)
        assert more.sentence.endswith("(workers=) would help if the cores were not busy already.")

    def test_what_is_fast_on_the_other_side_does_not_matter(self) -> None:
        slow_learner_parts = {"gather": 4.0, "update": 6.0}
        little = {"env": 2.5, "policy": 7.0, "slots": 0.5, "limiter": 0.0}
        assert verdict(slow_learner_parts, little).part == "policy"


class TestLearnerIsSlow:
    def test_updates(self) -> None:
        assert verdict(LEARNING, HELD) == (
            "update",
            "Updates took 70% of the learner's time, and the workers waited for it 70% of theirs: "
            "fewer samples per insert (samples_per_insert=), a smaller network, or a GPU for a "
            "large one would help.",
        )

    def test_on_a_gpu_none_is_asked_for(self) -> None:
        layout = dataclasses.replace(SEVERAL, on_cpu=False)
        assert "GPU" not in verdict(LEARNING, HELD, layout).sentence

    @pytest.mark.parametrize(
        ("name", "part", "setting"),
        [
            ("add", "replay", "unroll_length="),
            ("sample", "replay", "samples_per_insert="),
            ("feedback", "replay", "samples_per_insert="),
            ("publish", "publish", "trainer.publish_every_updates="),
            ("evaluate", "evaluate", "trainer.evaluate_every_env_steps="),
            ("checkpoint", "checkpoint", "trainer.checkpoint_every_env_steps="),
            ("other", "other", "callbacks"),
        ],
    )
    def test_other_parts(self, name: str, part: Part, setting: str) -> None:
        found = verdict({**LEARNING, name: 9.0}, HELD)
        assert found.part == part
        assert setting in found.sentence

    def test_the_replay_is_what_adds_samples_and_takes_feedback(self) -> None:
        parts = {"update": 4.0, "add": 1.5, "sample": 1.5, "feedback": 1.5}
        found = verdict({"gather": 1.5, **parts}, HELD)
        assert found.part == "replay"
        assert "The replay took 45% of the learner's time" in found.sentence

    @pytest.mark.parametrize("slow", ["update", "sample"])
    def test_many_updates_per_env_step_are_the_limiters_doing(self, slow: str) -> None:
        parts = {"gather": 1.0, "update": 2.0, "sample": 2.0} | {slow: 7.0}
        assert verdict(parts, HELD, updates=1_600) == (
            "limiter",
            "samples_per_insert asked for 8.0 updates per env step and held the workers back 60% "
            "of their time: a smaller samples_per_insert= would help, and each env step would be "
            "worth less.",
        )
        assert verdict(parts, HELD, updates=200).part != "limiter"
        assert verdict({**parts, "checkpoint": 9.0}, HELD, updates=1_600).part == "checkpoint"

    def test_many_updates_do_not_matter_where_the_workers_are_slow(self) -> None:
        assert verdict(WAITING, ACTING, updates=1_600).part == "env"


class TestACoreForTheLearner:
    """It needs one; on a small machine its workers, or others, may have them all."""

    TWO_CORES = Layout(workers=8, cores=2)
    BUSY: ClassVar[dict[str, Any]] = {"busy_cores": 19.0, "cores": 20.0}
    MANY: ClassVar[dict[str, float]] = {"env": 20.0, "policy": 10.0, "slots": 10.0, "limiter": 40.0}
    """Three of them are at work."""

    def test_fewer_workers_leave_it_one(self) -> None:
        _, sentence = verdict(LEARNING, self.MANY, self.TWO_CORES, **self.BUSY, learner_ran=4.5)
        assert (
            "theirs: fewer workers (workers=) would leave the learner a core, which it lacked 50% "
            "of the time; fewer samples" in sentence
        )

    def test_others_may_have_them(self) -> None:
        few = {"env": 4.0, "policy": 2.0, "slots": 10.0, "limiter": 40.0}
        _, sentence = verdict(LEARNING, few, self.TWO_CORES, **self.BUSY, learner_ran=4.5)
        assert (
            "theirs: all cores were busy, and the learner had none 50% of the time; fewer"
            in sentence
        )

    def test_a_single_worker_is_needed(self) -> None:
        one = Layout(workers=1, cores=1)
        _, sentence = verdict(LEARNING, self.MANY, one, **self.BUSY, learner_ran=4.5)
        assert "theirs: fewer samples" in sentence

    @pytest.mark.parametrize(
        "changes",
        [
            {"learner_ran": 8.0},  # it had one
            {"busy_cores": 12.0},  # so it waited for something else
            {"layout": Layout(workers=8, cores=2, on_cpu=False)},  # say, for the GPU
            {"learner": {**LEARNING, "checkpoint": 20.0}},  # say, for the disk
            {"learner": {**LEARNING, "evaluate": 5.0}, "learner_ran": 8.5},  # for that as well
        ],
    )
    def test_not_where_it_did_not_lack_one(self, changes: dict[str, Any]) -> None:
        layout = changes.pop("layout", self.TWO_CORES)
        learner = changes.pop("learner", LEARNING)
        more = {**self.BUSY, "learner_ran": 4.5} | changes
        assert "core" not in verdict(learner, self.MANY, layout, **more).sentence


class TestTurns:
    SLOTS: ClassVar[dict[str, float]] = {"env": 20.0, "policy": 5.0, "slots": 15.0, "limiter": 0.0}

    def test_slots_where_both_wait(self) -> None:
        assert verdict(WAITING, self.SLOTS) == (
            "slots",
            "Workers waited for a free slot 38% of their time, and the learner for rows 60% of "
            "its own: more slots (launch.slots=) or longer unrolls (unroll_length=) would let both "
            "work at the same time.",
        )

    def test_a_side_that_hardly_waits_is_slow(self) -> None:
        assert verdict({**LEARNING, "gather": 1.5}, self.SLOTS).part == "update"
        assert verdict(WAITING, {**self.SLOTS, "slots": 5.0}).part == "env"

    def test_the_limiter_is_no_lack_of_slots(self) -> None:
        held = {**self.SLOTS, "slots": 1.0, "limiter": 30.0}
        assert verdict({**LEARNING, "gather": 3.0}, held).part == "update"

    def test_on_purpose_in_lockstep(self) -> None:
        layout = dataclasses.replace(SEVERAL, takes_turns=True)
        assert verdict(WAITING, self.SLOTS, layout).part == "env"
        assert verdict({**WAITING, "gather": 2.0}, self.SLOTS, layout).part == "update"

    def test_to_work_at_the_same_time_takes_cores(self) -> None:
        """Of 10 s the learner works 4 and the workers 25: that is more than two cores can do."""
        layout = Layout(workers=4, cores=2)
        busy = {"busy_cores": 20.0, "cores": 20.0}
        assert verdict(WAITING, self.SLOTS, layout, **busy).part == "env"
        assert verdict(WAITING, self.SLOTS, layout).part == "slots"
        by_others = dataclasses.replace(layout, cores=3)
        assert verdict(WAITING, self.SLOTS, by_others, **busy).part == "slots"

    def test_where_neither_waits_the_largest_part_counts(self) -> None:
        learner = {"gather": 1.0, "update": 9.0}
        found = verdict(learner, {"env": 20.0, "policy": 19.0, "slots": 1.0, "limiter": 0.0})
        assert found.part == "env"
        assert "50% of the workers' time, and neither side waited for the other:" in found.sentence
        found = verdict(learner, {"env": 5.0, "policy": 4.0, "slots": 1.0, "limiter": 0.0})
        assert found.part == "update"
        assert "90% of the learner's time, and neither side waited" in found.sentence


class TestInline:
    """One process does everything: its largest part is what it waits for."""

    def test_the_worker_works_while_the_learner_gathers(self) -> None:
        learner = {"gather": 8.0, "update": 2.0}
        assert verdict(learner, {"env": 5.0, "policy": 2.0}, INLINE) == (
            "env",
            "Environments took 50% of the time: worker processes (workers=) would help.",
        )
        assert verdict(learner, {"env": 2.0, "policy": 5.0}, INLINE).part == "policy"
        assert verdict(learner, {"env": 1.0, "policy": 1.0}, INLINE).part == "other"
        assert verdict({**learner, "update": 6.0}, {"env": 5.0, "policy": 2.0}, INLINE) == (
            "update",
            "Updates took 43% of the time: fewer samples per insert (samples_per_insert=), a "
            "smaller network, or a GPU for a large one would help.",
        )

    def test_the_limiter(self) -> None:
        found = verdict({"gather": 1.0, "update": 5.0}, {"env": 1.0}, INLINE, updates=500)
        assert found.part == "limiter"
        assert "asked for 2.5 updates per env step: a smaller" in found.sentence

    def test_a_single_core(self) -> None:
        layout = Layout(workers=0, cores=1)
        found = verdict({"gather": 5.0}, {"env": 5.0}, layout, busy_cores=5.0, cores=5.0)
        assert "the core was busy" in found.sentence


@pytest.mark.parametrize(
    "nothing", [TimeSpent(), TimeSpent({"gather": 0.0}, env_steps=5), TimeSpent({"gather": 1.0})]
)
def test_no_verdict_without_time_or_steps(nothing: TimeSpent) -> None:
    assert diagnose(nothing, SEVERAL) is None


def test_stretches_add_up() -> None:
    total = TimeSpent()
    first = spent({"gather": 1.0, "update": 2.0}, {"env": 3.0})
    total.add(first)
    total.add(spent({"update": 2.0, "sample": 1.0}, {"env": 1.0, "policy": 5.0}, updates=7))
    assert dataclasses.asdict(total) == {
        "learner": {"gather": 1.0, "update": 4.0, "sample": 1.0},
        "workers": {"env": 4.0, "policy": 5.0},
        "learner_ran": 200.0,
        "busy_cores": 2.0,
        "cores": 16.0,
        "env_steps": 400,
        "updates": 57,
    }
    assert first.learner == {"gather": 1.0, "update": 2.0}


def test_shares() -> None:
    assert shares({"a": 1.0, "b": 3.0}) == {"a": 0.25, "b": 0.75}
    assert shares({"a": 0.0}) == {"a": 0.0}


def test_every_setting_that_is_named_exists() -> None:
    """Each part once; a renamed setting must be renamed there, too."""
    known = set(dotted(_unresolved(compose([]))))
    sentences = [verdict({**LEARNING, n: 9.0}, HELD) for n in (*LEARNING, "add", "publish",
                 "evaluate", "checkpoint")]  # fmt: skip
    sentences += [verdict(WAITING, w) for w in (ACTING, TestTurns.SLOTS, {**ACTING, "env": 1.0})]
    sentences += [verdict(LEARNING, HELD, updates=900)]
    sentences += [verdict(WAITING, ACTING, Layout(workers=4, cores=2), busy_cores=8.0)]
    assert {found.part for found in sentences} == set(get_args(Part))
    named = {k for found in sentences for k in re.findall(r"([a-z_.]+)=", found.sentence)}
    assert named >= {"workers", "launch.slots", "trainer.checkpoint_every_env_steps", "env.vector"}
    assert named <= known
