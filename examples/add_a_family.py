"""A family from outside kronsched: the rank-one update Y = X + a bᵀ, with one CPU schedule. Tuned, replayed and loaded.

From the command line: kronsched --plugin examples/add_a_family.py tune rank_one --m 64 --n 256 --target cpu
"""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import kronsched
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.space import Knob, SearchSpace
from kronsched.workloads.base import TensorSpec, Workload


@kronsched.register_family
@dataclass(frozen=True)
class RankOne(Workload):
    """Y = X + a bᵀ: X and Y (m, n), a (m), b (n), float32."""

    family = "rank_one"
    m: int = field(metadata={"help": "rows"})  # a field is an option of every command
    n: int = field(metadata={"help": "columns"})

    @property
    def inputs(self):
        return tuple(
            TensorSpec(name, shape, "float32") for name, shape in (("x", (self.m, self.n)), ("a", (self.m,)), ("b", (self.n,)))
        )

    @property
    def output(self):
        return TensorSpec("y", (self.m, self.n), "float32")

    @property
    def flops(self):
        return 2 * self.m * self.n

    @property
    def label(self):
        return f"rank_one m={self.m} n={self.n}"

    def reference(self, x, a, b):
        return x.double() + a.double()[:, None] * b.double()

    def program(self):
        import tvm
        from tvm import te

        x, a, b = (te.placeholder(t.shape, t.dtype, name=t.name) for t in self.inputs)
        y = te.compute(x.shape, lambda i, j: x[i, j] + a[i] * b[j], name="y")
        return tvm.IRModule({"main": te.create_prim_func([x, a, b, y]).with_attr("global_symbol", "main")})


@kronsched.register_schedule
class RankOneCpu(Schedule):
    """Rows shared out to cores, columns in vectors of `lanes`."""

    name, family, device_kind = "rank_one_cpu", "rank_one", "cpu"

    def space(self, workload, device):
        knobs = [Knob("lanes", (1, 8, 16), "vector length"), Knob("parallel", (False, True), "rows shared out to cores")]
        return SearchSpace(self.name, knobs)

    def apply(self, workload, config, device):
        from tvm import s_tir

        sch = s_tir.Schedule(workload.program())
        i, j = sch.get_loops(sch.get_sblock("y"))
        sch.vectorize(sch.split(j, [None, config["lanes"]])[1])
        if config["parallel"]:
            sch.parallel(i)
        return Scheduled(sch.mod, (Launch("main", ("x", "a", "b", "y")),))

    def default_config(self, workload, device):
        return {"lanes": 8, "parallel": True}


def main():
    """Tune it, replay its log, load it and run it."""
    import torch

    workload = RankOne(m=64, n=256)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "rank_one.jsonl"
        result = kronsched.tune(workload, target="cpu", trials=6, log=log)
        print(f"best {result.best.median_us:.1f} µs with {result.best.config}")
        print("replay:", [r.status for r in kronsched.replay(log, verify=True)])
        mod = kronsched.load(log, device="cpu")
        x, a, b = torch.randn(64, 256), torch.randn(64), torch.randn(256)
        torch.testing.assert_close(mod(x, a, b), x + torch.outer(a, b))
        print("loaded and right")


if __name__ == "__main__":  # worker processes import this file to know the family
    main()
