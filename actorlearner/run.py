"""``python -m actorlearner.run``: from a command line to a run.

Settings are composed by Hydra; what is wrong with them is told in one line, with exit code 2. The
other codes: 0 finished, 1 failed (or interrupted and unsaved), 3 finished but a save failed,
130 and 143 interrupted by SIGINT and SIGTERM and saved.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from actorlearner.config import Settings, config_dir, dotted, make, told_plainly, unknown_key
from actorlearner.contracts import BadInput, CheckpointError
from actorlearner.launch.processes import start_processes

logger = logging.getLogger("actorlearner.run")  # whose __name__ is __main__ as a command

_GROUPS = (
    "env",
    "agent",
    "replay",
    "acting",
    "evaluation",
    "launch",
    "tracking",
    "trainer",
    "faults",
    "experiment",
)
_THROUGH_HYDRA = ("-m", "--multirun", "-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info")
_VERSION_BASE = "1.3"
_OPTIONAL = ("tracking", "experiment")  # groups of which null chooses nothing
_PATHS = ("run_dir", "resume", "ckpt")


@dataclass(frozen=True, kw_only=True)
class CommandSettings(Settings):
    """Settings of the command line alone."""

    experiment: str = "unnamed"
    """Names the directory of the runs."""
    resume: str | None = None
    """A run or a checkpoint to go on from, or ``auto``."""
    ckpt: str | None = None
    """A run or a checkpoint to evaluate."""
    eval_only: bool = False
    """Evaluate, and train nothing."""
    imports: tuple[str, ...] = ()
    """Modules to import first, in workers too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    # Read when torch is loaded. Threads that wait for each other spin at first; left to themselves
    # for so long that an update by two on two busy cores took 58 to 305 ms, and 44 with this.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    arguments = ["eval_only=true" if a == "--eval-only" else a for a in arguments]
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("actorlearner").setLevel(logging.INFO)  # not the root: torch has much to say
    if any(argument.partition("=")[0] in _THROUGH_HYDRA for argument in arguments):
        return _through_hydra(arguments)
    return told_plainly(lambda: _run(compose(arguments)))


def _through_hydra(arguments: list[str]) -> int:
    """Multirun, ``--help`` and ``--cfg``."""
    codes = [0]

    def job(_: DictConfig) -> None:
        # Composed anew: Hydra does not know that a checkpoint brings its own settings.
        GlobalHydra.instance().clear()
        own = HydraConfig.get()
        sources = own.runtime.config_sources
        dirs = [f"--config-dir={s.path}" for s in sources if s.provider == "command-line"]
        os.chdir(own.runtime.cwd)  # paths are relative to it, whatever hydra.job.chdir says
        overrides = [_from_hydra(_unescaped_path(override)) for override in own.overrides.task]
        logger.info("Run %d: %s", own.job.num, " ".join(overrides))
        codes.append(told_plainly(lambda: _run(compose([*dirs, *overrides]))))
        if codes[-1] >= 128:
            sys.exit(codes[-1])  # interrupted: the jobs that are left don't start

    arguments += _experiment_of_agent(arguments)
    # argparse wants all settings in a row.
    arguments = sorted(arguments, key=lambda a: "=" in a and not a.startswith("-"))
    sys.argv = ["python -m actorlearner.run", *map(_for_hydra, arguments)]
    decorate = hydra.main(
        version_base=_VERSION_BASE, config_path=str(config_dir()), config_name="config"
    )
    decorate(job)()
    return max(codes)


# ------------------------------------------------------------------------------ configuration


