"""Updates: what is not finite, what a device does alone, and training steps that are compiled."""

from __future__ import annotations

import logging
import math
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actorlearner import assembly, feedback
from actorlearner.agents.dqn import DQN
from actorlearner.agents.dreamer import Dreamer
from actorlearner.contracts import (
    ArraySpec,
    BadInput,
    EnvSpec,
    NonFiniteError,
    StepOutput,
    StreamLayout,
)
from actorlearner.feedback import FeedbackLine
from actorlearner.optim import LaProp
from actorlearner.replay import ReplayBuffer
from actorlearner.trainer import Trainer
from benchmarks.common import synthetic_unrolls
from tests.test_trainer import (
    Recorder,
    checkpoints,
    differences,
    dqn,
    everything,
    replay,
    trainer_of,
)
from tests.tiny import Guess

DREAMER: dict[str, Any] = {
    "units": 8, "deterministic": 16, "classes": 4, "latents": 4, "blocks": 4, "image_depth": 2,
    "batch_size": 3, "batch_length": 4, "imagination_length": 3, "warmup_updates": 0,
}  # fmt: skip


SHORT = {"batch_length": 2, "imagination_length": 1, "latents": 2}
"""A graph is as long as they say."""


class Event:
    """Of a device that is never behind."""

    def __init__(self, device: torch.device) -> None:
        self.record = self.synchronize = lambda: None


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is treated as an accelerator, from which nothing is read at once."""
    monkeypatch.setattr(Trainer, "_reads_at_once", False)
    monkeypatch.setattr(torch, "Event", Event)


class Explodes(DQN):
    """Its loss and its priorities are ``value`` where ``is_bad`` says so of the update."""

    is_bad: Callable[[int], bool]
    value = math.nan

    def q_training_step(self, batch: Any) -> StepOutput:
        output = super().q_training_step(batch)
        self.step = getattr(self, "step", 0) + 1
        if self.is_bad(self.step):
            self.before = {name: p.clone() for name, p in self.online.state_dict().items()}
            output.loss = output.loss * self.value
            output.feedback = {"priority": output.feedback["priority"] * self.value}
        return output

    def after_step(self, name: str, updates: int) -> None:
        if self.is_bad(self.step):
            assert differences(self.before, self.online.state_dict()) == []
        super().after_step(name, updates)


def explodes(is_bad: Callable[[int], bool], **settings: Any) -> Explodes:
    model = Explodes(hidden=(8,), batch_size=8, **settings)
    model.is_bad = is_bad
    return model


def filled(store: ReplayBuffer, agent: Any, env_spec: EnvSpec) -> ReplayBuffer:
    """``store`` with some noise for ``agent``, both built."""
    layout = StreamLayout(1, 8)
    agent.build(env_spec)
    if not store._built_for:
        store.build(env_spec, agent.sample_spec, layout, planned_updates=1)
    noted = agent.policy_factory(store.extras).extras_spec
    for unroll in synthetic_unrolls(env_spec, layout, 20, noted):
        store.add(unroll)
    return store


def one_update(agent: Any, steps: Any, carry: Any) -> dict[str, torch.Tensor]:
    """All that the training ``steps`` say of a batch, and their gradients."""
    torch.manual_seed(0)
    state = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
    said: dict[str, torch.Tensor] = {}
    for name, step in steps.items():
        agent.zero_grad()
        output = step(carry)
        output.loss.backward()
        numbers = {"loss": output.loss.detach(), **output.metrics, **output.feedback}
        said |= {f"{name}/{key}": torch.as_tensor(number) for key, number in numbers.items()}
        said |= {f"{name}/{k}": p.grad for k, p in agent.named_parameters() if p.grad is not None}
        carry = carry if output.carry is None else output.carry
    agent.load_state_dict(state)  # returns have moved the scale of advantages
    return said


# ----------------------------------------------------------------- memory that an update frees


KEEPING = """
import resource
import numpy as np
from tests.test_trainer import dqn, replay, trainer_of
from tests.tiny import Guess

def faults():
    def update():
        blocks = [np.ones(3_000_000, np.uint8) for _ in range(8)]
    update()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        update()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
