"""What one line of a bench says: plain data, its JSON form, and the means over rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kronsched.workloads.base import Workload


@dataclass(frozen=True)
class Kernel:
    """The kernel that was timed.

    how: "tuned" (measured on this model of device), "elsewhere" (on another one), "predicted" or "default" (nothing was
    measured).  launches: kernels a call, each of which moves the tensor once.
    """

    how: str
    space: str
    config: Mapping[str, Any]
    launches: int
    origin: str = ""


@dataclass(frozen=True)
class Row:
    """One shape on one device. All times in microseconds a call; None where there is no valid one.

    us: ours.  peers: by name.  floor_us: the roofline time of one pass.  error: of our result, relative, against float64.
    peer_errors: the same of peers.  floor_by: "bandwidth" or "compute".  failure: why `us` is None.  notes: by contestant, why it
    has no time or what is to be known about it.  published: times by peer that were measured earlier on the same model of device.
    information: peers that are shown and do not count as the best.  joules: energy a call by contestant ("kronsched" and peers),
    where it was measured.
    """

    workload: Workload
    us: float | None
    peers: Mapping[str, float | None]
    floor_us: float
    error: float | None = None
    failure: str | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    peer_errors: Mapping[str, float] = field(default_factory=dict)
    floor_by: str = ""
    kernel: Kernel | None = None
    published: Mapping[str, float] = field(default_factory=dict)
    information: tuple[str, ...] = ()
    joules: Mapping[str, float] = field(default_factory=dict)

    def but(self, **changes: Any) -> Row:
        """The row with other values in some fields."""
        return replace(self, **changes)

    @property
    def share_of_floor(self) -> float | None:
        """floor_us / us: 1.0 is the roofline."""
        return self.floor_us / self.us if self.us else None

    @property
    def ratios(self) -> dict[str, float | None]:
        """Peer time / our time, above 1 where ours is faster."""
        return {name: us / self.us if us and self.us else None for name, us in self.peers.items()}

    @property
    def best_peer(self) -> str | None:
        """The name of the fastest peer that counts, None where no peer has a time."""
        times = {name: us for name, us in self.peers.items() if us and name not in self.information}
        return min(times, key=lambda name: times[name]) if times else None

    @property
    def best_ratio(self) -> float | None:
        """Time of the best peer / our time."""
        return self.ratios[self.best_peer] if self.best_peer is not None else None

    @property
    def joules_ratio(self) -> float | None:
        """Our joules a call / the best peer's: below 1 where ours takes less."""
        ours, peer = self.joules.get("kronsched"), self.joules.get(self.best_peer or "")
        return ours / peer if ours and peer else None

    def to_dict(self) -> dict[str, Any]:
        """A row of `bench --json`."""
        kernel = self.kernel
        return {
            "workload": self.workload.to_dict(),
            "label": self.workload.label,
            "us": self.us,
            "peers": dict(self.peers),
            "ratios": self.ratios,
            "best_peer": self.best_peer,
            "best_ratio": self.best_ratio,
            "floor_us": self.floor_us,
            "floor_by": self.floor_by,
            "share_of_floor": self.share_of_floor,
            "error": self.error,
            "peer_errors": dict(self.peer_errors),
            "kernel": None
            if kernel is None
            else {
                "how": kernel.how,
                "space": kernel.space,
                "config": dict(kernel.config),
                "launches": kernel.launches,
                "origin": kernel.origin,
            },
            "published": dict(self.published),
            "information": list(self.information),
            "joules": dict(self.joules),
            "failure": self.failure,
            "notes": dict(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Row:
        """The row that `to_dict` described. Raises what the workload's registry raises, or KeyError, TypeError, ValueError."""
        from kronsched import registry

        kernel = data.get("kernel")
        for what in ("peers", "published", "joules"):
            for name, value in dict(data.get(what, {})).items():
                _positive(f"{what}.{name}", value)
        for name in ("us", "floor_us"):
            _positive(name, data[name])
        return cls(
            workload=registry.workload_from_dict(data["workload"]),
            us=data["us"],
            peers=dict(data["peers"]),
            floor_us=float(data["floor_us"]),
            error=data.get("error"),
            failure=data.get("failure"),
            notes=dict(data.get("notes", {})),
            peer_errors=dict(data.get("peer_errors", {})),
            floor_by=str(data.get("floor_by", "")),
            kernel=None if kernel is None else Kernel(**kernel),
            published=dict(data.get("published", {})),
            information=tuple(data.get("information", ())),
            joules=dict(data.get("joules", {})),
        )


def _positive(name: str, value: Any) -> None:
    """A measured number: finite and above 0, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} must be a number")
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r} must be a number > 0")


def best_geomean(rows: Sequence[Row]) -> float | None:
    """Geometric mean of the best peer's time / ours, the best of each row by itself; None without such rows."""
    return _geomean(rows, lambda row: row.peers.get(row.best_peer or ""))


def joules_geomean(rows: Sequence[Row]) -> float | None:
    """Geometric mean of our joules / the best peer's over the rows that have both (below 1: ours takes less)."""
    logs = [math.log(row.joules_ratio) for row in rows if row.joules_ratio]
    return math.exp(sum(logs) / len(logs)) if logs else None


def geomean(rows: Sequence[Row], peer: str) -> float | None:
    """Geometric mean of peer time / our time over the rows that have both (above 1: ours is faster); None without such rows."""
    return _geomean(rows, lambda row: row.peers.get(peer))


def published_geomean(rows: Sequence[Row], peer: str) -> float | None:
    """The same with the times published for the peer."""
    return _geomean(rows, lambda row: row.published.get(peer))


def by_dtype(rows: Sequence[Row], peers: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """The geometric means for each dtype apart."""
    dtypes = dict.fromkeys(row.workload.compute_dtype for row in rows)
    return {d: {p: geomean([r for r in rows if r.workload.compute_dtype == d], p) for p in peers} for d in dtypes}


def slower_than(rows: Sequence[Row], peer: str) -> list[Row]:
    """The rows where a peer, measured now or published, is faster than ours."""
    return [r for r in rows if r.us and any(us and us < r.us for us in (r.peers.get(peer), r.published.get(peer)))]


def _geomean(rows: Sequence[Row], us_of: Callable[[Row], float | None]) -> float | None:
    logs = [math.log(us / r.us) for r in rows if r.us and (us := us_of(r))]
    return math.exp(sum(logs) / len(logs)) if logs else None