def compose(arguments: Sequence[str]) -> DictConfig:
    """The configuration, unresolved: composed, or a checkpoint's own with changes."""
    overrides, config_dirs = _split_config_dirs(arguments)
    given = _parse(overrides)
    for key in ("ckpt", "resume"):
        path = given.get(key)
        if path not in (None, "auto"):
            return _saved_config(key, Path(str(path)), given)
    overrides += _experiment_of_agent(overrides)
    search = [f"file://{Path(d).absolute()}" for d in config_dirs]
    places = [f"hydra.searchpath=[{','.join(search)}]"] if search else []
    try:
        with hydra.initialize_config_dir(str(config_dir()), version_base=_VERSION_BASE):
            try:
                config = hydra.compose("config", [*map(_for_hydra, overrides), *places])
            except (HydraException, ValueError) as error:
                raise BadInput(_explain(error, given, places)) from error
    except OmegaConfBaseException as error:
        raise BadInput(str(error)) from error
    if config.resume == "auto":
        from actorlearner import checkpoint

        newest = checkpoint.newest_run(config.run_dir or _runs_of(config))
        if newest is not None:
            given.pop("run_dir", None)  # it said where to look, maybe above the run itself
            return _saved_config("resume", newest, given, config)
        logger.info("resume=auto: no checkpoint yet, starting afresh")
        config.resume = None
    return config


def _experiment_of_agent(arguments: Sequence[str]) -> list[str]:
    """The override that an agent brings along: CartPole by that agent, unless something is said.

    ``cartpole_dqn``, the default, has settings that only a DQN knows.
    """
    values = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    name = f"cartpole_{values.get('agent')}"
    is_one = (config_dir() / "experiment" / f"{name}.yaml").exists()
    return [f"experiment={name}"] if is_one and "experiment" not in values else []


