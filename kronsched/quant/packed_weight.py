"""`pack`: 4-bit weights as checkpoints hold them, re-laid once into the order kernels read (see layout.py).

Read first: `pack` (what the values mean, what is checked) and `PackedWeight.tensors` (what a kernel gets).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kronsched.errors import ArgumentError, ArgumentTypeError, UnsupportedError, choose
from kronsched.quant.layout import (
    GROUP_STEP,
    NEUTRAL,
    Layout,
    pack_columns,
    pack_words,
    row_groups,
    unpack_columns,
    unpack_words,
)

if TYPE_CHECKING:
    import torch

ZERO_POINTS = ("symmetric", "asymmetric", "float")
SCALE_DTYPES = ("float16", "bfloat16", "float32", "float64")
MAX_ZERO = 16
"""The largest integer zero point: 16 and not 15, as some writers of GPTQ files store zero - 1 and mean it."""


class PackedWeight:
    """A 4-bit weight matrix (k, n) in the packed layout. Made by `pack`; passed to a module as `mod(x, pw)`.

    layout: its shapes.  words, scales, zeros, perm: the packed tensors, all on one device; zeros is None when they are all 8,
    perm when rows are in their own order.  zero_point: "symmetric" (no zeros), "asymmetric" (integers) or "float".

    The tensors are constants to the kernels: on sm_90 a launch begins to read them while the kernel before it ends. Who writes
    them in place on a GPU calls `torch.cuda.synchronize()` before the next product.
    """

    def __init__(
        self,
        layout: Layout,
        words: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        perm: torch.Tensor | None = None,
    ) -> None:
        """Hold the tensors; see the class. Use `pack` to make one."""
        self.layout = layout
        self.words = words
        self.scales = scales
        self.zeros = zeros
        self.perm = perm
        self._ready: dict[tuple[str, str, bool], tuple[torch.Tensor, ...]] = {}
        self._order: torch.Tensor | None = None

    # -- description --------------------------------------------------------------------------------

    @property
    def n(self) -> int:
        """Columns: outputs."""
        return self.layout.n

    @property
    def k(self) -> int:
        """Rows: what is summed over."""
        return self.layout.k

    @property
    def group_size(self) -> int:
        """Rows that share a scale; -1 for all."""
        return self.layout.group_size

    @property
    def act_order(self) -> bool:
        """Whether rows were sorted by group, so that x has to be gathered."""
        return self.perm is not None

    @property
    def zero_point(self) -> str:
        """One of `ZERO_POINTS`."""
        if self.zeros is None:
            return "symmetric"
        return "float" if self.zeros.is_floating_point() else "asymmetric"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the scales were given in."""
        return self.scales.dtype

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.words.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding included."""
        return sum(t.nbytes for t in (self.words, self.scales, self.zeros, self.perm) if t is not None)

    def __repr__(self) -> str:
        order = ", act_order" if self.act_order else ""
        return f"<PackedWeight k={self.k} n={self.n} group_size={self.group_size} {self.zero_point}{order} on {self.device}>"

    # -- use ----------------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same weights on another device; itself when they are there already."""
        held = (self.words, self.scales, self.zeros, self.perm)
        words, scales, zeros, perm = (None if t is None else t.to(device) for t in held)
        assert words is not None and scales is not None
        return self if words is self.words else PackedWeight(self.layout, words, scales, zeros, perm)

    def tensors(self, dtype: str, zero_point: str, act_order: bool) -> tuple[torch.Tensor, ...]:
        """The flat tensors of a call: words, scales in `dtype`, zeros unless symmetric, perm when `act_order`.

        Zeros come in `dtype` when `zero_point` is "asymmetric", in float32 when it is "float". Weights that are a special case of
        what is asked for are converted, once. Raises ArgumentError when they are not. With act_order=False, sorted weights
        want x through `order`.
        """
        key = (dtype, zero_point, act_order)
        ready = self._ready.get(key)
        if ready is None:
            zeros, perm = self._zeros_as(zero_point, dtype), self._perm_as(act_order)
            scales = self.scales.to(_torch_dtype(dtype))
            ready = self._ready[key] = tuple(t for t in (self.words, scales, zeros, perm) if t is not None)
        return ready

    @property
    def order(self) -> torch.Tensor | None:
        """(k,) int64: the columns of x in the order of sorted rows, for a kernel that knows no act-order; None: as they are.

        Raises ArgumentError when only a kernel with act-order can do it: padding between groups.
        """
        import torch

        if self.perm is not None and self._order is None:
            same_shape = Layout(self.n, self.k, self.group_size).words == self.layout.words
            if not same_shape or bool((self.perm[: self.k] < 0).any()):
                raise ArgumentError("pw has a short group between others: a workload with act_order=True is needed for it")
            self._order = self.perm[: self.k].to(torch.int64)
        return self._order

    def unpack(self) -> torch.Tensor:
        """The weights (k, n) in float64: (q - zero) · scale, rows in the order of x."""
        import torch

        q = unpack_words(self.words, self.layout).double()
        groups = row_groups(self.layout, self.device)
        zeros = NEUTRAL if self.zeros is None else unpack_columns(self.zeros).double()[groups]
        values = ((q - zeros) * unpack_columns(self.scales).double()[groups])[:, : self.n]
        if self.perm is None:
            return values[: self.k].contiguous()
        real = self.perm >= 0
        out = torch.empty((self.k, self.n), dtype=torch.float64, device=self.device)
        out[self.perm[real].long()] = values[real]
        return out

    def _zeros_as(self, zero_point: str, dtype: str) -> torch.Tensor | None:
        import torch

        if zero_point == "symmetric":
            if self.zeros is not None:
                raise ArgumentError(f"pw is {self.zero_point}: this workload has zero_point='symmetric', which has no zeros")
            return None
        wanted = torch.float32 if zero_point == "float" else _torch_dtype(dtype)
        if self.zeros is None:
            return torch.full_like(self.scales, NEUTRAL, dtype=wanted)
        if zero_point == "asymmetric" and self.zero_point == "float":
            whole = (self.zeros == self.zeros.round()) & (self.zeros >= 0) & (self.zeros <= MAX_ZERO)
            if not bool(whole.all()):
                raise ArgumentError(
                    "pw has zeros that are no integers from 0 to 16: a workload with zero_point='float' is needed for it"
                )
        return self.zeros.to(wanted)

    def _perm_as(self, act_order: bool) -> torch.Tensor | None:
        import torch

        if not act_order:
            return None
        if self.perm is not None:
            return self.perm
        if Layout(self.n, self.k, self.group_size, True).words != self.layout.words:
            raise ArgumentError("pw has no g_idx and a short last group: a workload with act_order=False is needed for it")
        perm = torch.full((self.layout.k_packed,), -1, dtype=torch.int32, device=self.device)
        perm[: self.k] = torch.arange(self.k, device=self.device)
        return perm


