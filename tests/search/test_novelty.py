"""Greedy picks: by hand on points of a line."""

from __future__ import annotations

import numpy as np

from kronsched.search.novelty import nearest, pick, spread_out

LINE = np.array([[0.0], [0.1], [0.5], [0.9], [1.0]])
FAR = np.full(5, np.inf)


def test_nearest() -> None:
    np.testing.assert_allclose(nearest(LINE, np.array([[0.0], [1.0]])), [0, 0.1, 0.5, 0.1, 0], atol=1e-7)
    assert np.isinf(nearest(LINE, np.empty((0, 1)))).all()
    assert nearest(np.empty((0, 1)), LINE).shape == (0,)


def test_spread_out_is_max_min() -> None:
    assert spread_out(LINE, 3, FAR) == [0, 4, 2]
    assert spread_out(LINE, 2, nearest(LINE, np.array([[1.0]]))) == [0, 2]
    assert sorted(spread_out(LINE, 9, FAR)) == [0, 1, 2, 3, 4]


def test_without_novelty_the_best_scores_are_picked() -> None:
    scores = np.array([5.0, 4.9, 1.0, 2.0, 3.0])
    assert pick(scores, LINE, 3, FAR, 0.0) == [0, 1, 4]


def test_with_novelty_a_near_copy_of_the_best_is_left() -> None:
    scores = np.array([5.0, 4.9, 1.0, 2.0, 4.0])
    assert pick(scores, LINE, 2, FAR, 1.0) == [0, 4]


def test_what_is_measured_counts_as_picked() -> None:
    scores = np.array([5.0, 4.9, 1.0, 2.0, 4.0])
    assert pick(scores, LINE, 1, nearest(LINE, np.array([[0.0]])), 1.0) == [4]


def test_without_knowledge_novelty_decides() -> None:
    assert pick(np.zeros(5), LINE, 3, FAR, 2.0) == [0, 4, 2]


def test_more_than_there_are_and_equal_points() -> None:
    assert sorted(pick(np.arange(5.0), LINE, 9, FAR, 2.0)) == [0, 1, 2, 3, 4]
    assert sorted(pick(np.arange(3.0), np.zeros((3, 2)), 3, np.zeros(3), 2.0)) == [0, 1, 2]
    assert pick(np.empty(0), np.empty((0, 2)), 3, np.empty(0), 2.0) == []
