"""serialize_cuda: the very CUDA schedule, run on this CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from tvm import s_tir, te

from kronsched.hardware import resolve_target
from kronsched.schedules.serial import serialize_cuda


def _staged_transpose(n: int, pad: int = 1) -> s_tir.Schedule:
    """y = (2x)ᵀ through a padded shared tile and a register copy: bindings, scopes, vectors, unrolling, a guarded edge."""
    x = te.placeholder((n, n), name="x")
    doubled = te.compute((n, n), lambda i, j: x[i, j] * 2.0, name="doubled")
    y = te.compute((n, n), lambda i, j: doubled[j, i], name="y")
    sch = s_tir.Schedule(tvm.IRModule({"main": te.create_prim_func([x, y])}))
    writer = sch.get_sblock("y")
    local = sch.cache_read(writer, 0, "local")
    i, j = sch.get_loops(writer)
    bi, ti = sch.split(i, [None, 16])
    bj, tj, v = sch.split(j, [None, 4, 4])
    sch.reorder(bi, bj, ti, tj, v)
    block = sch.fuse(bi, bj)
    sch.bind(block, "blockIdx.x")
    sch.bind(ti, "threadIdx.y")
    sch.bind(tj, "threadIdx.x")
    sch.compute_at(local, tj)
    sch.unroll(sch.get_loops(local)[-1])
    sch.set_scope("doubled", 0, "shared.dyn")
    sch.compute_at("doubled", block)
    rows, columns = sch.get_loops("doubled")[-2:]
    sch.bind(rows, "threadIdx.y")
    outer, inner = sch.split(columns, [None, 4])
    sch.bind(outer, "threadIdx.x")
    sch.vectorize(inner)
    sch.annotate(block, "pragma_auto_unroll_max_step", 64)
    sch.storage_align("doubled", 0, 0, 16, pad)
    return sch


def _run(mod: tvm.IRModule, *tensors: torch.Tensor) -> None:
    tvm.compile(mod, target=resolve_target("cpu").tvm_target())["main"](*tensors)


@pytest.mark.parametrize("n", [64, 50])
def test_a_staged_kernel_gives_the_same_numbers(n: int) -> None:
    mod = _staged_transpose(n).mod
    x, y = torch.randn(n, n), torch.full((n, n), float("nan"))
    _run(serialize_cuda(mod), x, y)
    assert torch.equal(y, 2 * x.T)


def test_bindings_scopes_and_hints_are_gone_and_the_rest_stays() -> None:
    mod = _staged_transpose(64).mod
    before = mod.script()
    after = serialize_cuda(mod).script()
    assert "thread_binding" in before and 'scope="shared.dyn"' in before and 'scope="local"' in before
    for word in ("thread_binding", "scope=", "unroll", "pragma"):
        assert word not in after, word
    assert before.count("T.vectorized(4)") == after.count("T.vectorized(4)") > 0
    assert after.count("buffer_dim_align") == 1
    assert mod.script() == before, "the module given must not change"


def test_a_wrong_schedule_is_found_out() -> None:
    """The point of it all: an error in the program shows in the numbers, because it is this program that runs."""
    text = serialize_cuda(_staged_transpose(64).mod).script()
    statement = next(line for line in text.splitlines() if "* T.float32(2.0)" in line)
    broken = tvm.script.from_source(text.replace(statement, statement.replace("2.0", "3.0")))
    x, y = torch.randn(64, 64), torch.zeros(64, 64)
    _run(broken, x, y)
    assert not torch.equal(y, 2 * x.T)


def test_large_shared_buffers_do_not_overflow_the_stack() -> None:
    n = 4 * 1024 * 1024  # 16 MB of "shared" memory in one block
    x = te.placeholder((n,), name="x")
    staged = te.compute((n,), lambda i: x[i] + 1.0, name="staged")
    y = te.compute((n,), lambda i: staged[n - 1 - i] * 3.0, name="y")
    sch = s_tir.Schedule(tvm.IRModule({"main": te.create_prim_func([x, y])}))
    for name in ("staged", "y"):
        (loop,) = sch.get_loops(name)
        _, thread = sch.split(loop, [None, 128])
        sch.bind(thread, "threadIdx.x")
    sch.set_scope("staged", 0, "shared.dyn")
    x_values, y_values = torch.randn(n), torch.zeros(n)
    _run(serialize_cuda(sch.mod), x_values, y_values)
    assert torch.equal(y_values, (x_values.flip(0) + 1.0) * 3.0)


def test_a_cross_thread_reduction_becomes_a_plain_one() -> None:
    x = te.placeholder((8, 96), name="x")
    k = te.reduce_axis((0, 96), name="k")
    y = te.compute((8,), lambda i: te.sum(x[i, k], axis=k), name="y")
    sch = s_tir.Schedule(tvm.IRModule({"main": te.create_prim_func([x, y])}))
    i, r = sch.get_loops("y")
    sch.bind(i, "blockIdx.x")
    sch.bind(sch.split(r, [None, 32])[1], "threadIdx.x")
    values, sums = torch.randint(-9, 9, (8, 96)).float(), torch.zeros(8)
    _run(serialize_cuda(sch.mod), values, sums)
    np.testing.assert_array_equal(sums.numpy(), values.sum(1).numpy())