def _split_config_dirs(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's ``--config-dir DIR`` apart from the overrides."""
    overrides, config_dirs, waiting = [], [], list(arguments)
    while waiting:
        argument = waiting.pop(0)
        name, _, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            config_dirs.append(value or (waiting.pop(0) if waiting else ""))
            if not config_dirs[-1] or not Path(config_dirs[-1]).is_dir():
                raise BadInput(f"{name} {config_dirs[-1]}: there is no such directory")
        elif argument.startswith("-"):
            raise BadInput(f"{argument}: there is no such option; settings read key=value")
        else:
            overrides.append(_quoted_path(argument))
    return overrides, config_dirs


def _quoted_path(override: str) -> str:
    """``override`` with its value in quotes if that is a path, which may hold any character."""
    key, _, value = override.partition("=")
    if key not in _PATHS or value in ("", "null") or value[0] in "\"'":
        return override
    return f"{key}='{value}'" if "'" not in value else f'{key}="{value}"'


def _unescaped_path(override: str) -> str:
    """``override`` of a multirun with its value as it was typed, if that is a path."""
    key, _, value = override.partition("=")
    if key not in _PATHS or value[:1] in ("'", '"'):
        return override
    plain = re.sub(r"\\(.)", r"\1", value)  # Hydra escapes braces among others
    return f"{key}={plain}"


def _for_hydra(override: str) -> str:
    """``override`` as Hydra takes it: its ``group=null`` is ``~group``."""
    key, _, value = override.partition("=")
    return f"~{key}" if key in _OPTIONAL and value == "null" else override


def _from_hydra(override: str) -> str:
    """Undoes `_for_hydra`."""
    key = override[1:].partition("=")[0]
    return f"{key}=null" if override[:1] == "~" and key in _OPTIONAL else override


def _parse(overrides: Sequence[str]) -> dict[str, Any]:
    """Key and value of each override."""
    given = {}
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise BadInput(f"{text}: {error}") from error
        if override.is_delete():
            raise BadInput(f"{text}: a setting can't be deleted; key=value changes it")
        given[override.key_or_group] = override.value()
    return given


def _explain(error: Exception, given: Mapping[str, Any], places: Sequence[str]) -> str:
    """What is wrong with the command line.

    Args:
        error: Hydra's.
        given: key and value of each override.
        places: the override that names directories with choices of people's own, if any.
    """
    if isinstance(error, MissingConfigException) and error.options:
        group, _, choice = str(error.missing_cfg_file).partition("/")
        return f"{group}={choice}: there is no such choice; there are: {', '.join(error.options)}"
    for key, value in given.items():
        if key in _GROUPS and not (isinstance(value, str) or (value is None and key in _OPTIONAL)):
            return f"{key}={value}: the name of a choice is needed"
    choices = [
        f"~{group}" if given[group] is None else f"{group}={given[group]}"
        for group in _GROUPS
        if group in given
    ]
    try:
        config = hydra.compose("config", [*choices, *places])
    except (HydraException, ValueError):
        return str(error)
    known = list(dotted(_unresolved(config)))
    for key in given:
        if key in _GROUPS:
            continue
        group = key.partition(".")[0]
        if group in _GROUPS and not any(name.startswith(f"{group}.") for name in known):
            names = ", ".join(sorted(path.stem for path in (config_dir() / group).glob("*.yaml")))
            return f"{key}: has no meaning without a choice of {group}, which are: {names}"
        if key not in known and not key.startswith("hydra"):
            return unknown_key(key, known)
    return str(error)


def _saved_config(
    key: str, path: Path, given: Mapping[str, Any], fresh: DictConfig | None = None
) -> DictConfig:
    """The unresolved configuration of a checkpoint with what was given on the command line.

    Args:
        key: ``resume`` or ``ckpt``.
        path: of a run, a checkpoint or a file in it.
        given: key and value of each override.
        fresh: what the command line composes to; choices that the checkpoint made too are no
            change, and whom it trusts is trusted. None refuses every choice.
    """
    from actorlearner import checkpoint

    where = checkpoint.find(path, ["agent", "progress"] if key == "ckpt" else None)
    saved = OmegaConf.load(where / "config_unresolved.yaml")
    if not isinstance(saved, DictConfig) or "target" not in saved.get("agent", {}):
        raise CheckpointError(
            f"{where}: was written by a Python script, which alone knows its environment and "
            "agent: use Trainer(checkpoint=...) there"
        )
    is_evaluation = bool(given.get("eval_only"))
    saved.run_dir = None if is_evaluation else str(where.parent.parent)
    # A checkpoint may be a stranger's: only who runs it says whom to trust.
    saved.trust = [] if fresh is None else fresh.trust
    _refuse_resolvers(saved, given, fresh)
    if is_evaluation:  # which tracks nothing, calls nobody back, and may have no place for films
        saved.tracking = None
        OmegaConf.update(saved, "trainer.callbacks", [])
        if given.get("run_dir") is None:
            OmegaConf.update(saved, "evaluation.video", False)
    was = OmegaConf.to_container(saved, resolve=True)
    if "tracking" in given:
        choice = given["tracking"]
        saved.tracking = _chosen_tracking(choice) if fresh is None else fresh.get("tracking")
    known = list(dotted(_unresolved(saved)))
    # How to act and to evaluate may have got settings since, and so may faults.
    for file in ("acting/default", "evaluation/default", "faults/none"):
        settings = OmegaConf.load(config_dir() / f"{file}.yaml")
        known += [f"{file.partition('/')[0]}.{name!s}" for name in settings]
    for name, value in given.items():
        if name == "tracking":
            continue
        if name in _GROUPS:
            if fresh is not None and _same_choice(fresh.get(name), saved.get(name), name, given):
                continue
            raise BadInput(
                f"{name}={value}: a checkpoint keeps its {name}; single settings can be changed, "
                f"such as {next((k for k in known if k.startswith(name + '.')), 'seed')}=..."
            )
        if name not in known:
            raise BadInput(unknown_key(name, known))
        OmegaConf.update(saved, name, value)
    saved.eval_only, saved.ckpt, saved.resume = is_evaluation, None, None
    saved[key] = str(where)
    elsewhere = saved.run_dir and Path(saved.run_dir).absolute() != where.parent.parent
    if elsewhere and not is_evaluation:
        logger.info("going on in another run directory: %s", saved.run_dir)
    _refuse_strange_modules(saved, given, fresh)
    _tell_differences(was, OmegaConf.to_container(saved, resolve=True))
    return saved


def _refuse_strange_modules(
    saved: DictConfig, given: Mapping[str, Any], fresh: DictConfig | None
) -> None:
    """Refuse what only a checkpoint wants imported or told, unless whoever runs it trusts that."""
    trusted = {"actorlearner", *_texts(saved, "trust")}
    own = {} if fresh is None else _modules(fresh)
    for key, names in _modules(saved).items():
        for name in names if key not in given else ():
            package = name.partition(".")[0]
            if package not in trusted and name not in own.get(key, ()):
                raise BadInput(
                    f"{key}={name}: the checkpoint asks to import {package}; "
                    f"add trust=[{package}] if you trust it"
                )
    service = _service(saved)
    is_own = "tracking" in given or (
        fresh is not None and fresh.get("tracking") == saved.get("tracking")
    )
    if service and service not in trusted and not is_own:
        raise BadInput(
            f"tracking={service}: the checkpoint asks to send the run's settings and metrics to "
            f"where it says; add trust=[{service}] if you trust it, or tracking=null"
        )


def _service(config: DictConfig) -> str:
    """The package by which ``config`` wants the run tracked; "" for none."""
    module, _, name = str(OmegaConf.select(config, "tracking.target") or "").partition(":")
    package = module.partition(".")[0]
    # Those of this package are named as the package of their service.
    own = name.removesuffix("Tracker").lower() or name
    return own if package == "actorlearner" else package


def _refuse_resolvers(
    saved: DictConfig, given: Mapping[str, Any], fresh: DictConfig | None
) -> None:
    """Refuse all of a checkpoint but references to its own keys: the rest reads this machine."""
    own = {} if fresh is None else dotted(_unresolved(fresh))
    for key, value in dotted(_unresolved(saved)).items():
        strange = "${" in re.sub(r"\$\{[\w.\[\]-]+\}", "", str(value))
        if strange and key in given:
            OmegaConf.update(saved, key, None)  # to be replaced, and not to be read before
        elif strange and own.get(key) != value:
            raise BadInput(
                f"{key}={value}: a checkpoint may refer to its own settings only, as ${{seed}} "
                f"does; give {key}=... yourself"
            )


def _unresolved(config: DictConfig) -> dict[str, Any]:
    tree: dict[str, Any] = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]
    return tree


