"""The small kernels around the W4A16 product: the sum of split-K partial results, and the gathering of x.

Read first: `sum_kernel`, `gather_kernel`; gemm_w4a16_cuda.py for when they are launched.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined,no-redef"

from typing import Any

from tvm.script import tirx as T

from kronsched.schedules.w4a16_plan import W4Tiles

THREADS = 256


@T.inline
def wait():
    """Until all kernels before this one have ended; the next one may get its blocks ready from here on."""
    T.ptx.griddepcontrol.wait()
    T.ptx.griddepcontrol.launch_dependents()


def sum_kernel(p: W4Tiles) -> Any:
    """The PrimFunc over p (split_k · m, n) float32 and y: partial results added in order."""
    m, n, S, dtype = p.workload.m, p.workload.n, p.split_k, p.workload.a_dtype
    V = 4 if m * n % 4 == 0 else 1
    load = "ld.global.v4.f32" if V == 4 else "ld.global.f32"
    count, waits = m * n // V, p.start != "serial"

    @T.prim_func
    def w4a16_sum(p: T.Buffer((S * m * n,), "float32"), y: T.Buffer((m * n,), dtype)):
        T.device_entry()
        cta = T.cta_id([T.ceildiv(count, THREADS)])
        tx = T.thread_id([THREADS])
        at: T.let = cta * THREADS + tx
        if waits:
            wait()
        v = T.alloc_local([V], "float32")
        parts = T.alloc_local([S * V], "float32")
        if at < count:
            for j in T.unroll(S):
                T.ptx[load](*[parts[j * V + q] for q in range(V)], p.ptr_to([j * (m * n) + at * V]))
            for q in T.unroll(V):
                v[q] = T.float32(0)
            for j in T.unroll(S):
                for q in T.unroll(V):
                    v[q] = v[q] + parts[j * V + q]
            for q in T.vectorized(V):
                y[at * V + q] = T.cast(v[q], dtype)

    return w4a16_sum


def gather_kernel(p: W4Tiles) -> Any:
    """The PrimFunc over x, [perm] and xs (m, k_packed): x in the order of the packed rows, zeros for padding."""
    w = p.workload
    m, k, K, dtype = w.m, w.k, p.k, w.a_dtype
    waits = p.start != "serial"

    @T.inline
    def element(x, xs, at, source, inside, value):
        value[0] = T.uint16(0)
        if inside:
            T.ptx["ld.global.b16"](value[0], x.ptr_to([at // K, source]))
        xs[at // K, at % K] = T.reinterpret(dtype, value[0])

    if w.act_order:

        @T.prim_func
        def w4a16_gather(x: T.Buffer((m, k), dtype), perm: T.Buffer((K,), "int32"), xs: T.Buffer((m, K), dtype)):
            T.device_entry()
            cta = T.cta_id([T.ceildiv(m * K, THREADS)])
            tx = T.thread_id([THREADS])
            at: T.let = cta * THREADS + tx
            source = T.alloc_local([1], "int32")
            value = T.alloc_local([1], "uint16")
            T.ptx["ld.global.b32"](source[0], perm.ptr_to([at % K]))  # a constant: read before the wait, like weights
            if waits:
                wait()
            if at < m * K:
                element(x, xs, at, source[0], source[0] >= 0, value)

    else:

        @T.prim_func
        def w4a16_gather(x: T.Buffer((m, k), dtype), xs: T.Buffer((m, K), dtype)):
            T.device_entry()
            cta = T.cta_id([T.ceildiv(m * K, THREADS)])
            tx = T.thread_id([THREADS])
            at: T.let = cta * THREADS + tx
            value = T.alloc_local([1], "uint16")
            if waits:
                wait()
            if at < m * K:
                element(x, xs, at, at % K, at % K < k, value)

    return w4a16_gather


def renamed(func: Any, *names: dict[str, str]) -> Any:
    """The function with some parameters under other names (a tile program's parameter names are fixed in its source)."""
    import tvm
    import tvm_ffi
    from tvm import tirx

    table = {old: new for part in names for old, new in part.items()}
    swaps = [(v, tirx.decl_buffer(v.shape, v.dtype, name=table[str(v.name)])) for v in func.params if str(v.name) in table]
    if not swaps:
        return func

    def swap(var: Any) -> Any:
        return next((new for old, new in swaps if var.same_as(old)), var)

    return tvm_ffi.structural_map(func, (tvm.ir.Var, swap), order="post")
