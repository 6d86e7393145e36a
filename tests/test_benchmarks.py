"""The benchmarks in tiny configurations: what they tell, never how fast anything is."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch

from actorlearner.contracts import Acting, BadInput, Batch, EnvFactory, Snapshot, StreamLayout
from actorlearner.envs import GymEnvFactory
from actorlearner.suites import AtariSettings
from actorlearner.worker import probe
from tests.command import ROOT, Command
from tests.tiny import Treadmill

BENCHMARKS = ROOT / "benchmarks"
FACTS = {"time", "commit", "source", "cpu", "cores", "platform", "python", "versions"}
SMALL = ["workers=2", "agent.hidden=[16]", "replay.capacity=5000", "device=cpu"]


def check(result: dict[str, Any], script: str) -> dict[str, Any]:
    """``result``, which must say what measured where."""
    assert result["benchmark"] == script
    assert set(result) >= FACTS
    assert result["cores"] >= 1
    assert result["versions"]["torch"]
    return result


def load(script: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module(script)


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/learning.py as a module."""
    return load("learning", monkeypatch)


class Called(NamedTuple):
    """What a benchmark returned and reported."""

    code: int
    result: dict[str, Any]
    out: str


Call: TypeAlias = Callable[[str, str], Called]


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Call]:
    """Runs a benchmark in this process, below ``tmp_path``."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(Batch, "to", Batch.to)  # the learner's puts a clock into it
    monkeypatch.chdir(tmp_path)

    def call(script: str, arguments: str) -> Called:
        monkeypatch.setattr(sys, "argv", [script, *shlex.split(arguments)])
        code = load(script, monkeypatch).main() or 0
        out = capsys.readouterr().out
        return Called(code, check(json.loads(out.splitlines()[-1]), script), out)

    yield call
    torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------- env steps


def test_env_steps_tells_ours_and_the_limit(tmp_path: Path) -> None:
    short = "--seconds 0.2 --warmup 0.1 --pairs 2 --search-seconds 0.1 --limit-envs 2,4"
    arguments = [*SMALL, *short.split(), "--out", "lines"]
    with Command(arguments, tmp_path, BENCHMARKS / "env_steps.py") as command:
        assert command.wait().code == 0, command.err
        assert command.leaves_nothing()
    assert command.err == ""
    result = check(json.loads(command.out.splitlines()[-1]), "env_steps")
    assert json.loads((tmp_path / "lines").read_text()) == result
    assert result["env"] == "CartPole-v1"
    assert result["env_class"] == "SyncVectorEnv"
    assert (result["workers"], result["unroll_length"]) == (2, 16)
    tried = {int(count): rate for count, rate in result["limit_search"].items()}
    assert set(tried) == {2, 4}
    best = max(tried, key=lambda count: tried[count])
    assert result["envs_per_worker"] == result["limit_envs_per_process"] == best
    assert len(result["ratios"]) == 2
    assert result["ratio"] == pytest.approx(sum(result["ratios"]) / 2, abs=1e-3)
    for pair in result["pairs"]:
        quotient = pair["env_steps_per_s"] / pair["limit_per_s"]
        assert pair["ratio"] == pytest.approx(quotient, abs=1e-3)
    assert 0.01 < result["ratio"] < 10
    assert result["ratio_per_core_s"] > 0
    assert 50 < result["bytes_per_unroll"] <= result["bytes_per_unroll_max"]
    assert 0 < result["first_env_step_s"] < 60
    assert result["settings"][: len(SMALL)] == SMALL
    assert result["settings"][-1] == f"envs_per_worker={best}"


def test_env_steps_refuses_what_the_command_refuses(call: Call) -> None:
    with pytest.raises(BadInput, match="did you mean workers"):
        call("env_steps", "worker=2")


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGINT, ["--skip-start-up"]),
        (signal.SIGTERM, ["--skip-start-up"]),
        pytest.param(signal.SIGTERM, [], marks=pytest.mark.slow),  # in the start-up
    ],
)
def test_env_steps_leaves_nothing_when_interrupted(
    number: signal.Signals, options: list[str], tmp_path: Path
) -> None:
    endless = ["--seconds", "1000", "--warmup", "0", "--search-seconds", "0.1", "--limit-envs", "2"]
    arguments = [*SMALL, *endless, *options]
    with Command(arguments, tmp_path, BENCHMARKS / "env_steps.py") as command:
        command.wait_until(lambda: command.worker(1))
        command.signal(number, group=number == signal.SIGINT)
        assert command.wait().code == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
        assert command.leaves_nothing()
    assert command.err == ""


def limit_of(limit: ModuleType, factory: EnvFactory, num_envs: int) -> Any:
    """A recipe of one process that acts with 0 only."""

    class Still:
        def load(self, snapshot: Snapshot) -> None: ...

        def act(self, observation: Any, generator: Any) -> tuple[Any, dict[str, Any]]:
            return np.zeros(num_envs, np.int64), {}

    spec, snapshot = probe(factory), Snapshot(0, {})
    return limit.Recipe(factory, spec, lambda *_: Still(), snapshot, num_envs, 1, Acting())


def test_the_limit_does_not_count_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = load("limit", monkeypatch)
    factory = GymEnvFactory.of(partial(Treadmill, True, False, limit=4))
    recipe = limit_of(limit, factory, num_envs=3)
    steps = limit._steps(recipe, 0, limit.vector_env(recipe))
    assert [next(steps) for _ in range(11)] == [3, 3, 3, 3, 0, 3, 3, 3, 3, 0, 3]


def test_the_limit_plays_the_same_atari_as_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ale_py")
    limit = load("limit", monkeypatch)
    settings = AtariSettings(
        frame_skip=3, frame_stack=2, screen_size=42, sticky_actions=0.3, noop_max=5,
        fire_on_reset=True, full_action_space=True, max_frames=60,
    )  # fmt: skip
    factory = settings.factory()
    ours = factory.vector(2)
    assert ours is not None
    envs = limit.vector_env(limit_of(limit, factory, num_envs=2))
    try:
        assert isinstance(envs, type(ours))
        generator = np.random.default_rng(0)
        seeds: Any = np.array([3, 4])
        (frame, _), (stack, _) = ours.reset(seed=seeds), envs.reset(seed=seeds)
        ends = 0
        for _ in range(60):
            assert stack.shape == (2, 2, 42, 42)
            assert np.array_equal(stack[:, -1:], frame)
            action = generator.integers(18, size=2)
            frame, *outcome, _ = ours.step(action)
            stack, *same, _ = envs.step(action)
            assert all(np.array_equal(a, b) for a, b in zip(outcome, same, strict=True))
            ends += int(outcome[2].sum())
        assert ends >= 2, "max_frames were kept"
    finally:
        ours.close()
        envs.close()


# ------------------------------------------------------------------------- replay and learner


def test_replay_tells_speed_and_size(call: Call) -> None:
    short = "--capacity 300 --seconds 0.005 --pairs 2 --batch-sizes 8,16"
    result = call("replay", short).result
    kinds = {(r["row"], r["prioritized"], r["batch_size"]): r for r in result["results"]}
    assert set(kinds) == set(product(("vector", "atari"), (False, True), (8, 16)))
    for (kind, _, _), r in kinds.items():
        assert r["rows_added_per_s"] > 1
        assert r["batches_per_s"] > 1
        assert set(r["batch_ratios"]) == {"take"}
        assert 0 < r["batch_ratios"]["take"] < 10
        one_frame = 84 * 84 if kind == "atari" else 16
        assert one_frame < r["bytes_per_row"] < 1.2 * one_frame + 100
    assert (result["capacity"], result["batch_sizes"]) == (300, [8, 16])


def test_the_frames_of_a_batch_are_those_that_the_buffer_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many from as many places: what `take` is measured by must not be less work."""
    replay = load("replay", monkeypatch)
    index = replay.same_frames(np.array([25, 12]), 10, 4)
    assert index.tolist() == [[[2, 3, 4, 5], [0, 0, 1, 2]], [[3, 4, 5, 6], [0, 1, 2, 3]]]
    assert replay.same_frames(np.array([9]), 10, 1).tolist() == [[[9]], [[9]]]


