"""The small kernels around the W4A16 product: the sum of split-K partial results, and the gathering of x.

Read first: `sum_kernel`, `gather_kernel`; gemm_w4a16_cuda.py for when they are launched.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,valid-type,name-defined,no-redef"

from typing import Any

from tvm.script import tirx as T

from kronsched.schedules.w4a16_plan import W4Plan

THREADS = 256


def sum_kernel(p: W4Plan) -> Any:
    """The PrimFunc over p (split_k · m, n) float32 and y: partial results added in order."""
    m, n, S, dtype = p.workload.m, p.workload.n, p.split_k, p.workload.a_dtype
    V = 4 if m * n % 4 == 0 else 1
    count = m * n // V

    @T.prim_func
    def w4a16_sum(p: T.Buffer((S * m * n,), "float32"), y: T.Buffer((m * n,), dtype)):
        T.device_entry()
        cta = T.cta_id([T.ceildiv(count, THREADS)])
        tx = T.thread_id([THREADS])
        at: T.let = cta * THREADS + tx
        v = T.alloc_local([V], "float32")
        if at < count:
            for q in T.unroll(V):
                v[q] = T.float32(0)
            for j in T.unroll(S):
                for q in T.vectorized(V):
                    v[q] = v[q] + p[j * (m * n) + at * V + q]
            for q in T.vectorized(V):
                y[at * V + q] = T.cast(v[q], dtype)

    return w4a16_sum


def gather_kernel(p: W4Plan) -> Any:
    """The PrimFunc over x, [perm] and xs (m, k_packed): x in the order of the packed rows, zeros for padding."""
    w = p.workload
    m, k, K, dtype = w.m, w.k, p.k, w.a_dtype

    if w.act_order:

        @T.prim_func
        def w4a16_gather(x: T.Buffer((m, k), dtype), perm: T.Buffer((K,), "int32"), xs: T.Buffer((m, K), dtype)):
            T.device_entry()
            cta = T.cta_id([T.ceildiv(m * K, THREADS)])
            tx = T.thread_id([THREADS])
            at: T.let = cta * THREADS + tx
            if at < m * K:
                source: T.let = perm[at % K]
                xs[at // K, at % K] = T.if_then_else(source >= 0, x[at // K, source], T.cast(T.float32(0), dtype))

    else:

        @T.prim_func
        def w4a16_gather(x: T.Buffer((m, k), dtype), xs: T.Buffer((m, K), dtype)):
            T.device_entry()
            cta = T.cta_id([T.ceildiv(m * K, THREADS)])
            tx = T.thread_id([THREADS])
            at: T.let = cta * THREADS + tx
            if at < m * K:
                xs[at // K, at % K] = T.if_then_else(at % K < k, x[at // K, at % K], T.cast(T.float32(0), dtype))

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
