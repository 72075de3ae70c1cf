"""What running a Kronecker-sparse chain as one module gains over its factors one by one, and what it could gain at most.

The factors of a chain write and read the intermediate, a chain in one pass does not. Where every part runs at its roofline, the
gain is the sum of the factors' floors over the floor of the chain: the most that fusing can bring.

Read first: `chains`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kronsched.bench.row import Row
from kronsched.workloads.ks import KSMatmul


@dataclass(frozen=True)
class Chain:
    """A chain whose factors were timed as well, microseconds a call.

    passes: kernels that move the data, 1 when it is fused.  factors_us: of ours, together.  factors_floor_us: of their floors.
    """

    workload: KSMatmul
    us: float
    floor_us: float
    passes: int
    factors_us: float
    factors_floor_us: float

    @property
    def gain(self) -> float:
        """The factors' time / the chain's."""
        return self.factors_us / self.us

    @property
    def most(self) -> float:
        """The factors' floors / the chain's floor: the gain of fusing when everything runs at its roofline."""
        return self.factors_floor_us / self.floor_us

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "workload": self.workload.to_dict(), "gain": self.gain, "most": self.most}


def chains(rows: Sequence[Row]) -> list[Chain]:
    """The chains among the rows that have a time, and so have all their factors."""
    by_key = {row.workload.key: row for row in rows}
    out = []
    for row in rows:
        w = row.workload
        if not isinstance(w, KSMatmul) or len(w.patterns) < 2 or not row.us:
            continue
        factors = [by_key.get(replace(w, pattern=p).key) for p in w.patterns]
        times = [f.us for f in factors if f is not None and f.us]
        if len(times) == len(factors):
            floors = sum(f.floor_us for f in factors if f is not None)
            passes = row.kernel.launches if row.kernel is not None else len(factors)
            out.append(Chain(w, row.us, row.floor_us, passes, sum(times), floors))
    return out
