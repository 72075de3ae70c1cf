"""The collectives of the distributed product: groups of a grid, a differentiable all-to-all that overlaps, summed gradients.

    forward:   start (send blocks, do not wait) … other work … wait       backward:  wait's gradient starts the reverse exchange,
                                                                           start's gradient waits for it

so chunks overlap in both directions. With NCCL a start runs on NCCL's stream, and a wait makes only the compute stream wait.

A peer that ended or hangs: the backend gives up after the timeout of `init_process_group(timeout=…)`, which the groups made here
inherit, and `CommunicationError` is raised. With NCCL a call returns before anything has moved, so the error is raised where the
result is waited for by `finish`; a process that waits in another way is ended by torch's watchdog after that time.

Read first: `GridGroups`, `Flight`, `finish`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kronsched.distributed.grid import Grid
from kronsched.errors import KronschedError


class CommunicationError(KronschedError):
    """A collective failed: a peer ended, did not answer in time, or called something else."""


@dataclass
class Counter:
    """What this rank sent to other ranks in all-to-all exchanges, such as for tests: see `counting`."""

    exchanges: int = 0
    bytes: int = 0


_counters: list[Counter] = []


@contextmanager
def counting() -> Iterator[Counter]:
    """Count this rank's exchanges, forward and backward, while it is open."""
    counter = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


@dataclass(frozen=True)
class GridGroups:
    """The process groups of this rank in a grid."""

    grid: Grid
    rank: int
    """Index of this rank in the flattened mesh."""
    everyone: Any
    """All ranks of the mesh."""
    row: Any
    """The ranks of this rank's row of the grid; None where GK = 1."""
    limit: str
    """The timeout, in words."""
    order: tuple[int, ...] | None
    """Column of each rank of the row's group, which torch sorts by rank; None where that is the order of the columns."""

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Turns what a backend raises into one clear line."""
        try:
            yield
        except RuntimeError as error:
            text = _first_line(error)
            raise CommunicationError(
                f"rank {self.rank} of grid {self.grid}: {what} failed: another rank ended, did not answer within {self.limit} "
                f"or called something else ({text})"
            ) from error


_made: dict[tuple[tuple[int, ...], Grid | None], tuple[Any, Any]] = {}


def timeout_of(group: Any, device: torch.device) -> timedelta | None:
    """The timeout of a process group, None where its backend does not tell."""
    try:
        limit = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return limit if isinstance(limit, timedelta) else None


def everyone(mesh: DeviceMesh, device: torch.device) -> Any:
    """A process group of all ranks of the mesh."""
    ranks = tuple(int(r) for r in mesh.mesh.flatten())
    if list(ranks) == list(range(dist.get_world_size())):
        return dist.group.WORLD
    return _group(ranks, None, ranks, device)


def grid_groups(mesh: DeviceMesh, grid: Grid, device: torch.device) -> GridGroups:
    """The groups of a grid over the ranks of a mesh, made once; every rank of the mesh must ask for the same."""
    ranks = tuple(int(r) for r in mesh.mesh.flatten())
    index = ranks.index(dist.get_rank())
    whole, row = everyone(mesh, device), None
    members = tuple(ranks[i] for i in grid.row_of(index))
    if grid.columns > 1:
        row = whole if members == ranks else _group(ranks, grid, members, device)
    return GridGroups(grid, index, whole, row, limit_text(device), sorted_order(members))


def limit_text(device: torch.device) -> str:
    """The timeout, in words."""
    limit = timeout_of(dist.group.WORLD, device)
    return "the timeout" if limit is None else f"{limit.total_seconds():g} s"


SHARE_OF_TIMEOUT = 0.8
"""`finish` gives up before torch's watchdog does, which would end the process."""