def pack(
    q: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    group_size: int = 128,
    g_idx: torch.Tensor | None = None,
) -> PackedWeight:
    """Re-lay 4-bit weights for a `Gemm` module: value = (q - zero) · scale.

    q: (k, n) uint8, values 0 to 15.  scales: (⌈k / group_size⌉, n), float16, bfloat16, float32 or float64; a call rounds them
    to the dtype of x.  zeros: the same shape, integers 0 to 16 or floats; None means 8 (symmetric).  group_size: a multiple of
    32, or -1 for one group.  g_idx: (k,) the group of each row (act-order), at most `group_size` rows a group; rows are then
    sorted by group here and x is gathered in that order by a small kernel of its own before the product: gathering inside it
    would repeat the scattered reads in every block. All torch tensors of one device, or numpy arrays.

    Raises ArgumentError or ArgumentTypeError naming the argument.
    """
    import torch

    q, scales = torch.as_tensor(q), torch.as_tensor(scales)
    check_group_size(group_size)
    if q.dtype != torch.uint8:
        raise ArgumentTypeError(f"q has dtype {_name(q.dtype)}, uint8 is needed")
    if q.dim() != 2 or 0 in q.shape:
        raise ArgumentError(f"q has shape {tuple(q.shape)}, (k, n) is needed")
    if int(q.max()) > 15:
        raise ArgumentError(f"q holds the value {int(q.max())}: values 0 to 15 are needed")
    k, n = q.shape
    if _name(scales.dtype) not in SCALE_DTYPES:
        raise ArgumentTypeError(f"scales has dtype {_name(scales.dtype)}, one of {', '.join(SCALE_DTYPES)} is needed")
    _check_like("scales", scales, q, Layout(n, k, group_size))
    if not bool(torch.isfinite(scales).all()):
        raise ArgumentError("scales holds NaN or infinity: finite values are needed")
    order = None if g_idx is None else _sorted_rows(torch.as_tensor(g_idx), Layout(n, k, group_size, True))
    layout = Layout(n, k, group_size, order is not None)
    packed_zeros = None if zeros is None else pack_columns(_checked_zeros(torch.as_tensor(zeros), q, layout), layout)
    perm = None
    if order is not None:
        perm = order.to(device=q.device, dtype=torch.int32)
        rows = torch.full((layout.k_packed, n), NEUTRAL, dtype=torch.uint8, device=q.device)
        real = perm >= 0
        rows[real] = q[perm[real].long()]
        q = rows
    return PackedWeight(layout, pack_words(q, layout), pack_columns(scales, layout), packed_zeros, perm)