def test_replay_drives_other_libraries(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What stands in for one is told what to do, and answers with CPU seconds."""
    stand_in = (
        f"#!{sys.executable}\nimport sys\n"
        "for line in sys.stdin:\n"
        "    print({'batch 8': 2.0, 'add 32': 16.0}[line.strip()], flush=True)\n"
    )
    for name in ("cpprb", "tianshou"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").write_text(stand_in)
        (tmp_path / name / "bin" / "python").chmod(0o755)
    replay = load("replay", monkeypatch)
    monkeypatch.setattr(replay, "ROWS", {"atari": replay.ROWS["atari"]})
    monkeypatch.setattr(replay, "clock", lambda job, seconds: lambda: 0.5)
    short = f"--peers {tmp_path} --capacity 300 --pairs 2 --batch-sizes 8 --envs 1"
    uniform, by_priority = call("replay", short).result["results"]
    assert set(uniform["batch_ratios"]) == {"take"}
    assert by_priority["batch_ratios"] == {"take": 1.0, "cpprb": 4.0, "tianshou": 4.0}
    assert by_priority["rows_added_per_s"] == 32.0, "an unroll of 16 rows in half a second"
    assert by_priority["add_ratios"] == {"cpprb": 16.0, "tianshou": 16.0}, "of a row"


def test_checkpoint_tells_the_time_between_updates(call: Call) -> None:
    result = call("checkpoint", "--only atari --rows 128 --every 64 --checkpoints 3").result
    assert [r["storage"] for r in result["results"]] == ["memory", "disk"]
    for r in result["results"]:
        plain, during = r["intervals"]
        assert during > 0
        assert plain + during > 5
        assert r["longest_ms"][1] > r["median_ms"][1] > 0.1


def test_learner_tells_where_the_time_goes(call: Call) -> None:
    result = call("learner", f"{' '.join(SMALL)} --threads 1 --seconds 0.1 --rows 500").result
    assert (result["agent"], result["device"], result["threads"]) == ("DQN", "cpu", 1)
    assert result["updates_per_s"] > 1
    assert result["samples_per_s"] == pytest.approx(128 * result["updates_per_s"], rel=0.01)
    parts = {"sample", "to_device", "q_step", "optimise", "feedback", "after_step", "other"}
    assert set(result["parts_ms"]) == parts
    assert all(ms > 0 for ms in result["parts_ms"].values())
    assert result["bare_ms"] > 0
    assert -1 < result["overhead_cpu"] < 10


def test_training_tells_its_rate_beside_bare_updates(call: Call) -> None:
    settings = "workers=0 agent.hidden=[16] agent.batch_size=16 samples_per_insert=4 device=cpu"
    result = call("training", f"{settings} --seconds 0.3 --warmup 0.1 --pairs 2").result
    assert len(result["pairs"]) == 2
    for pair in result["pairs"]:
        steps_per_update = pair["env_steps_per_s"] / pair["updates_per_s"]
        assert steps_per_update == pytest.approx(4, rel=0.2)  # 16 rows of a batch, 4 of an insert
        assert 0 < pair["ratio"] < 1.2
        quotient = pair["updates_per_s"] / pair["bare_updates_per_s"]
        assert pair["ratio"] == pytest.approx(quotient, abs=1e-3)
        quotient = pair["updates_per_s"] / pair["model_updates_per_s"]
        assert pair["of_model"] == pytest.approx(quotient, abs=1e-3)
        assert pair["model_updates_per_s"] <= pair["bare_updates_per_s"]


def test_the_cost_model_shares_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("training", monkeypatch).model_updates_per_s
    assert model(2.0, 2, 1.0, 2, 2) == pytest.approx(1 / 3), "both take both cores, in turns"
    assert model(2.0, 1, 0.5, 2, 2) == pytest.approx(1 / 2), "acting fits beside one thread"
    assert model(2.0, 1, 1.5, 1, 2) == pytest.approx(1 / 2), "each has a core"
    assert model(1.0, 1, 3.0, 8, 16) == pytest.approx(1 / 3), "acting takes longest"
    assert model(2.0, 1, 3.0, 8, 2) == pytest.approx(1 / 4)


def test_time_to_return_tells_ours_alone(call: Call) -> None:
    """Any return is enough: it stops at the first evaluation."""
    settings = "workers=0 agent.hidden=[8] replay.capacity=2000 replay.warmup_env_steps=2000"
    short = "--seeds 1,2 --target 0 --episodes 1 --every 200 total_steps=2_000"
    result = call("time_to_return", f"{settings} {short}").result
    assert [200 <= run["ours_env_steps"] < 600 for run in result["runs"]] == [True, True]
    assert all(0 < run["ours_s"] < 60 for run in result["runs"])
    assert "ratio" not in result


def test_scaling_tells_every_point_and_draws_them(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    short = "--workers 1,2 --envs 1,4 --rounds 1 --seconds 0.1 --warmup 0.05 --plot points.png"
    result = call("scaling", f"agent.hidden=[16] replay.capacity=5000 {short}").result
    rates = result["env_steps_per_s"]
    assert [(w, e) for w in rates for e in rates[w]] == [(w, e) for w in "12" for e in "14"]
    assert all(rate > 0 for by_envs in rates.values() for rate in by_envs.values())
    assert (tmp_path / "points.png").read_bytes().startswith(b"\x89PNG")


def test_guards_tell_what_is_too_low(call: Call, tmp_path: Path, monkeypatch: Any) -> None:
    check = load("check", monkeypatch)
    (tmp_path / "one.py").write_text("""print('{"ratio": 0.7}')""")
    command = (str(tmp_path / "one.py"),)
    guards = [check.Guard(f"at least {n}", command, lambda r: r["ratio"], n) for n in (0.6, 0.8)]
    monkeypatch.setattr(check, "GUARDS", guards)
    told = call("check", "")
    assert told.code == 1
    assert told.result["low"] == ["at least 0.8"]
    monkeypatch.setattr(check, "GUARDS", guards[:1])
    told = call("check", "")
    assert (told.code, told.result["low"]) == (0, [])


PEER = """
import json, sys
with open("calls", "a") as file:
    file.write("peer ")
assert sys.argv[1:] == ["--n", "3", "--work", "w2", "--seconds", "7"]
print("hello")
print(json.dumps({"env_steps_per_s": 50}))
"""


def test_peers_take_turns(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "one.py").write_text(PEER)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
    listed = {"w2": [("one", "venv", "one.py --n 3"), ("other", "venv", "absent.py")]}
    (tmp_path / "run_peers.py").write_text(f"P = {str(tmp_path)!r}\nS = {listed}\n")
    ours = f"""open({str(tmp_path / "runs" / "calls")!r}, "a").write("ours "); """
    ours += """print('{"env_steps_per_s": 100}')"""
    (tmp_path / "ours.py").write_text(ours)
    peers = load("peers", monkeypatch)
    monkeypatch.setattr(peers, "OURS", {"w2": (str(tmp_path / "ours.py"), "workers=2")})
    line = f"--peers {tmp_path} --work w2 --seconds 7 --pairs 3 agent.gamma=0.9 --only "
    result = call("peers", line + "one").result
    assert (tmp_path / "runs" / "calls").read_text() == "ours peer peer ours ours peer "
    assert (result["peer"], result["ratio"], result["ratios"]) == ("one", 2.0, [2.0] * 3)
    assert result["settings"] == ["workers=2", "--seconds=7", "agent.gamma=0.9"]
    with pytest.raises(RuntimeError, match=r"absent\.py.*told nothing"):
        call("peers", line + "other")
    with pytest.raises(argparse.ArgumentTypeError, match="there is no another"):
        call("peers", line + "another")


def test_learner_knows_sequences(call: Call) -> None:
    """And the bare loop makes the same steps: only its own arithmetic is timed against it."""
    small = "units=8 deterministic=16 latents=2 batch_size=2 batch_length=2 imagination_length=1"
    settings = " ".join(f"agent.{setting}" for setting in [*small.split(), "imagine_last=null"])
    result = call(
        "learner",
        f"experiment=cartpole_dreamer workers=0 device=cpu {settings} --threads 1 --seconds 0.1 "
        "--rows 100 --pairs 2",
    ).result
    assert (result["agent"], result["pairs"]) == ("Dreamer", 2)
    assert {"world_step", "controller_step"} <= set(result["parts_ms"])


def test_the_bare_loop_makes_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, common = load("learner", monkeypatch), load("common", monkeypatch)
    ends = []
    for is_bare in (True, False):
        parts = common.Parts.of([*SMALL, "replay.prioritized=false", "seed=1"])
        learner.build(parts, 200)
        torch.manual_seed(0)
        if is_bare:
            learner.bare_loop(parts)()
        else:
            parts.trainer._update(parts.store, parts.agent)
        ends.append(parts.agent.online.state_dict())
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_synthetic_unrolls_keep_to_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    common, replay = (load(name, monkeypatch) for name in ("common", "replay"))
    unrolls = common.synthetic_unrolls(replay.ROWS["vector"], StreamLayout(5, 20), 30)
    valid, first, terminated = (
        np.concatenate([getattr(unroll, name) for unroll in unrolls])
        for name in ("valid", "first", "terminated")
    )
    assert terminated.sum() > 5
    assert np.array_equal(~valid[1:], terminated[:-1])
    assert np.array_equal(first[1:], ~valid[:-1])
    assert valid[0].all()
    assert not first[0].any()
    assert not terminated[-1].any()


# ----------------------------------------------------------------------------------- learning


def fake_run(path: Path, returns: Sequence[float], total_steps: int = 300) -> Path:
    """A run directory with an evaluation every 100 env steps."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(f"total_steps: {total_steps}\nseed: 7\nworkers: 2\n")
    lines = [{"env_steps": 50, "updates": 9, "wall_s": 1.0, "policy/lag_mean": 0.5}]
    for index, value in enumerate(returns, 1):
        lines.append({"env_steps": 100 * index, "evaluation/return_mean": value})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "metrics.jsonl").write_text(text + '{"env_steps": 3')  # an incomplete last line
    return path


