"""How good the answer without measuring is: what `load` would pick for an untuned shape, looked up in a table.

Read first: `zero_trial`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kronsched.cost_model.transfer import Prior
from kronsched.cost_model.xgb import XgbModel
from kronsched.search.distinctive import Distinctive
from kronsched.search.predict import choose_safely
from kronsched.search.simulate import model_for
from kronsched.search.table import Table


@dataclass(frozen=True)
class ZeroTrial:
    """Shares of a table's optimum: of what is picked, of the model's first choice, and of the schedule's default.

    default: None when the table does not hold it.  taken: "model" or "default".
    """

    table: str
    share: float
    model: float
    default: float | None
    taken: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def zero_trial(table: Table, prior: Prior, name: str | None = None) -> ZeroTrial | None:
    """Judge a prior that has seen no record of the table's workload; None when it is not known what the table is of."""
    if table.subject is None:
        return None
    model = model_for(table, Distinctive, prior=prior)
    assert isinstance(model, XgbModel)
    candidates, entries = zip(*table, strict=True)
    shares = [0.0 if e.cost is None else table.optimum / e.cost for e in entries]
    scores = model.predict(candidates)
    first = int(scores.argmax())
    default = next(iter(table.default()), None)
    at = None if default is None else candidates.index(default)
    if default is not None and not choose_safely(table.subject.workload, prior, model, candidates[first], default):
        first_taken, taken = at, "default"
    else:
        first_taken, taken = first, "model"
    assert first_taken is not None
    return ZeroTrial(name or table.name, shares[first_taken], shares[first], None if at is None else shares[at], taken)
