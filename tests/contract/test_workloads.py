"""Every family, put through the workload contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kronsched.workloads.base import Workload
from kronsched.workloads.kron import KronMatmul
from tests.contract.workload_battery import WorkloadBattery


class TestKron(WorkloadBattery):
    def workloads(self) -> Sequence[Workload]:
        return [
            KronMatmul(6, [(4, 3), (5, 7), (2, 8)]),
            KronMatmul(6, [(4, 3), (5, 7), (2, 8)], "float64"),
            KronMatmul(6, [(4, 3), (5, 7), (2, 8)], "float16"),
            KronMatmul(6, [(4, 3), (5, 7), (2, 8)], "bfloat16"),
            KronMatmul(5, [(33, 17)]),
            KronMatmul(9, [(8, 1)] * 3),
            KronMatmul(9, [(1, 8)] * 3),
            KronMatmul(1, [(1, 1)]),
            KronMatmul(2, [(1, 1)] * 60 + [(2, 3)] * 4),
            KronMatmul(64, [(8, 8)] * 4),
            KronMatmul(1024, [(8, 8)] * 5, "float16"),
            KronMatmul(1, [(128, 2)] * 4),
        ]

    def bad_fields(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        good: dict[str, Any] = {"m": 4, "factors": [[2, 2], [3, 3]], "dtype": "float32"}
        return [
            ({**good, "m": 0}, "m=0"),
            ({**good, "m": -3}, "m=-3"),
            ({**good, "m": 2.0}, "m=2.0"),
            ({**good, "m": "4"}, "m='4'"),
            ({**good, "m": True}, "m=True"),
            ({**good, "factors": []}, "factors"),
            ({**good, "factors": "2x2"}, "factors='2x2'"),
            ({**good, "factors": 7}, "factors=7"),
            ({**good, "factors": [[2, 2], [3]]}, "factors[1]"),
            ({**good, "factors": [[2, 2], [3, 0]]}, "factors[1] Q=0"),
            ({**good, "factors": [[-2, 2]]}, "factors[0] P=-2"),
            ({**good, "factors": [[2.5, 2]]}, "factors[0] P=2.5"),
            ({**good, "factors": ["22"]}, "factors[0]='22'"),
            ({**good, "factors": [[1, 1]] * 65}, "factors: 65"),
            ({**good, "factors": [[64, 64]] * 6}, "m=4 with these factors"),
            ({**good, "dtype": "float8"}, "dtype='float8'"),
            ({**good, "dtype": None}, "dtype=None"),
        ]

    def dense(self, workload: Workload, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        assert isinstance(workload, KronMatmul)
        if workload.k_in * workload.k_out > 4_000_000:
            return None
        product = torch.ones((1, 1), dtype=torch.float64)
        for factor in inputs[1:]:
            product = torch.kron(product, factor.double())
        return inputs[0].double() @ product