def _chosen_tracking(choice: Any) -> Any:
    """The settings of a choice of ``tracking``; None for null."""
    if choice is None:
        return None
    choices = {path.stem: path for path in sorted((config_dir() / "tracking").glob("*.yaml"))}
    if choice not in choices:
        raise BadInput(
            f"tracking={choice}: there is no such choice; there are: {', '.join(choices)}, null"
        )
    return OmegaConf.load(choices[choice])


def _modules(config: DictConfig) -> dict[str, list[str]]:
    """What ``config`` wants imported, by the key that says so."""
    of_env = str(OmegaConf.select(config, "env.id")).rpartition(":")[0]
    return {"imports": _texts(config, "imports"), "env.id": [of_env] if of_env else []}


def _texts(config: DictConfig, key: str) -> list[str]:
    """The list at ``key``; none if there is something else, which is refused where it is used."""
    value = OmegaConf.select(config, key)
    return [str(item) for item in value] if isinstance(value, ListConfig) else []


def _same_choice(fresh: Any, saved: Any, group: str, given: Mapping[str, Any]) -> bool:
    """Whether both are one choice of ``group``, but for what was given setting by setting."""
    if not isinstance(saved, DictConfig):
        return bool(fresh == saved)
    # Unresolved: what a choice refers to may well have changed.
    ours: Any = OmegaConf.to_container(fresh, resolve=False)
    theirs: Any = OmegaConf.to_container(saved, resolve=False)
    changed = {key.split(".")[1] for key in given if key.startswith(f"{group}.")}
    return all(ours.get(k) == theirs.get(k) for k in {*ours, *theirs} - changed)


def _tell_differences(was: Any, now: Any, prefix: str = "") -> None:
    for name in now:
        key = f"{prefix}{name}"
        if key in ("resume", "ckpt", "eval_only", "run_dir"):
            continue
        if isinstance(now[name], dict):
            _tell_differences(was.get(name) or {}, now[name], f"{key}.")
        elif was.get(name) != now[name]:
            logger.info("changed: %s %s -> %s", key, was.get(name), now[name])


# ---------------------------------------------------------------------------------- one run


