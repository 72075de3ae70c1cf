"""The pool: rows and candidates agree, draws repeat nothing, moves are what they say."""

from __future__ import annotations

import numpy as np

from kronsched.search.pool import INVALID, SHUFFLED, Pool
from kronsched.space import Candidate, Config, Knob, SearchSpace


def even(config: Config) -> str | None:
    return None if (int(config["a"]) + int(config["b"])) % 2 == 0 else "odd"


SPACE = SearchSpace(
    "s", [Knob("a", tuple(range(10))), Knob("b", tuple(range(10))), Knob("c", ("x", "y", "z")), Knob("d", (7,))], even
)
HUGE = SearchSpace("h", [Knob(f"k{i}", tuple(range(12))) for i in range(20)], lambda c: None if c["k0"] == 3 else "no")


def test_ids_are_given_to_valid_rows_once() -> None:
    pool = Pool(SPACE, 0)
    rows = np.array([[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 1, 0], [9, 9, 2, 0]])
    ids = pool.ids(rows)
    assert ids.tolist() == [0, INVALID, 0, 1] and len(pool) == 2
    assert pool.candidates[0].config == {"a": 0, "b": 0, "c": "y", "d": 7}
    np.testing.assert_array_equal(pool.rows, rows[[0, 3]])


def test_the_check_runs_once_a_row() -> None:
    calls: list[Config] = []
    space = SearchSpace("s", [Knob("a", (1, 2, 3))], lambda c: calls.append(c))
    pool = Pool(space, 0)
    for _ in range(5):
        pool.ids(np.array([[0], [1], [2]]))
    assert len(calls) == 3


def test_a_candidate_of_another_knob_order_or_space() -> None:
    pool = Pool(SPACE, 0)
    i = pool.id_of(Candidate("s", (("d", 7), ("c", "z"), ("b", 4), ("a", 2))))
    assert pool.candidates[i] == SPACE.candidate({"a": 2, "b": 4, "c": "z", "d": 7})
    assert pool.id_of(Candidate("s", (("a", 2), ("b", 4)))) == INVALID
    assert pool.id_of(SPACE.candidate({"a": 2, "b": 5, "c": "z", "d": 7})) == INVALID


def test_draws_are_a_permutation_of_the_valid_candidates() -> None:
    pool, drawn = Pool(SPACE, 1), []
    while len(got := pool.draw(7)):
        drawn += got.tolist()
    assert pool.all_drawn and sorted(drawn) == list(range(150)) and len(pool) == 150
    assert drawn != sorted(drawn) or [pool.candidates[i] for i in drawn] != list(SPACE)


def test_a_draw_gives_up_after_its_tries_and_goes_on_the_next_time() -> None:
    space = SearchSpace("s", [Knob("a", tuple(range(1000)))], lambda c: None if c["a"] == 5 else "no")
    pool, calls = Pool(space, 0), 0
    while not len(pool.draw(1, tries=10)):
        calls += 1
        assert calls <= 100
    assert not len(pool.draw(1, tries=10_000)) and pool.all_drawn


def test_samples_are_distinct_and_valid_in_a_space_of_any_size() -> None:
    assert HUGE.size > SHUFFLED
    pool = Pool(HUGE, 0)
    ids = pool.sample(50)
    assert len(set(ids.tolist())) == 50 and all(pool.candidates[i].config["k0"] == 3 for i in ids)
    assert not pool.exhaustible and len(pool.draw(5)) == 5 and not pool.all_drawn
    assert len(Pool(SPACE, 0).sample(10_000)) == 150


def test_samples_are_about_uniform() -> None:
    pool = Pool(SPACE, 0)
    counts = np.zeros(3)
    for _ in range(300):
        i = pool.sample(1, tries=100)[0]
        counts[pool.rows[i, 2]] += 1
    assert counts.min() > 60


def test_a_mutation_changes_one_knob_or_up_to_two() -> None:
    pool = Pool(SPACE, 0)
    ids = pool.sample(40)
    for times in (1, 2):
        changed = (pool.mutate(ids, times) != pool.rows[ids]).sum(axis=1)
        assert changed.min() >= (1 if times == 1 else 0) and changed.max() == times
    assert (pool.mutate(ids)[:, 3] == 0).all()  # a knob with one value stays


def test_a_space_of_one_config_has_no_moves() -> None:
    pool = Pool(SearchSpace("s", [Knob("a", (1,))]), 0)
    ids = pool.sample(3)
    assert pool.mutate(ids).tolist() == [[0]] and len(pool.neighbours([0])) == 0


def test_neighbours_are_all_rows_one_knob_away() -> None:
    pool = Pool(SPACE, 0)
    i = pool.id_of(SPACE.candidate({"a": 4, "b": 2, "c": "y", "d": 7}))
    rows = pool.neighbours([i])
    assert len(rows) == len(np.unique(rows, axis=0)) == 9 + 9 + 2
    assert ((rows != pool.rows[i]).sum(axis=1) == 1).all()


def test_a_child_takes_each_knob_from_a_parent() -> None:
    pool = Pool(SPACE, 0)
    a, b = pool.sample(60)[:30], pool.sample(60)[30:]
    child = pool.cross(a, b)
    assert ((child == pool.rows[a]) | (child == pool.rows[b])).all()
    assert (child != pool.rows[a]).any() and (child != pool.rows[b]).any()
