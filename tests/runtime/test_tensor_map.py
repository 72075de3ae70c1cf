from __future__ import annotations

import ctypes
import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kronsched import Gemm, KronMatmul, registry
from kronsched.errors import CompileError, RecordError
from kronsched.runtime.lower import Lowered, lower
from kronsched.runtime.manifest import FILE_NAME, LaunchSpec, Manifest
from kronsched.runtime.tensor_map import DECLARATION, MapCache, TensorMap, encode, tensor_maps
from tests.runtime.runtime_toys import H200
from tests.runtime.test_manifest import MANIFEST

MAP = TensorMap("x_map", "x", "float16", (40, 30), (80,), (32, 8), swizzle=2, l2=2)
IM2COL = TensorMap("x_map", "x", "int8", (64, 9, 8, 2), (64, 576, 4608), (32, 300), 1, 2, (-1, -2), (-3, 0), (2, 1))


def lowered(**knobs: Any) -> Lowered:
    config = {
        "block_m": 64,
        "block_n": 64,
        "warpgroups": 1,
        "stages": 2,
        "group": 1,
        "split_k": 1,
        "promote": 0,
        "pair": False,
        "pingpong": False,
        "cluster": 1,
        **knobs,
    }
    return lower(Gemm(30, 48, 72, "bfloat16", "bfloat16"), registry.schedule("gemm_dense_wgmma"), config, H200)


# -- from a program -------------------------------------------------------------------------------------


def test_maps_are_read_from_the_host_side_of_the_program() -> None:
    low = lowered(block_n=64)
    (launch,) = low.launches
    assert launch.args == ("w_map", "x_map", "y_map")
    assert launch.shapes == ((48, 72), (30, 72), (30, 48))
    assert launch.dtypes == ("bfloat16",) * 3
    assert launch.tensors == {"x", "w", "y"}
    assert launch.maps == (
        TensorMap("w_map", "w", "bfloat16", (72, 48), (144,), (64, 64), 3, 2),
        TensorMap("x_map", "x", "bfloat16", (72, 30), (144,), (64, 64), 3, 2),
        TensorMap("y_map", "y", "bfloat16", (48, 30), (96,), (64, 64), 3, 0),
    )


def test_the_source_declares_the_type_and_its_digest_covers_the_maps() -> None:
    low = lowered()
    assert DECLARATION in low.source
    assert "//   tensor map x_map: x bfloat16 (72, 30) strides=(144,) box=(64, 64) swizzle=128B l2=2" in low.source
    workload, simt = KronMatmul(2, [(4, 4)]), registry.schedule("kron_cuda_simt")
    assert "CUtensorMap" not in lower(workload, simt, simt.default_config(workload, H200), H200).source


def test_a_map_that_is_not_understood_is_a_compile_error() -> None:
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as I

    with IRBuilder() as builder:
        with I.prim_func():
            I.func_name("f")
            x = I.arg("x", I.buffer((64, 64), "float16"))
            handle = IRBuilder.name("x_map", I.Bind(T.tvm_stack_alloca("tensormap", 1), var=T.handle("tensormap")))
            # element strides of 2
            numbers = (64, 64, 128, 64, 64, 2, 1, 0, 3, 2, 0)
            I.evaluate(T.call_packed("runtime.cuTensorMapEncodeTiled", handle, "float16", 2, x.data, *numbers))
        func = builder.get()
    with pytest.raises(CompileError, match="a tensor map is not understood: interleave, fill and element strides"):
        tensor_maps(func)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"strides": (100,)}, "multiples of 16"),
        ({"box": (64, 8)}, "a row of 128 bytes does not fit swizzle=2"),
        ({"box": (4, 8)}, "a row of 8 bytes"),
        ({"box": (32, 257)}, "out of range"),
        ({"extents": (40, 0)}, "out of range"),
        ({"extents": (40,)}, "do not fit each other"),
        ({"dtype": "float12"}, "do not fit each other"),
        ({"swizzle": 4}, "swizzle=4"),
    ],
)
def test_what_the_driver_would_refuse_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(MAP, **change).checked()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lower": (-129, 0)}, "lower=(-129, 0)"),
        ({"upper": ()}, "upper=()"),
        ({"steps": (9, 1)}, "steps=(9, 1)"),
        ({"steps": ()}, "do not fit each other"),  # a box of two sides for four dimensions
        ({"box": (32, 1025)}, "out of range"),
        ({"box": (16, 300)}, "must fill the swizzle"),  # an H200 does not pack narrower rows
    ],
)
def test_windows_the_driver_would_refuse_are_refused(change: dict[str, Any], says: str) -> None:
    assert IM2COL.checked() is IM2COL
    with pytest.raises(ValueError, match=re.escape(says)):
        dataclasses.replace(IM2COL, **change).checked()