def _run(config: DictConfig) -> int:
    """Build what ``config`` names, and train or evaluate."""
    try:
        tree: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise BadInput(str(error)) from error
    own = [item.name for item in fields(CommandSettings)]
    command = CommandSettings.make({name: tree[name] for name in own if name in tree})
    if command.eval_only and command.ckpt is None:
        raise BadInput("ckpt=null: --eval-only needs ckpt=RUN_DIR_or_FILE")
    if command.ckpt is not None and not command.eval_only:
        raise BadInput(f"ckpt={command.ckpt}: goes with --eval-only; to train on, resume=...")
    forks = tree["launch"].get("start_method") in ("auto", "forkserver")
    if forks and not command.eval_only and tree["workers"] != 0:
        start_processes()  # loads torch beside what follows, which needs seconds
    with _run_dir_of(config, command):
        return _build_and_run(config, tree, command)


def _build_and_run(config: DictConfig, tree: Mapping[str, Any], command: CommandSettings) -> int:
    from actorlearner.trainer import Trainer

    trainer = Trainer.from_config(config, checkpoint=command.ckpt or command.resume)
    trust = trainer.settings.trust
    factory = make(tree["env"], "env", "factory", trust).factory(command.imports, trust)
    agent = make(tree["agent"], "agent", "training_steps", trust)
    if command.eval_only:
        return _evaluate(trainer, factory, agent)
    return _train(trainer, factory, make(tree["replay"], "replay", "sample", trust), agent)


def _train(trainer: Any, factory: Any, replay_buffer: Any, agent: Any) -> int:
    run_dir, command = trainer.settings.run_dir, "python -m actorlearner.run"
    trusted = _trusted(trainer)
    try:
        trainer.fit(factory, replay_buffer, agent)
    except (KeyboardInterrupt, SystemExit) as error:
        if not trainer.is_saved:
            return 1
        code = int(error.code or 0) if isinstance(error, SystemExit) else 130
        if not trainer.env_steps:
            logger.info("Nothing had been done yet, so there was nothing to save.")
            return code
        again = [f"resume={run_dir}", *_trust_again([*trusted, _service(trainer.config)])]
        logger.info("Saved. To go on: %s %s", command, shlex.join(again))
        return code
    again = [f"ckpt={run_dir}", *_trust_again(trusted)]
    logger.info("To evaluate again: %s --eval-only %s", command, shlex.join(again))
    return 3 if trainer.save_failed or trainer.log_failed else 0


def _trusted(trainer: Any) -> list[str]:
    """The packages that this run trusts or imports: its checkpoints can't vouch for them."""
    imported = [name for names in _modules(trainer.config).values() for name in names]
    return [*trainer.settings.trust, *(name.partition(".")[0] for name in imported)]


def _trust_again(packages: Sequence[str]) -> list[str]:
    """The argument that trusts ``packages``, if any."""
    named = dict.fromkeys(package for package in packages if package)
    return [f"trust=[{','.join(named)}]"] if named else []


def _evaluate(trainer: Any, factory: Any, agent: Any) -> int:
    try:
        metrics = trainer.evaluation(factory, agent)
    except (KeyboardInterrupt, SystemExit):
        return 1
    text = json.dumps(metrics)
    run_dir = trainer.settings.run_dir
    if run_dir is not None:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "evaluation.json").write_text(text + "\n")
    sys.stdout.write(text + "\n")
    return 0


def _runs_of(config: DictConfig) -> Path:
    return Path("runs", str(config.get("experiment", CommandSettings.experiment)))


@contextmanager
def _run_dir_of(config: DictConfig, command: CommandSettings) -> Iterator[None]:
    """Give ``config`` a run directory of its own if it names none; an empty one does not stay."""
    if command.eval_only or config.run_dir is not None:
        yield
        return
    runs = _runs_of(config)
    name = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for candidate in (runs / name, *(runs / f"{name}_{i}" for i in range(2, 1000))):
        try:
            candidate.mkdir(parents=True)
            break
        except FileExistsError:  # taken, maybe a moment ago by another process
            continue
        except OSError as error:
            raise BadInput(f"run_dir={candidate}: {error.strerror}") from error
    config.run_dir = str(candidate)
    try:
        yield
    finally:
        for path in (candidate, runs, runs.parent):
            with suppress(OSError):
                path.rmdir()


if __name__ == "__main__":
    sys.exit(main())