def test_learning_reads_finished_runs(call: Call, tmp_path: Path) -> None:
    for index, final in enumerate((10.0, 20.0, 30.0, 1000.0)):
        fake_run(tmp_path / "many" / str(index), [0.0, 1.0, final])
    fake_run(tmp_path / "one", [0.0, 5.0, 7.0])
    code, result, out = call("learning", "--group four=many --group lone=one --out-dir told")
    assert code == 0
    assert json.loads((tmp_path / "told" / "report.json").read_text()) == result
    four, lone = result["groups"]["four"], result["groups"]["lone"]
    assert four["final_returns"] == [10, 20, 30, 1000]
    assert (four["mean"], four["iqm"], four["failed"]) == (265, 25, 0)
    assert 10 <= four["interval"][0] < 25 < four["interval"][1] <= 1000
    assert (lone["iqm"], lone["interval"]) == (7, [7, 7])
    assert lone["runs"][0]["seed"] == 7
    assert lone["runs"][0]["updates"] == 9
    assert "too narrow" in out


def test_a_run_that_failed_is_not_left_out(call: Call, tmp_path: Path) -> None:
    fake_run(tmp_path / "good", [0.0, 1.0, 9.0])
    fake_run(tmp_path / "bad", [0.0, 100.0])
    (tmp_path / "empty").mkdir()
    code, result, _ = call("learning", "--runs good bad empty")
    assert code == 1
    summary = result["groups"]["runs"]
    assert summary["final_returns"] == [9, None, None]
    assert (summary["iqm"], summary["mean"], summary["failed"]) == (None, None, 2)
    code, result, _ = call("learning", "--runs good bad empty --failed-return -3")
    assert code == 0
    summary = result["groups"]["runs"]
    assert (summary["final_returns"], summary["mean"]) == ([9, -3, -3], 1)