def check_group_size(group_size: Any) -> int:
    """A group size as an int; ArgumentError or ArgumentTypeError unless it is -1 or a positive multiple of 32."""
    if isinstance(group_size, bool) or not hasattr(group_size, "__index__"):
        raise ArgumentTypeError(f"group_size={group_size!r} must be an int")
    size = int(group_size.__index__())
    if size != -1 and (size < GROUP_STEP or size % GROUP_STEP != 0):
        raise ArgumentError(f"group_size={size} is not allowed: -1 (one group) or a multiple of {GROUP_STEP} is needed")
    return size


def check_zero_point(zero_point: Any) -> None:
    """ArgumentError unless it is one of `ZERO_POINTS`."""
    if zero_point not in ZERO_POINTS:
        raise choose("zero_point", zero_point, ZERO_POINTS)


def _check_like(name: str, values: torch.Tensor, q: torch.Tensor, layout: Layout) -> None:
    wanted = (layout.groups, layout.n)
    if tuple(values.shape) != wanted:
        given = "×".join(map(str, q.shape))
        raise ArgumentError(
            f"{name} has shape {tuple(values.shape)}, {wanted} is needed for q of {given} with group_size={layout.group_size}"
        )
    if values.device != q.device:
        raise ArgumentTypeError(f"{name} is on {values.device}, q is on {q.device}")


def _checked_zeros(zeros: torch.Tensor, q: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Zeros as uint8 (integers) or float32."""
    import torch

    _check_like("zeros", zeros, q, layout)
    if zeros.is_floating_point():
        if not bool(torch.isfinite(zeros).all()):
            raise ArgumentError("zeros holds NaN or infinity: finite values are needed")
        return zeros.float()
    if zeros.dtype == torch.bool or zeros.is_complex():
        raise ArgumentTypeError(f"zeros has dtype {_name(zeros.dtype)}, an integer or floating dtype is needed")
    low, high = int(zeros.min()), int(zeros.max())
    if low < 0 or high > MAX_ZERO:
        raise ArgumentError(f"zeros holds the value {low if low < 0 else high}: integers 0 to {MAX_ZERO} are needed")
    return zeros.to(torch.uint8)


def _sorted_rows(g_idx: torch.Tensor, layout: Layout) -> torch.Tensor | None:
    """The row of q for each packed row, -1 for padding; None when rows are in order already."""
    import torch

    if g_idx.is_floating_point() or g_idx.is_complex() or g_idx.dtype == torch.bool:
        raise ArgumentTypeError(f"g_idx has dtype {_name(g_idx.dtype)}, an integer dtype is needed")
    if tuple(g_idx.shape) != (layout.k,):
        raise ArgumentError(f"g_idx has shape {tuple(g_idx.shape)}, ({layout.k},) is needed")
    groups = g_idx.detach().cpu().long()
    low, high = int(groups.min()), int(groups.max())
    if low < 0 or high >= layout.groups:
        raise ArgumentError(f"g_idx holds the value {low if low < 0 else high}: groups 0 to {layout.groups - 1} are needed")
    if torch.equal(groups, row_groups(Layout(layout.n, layout.k, layout.group_size))[: layout.k]):
        return None
    counts = torch.bincount(groups, minlength=layout.groups)
    fullest = int(counts.argmax())
    if int(counts[fullest]) > layout.rows_per_group:
        raise UnsupportedError(
            f"g_idx puts {int(counts[fullest])} rows in group {fullest}: at most group_size={layout.group_size} are supported"
        )
    rows = torch.argsort(groups, stable=True)
    starts = torch.cumsum(counts, 0) - counts
    place = groups[rows] * layout.rows_per_group + torch.arange(layout.k) - starts[groups[rows]]
    out = torch.full((layout.k_packed,), -1, dtype=torch.int64)
    out[place] = rows
    return out


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
