"""A third-party family, as somebody outside would write it: Y = s ∘ X, rows scaled. `tests/test_third_party.py` uses it."""

from dataclasses import dataclass, field

from kronsched import register_family, register_schedule
from kronsched.schedules.base import Launch, Schedule, Scheduled
from kronsched.space import Knob, SearchSpace
from kronsched.workloads.base import TensorSpec, Workload


@register_family
@dataclass(frozen=True)
class ScaleRows(Workload):
    family = "scale_rows"
    shape: tuple = field(metadata={"help": "MxN", "parse": lambda text: [int(n) for n in text.split("x")]})

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(self.shape))

    inputs = property(lambda self: (TensorSpec("x", self.shape, "float32"), TensorSpec("s", self.shape[:1], "float32")))
    output = property(lambda self: TensorSpec("y", self.shape, "float32"))
    flops = property(lambda self: self.shape[0] * self.shape[1])
    label = property(lambda self: f"scale_rows {self.shape[0]}x{self.shape[1]}")

    def reference(self, x, s):
        return x.double() * s.double()[:, None]

    def program(self):
        import tvm
        from tvm import te

        x, s = (te.placeholder(t.shape, t.dtype, name=t.name) for t in self.inputs)
        y = te.compute(self.shape, lambda i, j: x[i, j] * s[i], name="y")
        return tvm.IRModule({"main": te.create_prim_func([x, s, y]).with_attr("global_symbol", "main")})


@register_schedule
class ScaleRowsCpu(Schedule):
    name, family, device_kind = "scale_rows_cpu", "scale_rows", "cpu"

    def space(self, workload, device):
        return SearchSpace(self.name, [Knob("lanes", (1, 4, 8, 16), "vector length")])

    def apply(self, workload, config, device):
        from tvm import s_tir

        sch = s_tir.Schedule(workload.program())
        _, j = sch.get_loops(sch.get_sblock("y"))
        sch.vectorize(sch.split(j, [None, config["lanes"]])[1])
        return Scheduled(sch.mod, (Launch("main", ("x", "s", "y")),))

    def default_config(self, workload, device):
        return {"lanes": 8}