def test_learning_draws_the_curves(learning: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [fake_run(tmp_path / name, [1.0, 2.0, 3.0]) for name in "ab"]
    paths.append(tmp_path / "empty")
    groups = {"both": [learning.Run.read(path) for path in paths], "none": []}
    assert learning.plot(groups, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_learning_does_without_matplotlib(
    learning: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    groups = {"lone": [learning.Run.read(fake_run(tmp_path / "a", [1.0]))]}
    assert not learning.plot(groups, tmp_path / "curves.png")
    assert 'pip install "actorlearner[plot]"' in capsys.readouterr().out


def test_learning_runs_every_seed_of_a_task(call: Call, tmp_path: Path) -> None:
    few = "workers=0 total_steps=200 replay.warmup_env_steps=100 agent.hidden=[16] device=cpu"
    evaluation = "evaluation.episodes=1 evaluation.step_limit=20"
    task = "--task 'a task=agent.n_step=2' --seeds 3,4 --jobs 2 --out-dir told"
    code, result, _ = call("learning", f"{few} {evaluation} {task}")
    assert code == 0, (tmp_path / "told/a_task/seed_3.log").read_text()
    (summary,) = result["groups"].values()
    assert [r["seed"] for r in summary["runs"]] == [3, 4]
    assert all(0 < score <= 20 for score in summary["final_returns"])
    assert all(r["env_steps"] >= 200 for r in summary["runs"])
    assert "n_step: 2" in (tmp_path / "told/a_task/seed_3/config.yaml").read_text()
    with pytest.raises(BadInput, match="seed_3 is there"):
        call("learning", task)
