"""Schedules, clocks and the samples-per-insert limiter."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorlearner.schedules import Every, SamplesPerInsert, check_knots, piecewise

numbers = st.integers(-(10**9), 10**9).map(lambda n: n / 1_000)


class TestPiecewise:
    @pytest.mark.parametrize(
        ("x", "y"), [(-1, 1.0), (0, 1.0), (5, 0.55), (10, 0.1), (15, 0.06), (20, 0.02), (99, 0.02)]
    )
    def test_linear_between_knots_and_constant_outside(self, x: float, y: float) -> None:
        assert piecewise([(0, 1.0), (10, 0.1), (20, 0.02)], x) == pytest.approx(y)

    def test_one_knot_is_a_constant(self) -> None:
        assert [piecewise([(3, 7.0)], x) for x in (-1, 3, 8)] == [7.0, 7.0, 7.0]

    @given(st.dictionaries(numbers, numbers, min_size=1, max_size=8), numbers)
    def test_equals_numpy(self, knots: dict[float, float], x: float) -> None:
        xs = sorted(knots)
        expected = np.interp(x, xs, [knots[k] for k in xs])
        assert piecewise([(k, knots[k]) for k in xs], x) == pytest.approx(expected, abs=1e-6)

    @pytest.mark.parametrize(
        ("knots", "message"),
        [
            ([], "at least one"),
            ([(1, 0.0), (0, 1.0)], "greater than the one before"),
            ([(1, 0.0), (1, 1.0)], "greater than the one before"),
            ([(0, math.nan)], "finite"),
            ([(math.inf, 0.0)], "finite"),
        ],
    )
    def test_refuses_what_is_no_schedule(
        self, knots: list[tuple[float, float]], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            check_knots(knots)
        with pytest.raises(ValueError, match=message):
            piecewise(knots, 0.5)


class TestEvery:
    def test_strikes_once_per_multiple_reached_or_passed(self) -> None:
        clock = Every(10)
        counts = [0, 9, 10, 10, 11, 19, 23, 29, 55, 59, 60]
        assert [count for count in counts if clock.due(count)] == [10, 23, 55, 60]

    def test_period_zero_never_strikes(self) -> None:
        assert not any(Every(0).due(count) for count in (0, 1, 10**9))

    def test_refuses_a_negative_period(self) -> None:
        with pytest.raises(ValueError, match="period=-1"):
            Every(-1)

    @given(st.integers(1, 50), st.lists(st.integers(0, 40), max_size=40))
    def test_strikes_as_often_as_multiples_allow(self, period: int, leaps: list[int]) -> None:
        clock, count = Every(period), 0
        for leap in leaps:
            before, count = count, count + leap
            assert clock.due(count) == any(n % period == 0 for n in range(before + 1, count + 1))

    def test_goes_on_where_it_was(self) -> None:
        clock, resumed, fresh = Every(1_000), Every(1_000), Every(1_000)
        assert clock.due(5_200)
        resumed.load_state_dict(clock.state_dict())
        assert not resumed.due(5_900)
        assert resumed.due(6_000)
        assert fresh.due(5_900)

    def test_a_resume_may_change_the_period(self) -> None:
        clock, resumed = Every(1_000), Every(500)
        assert clock.due(5_000)
        resumed.load_state_dict(clock.state_dict())
        assert [count for count in (5_000, 5_400, 5_500, 6_000) if resumed.due(count)] == [
            5_500,
            6_000,
        ]


def limiter(
    target: float = 0.25, batch_size: int = 32, warmup: int = 1_000, slack_rows: int = 256
) -> SamplesPerInsert:
    return SamplesPerInsert(target, batch_size, warmup, slack_rows)


class TestSamplesPerInsert:
    def test_warmup_owes_nothing_and_takes_everything(self) -> None:
        pace = limiter(warmup=1_000)
        for _ in range(10):
            assert pace.may_insert()
            assert not pace.owes_an_update()
            assert math.isnan(pace.ratio())
            pace.insert(100)
        assert not pace.owes_an_update()

    def test_only_rows_beyond_the_warmup_count(self) -> None:
        pace = limiter(target=1.0, batch_size=10, warmup=100)
        pace.insert(109)
        assert not pace.owes_an_update()
        pace.insert(1)
        assert pace.owes_an_update()
        pace.sample()
        assert not pace.owes_an_update()
        assert pace.ratio() == 1.0

    def test_batches_of_the_warmup_do_not_count(self) -> None:
        pace = limiter(target=1.0, batch_size=10, warmup=100)
        pace.sample()
        pace.insert(110)
        assert pace.owes_an_update()
        assert pace.ratio() == 0.0

    def test_the_slack_bounds_what_workers_may_run_ahead(self) -> None:
        pace = limiter(target=0.5, batch_size=4, warmup=0, slack_rows=100)
        pace.insert(100)
        assert pace.may_insert()
        pace.insert(1)
        assert not pace.may_insert()
        pace.sample()
        assert pace.may_insert()

    @pytest.mark.parametrize("slow_side", ["learner", "workers", "neither"])
    @given(
        target=st.sampled_from([0.1, 0.25, 1.0, 7.5, 64.0]),
        batch_size=st.sampled_from([1, 32, 256]),
        unroll=st.integers(1, 64),
        warmup=st.integers(0, 3_000),
        seed=st.integers(0, 999),
    )
    @settings(max_examples=10, deadline=None)
    def test_holds_the_target_from_both_sides(
        self, slow_side: str, target: float, batch_size: int, unroll: int, warmup: int, seed: int
    ) -> None:
        draw = random.Random(seed)
        slack_rows = 4 * unroll
        pace = SamplesPerInsert(target, batch_size, warmup, slack_rows)
        inserted = sampled = 0
        # Slack and one batch must be little against what the check is made over.
        enough = warmup + 30 * (max(2 * batch_size, target * slack_rows) / target + unroll)
        while inserted < enough:
            if pace.may_insert() and (slow_side != "workers" or draw.random() < 0.3):
                inserted += unroll
                pace.insert(unroll)
            turns = {"learner": draw.random() < 0.2, "workers": 10**9, "neither": 1}[slow_side]
            while turns and pace.owes_an_update():
                assert inserted > warmup
                sampled += batch_size
                pace.sample()
                turns -= 1
            assert pace.may_insert() or pace.owes_an_update(), "both sides are held back"
        assert sampled / (target * (inserted - warmup)) == pytest.approx(1, abs=0.05)
        assert pace.ratio() == pytest.approx(sampled / (inserted - warmup))

    def test_no_burst_after_a_resume_without_replay(self) -> None:
        pace = limiter(target=8.0, batch_size=32, warmup=1_000)
        pace.insert(50_000)
        pace.restart_warmup()
        assert pace.may_insert()
        assert math.isnan(pace.ratio())
        updates = 0
        for row in range(1, 2_001):
            pace.insert(1)
            while pace.owes_an_update():
                assert row > 1_000
                pace.sample()
                updates += 1
        assert updates == 1_000 * 8 // 32

    @pytest.mark.parametrize("inserted", [0, 400, 1_000, 1_500])
    def test_goes_on_where_it_was(self, inserted: int) -> None:
        pace, resumed = limiter(target=1.0), limiter(target=1.0)
        pace.insert(inserted)
        if pace.owes_an_update():
            pace.sample()
        resumed.load_state_dict(pace.state_dict())
        for _ in range(50):
            assert resumed.owes_an_update() == pace.owes_an_update()
            assert resumed.may_insert() == pace.may_insert()
            assert resumed.ratio() == pytest.approx(pace.ratio(), nan_ok=True)
            for each in (pace, resumed):
                each.insert(20)
                if each.owes_an_update():
                    each.sample()

    def test_a_resume_with_another_target_makes_no_debt(self) -> None:
        pace, resumed = limiter(target=0.25), limiter(target=4.0)
        pace.insert(101_000)
        while pace.owes_an_update():
            pace.sample()
        resumed.load_state_dict(pace.state_dict())
        assert not resumed.owes_an_update()
        resumed.insert(8)
        assert resumed.owes_an_update(), "the warm-up was over"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"target": 0.0}, "target=0.0"),
            ({"target": math.nan}, "target=nan"),
            ({"target": math.inf}, "target=inf"),
            ({"batch_size": 0}, "batch_size=0"),
            ({"warmup": -1}, "warmup_env_steps=-1"),
            ({"slack_rows": -1}, "slack_rows=-1"),
        ],
    )
    def test_refuses_numbers_out_of_bounds(self, arguments: dict[str, float], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            limiter(**arguments)  # type: ignore[arg-type]
