"""Plants deliberate bugs, each alone in a copy, and shows that the tests catch every one.

    python tests/mutations.py
    python tests/mutations.py -k replay -k worker
    python tests/mutations.py --list

Each bug goes into a copy of the package, never into the package itself. A bug's tests are those
that should notice it at the lowest level; all of them pass where no bug is planted, which is
checked first. The exit code is 1 if a bug survives, 2 if one could not be tried.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("actorlearner", "configs", "tests", "pyproject.toml")
TIMEOUT_S = 300
"""Of one call of pytest, whose tests have a timeout of their own."""
MOST_COPIES = 4
"""That tests run in at the same time; no more than there are cores."""

CONFTEST = """
from pathlib import Path

import actorlearner

assert Path(actorlearner.__file__).parents[1] == Path(__file__).parent, actorlearner.__file__
"""
"""Stands beside the copy: what a test imports must be the copy."""


class Mutation(NamedTuple):
    """A bug.

    Attributes:
        name: starts with the part of the package that it is in.
        bug: what is wrong then.
        file: below ``actorlearner/``.
        old: text that occurs there once.
        new: what it becomes.
        tests: files or node ids that notice it.
    """

    name: str
    bug: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    # ------------------------------------------------------------------------------------ agent
    Mutation(
        "dqn_networks_swapped",
        "double DQN chooses by the target network and values by the online one",
        "agents/dqn.py",
        """
            returns = self.target.distribution(following, s.precision)
            chooser_BA = self.online(following, s.precision) if s.double else returns.mean
""",
        """
            returns = self.online.distribution(following, s.precision)
            chooser_BA = self.target(following, s.precision) if s.double else returns.mean
