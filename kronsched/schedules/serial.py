"""Running a CUDA schedule on a CPU: the check of tiling, staging, padding and guards that needs no GPU.

A scheduled (not yet lowered) TensorIR module keeps sequential semantics whatever its thread bindings are, so the very
schedule can be run by LLVM once bindings are serial loops and memory scopes are plain memory. Races, missing barriers and
tensor intrinsics are out of reach of this check: blocks that were tensorised must be left untensorised by the caller.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tvm

# tvm::tirx::ForKind, as it stands in the JSON form.
_SERIAL, _UNROLLED, _THREAD_BINDING = 0, 3, 4
_FOR, _BLOCK, _NONE, _EVALUATE = "tirx.For", "s_tir.SBlock", "None", "tirx.Evaluate"
_LAUNCH_CONTROL = "tirx.ptx.griddepcontrol"
# Hints to the CUDA code generator. Unrolling 8x8 contractions costs LLVM seconds and proves nothing.
_HINT_PREFIXES = ("pragma_", "software_pipeline", "double_buffer", "tirx.manifest_shared_memory_local_stage")


def serialize_cuda(mod: tvm.IRModule) -> tvm.IRModule:
    """A scheduled CUDA module, before lowering, turned into one that `tvm.compile(..., target="llvm")` takes.

    Thread bindings and unrolled loops become serial loops, memory scopes (shared, shared.dyn, local, ...) become plain memory,
    unroll, pipeline and double-buffer hints and waits for an earlier launch are dropped; everything else, vectorised loops too,
    stays as it is. `mod` is not changed. It works on the JSON form of the module because TVM exposes no IR mutator to Python
    and its script form loses information.
    """
    import tvm

    graph = json.loads(tvm.ir.save_json(mod))
    nodes: list[dict[str, Any]] = graph["nodes"]
    nothing = next(i for i, node in enumerate(nodes) if node["type"] == _NONE)
    nodes.append({"type": "ffi.String", "data": "global"})
    plain_memory = len(nodes) - 1
    for node in nodes:
        data = node.get("data")
        if not isinstance(data, dict):
            continue
        if "storage_scope" in data:
            data["storage_scope"] = plain_memory
        if node["type"] == _FOR and data["kind"] in (_UNROLLED, _THREAD_BINDING):
            data["kind"], data["thread_binding"] = _SERIAL, nothing
        if node["type"] == _EVALUATE and _operator(nodes, data["value"]) == _LAUNCH_CONTROL:
            data["value"] = next(i for i, n in enumerate(nodes) if n["type"] == "ir.IntImm")  # does nothing
        if node["type"] in (_FOR, _BLOCK):
            data["annotations"] = _without_hints(nodes, data["annotations"])
    return tvm.ir.load_json(json.dumps(graph))


def _operator(nodes: list[dict[str, Any]], index: int) -> str | None:
    """The name of the operator that the node at `index` calls, if it calls one."""
    data = nodes[index].get("data")
    op = nodes[data["op"]] if isinstance(data, dict) and "op" in data else None
    return str(op["data"]) if op is not None and op["type"] == "ir.Op" else None


def _without_hints(nodes: list[dict[str, Any]], index: int) -> int:
    """Index of a map node equal to the one at `index` less the hints. Maps are shared, so the old one is left alone."""
    pairs = nodes[index].get("data") or []
    keys, values = pairs[::2], pairs[1::2]
    kept = [(k, v) for k, v in zip(keys, values, strict=True) if not str(nodes[k]["data"]).startswith(_HINT_PREFIXES)]
    if len(kept) == len(keys):
        return index
    nodes.append({"type": nodes[index]["type"], "data": [i for pair in kept for i in pair]})
    return len(nodes) - 1