trainer_of().fit(Guess, replay(), dqn())
print(before, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_memory_that_an_update_frees_is_kept_for_the_next() -> None:
    """Large blocks are mapped once, where the C library by itself maps their pages each time."""
    result = subprocess.run(
        [sys.executable, "-c", KEEPING], capture_output=True, text=True, timeout=50, check=True
    )
    before, after = map(int, result.stdout.split())
    assert before > 20_000
    assert after < 100


# -------------------------------------------------------------------------- what is not finite


class TestSkip:
    @pytest.mark.parametrize("where", ["cpu", "device"])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_bad_step_changes_nothing_and_is_counted(
        self,
        where: str,
        value: float,
        request: pytest.FixtureRequest,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        if where == "device":
            request.getfixturevalue("as_on_a_device")
        recorder, store = Recorder(), replay()
        runs = trainer_of(nonfinite="skip", sinks=[recorder])
        model = explodes(lambda step: step in (3, 4, 9))
        model.value = value
        runs.fit(Guess, store, model)
        store.check_valid()  # priorities are finite
        assert runs.updates == model.step == 12
        assert all(torch.isfinite(p).all() for p in model.parameters())
        steps = runs._optimizers["q"].state_dict()["state"][0]["step"]
        assert int(steps) == 12 - 3
        lines = [line for _, line in recorder.lines if "q/skipped_updates" in line]
        assert sum(line["q/skipped_updates"] for line in lines) == 3
        assert min(line["q/skipped_updates"] for line in lines) == 0
        told = [r.getMessage() for r in caplog.records if "was not finite" in r.getMessage()]
        assert len(told) == sum(line["q/skipped_updates"] > 0 for line in lines)
        assert "the first of them update 3;" in told[0]

    def test_by_default_the_run_ends_and_has_no_such_metric(self) -> None:
        recorder = Recorder()
        trainer_of(sinks=[recorder]).fit(Guess, replay(), dqn())
        assert recorder.steps("q/skipped_updates") == []

    @pytest.mark.usefixtures("as_on_a_device")
    def test_on_a_device_the_run_ends_at_the_log_period(self) -> None:
        model = explodes(lambda step: step in (5, 6))
        runs = trainer_of()
        with pytest.raises(
            NonFiniteError,
            match=r"^q/loss or its gradient was not finite in 2 updates, the first of them update "
            r"5; these steps were not made\. Lower agent.learning_rate",
        ):
            runs.fit(Guess, replay(), model)
        assert 6 <= runs.updates < 12

    def test_what_a_dreamer_knows_of_returns_stays_finite(self) -> None:
        """The world's step was not made, and what it imagined is not finite: the scale stands."""
        agent = Dreamer(**DREAMER)
        agent.build(EnvSpec("T", {"o": ArraySpec((3,), "float32")}, ArraySpec((), "int64", (2,))))
        agent.return_scale(torch.linspace(-3, 3, 100))
        before = agent.return_scale.low.clone(), agent.return_scale.high.clone()
        agent.return_scale(torch.full((5,), math.nan))
        agent.return_scale(torch.tensor([math.inf, -math.inf, 0.0]))
        assert (agent.return_scale.low, agent.return_scale.high) == before


# ------------------------------------------------------------------------- a device by itself


@pytest.mark.usefixtures("as_on_a_device")
class TestDevice:
    def test_learns_as_on_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """To the bit, where no feedback comes late."""

        def run() -> dict[str, Any]:
            runs, model = trainer_of(), dqn()
            runs.fit(Guess, replay(prioritized=False), model)
            return everything(runs, model)

        device = run()
        monkeypatch.undo()
        assert differences(device, run()) == []

    def test_no_feedback_is_lost_in_a_checkpoint(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """It comes an update late, but what is saved has all of it."""
        sent: list[Any] = []
        send = FeedbackLine.send

        def noting(line: FeedbackLine, keys: Any, *more: Any) -> None:
            sent.append(keys.tolist())
            send(line, keys, *more)

        monkeypatch.setattr(FeedbackLine, "send", noting)
        taken: list[Any] = []
        late: set[int] = set()

        class Store(ReplayBuffer):
            def sample(self) -> Any:
                late.add(len(sent) - len(taken))
                return super().sample()

            def feed_back(self, keys: Any, given: Any) -> None:
                taken.append(keys.tolist())
                super().feed_back(keys, given)

            def state_dict(self) -> dict[str, Any]:
                assert taken == sent
                return super().state_dict()

        store = Store(capacity=256, warmup_env_steps=16)
        runs = trainer_of(run_dir=tmp_path, checkpoint_every_env_steps=24)
        runs.fit(Guess, store, dqn())
        assert len(checkpoints(tmp_path)) > 1
        assert len(taken) == runs.updates
        assert late == {0, 1}  # none after a checkpoint

    @pytest.mark.parametrize("kind", ["dqn", "rainbow", "iqn", "dreamer", "dreamer of images"])
    def test_no_update_waits_for_it(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """On torch's meta device nothing has a value: whatever reads one is an error."""
        spec = ArraySpec((3,), "float32")
        if kind == "dreamer of images":
            spec = ArraySpec((16, 16, 3), "uint8")
        env_spec = EnvSpec("Meta", {"observation": spec}, ArraySpec((2,), "int64", (2, 3)))
        runs = Trainer(device="cpu", workers=0, unroll_length=8, console="off")
        runs.device = torch.device("meta")
        store: ReplayBuffer
        if kind.startswith("dreamer"):
            agent: Any = Dreamer(**DREAMER)
            store = ReplayBuffer(capacity=512, prioritized=False)
        else:
            head = {"dqn": "expected", "rainbow": "c51"}.get(kind, kind)
            soft = {"target_tau": 0.5} if kind == "iqn" else {"target_every_updates": 1}
            agent = DQN(hidden=(8,), head=head, noisy=kind == "rainbow", **soft)
            # Adam is fused, and heeds a step that is not finite, on real devices only.
            monkeypatch.setattr(
                DQN, "configure_optimizers", lambda a: {"q": LaProp(a.online.parameters(), 0.1)}
            )
            store = ReplayBuffer(capacity=512)
        copies: list[torch.Size] = []

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            assert tensor.is_meta
            copies.append(tensor.shape)
            return torch.ones(tensor.shape, dtype=tensor.dtype)

        monkeypatch.setattr(feedback, "_copied", copied)
        runs._build(env_spec, store, agent)
        filled(store, agent, env_spec)
        runs._finite_steps._begun.update(runs._training_steps)  # the first one is read
        for _ in range(2):
            runs._update(store, agent)
        assert all(p.is_meta for p in agent.parameters())
        assert copies
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            runs._log.means.flush()  # once per log period, to write them


# ---------------------------------------------------------------------- compiled training steps


class TestCompile:
    def test_every_step_is_compiled_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[tuple[Any, dict[str, Any]]] = []

        def compile_(step: Any, **options: Any) -> Any:
            made.append((step, options))
            return step

        monkeypatch.setattr(torch, "compile", compile_)
        model = dqn()
        runs = trainer_of(compile="max-autotune", lockstep=False)
        runs.fit(Guess, replay(), model)
        assert made == [(model.q_training_step, {"mode": "max-autotune", "dynamic": False})]
        trainer_of().fit(Guess, replay(), dqn())
        assert len(made) == 1

    def said(
        self, kind: str, compile_: Callable[[Any], Any]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """What the training steps of a small agent say, as they are and compiled."""
        env_spec = EnvSpec("T", {"o": ArraySpec((3,), "float32")}, ArraySpec((2,), "int64", (2, 3)))
        torch.manual_seed(0)
        agent: Any = Dreamer(**{**DREAMER, **SHORT}) if kind == "dreamer" else dqn()
        store = ReplayBuffer(capacity=512, prioritized=False)
        batch, steps = filled(store, agent, env_spec).sample(), agent.training_steps()
        plain = one_update(agent, steps, batch)
        assert differences(plain, one_update(agent, steps, batch)) == []
        compiled = one_update(agent, {name: compile_(s) for name, s in steps.items()}, batch)
        assert compiled.keys() == plain.keys()
        return plain, compiled

    @pytest.mark.parametrize("kind", ["dqn", pytest.param("dreamer", marks=pytest.mark.slow)])
    def test_our_steps_are_one_graph_each(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing falls back to Python; and without a code generator they say the same."""
        # pytest listens to every logger, and torch would write the graph out at every stage.
        monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        plain, compiled = self.said(
            kind, lambda step: torch.compile(step, backend=backend, fullgraph=True)
        )
        assert len(graphs) == {"dqn": 1, "dreamer": 2}[kind]
        for name, tensor in compiled.items():
            torch.testing.assert_close(tensor, plain[name], rtol=1e-4, atol=1e-5)

    @pytest.mark.slow
    @pytest.mark.timeout(300)  # nothing is compiled yet on a new machine
    @pytest.mark.filterwarnings("ignore")  # of torch, in its own code
    @pytest.mark.parametrize("kind", ["dqn", "dreamer"])
    def test_compiled_steps_say_the_same(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._inductor import config

        monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
        cpu = torch.device("cpu")
        with config.patch(fallback_random=True):  # else it draws other numbers
            plain, compiled = self.said(
                kind, lambda step: assembly.compiled({"it": step}, "default", cpu)["it"]
            )
        for name, tensor in compiled.items():
            torch.testing.assert_close(tensor, plain[name], rtol=1e-3, atol=1e-4)

    def test_no_compiler_no_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._inductor import cpp_builder

        def missing() -> str:
            raise RuntimeError("No working C++ compiler found")

        monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
        runs = trainer_of(compile="default", lockstep=False)
        with pytest.raises(BadInput, match=r"^trainer.compile=default: there is no C\+\+ compiler"):
            runs.fit(Guess, replay(), dqn())