""",
        ("tests/unit/test_dqn.py::TestLoss::test_two_transitions_by_hand",),
    ),
    Mutation(
        "dqn_priority_weighted",
        "priorities are TD errors times importance weights",
        "agents/dqn.py",
        "else error_B\n",
        "else batch.weight * error_B\n",
        (
            "tests/unit/test_dqn.py::TestLoss"
            "::test_importance_weights_scale_the_loss_and_leave_the_priorities",
        ),
    ),
    Mutation(
        "dqn_target_period",
        "the target network is copied every n + 1 updates",
        "agents/dqn.py",
        "updates % self.settings.target_every_updates == 0",
        "updates % (self.settings.target_every_updates + 1) == 0",
        ("tests/unit/test_dqn.py::TestTarget::test_copied_exactly_every_n_updates",),
    ),
    Mutation(
        "dqn_epsilon_exponent",
        "the exponents of epsilon lack their 1, so that the first stream acts at random only",
        "agents/dqn.py",
        "base ** (1 + alpha * place_N)",
        "base ** (alpha * place_N)",
        ("tests/unit/test_dqn.py::TestEpsilonOfEachStream::test_exact_values",),
    ),
    Mutation(
        "dqn_evaluation_is_noisy",
        "evaluations act with the noise of noisy layers",
        "agents/dqn.py",
        "noisy = () if greedy else network.modules()",
        "noisy = network.modules()",
        ("tests/unit/test_dqn.py::TestNoise::test_evaluations_use_the_mean_weights",),
    ),
    Mutation(
        "noise_keeps_its_size",
        "factorised noise is Gaussian itself, without the signed square root",
        "networks.py",
        "return numbers.sign() * numbers.abs().sqrt()",
        "return numbers",
        ("tests/unit/test_networks.py::TestNoisyLinear::test_statistics_of_the_noise",),
    ),
    Mutation(
        "heads_quantile_levels_reversed",
        "quantile regression pulls the wrong way: each quantile stands for 1 - level",
        "returns.py",
        "torch.where(target_BNM < quantile_BNM, 1 - level_BN1, level_BN1)",
        "torch.where(target_BNM < quantile_BNM, level_BN1, 1 - level_BN1)",
        ("tests/unit/test_returns.py::test_quantile_loss_equals_its_slow_twin",),
    ),
    Mutation(
        "joint_actions_first_part_fastest",
        "vectors are numbered with the first part fastest, and looked up with the last",
        "joint_actions.py",
        "math.prod(radices[i + 1 :])",
        "math.prod(radices[:i])",
        ("tests/unit/test_joint_actions.py::test_they_count_all_combinations_in_order",),
    ),
    # ------------------------------------------------------------------------------- Dreamer
    Mutation(
        "dreamer_symlog_twice",
        "two-hot targets are squeezed although the bins are spaced exponentially",
        "distributions.py",
        "        targets = targets.to(bins.dtype)\n",
        "        targets = symlog(targets.to(bins.dtype))\n",
        ("tests/unit/test_distributions.py::TestTwoHot::test_loss_equals_the_slow_twin",),
    ),
    Mutation(
        "dreamer_rewards_are_logits",
        "imagined rewards are the likeliest bin's number, not the mean",
        "agents/dreamer.py",
        "self.two_hot.mean(world.reward(features))",
        "world.reward(features).argmax(-1).float()",
        ("tests/unit/test_dreamer.py::test_returns_and_weights_of_imagination_by_hand",),
    ),
    Mutation(
        "dreamer_imagines_by_another_prior",
        "imagination feeds the prior the state before instead of the new one",
        "agents/world_model.py",
        "prior = self.representation.latents(self.prior(deterministic))",
        "prior = self.predict(state)",
        (
            "tests/unit/test_world_model.py::TestUnroll"
            "::test_imagination_takes_the_prior_that_is_trained",
        ),
    ),
    Mutation(
        "dreamer_free_nats_of_each_latent",
        "the floor is under each latent's divergence, not under their sum",
        "agents/world_model.py",
        "posterior.detach().divergence(prior).sum(-1).clamp(min=free_nats)",
        "posterior.detach().divergence(prior).clamp(min=free_nats).sum(-1)",
        (
            "tests/unit/test_world_model.py::TestDivergences"
            "::test_the_floor_is_under_the_sum_of_latents",
        ),
    ),
    Mutation(
        "dreamer_no_unimix",
        "divergences are those of the bare softmax, without a share for every class",
        "agents/world_model.py",
        "return Categorical(split, self._uniform_share)",
        "return Categorical(split)",
        ("tests/unit/test_world_model.py::TestUnroll::test_no_class_is_without_probability",),
    ),
    Mutation(
        "dreamer_dynamics_move_the_posterior",
        "the gradient that is for the prior reaches the posterior, too",
        "agents/world_model.py",
        '"dynamics": posterior.detach().divergence(prior)',
        '"dynamics": posterior.divergence(prior)',
        ("tests/unit/test_world_model.py::TestDivergences::test_each_moves_one_side",),
    ),
    Mutation(
        "dreamer_scales_swapped",
        "the divergences have each other's scale",
        "agents/dreamer.py",
        's.dynamics_scale * kept["dynamics"]',
        's.representation_scale * kept["dynamics"]',
        ("tests/unit/test_dreamer.py::test_the_world_loss_is_the_weighted_sum_of_means",),
    ),
    Mutation(
        "dreamer_action_over_a_start",
        "the last action of an episode tells of the next one's first state",
        "agents/world_model.py",
        "tokens_LBE, action_LBA * keep_LB1, keep_LB1, strict",
        "tokens_LBE, action_LBA, keep_LB1, strict",
        (
            "tests/unit/test_world_model.py::TestUnroll"
            "::test_a_start_in_the_middle_makes_two_sequences",
        ),
    ),
    Mutation(
        "dreamer_acting_over_a_start",
        "the policy keeps its last action at a reset",
        "agents/dreamer.py",
        "for tensor in (*self._state, self._action):",
        "for tensor in self._state:",
        ("tests/unit/test_dreamer.py::test_a_reset_forgets_a_column",),
    ),
    Mutation(
        "dreamer_block_fan_in",
        "weights of blocks begin by the inputs of a block",
        "networks.py",
        "        truncated_normal_(self.weight, inputs)\n",
        "        truncated_normal_(self.weight, inputs // blocks)\n",
        (
            "tests/unit/test_networks.py::TestNormedLayers"
            "::test_weights_begin_by_the_inputs_of_the_whole_layer",
        ),
    ),
    Mutation(
        "dreamer_ends_are_imagined_from",
        "weights begin at 1, not at the root's own continuation",
        "agents/dreamer.py",
        "            discount.cumprod(0)[:-1],\n",
        "            discount.cumprod(0)[:-1] / discount[0],\n",
        ("tests/unit/test_dreamer.py::test_imagining_from_an_end_counts_for_nothing",),
    ),
    Mutation(
        "dreamer_continuation_unused",
        "returns are discounted as if no episode ended",
        "agents/dreamer.py",
        "lambda_return(reward[1:], discount[1:], value[1:]",
        "lambda_return(reward[1:], 0 * discount[1:] + 0.997, value[1:]",
        ("tests/unit/test_dreamer.py::test_returns_and_weights_of_imagination_by_hand",),
    ),
    Mutation(
        "dreamer_only_entropy_trains",
        "the gain has no log-probability, so that only entropy trains the actor",
        "agents/dreamer.py",
        "distribution.log_prob(carry.action) * advantage",
        "advantage",
        ("tests/unit/test_dreamer.py::test_the_actor_follows_the_advantage",),
    ),
    Mutation(
        "dreamer_acts_by_the_prior",
        "states know nothing of the new observation",
        "agents/world_model.py",
        "torch.cat([deterministic, tokens], -1)",
        "torch.cat([deterministic, 0 * tokens], -1)",
        ("tests/unit/test_world_model.py::TestUnroll::test_the_observation_is_part_of_the_state",),
    ),
    Mutation(
        "dreamer_errors_are_averaged",
        "errors of pixels are averaged: divergences dominate",
        "agents/world_model.py",
        "            return error.flatten(1).sum(1)",
        "            return error.flatten(1).mean(1)",
        ("tests/unit/test_world_model.py::TestObservations::test_errors_are_summed_by_hand",),
    ),
    Mutation(
        "dreamer_horizon_is_summed",
        "the actor's loss is summed over the horizon",
        "agents/dreamer.py",
        "actor_loss = -(dreamt.weight * gain).mean()",
        "actor_loss = -(dreamt.weight * gain).sum(0).mean()",
        ("tests/unit/test_dreamer.py::test_the_controller_loss_by_hand",),
    ),
    Mutation(
        "dreamer_departing_rewards",
        "a state is told the reward of the action taken in it",
        "agents/dreamer.py",
        "reward=batch.reward[:-1] * ~first",
        "reward=batch.reward[1:] * ~first",
        ("tests/unit/test_dreamer.py::test_rows_become_arrivals",),
    ),
    Mutation(
        "dreamer_pixels_as_bytes",
        "pixels are not scaled",
        "agents/world_model.py",
        'return pixels / 255 if spec.dtype == "uint8" else pixels',
        "return pixels",
        ("tests/unit/test_world_model.py::TestObservations::test_pixels_are_scaled_and_centred",),
    ),
    Mutation(
        "dreamer_time_limit_terminates",
        "a truncation is predicted as an end",
        "agents/dreamer.py",
        "terminal=batch.terminated[:-1] & ~first",
        "terminal=(batch.terminated | batch.truncated)[:-1] & ~first",
        ("tests/unit/test_dreamer.py::test_rows_become_arrivals",),
    ),
    Mutation(
        "dreamer_ratio_of_updates",
        "samples per insert counts sequences, not their rows",
        "contracts.py",
        "return self.batch_size * self.length",
        "return self.batch_size",
        ("tests/test_sequences.py::test_samples_per_insert_count_the_rows_that_are_learned_from",),
    ),
    Mutation(
        "dreamer_warmup_is_fixed",
        "the warm-up takes 1,000 updates whatever is asked",
        "agents/dreamer.py",
        "linear_warmup(rate, updates, s.warmup_updates)",
        "linear_warmup(rate, updates, 1_000)",
        ("tests/unit/test_dreamer.py::TestSettings::test_live_ones_change",),
    ),
    Mutation(
        "dreamer_world_moves_the_critic",
        "the world's step has a gradient for the critic's parameters",
        "agents/dreamer.py",
        "name: value.detach() for name, value in self.critic.named_parameters()",
        "name: value for name, value in self.critic.named_parameters()",
        (
            "tests/unit/test_dreamer.py"
            "::test_the_gradient_of_replayed_values_reaches_the_world_alone",
        ),
    ),
    Mutation(
        "dreamer_slow_critic_bootstraps",
        "imagined returns end with the slow critic's value",
        "agents/dreamer.py",
        "value = self.two_hot.mean(self.critic(features))",
        "value = self.two_hot.mean(self.slow_critic(features))",
        ("tests/unit/test_dreamer.py::test_returns_and_weights_of_imagination_by_hand",),
    ),
    Mutation(
        "dreamer_report_draws",
        "a report draws from the generator that learning draws from",
        "agents/dreamer.py",
        "TorchNoise(device, torch.Generator(device).manual_seed(0))",
        "TorchNoise(device)",
        ("tests/contracts/test_agents.py::test_a_report_changes_nothing[dreamer]",),
    ),
    # ---------------------------------------------------------------------------------- returns
    Mutation(
        "returns_atoms_not_clipped",
        "the last atom gets more than all where a return lies beyond it",
        "returns.py",
        "(last / (high - low))).clamp(0, last)",
        "(last / (high - low)))",
        ("tests/unit/test_returns.py::test_projection_by_hand",),
    ),
    Mutation(
        "returns_termination_ignored",
        "a window that terminates is bootstrapped: no factor (1 - terminated)",
        "returns.py",
        "0.0 if terminates else powers_N[steps]",
        "powers_N[steps]",
        ("tests/unit/test_returns.py::test_termination_inside_the_window_cuts_what_follows",),
    ),
    Mutation(
        "returns_gamma_to_the_n",
        "the bootstrap value is discounted by gamma, not by gamma ** n",
        "returns.py",
        "0.0 if terminates else powers_N[steps]",
        "0.0 if terminates else powers_N[1]",
        ("tests/unit/test_returns.py::test_leaving_the_window_keeps_the_bootstrap",),
    ),
    # ----------------------------------------------------------------------------------- replay
    Mutation(
        "replay_window_over_an_end",
        "windows of n steps go on into the next episode",
        "replay.py",
        "            ring.valid,\n            spec.gamma,\n",
        "            ring.valid | True,\n            spec.gamma,\n",
        ("tests/unit/test_replay.py::test_transitions_equal_the_twin[4-1-3-False]",),
    ),
    Mutation(
        "replay_reward_clipped_for_good",
        "rewards are clipped when they are stored",
        "ring.py",
        "put(self.reward, unroll.reward)",
        "put(self.reward, unroll.reward.clip(-1, 1))",
        ("tests/unit/test_replay.py::test_rewards_are_clipped_in_the_batch_only",),
    ),
    Mutation(
        "replay_wraps_to_other_columns",
        "at the ring's end an unroll goes on with its first columns",
        "ring.py",
        "pieces.append((slice(before_end, num_blocks), slice(0, rest * length)))",
        "pieces.append((slice(0, rest), slice(0, rest * length)))",
        ("tests/unit/test_replay.py::test_transitions_equal_the_twin[4-1-3-False]",),
    ),
    Mutation(
        "replay_weight_exponent",
        "the exponent of the importance weights has the wrong sign",
        "replay.py",
        "(lowest / leaves[addresses[i]]) ** beta",
        "(lowest / leaves[addresses[i]]) ** -beta",
        ("tests/unit/test_replay.py::test_importance_weights",),
    ),
    Mutation(
        "replay_runs_of_frames",
        "rows are copied as if they stood together, though some are missing between them",
        "rows.py",
        "begin + count] == first + count",
        "begin + count] >= first + count",
        ("tests/unit/test_rows.py::test_rows_are_taken_as_by_an_index",),
    ),
    Mutation(
        "replay_tree_on_a_border",
        "what lies exactly between two leaves is drawn from the one before",
        "sum_tree.py",
        "if after <= left[i]:",
        "if after < left[i]:",
        ("tests/unit/test_sum_tree.py::test_equals_a_list",),
    ),
    Mutation(
        "replay_stale_feedback",
        "a late priority goes to the row that has overwritten its own",
        "ring.py",
        "if max(0, head - num_rows) <= keys[place] < head and drawable[address]:",
        "if drawable[address]:",
        ("tests/unit/test_replay.py::test_stale_feedback_is_dropped_and_counted",),
    ),
    Mutation(
        "replay_reset_rows_drawn",
        "uniform draws take rows that are not valid",
        "replay.py",
        "candidates[ring.drawable[candidates]]",
        "candidates",
        ("tests/unit/test_replay.py::test_newest_row_is_drawn_and_reset_rows_are_not",),
    ),
    Mutation(
        "replay_peek_takes",
        "what is only looked at counts as learned from",
        "replay.py",
        "self._generator.bit_generator.state, self._ring.windows = generator, windows",
        "self._generator.bit_generator.state = generator",
        ("tests/unit/test_replay_sequences.py::test_to_peek_changes_nothing",),
    ),
    # ----------------------------------------------------------------------------- frame stacks
    Mutation(
        "stack_over_a_start",
        "stacks for acting keep frames of the episode before: no reset mask",
        "frames.py",
        "            if first.any():\n                frames[first] = newest[first][:, None]\n",
        "",
        ("tests/unit/test_frames.py::test_stacks_equal_gymnasiums",),
    ),
    Mutation(
        "stack_cut_off_is_drawn",
        "rows are drawn whose older frames are overwritten",
        "ring.py",
        "        self.drawable[cut] = False\n        self.num_drawable -= len(cut)\n",
        "        cut = cut[:0]\n",
        ("tests/unit/test_replay.py::test_rows_cut_off_from_their_frames",),
    ),
    # ---------------------------------------------------------------------------------- limiter
    Mutation(
        "limiter_counts_updates",
        "an update pays off one row of the debt instead of a batch of them",
        "schedules.py",
        "self._sampled += self.batch_size",
        "self._sampled += 1",
        (
            "tests/unit/test_schedules.py::TestSamplesPerInsert"
            "::test_only_rows_beyond_the_warmup_count",
        ),
    ),
    # ----------------------------------------------------------------------------------- worker
    Mutation(
        "worker_truncation_terminates",
        "a truncation is learned from as a termination",
        "worker.py",
        "into.terminated[row] = steps.terminated | steps.lost_life",
        "into.terminated[row] = steps.terminated | steps.truncated | steps.lost_life",
        ("tests/unit/test_worker.py::test_every_number_is_where_it_belongs",),
    ),
    Mutation(
        "worker_final_observation_lost",
        "the observation of the reset stands where a truncated episode's last one should",
        "worker.py",
        "steps = self._envs.step(action_B, rests_B, following)\n",
        """\
