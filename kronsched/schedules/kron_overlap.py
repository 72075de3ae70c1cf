"""Programmatic dependent launch for kernels scheduled by Schedule primitives.

Read first: `overlapped`.
"""

from __future__ import annotations

from typing import Any


def overlapped(func: Any) -> Any:
    """The function as a launch that starts while the one before it ends, and waits for that at its start.

    func: a PrimFunc whose root block is one loop bound to blockIdx.x.
    """
    from tvm import tirx
    from tvm.script import tirx as T

    wait = tirx.Evaluate(T.ptx.griddepcontrol.wait()), tirx.Evaluate(T.ptx.griddepcontrol.launch_dependents())
    root, block = func.body, func.body.block
    loop = block.body
    body = tirx.SeqStmt([*wait, loop.body])
    loop = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations)
    parts = block.iter_vars, block.reads, block.writes, block.name_hint, loop, block.init
    block = type(block)(*parts, block.alloc_buffers, block.match_buffers, block.annotations)
    return func.with_body(type(root)(root.iter_values, root.predicate, block))
