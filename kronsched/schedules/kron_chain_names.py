"""The PTX instructions of the 16-bit chained Kron-Matmul kernels, by dtype or knob value."""

from __future__ import annotations

MMA = {
    "float16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "bfloat16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
}
MMA_K8 = {
    "float16": "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32",
    "bfloat16": "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32",
}
PACK = {"float16": "cvt.rn.f16x2.f32", "bfloat16": "cvt.rn.bf16x2.f32"}
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
LDMATRIX_TRANS = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
COPY = "cp.async.cg.shared.global"
LOADS = {
    "nc": "ld.global.nc.v4.b32",
    "stream": "ld.global.nc.L1::no_allocate.v4.b32",
    "wide": "ld.global.nc.L2::256B.v4.b32",
}
STORES = {"wb": "st.global", "cs": "st.global.cs"}
