"""Intervals by bootstrap over prompts, held against every resample there is, and against known truths."""

from itertools import product

import numpy as np
import pytest

from eagle3 import bootstrap

ROWS = np.array([[0, 4], [3, 4], [9, 3], [2, 5]])  # accepted tokens and passes of four prompts


def every_resample(rows):
    """The figure of each of the n**n equally likely resamples, sorted."""
    draws = (rows[list(draw)].sum(axis=0) for draw in product(range(len(rows)), repeat=len(rows)))
    return np.sort([1 + accepted / passes for accepted, passes in draws])


def test_the_interval_is_that_of_all_resamples():
    """Of four prompts there are 256 resamples: the middle 95% of their ratios of sums, up to a step of the list."""
    exact = every_resample(ROWS)
    low, high = bootstrap.ratio_interval([ROWS], plus=1)
    for found, share in ((low, 0.025), (high, 0.975)):
        at = share * len(exact)
        assert exact[int(at) - 2] <= found <= exact[int(at) + 2]


def test_each_benchmark_keeps_its_number_of_prompts():
    """Prompts that are all alike within their benchmark leave nothing to chance: 1 + (2 + 2 + 8) / (4 + 4 + 4) = 2."""
    strata = [np.array([[2, 4], [2, 4]]), np.array([[8, 4]])]
    assert bootstrap.ratio_interval(strata, plus=1) == [2.0, 2.0]


def test_the_draws_are_the_same_in_every_run():
    """Two calls give the same numbers: a table that is printed again does not change."""
    assert bootstrap.ratio_interval([ROWS], plus=1) == bootstrap.ratio_interval([ROWS], plus=1)


@pytest.mark.parametrize("strata", [[ROWS[:1]], [np.zeros((3, 2))], [np.array([[0, 0], [2, 1]])]])
def test_where_there_is_nothing_to_resample_there_is_no_interval(strata):
    """One prompt, or passes that may sum to nothing: None, not an interval of no width or a NaN."""
    assert bootstrap.ratio_interval(strata) is None


def test_a_paired_difference_is_sharper_than_two_intervals():
    """A draft that accepts one token more in every pass is better by exactly 1, however much the prompts differ."""
    both = np.hstack([ROWS, ROWS + [[4, 0], [4, 0], [3, 0], [5, 0]]])
    difference, ratio = bootstrap.compared([both])
    assert difference == pytest.approx([1.0, 1.0])
    low, high = bootstrap.ratio_interval([ROWS], plus=1)
    assert high - low > 1 and ratio[0] < ratio[1]


def test_intervals_hold_the_truth_about_as_often_as_they_say(monkeypatch):
    """Of 200 samples of 40 prompts from a known distribution, about 95% have an interval that holds its true value."""
    monkeypatch.setattr(bootstrap, "RESAMPLES", 1000)
    random, held = np.random.default_rng(1), 0
    for _ in range(200):
        passes = random.integers(20, 60, 40)
        accepted = random.binomial(passes, random.beta(2, 2, 40))
        low, high = bootstrap.ratio_interval([np.stack([accepted, passes], axis=1)], plus=1)
        held += low <= 1.5 <= high
    assert 176 <= held <= 198