# -- in a manifest --------------------------------------------------------------------------------------


def manifest(spec: TensorMap = MAP) -> Manifest:
    launch = LaunchSpec("k", ("x_map", "t"), ((30, 40), (16, 8, 7)), dtypes=("float16", "float32"), maps=(spec,))
    return dataclasses.replace(MANIFEST, launches=(launch,))


@pytest.mark.parametrize("spec", [MAP, IM2COL], ids=["tiled", "im2col"])
def test_manifest_round_trip(spec: TensorMap, tmp_path: Path) -> None:
    manifest(spec).save(tmp_path)
    assert Manifest.load(tmp_path) == manifest(spec)


def test_a_manifest_from_before_tensor_maps_loads(tmp_path: Path) -> None:
    MANIFEST.save(tmp_path)
    data = json.loads((tmp_path / FILE_NAME).read_text())
    del data["launches"][0]["maps"]
    (tmp_path / FILE_NAME).write_text(json.dumps(data))
    assert Manifest.load(tmp_path) == MANIFEST


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tensor": "u"}, "tensors that are not described"),
        ({"name": "other_map"}, "a tensor map is no argument"),
        ({"strides": [100]}, "multiples of 16"),
        ({"box": "32x8"}, "must be an int"),
        ({"box": None}, "manifest"),
    ],
)
def test_a_broken_map_in_a_manifest_is_one_line(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    manifest().save(tmp_path)
    data = json.loads((tmp_path / FILE_NAME).read_text())
    data["launches"][0]["maps"][0].update(change)
    (tmp_path / FILE_NAME).write_text(json.dumps(data))
    with pytest.raises(RecordError, match=says):
        Manifest.load(tmp_path)


# -- encoded --------------------------------------------------------------------------------------------


def test_each_address_is_encoded_once() -> None:
    asked: list[int] = []

    def fake(spec: TensorMap, address: int) -> bytes:
        assert spec is MAP
        asked.append(address)
        return address.to_bytes(8, "little") * 16

    cache = MapCache(MAP, fake)
    for _ in range(3):
        for address in (16, 32, 48):
            assert ctypes.string_at(cache.address(address), 128) == address.to_bytes(8, "little") * 16
    assert asked == [16, 32, 48]
    for address in range(1024, 1024 + 16 * 64, 16):
        cache.address(address)
    cache.address(16)  # forgotten since
    assert asked.count(16) == 2


def test_what_the_driver_is_asked() -> None:
    asked: list[tuple[Any, ...]] = []
    content = ctypes.create_string_buffer(bytes(range(128)), 128)

    class Driver:
        CUtensorMapDataType = SimpleNamespace(
            CU_TENSOR_MAP_DATA_TYPE_FLOAT16="float16",
            CU_TENSOR_MAP_DATA_TYPE_UINT8="uint8",
            CU_TENSOR_MAP_DATA_TYPE_INT32="int32",
        )
        cuuint64_t = staticmethod(lambda n: ("u64", n))
        cuuint32_t = staticmethod(lambda n: ("u32", n))
        CUtensorMapInterleave = CUtensorMapSwizzle = CUtensorMapL2promotion = CUtensorMapFloatOOBfill = staticmethod(lambda n: n)
        status = 0

        def cuTensorMapEncodeTiled(self, *args: Any) -> tuple[int, Any]:
            asked.append(args)
            return self.status, SimpleNamespace(getPtr=lambda: ctypes.addressof(content))

        def cuTensorMapEncodeIm2col(self, *args: Any) -> tuple[int, Any]:
            return self.cuTensorMapEncodeTiled(*args)

    driver = Driver()
    assert encode(driver, MAP, 4096) == bytes(range(128))
    extents, strides, box, steps = ([("u64", 40), ("u64", 30)], [("u64", 80)], [("u32", 32), ("u32", 8)], [("u32", 1)] * 2)
    assert asked == [("float16", 2, 4096, extents, strides, box, steps, 0, 2, 2, 0)]
    encode(driver, dataclasses.replace(MAP, dtype="float8_e5m2"), 4096)
    assert asked[-1][0] == "uint8"
    encode(driver, IM2COL, 4096)
    assert asked[-1][5:] == ([-1, -2], [-3, 0], 32, 300, [("u32", n) for n in (1, 2, 1, 1)], 0, 1, 2, 0)
    driver.status = 1
    with pytest.raises(RuntimeError, match=r"tensor map x_map: x float16 .* failed: 1"):
        encode(driver, MAP, 4096)
