"""Every cost model, put through the cost-model contract."""

from __future__ import annotations

from kronsched.cost_model.base import CostModel
from kronsched.cost_model.features import Featurizer
from kronsched.cost_model.null import NullModel
from kronsched.cost_model.xgb import XgbModel, XgbOptions
from kronsched.space import SearchSpace
from tests.contract.cost_model_battery import CostModelBattery


class TestNullModel(CostModelBattery):
    learns = False

    def make(self, space: SearchSpace, seed: int = 0) -> CostModel:
        return NullModel(space)


class TestRank(CostModelBattery):
    objective = "rank"

    def make(self, space: SearchSpace, seed: int = 0) -> CostModel:
        return XgbModel(Featurizer(space), XgbOptions(objective=self.objective), seed)


class TestLog(TestRank):
    objective = "log"


class TestThroughput(TestRank):
    objective = "throughput"
