"""The answer without measuring, and a search over several spaces."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kronsched import registry
from kronsched.cost_model import pretrained
from kronsched.cost_model.null import NullModel
from kronsched.cost_model.pretrained import save_prior
from kronsched.cost_model.transfer import Shape, fit_prior, shapes_of
from kronsched.errors import InvalidConfig, UnsupportedError
from kronsched.hardware import PRESETS
from kronsched.runtime.load import choose_config
from kronsched.schedules.kron_cuda_simt import KronCudaSimt
from kronsched.search.base import Observation
from kronsched.search.distinctive import Distinctive
from kronsched.search.pool import Pool
from kronsched.search.portfolio import Portfolio
from kronsched.search.predict import model_on, predict, predict_best
from kronsched.search.random import Random
from kronsched.search.simulate import model_for
from kronsched.search.table import SimulatedMeasurer, Table
from kronsched.space import Candidate, Knob, SearchSpace
from kronsched.workloads.kron import KronMatmul
from tests.search.synthetic import H200, FusedSchedule, fused_table, fused_workload, records

# -- prediction -----------------------------------------------------------------------------------------


def test_a_model_that_knows_nothing_answers_with_the_default() -> None:
    table = fused_table()
    [default] = table.default()
    assert predict_best(table.space, NullModel(table.space), default) == [default]


def test_a_model_of_other_shapes_answers_with_something_better_and_ends_with_the_default() -> None:
    table = fused_table(1024)
    prior = fit_prior(shapes_of(FusedSchedule(), H200, records(256, 300) + records(4096, 300)))
    assert prior is not None and table.subject is not None
    s = table.subject
    model = model_on(prior, s.schedule, table.space, s.workload, s.device)
    [default] = table.default()
    ranked = predict_best(table.space, model, default)
    assert ranked[-1] == default and len({c.key for c in ranked}) == len(ranked) and 2 <= len(ranked) <= 9
    scores = model.predict(ranked[:-1])
    assert list(scores) == sorted(scores, reverse=True)
    assert scores[0] >= np.quantile(model.predict([c for c, _ in table]), 0.99)
    first, last = table.get(ranked[0]), table.get(default)
    assert first is not None and last is not None and first.cost and last.cost and first.cost < last.cost


class Twin(FusedSchedule):
    """The same schedule under another name, without a model or with one of its own."""

    name = "made_up_twin"


def save(folder: Path, schedule: FusedSchedule, faster: float = 1.0) -> None:
    """A model of a schedule whose times are `faster` times shorter than those of the table."""
    shapes = shapes_of(FusedSchedule(), H200, records(256, 200) + records(4096, 200))
    prior = fit_prior([replace(s, costs=s.costs / faster) for s in shapes], members=2)
    assert prior is not None
    save_prior(prior, folder, schedule.name, "")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pretrained, "model_dirs", lambda: [tmp_path])
    monkeypatch.setattr("kronsched.search.predict.CLEARLY", 0.05)  # the made-up table has less to gain
    return tmp_path


W = fused_workload(1024)


def test_without_a_model_the_default_of_the_schedule_that_promises_most_is_taken(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for share, name in ((0.1, "made_up"), (0.9, "made_up_twin")):
        monkeypatch.setattr(Twin, "untuned_share", share)
        found = predict(W, H200, [FusedSchedule(), Twin()])
        assert (found.schedule.name, found.origin) == (name, "default, not measured")
        assert found.candidate.config == found.schedule.default_config(W, H200)


def test_what_a_schedule_expects_of_its_default_goes_before_its_share(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Twin, "untuned_share", 0.9)
    for us, name in ((1e6, "made_up"), (1e-3, "made_up_twin")):
        monkeypatch.setattr(Twin, "expected_us", lambda *_, us=us: us)
        assert predict(W, H200, [FusedSchedule(), Twin()]).schedule.name == name


def test_a_schedule_that_has_no_default_here_is_passed_over(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> None:
        raise InvalidConfig("nothing fits")

    monkeypatch.setattr(Twin, "default_config", nothing)
    with pytest.warns(UserWarning, match="made_up_twin is passed over: nothing fits"):
        assert predict(W, H200, [Twin(), FusedSchedule()]).schedule.name == "made_up"
    with pytest.warns(UserWarning), pytest.raises(UnsupportedError, match="has a default config"):
        predict(W, H200, [Twin()])


def test_a_schedule_with_a_model_goes_before_one_without(models: Path) -> None:
    save(models, FusedSchedule())
    found = predict(W, H200, [Twin(), FusedSchedule()])
    assert (found.schedule.name, found.origin) == ("made_up", "predicted, not measured")
    chosen, default = fused_table().get(found.candidate), fused_table().get(fused_table().default()[0])
    assert chosen is not None and default is not None and chosen.cost and default.cost and chosen.cost < default.cost
    assert found.us is not None and 0.3 < found.us / chosen.cost < 3


@pytest.mark.parametrize("faster", [0.4, 2.5])
def test_schedules_with_models_of_their_own_are_compared_by_time(models: Path, faster: float) -> None:
    save(models, FusedSchedule())
    save(models, Twin(), faster)
    assert predict(W, H200, [FusedSchedule(), Twin()]).schedule.name == ("made_up_twin" if faster > 1 else "made_up")


def test_on_a_device_that_no_model_knows_the_default_is_taken(models: Path) -> None:
    save(models, FusedSchedule())
    a100 = PRESETS["nvidia/a100"]
    found = predict(W, a100, [FusedSchedule()])
    assert (found.origin, found.candidate.config) == ("default, not measured", FusedSchedule().default_config(W, a100))


def test_load_names_where_its_config_comes_from(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "schedules_for", lambda *_: [FusedSchedule()])
    assert choose_config(W, H200) == ("made_up", FusedSchedule().default_config(W, H200), "default, not measured")
    save(models, FusedSchedule())
    space, config, origin = choose_config(W, H200)
    assert (space, origin) == ("made_up", "predicted, not measured") and config != FusedSchedule().default_config(W, H200)


def test_the_answer_takes_less_than_two_seconds_of_one_core(models: Path) -> None:
    """For a shipped schedule on its whole space; a fresh process adds the import of xgboost."""
    w, schedule = KronMatmul(512, [(8, 8)] * 5), KronCudaSimt()
    space = schedule.space(w, H200)
    pool = Pool(space, 0)
    candidates = tuple(pool.candidates[i] for i in pool.sample(200).tolist())
    prior = fit_prior([Shape(schedule, w, H200, candidates, np.linspace(50.0, 200.0, len(candidates)))])
    assert prior is not None
    save_prior(prior, models, schedule.name, "")
    begin = time.process_time()
    found = predict(w, H200, [schedule])
    assert time.process_time() - begin < 2.0
    assert space.invalid(found.candidate.config) is None


# -- portfolio ------------------------------------------------------------------------------------------


def spaces(*sizes: int) -> list[SearchSpace]:
    return [SearchSpace(f"s{i}", [Knob("a", tuple(range(n)))]) for i, n in enumerate(sizes)]


def portfolio(*sizes: int) -> Portfolio:
    return Portfolio([Random(s, NullModel(s)) for s in spaces(*sizes)])


def counts(candidates: list[Candidate]) -> dict[str, int]:
    return dict(Counter(c.space for c in candidates))


def tell(p: Portfolio, candidates: list[Candidate], costs: dict[str, float]) -> None:
    p.tell([Observation(c, "ok", costs[c.space]) for c in candidates])


def test_one_space_passes_through() -> None:
    p = portfolio(20)
    assert len(p.ask(8)) == 8 and p.batch_size == 8 and len(p.ask(100)) == 12 and p.ask(1) == []


def test_before_any_result_spaces_share_alike() -> None:
    assert counts(portfolio(99, 99).ask(8)) == {"s0": 4, "s1": 4}
    p = portfolio(99, 99, 99)
    assert counts(p.ask(2) + p.ask(2) + p.ask(2)) == {"s0": 2, "s1": 2, "s2": 2}


def test_the_best_space_gets_nearly_all_and_the_others_are_still_looked_at() -> None:
    p = portfolio(999, 999)
    tell(p, p.ask(16), {"s0": 9.0, "s1": 3.0})
    asked = [p.ask(1)[0] for _ in range(64)]
    assert counts(asked)["s1"] >= 56 and 2 <= counts(asked)["s0"] <= 8


def test_a_space_that_is_close_stays_in_play() -> None:
    p = portfolio(999, 999)
    tell(p, p.ask(16), {"s0": 3.3, "s1": 3.0})
    shared = counts(p.ask(32))
    assert shared["s0"] >= 8 and shared["s1"] > shared["s0"]


def test_a_space_where_everything_fails_is_given_up() -> None:
    p = portfolio(999, 999)
    for _ in range(8):
        p.tell([Observation(c, "crash", None) if c.space == "s0" else Observation(c, "ok", 2.0) for c in p.ask(8)])
    assert counts(p.ask(64)).get("s0", 0) <= 4


def test_what_a_log_holds_counts_as_trials() -> None:
    p = portfolio(99, 99)
    known = portfolio(99, 99).strategies[0].ask(20)
    p.tell([Observation(c, "crash", None) for c in known])
    assert counts(p.ask(8)) == {"s1": 8}


def test_trials_flow_to_the_schedule_that_wins() -> None:
    """Two schedules, one three times as slow: the search takes little longer than with the fast one alone."""
    fast = fused_table(1024)
    slow = Table(
        "slow", "slow", {Candidate("slow", c.items): replace(e, cost=e.cost and 3 * e.cost) for c, e in fused_table(1024, "b")}
    )

    def trials(*tables: Table) -> float:
        found = []
        for seed in range(6):
            strategies = [Distinctive(t.space, model_for(t, Distinctive, seed), seed) for t in tables]
            p, measurers, done = Portfolio(strategies), {t.space.name: SimulatedMeasurer(t) for t in tables}, 0
            best = np.inf
            while best > fast.optimum / 0.9 and done < 256:
                batch = p.ask(8)
                results = [next(iter(measurers[c.space].measure([c]))) for c in batch]
                p.tell([Observation(r.candidate, r.status, r.median_us) for r in results])
                best = min([best, *(r.median_us for r in results if r.median_us is not None)])
                done += len(batch)
            found.append(done)
        return float(np.mean(found))

    assert trials(fast, slow) <= 1.3 * trials(fast) + 16


def test_an_exhausted_space_leaves_its_share_to_the_others() -> None:
    p = portfolio(3, 99)
    tell(p, p.ask(8), {"s0": 1.0, "s1": 2.0})
    assert counts(p.ask(16)) == {"s1": 16}
    rest = p.ask(500)
    assert len(rest) == 99 - 5 - 16 and p.ask(4) == []