def finish(device: torch.device | str, timeout_s: float | None = None) -> None:
    """Wait until the device's present stream has done all that was called; CommunicationError when that takes too long.

    For GPUs, after a product and before its result is read on the host: a peer that ended or hangs stops the stream for ever.
    The communicators are then aborted, so that this process can end or start anew. On a CPU there is nothing to wait for.
    timeout_s: None is `SHARE_OF_TIMEOUT` of that of `init_process_group`.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return
    if timeout_s is None:
        limit = timeout_of(dist.group.WORLD, device)
        timeout_s = SHARE_OF_TIMEOUT * (limit.total_seconds() if limit is not None else 600.0)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(device))
    try:
        arrived = wait_until(done.query, timeout_s)
    except RuntimeError as error:
        raise CommunicationError(f"rank {dist.get_rank()}: {device} failed: {_first_line(error)}") from error
    if not arrived:
        rank = dist.get_rank()
        _abort()
        raise CommunicationError(
            f"rank {rank}: {device} was not done within {timeout_s:g} s: another rank ended, hangs or called something else; "
            "communication was aborted, torch.distributed must be initialised anew"
        )


def wait_until(ready: Callable[[], bool], timeout_s: float) -> bool:
    """Look again and again, at first often; whether it was ready in time."""
    start = time.perf_counter()
    while not ready():
        waited = time.perf_counter() - start
        if waited > timeout_s:
            return ready()
        if waited > 0.01:
            time.sleep(min(0.01, waited / 20))
    return True


def _abort() -> None:
    """End what NCCL runs and all that wait for it. A communicator that is gone already is no second error."""
    _made.clear()
    with suppress(RuntimeError, ValueError, AssertionError):
        dist.distributed_c10d._abort_process_group()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def sorted_order(members: Sequence[int]) -> tuple[int, ...] | None:
    """Position in `members` of each rank of their group, which torch sorts; None where they are sorted."""
    order = tuple(sorted(range(len(members)), key=lambda i: members[i]))
    return None if order == tuple(range(len(members))) else order


def _group(ranks: tuple[int, ...], grid: Grid | None, members: tuple[int, ...], device: torch.device) -> Any:
    world = dist.group.WORLD
    found = _made.get((ranks, grid))
    if found is None or found[0] is not world:  # the process group was destroyed and made again
        try:
            made = dist.new_group(list(members), timeout=timeout_of(world, device), use_local_synchronization=True)
        except RuntimeError as error:
            raise CommunicationError(
                f"no process group of the ranks {list(members)} could be made: {_first_line(error)}"
            ) from error
        found = _made[(ranks, grid)] = (world, made)
    return found[1]


# -- all-to-all -----------------------------------------------------------------------------------------


@dataclass
class Flight:
    """One all-to-all under way, and the reverse one of its gradient."""

    groups: GridGroups
    what: str
    _work: Any = None
    _sent: Tensor | None = None
    _back: Flight | None = field(default=None, repr=False)

    @property
    def back(self) -> Flight:
        """The exchange of the gradient."""
        if self._back is None:
            self._back = Flight(self.groups, f"the gradient of {self.what.removeprefix('the gradient of ')}")
        return self._back

    def start(self, send: Tensor) -> Tensor:
        """Send block i of (GK, …) to rank i of the row; returns the buffer for `wait`."""
        order = self.groups.order
        send = send.contiguous() if order is None else send[list(order)]
        received = torch.empty_like(send)
        for counter in _counters:
            counter.exchanges += 1
            counter.bytes += send.numel() * send.element_size() // send.shape[0] * (send.shape[0] - 1)
        with self.groups.guarded(self.what):
            self._work = dist.all_to_all_single(received, send, group=self.groups.row, async_op=True)
        self._sent = send  # kept until it has left
        return received

    def wait(self, received: Tensor) -> Tensor:
        """The blocks in the order of the columns, once the buffer is filled; on a GPU only this stream waits."""
        with self.groups.guarded(self.what):
            self._work.wait()
        self._work = self._sent = None
        order = self.groups.order
        if order is None:
            return received.view_as(received)
        return received[[order.index(column) for column in range(len(order))]]


class Start(torch.autograd.Function):
    """`Flight.start`; its gradient waits for the reverse exchange."""

    @staticmethod
    def forward(ctx: Any, send: Tensor, flight: Flight) -> Tensor:
        """The buffer to be filled."""
        ctx.flight = flight
        return flight.start(send)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Wait."""
        return Wait.apply(grads[0], ctx.flight.back), None  # type: ignore[no-untyped-call]


class Wait(torch.autograd.Function):
    """`Flight.wait`; its gradient starts the reverse exchange."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, flight: Flight) -> Tensor:
        """The filled buffer."""
        ctx.flight = flight
        return flight.wait(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Start."""
        return Start.apply(grads[0], ctx.flight.back), None  # type: ignore[no-untyped-call]


# -- factors --------------------------------------------------------------------------------------------


class SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks of the mesh, on every rank; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, groups: GridGroups) -> Tensor:
        """Sum."""
        ctx.groups = groups
        total = tensor.clone(memory_format=torch.contiguous_format)
        with groups.guarded("the sum of the factors' gradients"):
            dist.all_reduce(total, group=groups.everyone)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum."""
        return SumOverRanks.apply(grads[0], ctx.groups), None  # type: ignore[no-untyped-call]


class Shared(torch.autograd.Function):
    """Factors that are the same on every rank: as they are, with gradients summed over the ranks in one all-reduce."""

    @staticmethod
    def forward(ctx: Any, groups: GridGroups, *factors: Tensor) -> tuple[Tensor, ...]:
        """The factors."""
        ctx.groups = groups
        return tuple(f.view_as(f) for f in factors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The sums; 16-bit gradients are summed in float32."""
        needed = [g for g, need in zip(grads, ctx.needs_input_grad[1:], strict=True) if need]
        wide = torch.float64 if needed[0].dtype == torch.float64 else torch.float32
        flat = torch.cat([g.reshape(-1).to(wide) for g in needed])
        total = SumOverRanks.apply(flat, ctx.groups)  # type: ignore[no-untyped-call]
        pieces = iter(total.split([g.numel() for g in needed]))
        summed = (
            next(pieces).reshape(g.shape).to(g.dtype) if need else None
            for g, need in zip(grads, ctx.needs_input_grad[1:], strict=True)
        )
        return None, *summed


# -- agreement ------------------------------------------------------------------------------------------


def gather_ints(values: Sequence[int], mesh: DeviceMesh, device: torch.device, grid: Grid) -> list[list[int]]:
    """Every rank's ints, in the order of the mesh. `grid` is for the message when that fails."""
    ranks = [int(r) for r in mesh.mesh.flatten()]
    group = everyone(mesh, device)
    groups = GridGroups(grid, ranks.index(dist.get_rank()), group, None, limit_text(device), None)
    mine = torch.tensor(list(values), dtype=torch.int64, device=device)
    found = [torch.empty_like(mine) for _ in ranks]
    with groups.guarded("the comparison of the ranks' arguments"):
        dist.all_gather(found, mine, group=group)
    order = sorted_order(ranks) or range(len(ranks))
    by_place = dict(zip(order, found, strict=True))
    return [by_place[i].tolist() for i in range(len(ranks))]