steps = self._envs.step(action_B, rests_B, following)
        self._envs.restart(np.flatnonzero(steps.truncated).tolist(), None, following)
""",
        ("tests/unit/test_worker.py::test_every_number_is_where_it_belongs",),
    ),
    Mutation(
        "worker_last_observation",
        "an unroll begins one observation too early",
        "worker.py",
        "self._observation[key][:] = array[-1]",
        "self._observation[key][:] = array[-2]",
        ("tests/unit/test_worker.py::test_every_number_is_where_it_belongs",),
    ),
    Mutation(
        "worker_reset_row_counts",
        "a reset row counts as an env step",
        "worker.py",
        "valid_B = np.logical_not(rests_B, out=into.valid[row])",
        "valid_B, into.valid[row] = ~rests_B, True",
        ("tests/unit/test_worker.py::test_conservation",),
    ),
    Mutation(
        "worker_draws_repeat",
        "every unroll explores by the same random numbers",
        "worker.py",
        "SeedSequence([spec.seed, spec.streams[0], self._sequence])",
        "SeedSequence([spec.seed, spec.streams[0]])",
        ("tests/unit/test_worker.py::test_every_unroll_has_draws_of_its_own",),
    ),
    Mutation(
        "worker_life_ends_the_game",
        "the score that is reported is that of a life",
        "worker.py",
        "self._episode_score.end(ended_B, row,",
        "self._episode_score.end(ended_B | steps.lost_life, row,",
        ("tests/unit/test_worker.py::test_lives_add_up_to_the_episode",),
    ),
)


def planted(mutation: Mutation, package: Path) -> str:
    """The text of the file with the bug; ``package`` is left alone.

    Raises:
        ValueError: the old text does not occur exactly once.
    """
    text = (package / mutation.file).read_text()
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.name}: its old text occurs {count} times in {mutation.file}")
    return text.replace(mutation.old, mutation.new)


def verdict(code: int, output: str) -> str | None:
    """The first test that failed, by what pytest returned and wrote; None if all passed.

    Raises:
        RuntimeError: pytest did not come to a verdict.
    """
    failed = re.search(r"^FAILED (\S.*?)(?: - .*)?$", output, re.MULTILINE)
    if code == 0:
        return None
    if code == 1 and failed:
        return failed[1]
    raise RuntimeError(f"pytest returned {code}:\n{output}")


def run_tests(copy: Path, tests: Sequence[str]) -> str | None:
    """The first of ``tests`` that fails in ``copy``, or None."""
    options = ["-x", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=copy,
        # Compiled files could outlive a bug that leaves a file's size and second as they were.
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return verdict(result.returncode, result.stdout)


def try_mutation(mutation: Mutation, copy: Path) -> str | None:
    """The test that notices ``mutation``, or None; ``copy`` is as before then."""
    file = copy / "actorlearner" / mutation.file
    sound = file.read_text()
    file.write_text(planted(mutation, copy / "actorlearner"))
    try:
        return run_tests(copy, mutation.tests)
    finally:
        file.write_text(sound)


def make_copy(copy: Path) -> None:
    """Copy what the tests need to directory ``copy``, a new one."""
    copy.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / name, ignore=ignore)
        else:
            shutil.copy(source, copy / name)
    (copy / "conftest.py").write_text(CONFTEST)


def say(text: str) -> None:
    """Write a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def check(mutations: Sequence[Mutation]) -> int:
    """Try ``mutations``, one in each of a few copies at a time, and tell what became of each.

    Returns:
        The exit code.
    """
    begun = time.perf_counter()
    survivors, troubles = [], []
    idle: SimpleQueue[Path] = SimpleQueue()

    def attempt(mutation: Mutation) -> tuple[str | Exception | None, float]:
        copy, since = idle.get(), time.perf_counter()
        try:
            return try_mutation(mutation, copy), time.perf_counter() - since
        except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
            return error, time.perf_counter() - since
        finally:
            idle.put(copy)

    with tempfile.TemporaryDirectory(prefix="mutations-") as directory:
        count = min(MOST_COPIES, os.cpu_count() or 1)
        copies = [Path(directory).resolve() / str(number) for number in range(count)]
        for copy in copies:
            make_copy(copy)
            idle.put(copy)
        tests = sorted({test for mutation in mutations for test in mutation.tests})
        if failed := run_tests(copies[0], tests):
            say(f"{failed} fails without any bug")
            return 2
        say(f"without a bug all pass: {time.perf_counter() - begun:.1f} s")
        with ThreadPoolExecutor(count) as pool:
            attempts = zip(mutations, pool.map(attempt, mutations), strict=True)
            for mutation, (found, seconds) in attempts:
                if isinstance(found, Exception):
                    troubles.append(mutation.name)
                    outcome = f"COULD NOT BE TRIED: {found}"
                else:
                    outcome = f"caught by {found}" if found else "SURVIVED"
                    survivors += [] if found else [mutation.name]
                say(f"{mutation.name}: {mutation.bug}")
                say(f"    {outcome} ({seconds:.1f} s)")
    count = len(mutations) - len(survivors) - len(troubles)
    say(f"{count} of {len(mutations)} caught in {time.perf_counter() - begun:.0f} s")
    for word, names in (("survived", survivors), ("not tried", troubles)):
        if names:
            say(f"{word}: {', '.join(names)}")
    return 1 if survivors else 2 if troubles else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "-k", metavar="NAME", action="append", help="only bugs with this in their names"
    )
    parser.add_argument("--list", action="store_true", help="list the bugs and plant none")
    asked = parser.parse_args(arguments)
    parts = asked.k or [""]
    chosen = [m for m in MUTATIONS if any(part in m.name for part in parts)]
    if not chosen:
        parser.error(f"no bug has {' or '.join(parts)} in its name; --list lists them")
    if asked.list:
        for mutation in chosen:
            say(f"{mutation.name}: {mutation.bug}")
        return 0
    return check(chosen)


if __name__ == "__main__":
    sys.exit(main())
