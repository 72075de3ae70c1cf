"""The answer without measuring: the cost model's first choice where it is clearly better than the schedule's default.

Read first: `predict` (over all schedules of a workload), `choose_safely` (model or default), `predict_best` (one space).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kronsched.cost_model.base import CostModel
from kronsched.cost_model.transfer import Prior, predicted_share, seen_space
from kronsched.cost_model.xgb import XgbModel
from kronsched.errors import InvalidConfig, UnsupportedError
from kronsched.runtime.load import DEFAULT
from kronsched.search.distinctive import Distinctive
from kronsched.space import Candidate, Config, SearchSpace

if TYPE_CHECKING:
    from kronsched.hardware import Device
    from kronsched.schedules.base import Schedule
    from kronsched.workloads.base import Workload

ROUNDS = 6
FAR = 4.0
"""Mean octaves between a shape and the nearest that the model knows, beyond which the default is taken."""
CLEARLY = 0.2
"""Log of the speed-up over the default that the model must promise: about as much as it errs by on a shape it has not seen."""
DOUBT = 3.0
"""How many times the disagreement of the model's boosters the promised speed-up must exceed."""
LAUNCH_US = 3.0
"""About the least time of any kernel: keeps what is expected for small shapes from promising less."""
PREDICTED = "predicted, not measured"


@dataclass(frozen=True)
class Prediction:
    """What to run when nothing was measured. origin: `PREDICTED` or `DEFAULT`.  us: expected time, None without a model."""

    schedule: Schedule
    candidate: Candidate
    origin: str
    us: float | None


def predict(workload: Workload, device: Device, schedules: Sequence[Schedule], seed: int = 0) -> Prediction:
    """The choice among the schedules that serve a workload, by the time expected of each.

    With a model: the roofline time of the workload, over the share of it that the schedule's best reached on the nearest known
    shapes, times how much slower than that best the choice should be. Without one: the default config, at what the schedule
    expects of it, or else at its `untuned_share` of the roofline and the time of a launch.
    A schedule that cannot build its default here is passed over.
    """
    found = [p for s in schedules if (p := _predict_one(s, workload, device, seed) or _guess(s, workload, device)) is not None]
    if not found:
        raise UnsupportedError(f"{workload.label}: no schedule of this version has a default config for it on {device.name}")
    return min(found, key=lambda p: math.inf if p.us is None else p.us)


def _guess(schedule: Schedule, workload: Workload, device: Device) -> Prediction | None:
    """The default config and a time for comparison."""
    try:
        default = schedule.space(workload, device).candidate(schedule.default_config(workload, device))
    except InvalidConfig as e:
        warnings.warn(f"{schedule.name} is passed over: {e}", stacklevel=3)
        return None
    return Prediction(schedule, default, DEFAULT, guessed_us(schedule, workload, device, default.config))


def guessed_us(schedule: Schedule, workload: Workload, device: Device, config: Config | None = None) -> float:
    """What the default config of a schedule may take where no cost model knows; infinite where the device's rates are not known.

    config: the default config, where it is at hand.
    """
    from kronsched.hardware import floor_us

    if not (device.bandwidth_gbs > 0 and "float32" in device.peak_gflops):
        return math.inf
    if config is not None and (us := schedule.expected_us(workload, config, device)) is not None:
        return us
    return floor_us(workload, device) / schedule.untuned_share + LAUNCH_US


def predict_best(space: SearchSpace, model: CostModel, default: Candidate, n: int = 8, seed: int = 0) -> list[Candidate]:
    """The `n` candidates the model likes most, best first, then the default; only the default when the model knows nothing.

    The space is searched by the evolution of `Distinctive`, started from the default: about half a second.
    """
    if not model.trained:
        return [default]
    search = Distinctive(space, model, seed, start=[default])
    ranked = search.ranked(ROUNDS)[:n]
    return [*(c for c in ranked if c != default), default]


def choose_safely(workload: Workload, prior: Prior, model: XgbModel, candidate: Candidate, default: Candidate) -> bool:
    """Whether a candidate may be taken instead of the default: the shape is near known ones, and all boosters promise a speed-up.

    model: a model with this prior and no observations.
    """
    _, distance = predicted_share(prior.known, workload)
    if distance > FAR:
        return False
    first, second = prior.members(model.featurizer.matrix([candidate, default])).T
    gain = first - second
    return bool(gain.mean() > CLEARLY + DOUBT * gain.std())


def model_on(
    prior: Prior | None, schedule: Schedule, space: SearchSpace, workload: Workload, device: Device, seed: int = 0
) -> XgbModel:
    """A fresh cost model of one schedule for one workload, on a copy of the prior's columns."""
    from kronsched.cost_model.features import Columns, Featurizer

    columns = Columns() if prior is None else Columns(prior.columns.names)
    return XgbModel(Featurizer(space, workload, device, schedule, columns), seed=seed, prior=prior)


def _predict_one(schedule: Schedule, workload: Workload, device: Device, seed: int) -> Prediction | None:
    """None where there is no model for this device."""
    from kronsched.cost_model.pretrained import pretrained

    prior = pretrained(schedule, workload, device)
    if prior is None or all(k.device != device.name for k in prior.known):
        return None
    try:
        space = schedule.space(workload, device)
        default = space.candidate(schedule.default_config(workload, device))
        model = model_on(prior, schedule, space, workload, device, seed)
        # The default may have a value that the prior has not seen: it is looked at beside the others.
        first = predict_best(seen_space(space, prior), model, default, n=1, seed=seed)[0]
    except InvalidConfig as e:
        warnings.warn(f"{schedule.name} is passed over: {e}", stacklevel=2)
        return None
    taken = first if first != default and choose_safely(workload, prior, model, first, default) else default
    return Prediction(
        schedule, taken, DEFAULT if taken == default else PREDICTED, expected_us(workload, device, prior, model, taken)
    )


def expected_us(workload: Workload, device: Device, prior: Prior, model: XgbModel, candidate: Candidate) -> float:
    """A rough time of a candidate: good enough to compare schedules, not to be shown."""
    from kronsched.hardware import floor_us

    share, _ = predicted_share(prior.known, workload)
    return floor_us(workload, device) / share * math.exp(-min(0.0, float(model.predict([candidate])[0]))) + LAUNCH_US
