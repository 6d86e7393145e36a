"""The Trainer: owns the loop, the optimisation, evaluation, checkpoints and the log.

It knows contracts only: which algorithm, store or launcher it drives is the caller's choice.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from actorlearner import checkpoint
from actorlearner.acting import ActingSettings, choose
from actorlearner.assembly import (
    compiled,
    default_agent,
    default_store,
    going_on,
    make_callbacks,
    make_launcher,
    make_tracker,
    one_thread,
    update_threads,
    worker_specs,
)
from actorlearner.callbacks import Callback
from actorlearner.config import unknown_key
from actorlearner.contracts import (
    Acting,
    Agent,
    BadInput,
    CheckpointError,
    EnvSpec,
    EvaluationResult,
    Launcher,
    LauncherClosed,
    MetricSink,
    NonFiniteError,
    PolicyFactory,
    ReportingAgent,
    SettingError,
    StepOutput,
    Store,
    StorePlace,
    StreamLayout,
    Tracker,
)
from actorlearner.control import FILE_NAME, Control
from actorlearner.envs import EnvLike, GymEnvFactory
from actorlearner.evaluate import films_of, summarise, write_films
from actorlearner.faults import Faults
from actorlearner.feedback import FeedbackLine
from actorlearner.interrupts import Interrupts
from actorlearner.memory import core_count, keep_freed_memory
from actorlearner.messages import Messages
from actorlearner.optim import FiniteSteps, LeftOut
from actorlearner.progress import Progress
from actorlearner.randomness import seed_everything
from actorlearner.runlog import RunLog, parameters_in_words
from actorlearner.runstate import RunState, read_weights, settings_of
from actorlearner.saving import Saver, Write
from actorlearner.schedules import SamplesPerInsert
from actorlearner.streams import StreamLedger
from actorlearner.trainersettings import TrainerSettings, resolve_device
from actorlearner.verdict import Layout

logger = logging.getLogger(__name__)

# At the root of the config tree, besides the Trainer's own settings.
_OTHER_KEYS = (
    "env",
    "agent",
    "replay",
    "trainer",
    "experiment",
    "imports",
    "resume",
    "ckpt",
    "eval_only",
)

_AGAINST_NAN = (
    "Lower agent.learning_rate, clip rewards, or look at what the environment pays; "
    "trainer.nonfinite=skip leaves such steps out"
)
_WAIT_S = 0.1  # how long to wait before looking at signals again
_LEARN_S = 0.02  # how long to learn before looking for unrolls again


class Trainer:
    """Trains any agent on any environment.

    Example::

        Trainer(total_steps=20_000).fit("CartPole-v1")

        trainer = Trainer(total_steps=20_000, workers=2, run_dir="runs/mine")
        metrics = trainer.fit(MyEnv, ReplayBuffer(capacity=50_000), DQN())

    Attributes:
        settings: see `TrainerSettings`.
        config: the whole configuration, resolved; stored in checkpoints.
        device: of the learner.
        dtype: of the model's parameters.
        checkpoint: what to go on from.
        model: what `fit` trains, or trained last; None before.
    """

    def __init__(
        self,
        config: DictConfig | None = None,
        *,
        launcher: Launcher | str | None = None,
        tensorboard: Any = None,
        sinks: Sequence[MetricSink] = (),
        callbacks: Sequence[Callback | Mapping[str, Any]] = (),
        checkpoint: str | Path | None = None,
        **settings: Any,
    ) -> None:
        """Check the settings; nothing runs or is written yet.

        Args:
            config: the Hydra configuration behind it all, if there is one, to store.
            launcher: an instance or its target text; None: local processes, or inline for
                ``workers=0``.
            tensorboard: a ``SummaryWriter`` or a directory; None writes into the run directory.
            sinks: further receivers of metrics.
            callbacks: instances; or settings with a ``target``, which come first.
            checkpoint: run, checkpoint directory or file to go on from.
            settings: see `TrainerSettings`; ``device`` and ``dtype`` also as torch objects.

        Raises:
            SettingError: a setting is unknown, of a wrong type or out of bounds.
        """
        for name in ("device", "dtype"):
            if isinstance(settings.get(name), torch.device | torch.dtype):
                settings[name] = str(settings[name]).removeprefix("torch.")
        named: Any = callbacks
        if isinstance(callbacks, list | tuple):
            named = [node for node in callbacks if not isinstance(node, Callback)]
        self.settings = TrainerSettings.make({**settings, "callbacks": named})
        self.config = config
        for name in ("workers", "envs_per_worker"):
            if config is not None and config.get(name) == "auto":
                config[name] = getattr(self.settings, name)  # a resume keeps it, wherever it runs
        self.device = resolve_device(self.settings.device, self.settings.lockstep)
        self.dtype: torch.dtype = getattr(torch, self.settings.dtype)
        self.checkpoint = checkpoint
        self.model: Agent | None = None
        self._callbacks = [
            *make_callbacks(self.settings),
            *(callback for callback in callbacks if isinstance(callback, Callback)),
        ]
        self._faults = Faults(self.settings.faults)
        if self.settings.faults.any:
            self._callbacks.append(self._faults)
        self._stops = False
        self._launcher: Launcher | str | None = launcher
        self._tensorboard = tensorboard
        self._sinks = list(sinks)
        self._training_steps: Mapping[str, Callable[[Any], StepOutput]] = {}
        self._optimizers: Mapping[str, torch.optim.Optimizer] = {}
        self._progress = self._new_progress(batch_rows=1, warmup_env_steps=0)
        self._log = RunLog(None)
        self._control = Control(None)
        self._interrupts = Interrupts()
        self._in_update = False
        self._saver = Saver(self._interrupts, None, self._tell_save)
        self._published_at = 0
        self._published_scalars: dict[str, float] = {}
        self._running_launcher: Launcher | None = None
        self._replay_buffer: Store | None = None

    @property
    def env_steps(self) -> int:
        """Decisions made so far, by all workers."""
        return self._progress.env_steps

    @property
    def updates(self) -> int:
        """Batches learned from so far."""
        return self._progress.updates

    @property
    def log_failed(self) -> bool:
        """Whether some metrics could not be written."""
        return self._log.failed

    @property
    def save_failed(self) -> bool:
        """Whether the newest checkpoint, or the best weights, could not be written."""
        return self._saver.failed

    @property
    def is_saving(self) -> bool:
        """Whether something is being written, or was and nobody has looked since."""
        return self._saver.is_busy

    @property
    def is_saved(self) -> bool:
        """Whether nothing would be lost by ending now."""
        return self._saver.saved_at == (self.env_steps, self.updates)

    @classmethod
    def from_config(cls, config: DictConfig, **arguments: Any) -> Trainer:
        """A Trainer from the whole config tree: root keys, ``trainer``, ``evaluation``, ``launch``.

        Args:
            config: composed; other groups are only stored.
            arguments: of the constructor; callbacks come after those of the config.

        Raises:
            SettingError: as the constructor.
        """
        tree: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
        known = [*TrainerSettings.root, *_OTHER_KEYS]
        misplaced = [f"trainer.{name}" for name in tree.get("trainer", {}) if name in known]
        for key in (*misplaced, *tree):
            if key not in known:
                raise SettingError(unknown_key(key, known))
        at_root = {name: tree[name] for name in TrainerSettings.root if name in tree}
        settings = {**at_root, **tree.get("trainer", {})}
        if "callbacks" in arguments:
            settings["callbacks"] = [*settings.get("callbacks", ()), *arguments.pop("callbacks")]
        return cls(config, **arguments, **settings)

    def fit(
        self, env: EnvLike, replay_buffer: Store | None = None, model: Agent | None = None
    ) -> dict[str, float]:
        """Train ``model`` until ``total_steps``, or until `stop`; evaluate it, save it.

        Args:
            env: a Gymnasium id or spec, an environment class, a callable that makes one, or a
                factory.
            replay_buffer: where the experience goes; None for a `ReplayBuffer` as it comes.
            model: what learns; None for a `DQN` as it comes.

        Returns:
            The metrics of the final evaluation.

        Raises:
            BadInput: something asked for can't be.
            WorkerError: an environment or a worker failed.
            NonFiniteError: a loss or a gradient is not finite.
            KeyboardInterrupt: SIGINT came; everything is saved and closed.
            SystemExit: SIGTERM came; likewise.
        """
        replay_buffer = default_store() if replay_buffer is None else replay_buffer
        model = default_agent() if model is None else model
        with self._running(env, replay_buffer, model) as launcher:
            while not self._is_over and self._interrupts.signal is None:
                self._gather(launcher, replay_buffer, model)
                self._learn(launcher, replay_buffer, model)
                self._do_what_is_due(launcher, replay_buffer, model)
            self._interrupts.raise_if_any()
            self._write_training(replay_buffer)
            metrics = self.evaluate(model)
            self._save(model)
            self._finish_save()
            self._tell_end(metrics)
        return metrics

    def stop(self) -> None:
        """Let `fit` end as it would at ``total_steps``: for callbacks."""
        self._stops = True

    @property
    def _reads_at_once(self) -> bool:
        """Whether the host need not wait for a device to read what a training step gives."""
        return self.device.type == "cpu"

    @property
    def _is_over(self) -> bool:
        return self._stops or self.env_steps >= self.settings.total_steps

    def _gather(self, launcher: Launcher, replay_buffer: Store, model: Agent) -> None:
        """Take in the unrolls that are there; wait for one if there is nothing to learn."""
        self._publish(launcher, model)
        owes = self._progress.limiter.owes_an_update()
        timeout = 0.0 if owes else _WAIT_S
        s = self.settings
        # While updates are owed it takes what is there, unless workers work in this very time.
        is_waiting = not owes or s.lockstep or not s.workers
        with self._log.split("gather" if is_waiting else "add"):
            unrolls = launcher.gather(timeout, self._may_insert)
            # In lockstep a round counts as a whole, lest a failure leave half of one to resume.
            for unroll in list(unrolls) if s.lockstep else unrolls:
                with self._log.split("add"):
                    replay_buffer.add(unroll)
                    self._progress.insert(unroll)
                    self._log.note(unroll, self.updates)
                if self.env_steps >= s.total_steps and not s.lockstep:
                    break
        self._tell_progress(model)
        self._tell_notes(launcher)

    @staticmethod
    def _tell_notes(launcher: Launcher) -> None:
        while launcher.notes:
            logger.warning(launcher.notes.pop(0))

    def _may_insert(self) -> bool:
        """Whether workers may go on; a store that can't answer yet is short of what they bring."""
        store = self._replay_buffer
        return self._progress.limiter.may_insert() or (store is not None and not store.ready())

    def _learn(self, launcher: Launcher, replay_buffer: Store, model: Agent) -> None:
        """Make the updates that are owed; in lockstep all, else until other work may wait."""
        self._threads.busy_cores = launcher.busy_cores()
        deadline = time.perf_counter() + _LEARN_S
        while self._progress.limiter.owes_an_update() and replay_buffer.ready():
            self._update(replay_buffer, model)
            if self.settings.lockstep:
                continue
            self._publish(launcher, model)
            is_asked_to_end = self._stops or self._interrupts.signal is not None
            if is_asked_to_end or time.perf_counter() > deadline:
                break

    def _update(self, replay_buffer: Store, model: Agent) -> None:
        """One sampled batch through all training steps."""
        self._in_update = True
        with self._log.split("sample"):
            batch = replay_buffer.sample()
        self._progress.limiter.sample()
        if self.settings.compile is not None and self.device.type == "cuda":
            # Or CUDA graphs would reuse the memory of what a training step carries to the next.
            torch.compiler.cudagraph_mark_step_begin()
        told: dict[str, torch.Tensor | float] = {}
        with self._log.split("update"), self._threads.update():
            carry: Any = batch.to(self.device)
            for name, training_step in self._training_steps.items():
                output = training_step(carry)
                norm, is_made = self._optimise(name, output.loss)
                metrics = {**output.metrics, "gradient_norm": norm}
                self._log.means.add(name, metrics)
                if self._callbacks:
                    told |= {f"{name}/{metric}": value for metric, value in metrics.items()}
                self._feedback.send(batch.keys, output.feedback, is_made)
                carry = carry if output.carry is None else output.carry
            self._progress.updates += 1
            for name in self._training_steps:
                model.after_step(name, self.updates)
            self._feedback.deliver()
        self._in_update = False
        for callback in self._callbacks:
            callback.after_update(self, told)

    def _optimise(self, name: str, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | bool]:
        """Minimise ``loss`` by one step, if it is finite.

        Returns:
            The norm of the gradient before clipping; and whether the step was made, see
            `FiniteSteps.step`.
        """
        optimizer, update = self._optimizers[name], self.updates + 1
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:  # `zero_grad` takes long around this, for small networks
            parameter.grad = None
        loss.backward()
        clip = self.settings.gradient_clip_val
        norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if clip is None else clip)
        is_finite = torch.isfinite(loss.detach() + norm)
        is_made = self._finite_steps.step(name, optimizer, is_finite, update)
        if is_made is False and self.settings.nonfinite == "stop":
            raise NonFiniteError(
                f"{name}/loss is {loss.item():g} and its gradient's norm {norm.item():g} in update "
                f"{update}; this step was not made. {_AGAINST_NAN}"
            )
        return norm, is_made

    def _tell_left_out(self) -> dict[str, float]:
        """Metrics of the steps left out since this was last asked; with ``stop`` there are none.

        Raises:
            NonFiniteError: some were left out on a device, and shall end the run.
        """
        left_out = self._finite_steps.flush()
        stops = self.settings.nonfinite == "stop"
        for name, (count, first) in left_out.items():
            text = (
                f"{name}/loss or its gradient was not finite in {count} updates, the first of them "
                f"update {first}; these steps were not made"
            )
            if stops:
                raise NonFiniteError(f"{text}. {_AGAINST_NAN}")
            logger.warning("%s", text)
        if stops:
            return {}
        none = dict.fromkeys(self._optimizers, LeftOut(0, 0))
        counts = {name: steps.updates for name, steps in (none | left_out).items()}
        return {f"{name}/skipped_updates": float(count) for name, count in counts.items()}

    def _publish(self, launcher: Launcher, model: Agent) -> None:
        """Give workers a new snapshot if it is due, or if what it holds besides weights changed."""
        period = 1 if self.settings.lockstep else self.settings.publish_every_updates
        is_due = self.updates - self._published_at >= period
        if is_due or model.scalars != self._published_scalars:
            with self._log.split("publish"):
                snapshot = model.snapshot(self.updates)
                launcher.publish(snapshot)
            self._published_at, self._published_scalars = self.updates, snapshot.scalars

    def _do_what_is_due(self, launcher: Launcher, replay_buffer: Store, model: Agent) -> None:
        self._log.progress(self.env_steps)
        is_last = self._is_over  # whose work `fit` does anyway
        if self._progress.log_clock.due(self.env_steps) and not is_last:
            self._take_live_changes(model)
            self._write_training(replay_buffer)
        before = self._progress.evaluation_clock.state_dict()
        if self._progress.evaluation_clock.due(self.env_steps) and not is_last:
            if self.settings.lockstep:
                self.evaluate(model)
            else:
                self._request_evaluation(launcher, model, before)
        if (result := launcher.poll_evaluation()) is not None:
            self._take_evaluation(result)
        saver = self._saver
        saver.look()
        saver.is_due |= self._progress.checkpoint_clock.due(self.env_steps)
        if saver.is_due and not is_last:
            if saver.is_busy and not self.settings.lockstep:
                saver.hurry()  # this one comes as soon as that is written
            else:
                self._save(model)

    def _take_live_changes(self, model: Agent) -> None:
        """Do what ``control.json`` asks for; what it can't have ends no run, but it is told."""
        try:
            wanted = self._control.poll()
            of_agent, of_trainer = (
                {k.removeprefix(prefix): v for k, v in wanted.items() if k.startswith(prefix)}
                for prefix in ("agent.", "trainer.")
            )
            if len(of_agent) + len(of_trainer) < len(wanted):
                raise SettingError(f"{', '.join(wanted)}: keys read agent.name or trainer.name")
            settings = self.settings.changed(of_trainer)
            if of_agent:
                model.change(of_agent)
            self.settings = settings
        except (OSError, ValueError) as error:
            logger.error("%s: nothing was changed: %s", FILE_NAME, error)
        else:
            for key, value in wanted.items():
                logger.info("%s: %s is %s from env step %d", FILE_NAME, key, value, self.env_steps)

    def _request_evaluation(self, launcher: Launcher, model: Agent, before: dict[str, Any]) -> None:
        request = self.settings.evaluation.request(self.env_steps)
        with self._log.split("evaluate"):
            if launcher.request_evaluation(model.snapshot(self.updates), request):
                self._keep_evaluated(model)
                self._progress.before_evaluation = before
                self._report(model)
            else:
                logger.info("skipped an evaluation: the one before it is still running")

    def _report(self, model: Agent) -> None:
        """Log what ``model`` tells of itself, if it does."""
        store = self._replay_buffer
        if isinstance(model, ReportingAgent) and store is not None and store.ready():
            report = model.report(store.peek().to(self.device))
            self._log.write_report(self.env_steps, self.updates, report)

    def _take_evaluation(self, result: EvaluationResult) -> dict[str, float]:
        self._progress.before_evaluation = None
        metrics = self._log.write_evaluation(result)
        self._saver.judge(result.version, metrics["evaluation/return_mean"])
        for callback in self._callbacks:
            callback.after_evaluation(self, metrics)
        return metrics

    # -------------------------------------------------------------------- asked for by name

    def evaluate(self, model: Agent) -> dict[str, float]:
        """Evaluate ``model`` as it is now, and log the result; only while `fit` runs.

        Returns:
            ``evaluation/...`` metrics: raw returns of greedy episodes.

        Raises:
            LauncherClosed: `fit` is not running.
        """
        launcher = self._running_launcher
        if launcher is None:
            raise LauncherClosed("evaluate() needs a running fit(); evaluation() a checkpoint")
        snapshot = model.snapshot(self.updates)
        request = self.settings.evaluation.request(self.env_steps)
        with self._log.split("evaluate"):
            while not launcher.request_evaluation(snapshot, request):
                self._take_evaluation(self._await_evaluation(launcher))
            self._keep_evaluated(model)
            self._report(model)
            result = self._await_evaluation(launcher)
        return self._take_evaluation(result)

    def _await_evaluation(self, launcher: Launcher) -> EvaluationResult:
        while (result := launcher.poll_evaluation(_WAIT_S)) is None:
            self._tell_notes(launcher)
            # One in the middle of a lockstep run is finished: a resume would not make it up.
            if self._is_over:
                self._interrupts.raise_if_any()
        return result

    def evaluation(self, env: EnvLike, model: Agent) -> dict[str, float]:
        """Evaluate the model of ``checkpoint``: no training, no optimiser; only films are written.

        Args:
            env: as for `fit`.
            model: built from the same settings; its weights become the checkpoint's.

        Returns:
            ``evaluation/...`` metrics.

        Raises:
            CheckpointError: there is no checkpoint, or it is of another agent or environment.
        """
        if self.checkpoint is None:
            raise CheckpointError("evaluation needs checkpoint=RUN_DIR_or_FILE")
        factory = GymEnvFactory.of(env)
        alone = replace(self.settings, workers=0, envs_per_worker=1)
        self._log = RunLog(None)
        seed_everything(alone.seed)  # an environment may draw from global generators
        with one_thread(), make_launcher(alone, None) as launcher:
            self._env_spec = launcher.probe(factory, alone.evaluation.render_mode)
            model.build(self._env_spec)
            self.set_attributes_to_model(model)
            model.to(self.device, self.dtype)
            state = read_weights(self.checkpoint, model, self._env_spec)["progress"]
            env_steps, updates = state["env_steps"], state["updates"]
            setattr(model, "current_step", env_steps)  # noqa: B010 - see set_attributes_to_model
            model.train(False)
            snapshot = model.snapshot(updates)
            ledger = StreamLedger(alone.num_streams, record_actions=False)
            policy = model.policy_factory()
            launcher.start(worker_specs(alone, ledger, factory, self._env_spec, policy), snapshot)
            result = launcher.evaluate(snapshot, self.settings.evaluation.request(env_steps))
        if self.settings.run_dir is not None:
            write_films(self.settings.run_dir, result.env_steps, films_of(result))
        if result.films:
            logger.info("Films are in %s/videos", self.settings.run_dir)
        return summarise(result)

    def set_attributes_to_model(self, model: Agent) -> None:
        """Give ``model`` what its own code may want.

        These are ``device``, ``dtype``, ``tensorboard`` (a ``SummaryWriter`` or None),
        ``log_every_env_steps``, and the counters ``current_step`` (env steps) and
        ``current_episode``, which are kept true while `fit` runs.
        """
        attributes = {
            "device": self.device,
            "dtype": self.dtype,
            "tensorboard": self._log.writer,
            "log_every_env_steps": self.settings.log_every_env_steps,
        }
        for name, value in attributes.items():
            setattr(model, name, value)
        self._tell_progress(model)

    def save_checkpoint(self, model: Agent) -> Path:
        """Write a checkpoint of everything below the run directory, and return its own.

        Raises:
            OSError: it could not be written; older ones stand.
            BadInput: there is no run directory.
            LauncherClosed: `fit` has not run.
        """
        return self._saver.save_now(lambda: self._captured(model))

    def _captured(self, model: Agent) -> Write:
        """What writes a checkpoint of this moment."""
        if self.settings.run_dir is None:
            raise BadInput("run_dir=None: a checkpoint needs a run directory")
        if self._replay_buffer is None:
            raise LauncherClosed("there is nothing to save before fit()")
        self._feedback.flush()
        if self.settings.lockstep and self._running_launcher is not None:
            self._progress.ledger.note_env_states(self._running_launcher.env_states())
        write = self._run_state(model, self._replay_buffer).capture(
            self.settings.run_dir,
            texts=self._config_texts(),
            keep_last=self.settings.keep_last,
            lockstep=self.settings.lockstep,
        )
        return self._faults.limited(write)

    def _tell_save(self, directory: Path) -> None:
        for callback in self._callbacks:
            callback.at_save(self, directory)

    def load_checkpoint(self, model: Agent) -> None:
        """Bring everything to where ``checkpoint`` left it; does nothing if there is none.

        Raises:
            CheckpointError: missing, damaged, or of another agent or environment.
        """
        if self.checkpoint is None:
            return
        if self._replay_buffer is None:
            raise LauncherClosed("there is nothing to load into before fit()")
        self._finish_save()
        self._run_state(model, self._replay_buffer).load(self.checkpoint)
        self._saver.saved_at = self.env_steps, self.updates
        self._tell_progress(model)

    def _run_state(self, model: Agent, replay_buffer: Store) -> RunState:
        return RunState(
            model, self._env_spec, self._optimizers, self._progress, self._log, replay_buffer
        )

    # ---------------------------------------------------------------------------- the frame

    @contextmanager
    def _running(self, env: EnvLike, replay_buffer: Store, model: Agent) -> Iterator[Launcher]:
        """Everything around the loop: build, load, start, and however it ends, save and close."""
        s = self.settings
        factory = self._faults.put_into(GymEnvFactory.of(env))
        self.model, self._stops = model, False
        with ExitStack() as stack:
            messages = stack.enter_context(Messages(console=s.console != "off"))
            self._interrupts = stack.enter_context(Interrupts())
            stack.enter_context(one_thread())
            launcher = stack.enter_context(make_launcher(s, self._launcher))
            if s.run_dir is not None:
                checkpoint.refuse_used(s.run_dir, goes_on_from=self.checkpoint)
                if self.checkpoint is None:
                    checkpoint.forget_best(s.run_dir)
            tracker = make_tracker(s)
            env_spec = launcher.probe(factory, s.evaluation.render_mode)
            self._build(env_spec, replay_buffer, model)
            self.load_checkpoint(model)
            stack.push(self._close_log)
            self._log.open(s.total_steps, s.console, self._config_texts(), self._resume_point())
            messages.to_file(None if s.run_dir is None else s.run_dir / "run.log")
            self._track(model, tracker)
            self.set_attributes_to_model(model)  # now with a writer, and where a resume stands
            self._control = Control(s.run_dir)
            self._take_live_changes(model)
            model.train(True)
            snapshot = model.snapshot(self.updates)
            self._published_at, self._published_scalars = self.updates, snapshot.scalars
            policy = model.policy_factory(replay_buffer.extras)
            acting = self._choose_acting(policy)
            specs = worker_specs(s, self._progress.ledger, factory, self._env_spec, policy, acting)
            ledger = self._progress.ledger
            launcher.start(specs, snapshot, lambda spec, attempt: going_on(spec, ledger, attempt))
            self._running_launcher = launcher
            self._interrupts.defer()
            try:
                yield launcher
            except (Exception, KeyboardInterrupt, SystemExit):
                if not (self._interrupts.insists or self._saver.gave_up):
                    self._save_at_last(model)
                raise
            finally:
                self._running_launcher = None

    def _choose_acting(self, factory: PolicyFactory) -> Acting:
        s = self.settings
        if s.acting == ActingSettings():
            return Acting()
        columns = range(s.envs_per_worker)
        with torch.random.fork_rng(devices=[]):  # initial weights are drawn, and thrown away
            policy = factory(self._env_spec, columns, s.num_streams, False)
        cache = None if s.run_dir is None else s.run_dir / "acting.json"
        return choose(s.acting, policy, self._env_spec, len(columns), s.unroll_length, cache)

    def _build(self, env_spec: EnvSpec, replay_buffer: Store, model: Agent) -> None:
        """Build model, optimisers and store, and everything that counts and keeps time."""
        s = self.settings
        seed_everything(s.seed)
        self._env_spec = env_spec
        model.build(env_spec)
        self._tell_start(env_spec.name, model)
        if size := parameters_in_words(model):
            logger.info("%s has %s.", type(model).__name__, size)
        sample_spec = model.sample_spec
        layout = StreamLayout(s.num_streams, s.unroll_length)
        warmup = replay_buffer.warmup_env_steps
        owed_rows = max(0, s.total_steps - warmup) * s.samples_per_insert
        replay_buffer.seed(s.seed)
        planned_updates = int(owed_rows / sample_spec.num_rows)
        replay_buffer.build(env_spec, sample_spec, layout, planned_updates, self._store_place())
        if s.lockstep and not replay_buffer.save:
            raise SettingError("replay.save=False: lockstep needs the replay in its checkpoints")
        self._replay_buffer = replay_buffer
        self._progress = self._new_progress(sample_spec.num_rows, warmup)
        on_cpu = self.device.type == "cpu"
        run_layout = Layout(s.workers, s.lockstep, core_count(), on_cpu)
        self._log = RunLog(s.run_dir, self._tensorboard, self._sinks, run_layout)
        self._in_update = False
        self._saver = Saver(self._interrupts, s.preempt_deadline_s, self._tell_save)
        self.set_attributes_to_model(model)
        model.to(self.device, self.dtype)
        self._optimizers = model.configure_optimizers()
        self._training_steps = compiled(model.training_steps(), s.compile, self.device)
        if on_cpu:
            keep_freed_memory()
        self._threads = update_threads(s, self.device)
        self._finite_steps = FiniteSteps(self._reads_at_once)
        span = self._log.split("feedback")
        self._feedback = FeedbackLine(replay_buffer, self._reads_at_once, span)

    def _store_place(self) -> StorePlace | None:
        s = self.settings
        if s.run_dir is None:
            return None
        return StorePlace(s.run_dir / "replay", s.keep_last, s.checkpoint_every_env_steps)

    def _new_progress(self, batch_rows: int, warmup_env_steps: int) -> Progress:
        s = self.settings
        slack_rows = 2 * s.num_streams * s.unroll_length  # what is usually in flight
        return Progress(
            SamplesPerInsert(s.samples_per_insert, batch_rows, warmup_env_steps, slack_rows),
            StreamLedger(s.num_streams, record_actions=s.lockstep),
            s.log_every_env_steps,
            s.evaluate_every_env_steps,
            s.checkpoint_every_env_steps,
        )

    # ---------------------------------------------------------------- the log, checkpoints

    def _write_training(self, replay_buffer: Store) -> None:
        more = {f"replay/{name}": value for name, value in replay_buffer.metrics().items()}
        if self._running_launcher is not None:
            told = self._running_launcher.metrics()
            more |= {f"workers/{name}": value for name, value in told.items()}
        more["replay/samples_per_insert"] = self._progress.limiter.ratio()
        more |= {f"policy/{name}": value for name, value in self._published_scalars.items()}
        more |= self._tell_left_out()
        for name, optimizer in self._optimizers.items():
            more[f"{name}/learning_rate"] = float(optimizer.param_groups[0]["lr"])
        self._log.write_training(self.env_steps, self.updates, more)

    def _track(self, model: Agent, tracker: Tracker | None) -> None:
        """Start ``tracker`` with the configuration, and with what the agent is set to."""
        if tracker is None:
            return
        config: dict[str, Any] = OmegaConf.to_container(self._whole_config(), resolve=True)  # type: ignore[assignment]
        config.setdefault("agent", settings_of(model))
        is_same_run = checkpoint.lies_in(self.checkpoint, self.settings.run_dir)
        self._log.track(tracker, config, is_same_run)

    def _close_log(self, kind: type[BaseException] | None, *_: Any) -> None:
        is_signal = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit)
        self._log.close("finished" if kind is None else "interrupted" if is_signal else "failed")

    def _tell_progress(self, model: Agent) -> None:
        for name, value in (
            ("current_step", self.env_steps),
            ("current_episode", self._log.episodes.count),
        ):
            setattr(model, name, value)

    def _tell_start(self, env: str, model: Agent) -> None:
        s = self.settings
        envs = f" of {s.envs_per_worker} envs" if s.envs_per_worker > 1 else ""
        where = (
            f"{s.workers} worker processes{envs}, learner"
            if s.workers
            else (f"all{envs} in this process,")
        )
        logger.info(
            "Training %s on %s for %s env steps: %s on %s.",
            type(model).__name__, env, f"{s.total_steps:,}", where, self.device,
        )  # fmt: skip
        if s.run_dir is None:
            logger.info("Nothing is written; run_dir=... keeps checkpoints and metrics.")
            return
        place = shlex.quote(str(s.run_dir))
        logger.info("Results go to %s; to watch: tensorboard --logdir %s", s.run_dir, place)
        logger.info("Ctrl-C saves and stops.")

    def _tell_end(self, metrics: Mapping[str, float]) -> None:
        logger.info(
            "Finished after %s env steps, %.0f s: evaluation return %.1f ± %.1f over %d episodes.",
            f"{self.env_steps:,}", self._log.wall_s, metrics["evaluation/return_mean"],
            metrics["evaluation/return_std"], metrics["evaluation/episodes"],
        )  # fmt: skip
        if (verdict := self._log.verdict) is not None:
            logger.info("%s", verdict.sentence)
        if self.settings.run_dir is not None:
            logger.info("Results are in %s.", self.settings.run_dir)

    def _config_texts(self) -> dict[str, str]:
        """The configuration as files: with references resolved, and as it was written."""
        config = self._whole_config()
        return {
            "config.yaml": OmegaConf.to_yaml(config, resolve=True),
            "config_unresolved.yaml": OmegaConf.to_yaml(config),
        }

    def _whole_config(self) -> DictConfig:
        if self.config is not None:
            return self.config
        values = asdict(self.settings)
        return OmegaConf.create(
            {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
        )

    def _save(self, model: Agent) -> None:
        """Begin to save if there is a run directory."""
        if self.settings.run_dir is None:
            return
        with self._log.split("checkpoint"):
            self._saver.save(lambda: self._captured(model), (self.env_steps, self.updates))
        if self.settings.lockstep:  # what callbacks do then mustn't depend on how long it took
            self._finish_save()

    def _finish_save(self) -> None:
        with self._log.split("checkpoint"):
            self._saver.finish()

    def _save_at_last(self, model: Agent) -> None:
        """Save what would be lost, when something has been raised; in an update nothing is lost.

        Then the weights may be half changed: the last checkpoint stands.
        """
        try:
            self._finish_save()
            if self._in_update or self.is_saved:
                return
            is_signal = self._interrupts.signal is not None
            logger.warning("%s: saving and closing", "interrupted" if is_signal else "failed")
            if not is_signal:
                self._running_launcher = None  # its workers may be what failed
            self._save(model)
            self._finish_save()
        except Exception:  # of a callback, say: what came first is to be told
            logger.exception("saving failed, too")

    def _keep_evaluated(self, model: Agent) -> None:
        """Hold on to the weights whose evaluation begins: they may turn out to be the best."""
        s = self.settings
        if s.run_dir is not None and s.keep_best and self._replay_buffer is not None:
            state = self._run_state(model, self._replay_buffer)
            write = state.capture_weights(s.run_dir, self._config_texts(), s.keep_best, s.lockstep)
            self._saver.hold(self.updates, write)

    def _resume_point(self) -> tuple[int, int] | None:
        return None if self.checkpoint is None else (self.env_steps, self.updates)
