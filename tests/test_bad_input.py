"""A user's mistake is one clear line and exit code 2 (in Python a ValueError or TypeError naming the argument), no traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING, Any

import pytest

import kronsched
from kronsched.cli.root import run
from kronsched.hardware import cuda_driver

if TYPE_CHECKING:
    import torch

    from kronsched import TunedModule

KRON = ["tune", "kron", "--m", "4", "--factors", "4x4,4x4", "--target", "cpu", "--trials", "1"]


def changed(**options: str) -> list[str]:
    """`KRON` with some options set to other values, or added."""
    args = list(KRON)
    for name, value in options.items():
        flag = f"--{name}"
        if flag in args:
            args[args.index(flag) + 1] = value
        else:
            args += [flag, value]
    return args


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (changed(m="0"), "m=0 is not allowed: an int ≥ 1 is needed"),
        (changed(m="-3"), "m=-3"),
        (changed(m="many"), "'--m': 'many' is not a valid integer"),
        (changed(factors="8xx8"), "factors='8xx8': '8xx8' is not allowed: write each factor as PxQ"),
        (changed(factors="8x8,,4x4"), "''"),
        (changed(factors=""), "factors=''"),
        (changed(factors="8x0,4x4"), "factors[0] Q=0 is not allowed"),
        (changed(factors="4x4,0x2"), "factors[1] P=0 is not allowed"),
        (changed(factors=",".join(["1x1"] * 65)), "65 given, 1 to 64 are allowed"),
        (changed(m="4000000000"), "at most 2147483647"),
        (changed(dtype="float12"), "dtype='float12' is not allowed: choose one of float32, float64, float16, bfloat16"),
        (changed(dtype="int8"), "dtype='int8'"),
        (changed(target="gpu"), "target='gpu' is not allowed: choose one of auto, cpu, cuda, cuda:N, nvidia/h200"),
        (changed(strategy="luck"), "strategy='luck' is not allowed: choose one of annealing, distinctive"),
        (changed(log="/proc/none/kron.jsonl"), "log='/proc/none/kron.jsonl' cannot be written"),
        (changed(log="/"), "log='/'"),
        (changed(trials="-1"), "trials=-1"),
        (changed(trials="few"), "'--trials': 'few' is not a valid integer"),
        (changed(space="/none.toml"), "space file '/none.toml' cannot be read"),
        (changed(compiler="clang"), "'--compiler': 'clang' is not one of 'nvrtc', 'nvcc'"),
        ([*KRON, "--bogus"], "No such option"),
        (["tune", "kron", "--m", "4"], "Missing option '--factors'"),
        (["tune", "gemmm"], "family='gemmm' is not allowed: choose one of conv2d, gemm, kron, ks"),
        (["tune"], "FAMILY"),
        (["dance"], "No such command 'dance'"),
        (["show", "/none.jsonl"], "log='/none.jsonl' is not a file"),
        (["replay", "/none.jsonl"], "log='/none.jsonl' is not a file"),
        (changed(objective="fame"), "'--objective': 'fame' is not one of 'time', 'energy'"),
        (["simulate", "/none.jsonl"], "log='/none.jsonl' is not a file"),
        (["simulate", "/none.jsonl", "--strategy", "luck"], "strategy='luck' is not allowed: choose one of annealing"),
        (["simulate", "/none.jsonl", "--seeds", "0"], "'--seeds': 0 is not in the range"),
        (["report", "/none.jsonl"], "log='/none.jsonl' is not a file"),
        (["emit", "/none.jsonl", "-o", "out"], "log='/none.jsonl' is not a file"),
        (["emit", "kron", "--m", "4", "--factors", "4x4"], "Missing option '-o'"),
        (["bench", "kron", "--suite", "none"], "suite='none' is not allowed: choose one of large"),
        (["bench", "cats", "--suite", "large"], "suite family='cats' is not allowed: choose one of conv2d"),
        (["bench", "kron", "--suite", "large", "--peers", "me", "--target", "cpu", "--limit", "1"], "peer='me' is not allowed"),
        (["bench", "kron", "--suite", "large", "--target", "nvidia/h200"], "not on this machine"),
        (["bench", "ks", "--quick", "--for", "nan"], "'--for': nan is not a finite number"),
        (["versus", "gemm", "--seconds", "inf"], "'--seconds': inf is not a finite number"),
        (["--plugin", "no_such_module", "doctor"], "plugin='no_such_module' cannot be imported"),
        (["--plugin", "/none.py", "doctor"], "plugin='/none.py' is not allowed"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_command_line(args: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(args)
    out, err = capsys.readouterr()
    if args == ["tune"]:  # a group alone is a request for its help
        assert code == 2 and expected in err
        return
    assert code == 2, err
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("kronsched: ") and expected in lines[0], err
    assert out == ""


def test_cuda_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "gpus", lambda: ())
    assert run(changed(target="cuda")) == 2
    assert "target='cuda': no CUDA GPU was found" in capsys.readouterr().err


def test_a_real_process_says_one_line(kronsched_command: Callable[..., CompletedProcess[str]]) -> None:
    done = kronsched_command("tune", "kron", "--m", "0", "--factors", "8x8", "--json")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "kronsched: m=0 is not allowed: an int ≥ 1 is needed\n")


def test_a_broken_plugin_is_the_users_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = tmp_path / "broken_plugin.py"
    plugin.write_text("raise RuntimeError('boom')\n")
    assert run(["--plugin", str(plugin), "doctor"]) == 2
    assert capsys.readouterr().err.splitlines() == [f"kronsched: plugin='{plugin}' cannot be imported: RuntimeError: boom"]


# -- the same in Python ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "names"),
    [
        ({"m": 0}, ValueError, "m=0"),
        ({"m": 2.5}, TypeError, "m=2.5"),
        ({"m": True}, TypeError, "m=True"),
        ({"factors": []}, ValueError, "factors"),
        ({"factors": [(8, 0)]}, ValueError, r"factors\[0\] Q=0"),
        ({"factors": [(8,)]}, ValueError, r"factors\[0\]"),
        ({"factors": "8x8"}, TypeError, "factors='8x8'"),
        ({"dtype": "float12"}, ValueError, "dtype='float12'"),
        ({"dtype": 16}, ValueError, "dtype=16"),
    ],
)
def test_workload(fields: dict[str, Any], error: type[Exception], names: str) -> None:
    with pytest.raises(error, match=names):
        kronsched.KronMatmul(**{"m": 4, "factors": [(4, 4)], **fields})


@pytest.mark.parametrize(
    ("options", "names"),
    [({"target": "gpu"}, "target='gpu'"), ({"strategy": "luck"}, "strategy='luck'"), ({"log": "/proc/none/x.jsonl"}, "log=")],
)
def test_tune(options: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        kronsched.tune(kronsched.KronMatmul(m=4, factors=[(4, 4)]), **{"target": "cpu", "trials": 1, **options})


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> TunedModule:
    return kronsched.load(kronsched.KronMatmul(m=4, factors=[(4, 2), (3, 3)]), device="cpu")


def tensors() -> list[torch.Tensor]:
    import torch

    return [torch.randn(4, 12), torch.randn(4, 2), torch.randn(3, 3)]


def test_call_is_right_with_good_input(module: TunedModule) -> None:
    import torch

    x, a, b = tensors()
    torch.testing.assert_close(module(x, a, b), x @ torch.kron(a, b))


@pytest.mark.parametrize(
    ("position", "change", "error", "names"),
    [
        (0, lambda t: t[:3], ValueError, "x"),
        (0, lambda t: t.reshape(2, 24), ValueError, "x"),
        (0, lambda t: t[0], ValueError, "x"),
        (1, lambda t: t.T, ValueError, "f0"),
        (2, lambda t: t[:2], ValueError, "f1"),
        (0, lambda t: t.double(), TypeError, "x"),
        (1, lambda t: t.half(), TypeError, "f0"),
        (2, lambda t: t.int(), TypeError, "f1"),
        (0, lambda t: t.to("meta"), TypeError, "x"),
        (1, lambda t: t.to("meta"), TypeError, "f0"),
        (0, lambda t: t.numpy(), TypeError, ""),
        (1, lambda t: None, TypeError, "f0"),
        (0, lambda t: t.tolist(), TypeError, "x"),
    ],
)
def test_call_names_the_argument(module: TunedModule, position: int, change: Any, error: type[Exception], names: str) -> None:
    inputs: list[Any] = tensors()
    inputs[position] = change(inputs[position])
    with pytest.raises(error, match=rf"\b{names}\b") as found:
        module(*inputs)
    assert "\n" not in str(found.value)


def test_call_with_the_wrong_number_of_tensors(module: TunedModule) -> None:
    with pytest.raises((TypeError, ValueError), match="3"):
        module(*tensors()[:2])


def test_call_with_a_bad_output(module: TunedModule) -> None:
    import torch

    for out in (torch.empty(4, 5), torch.empty(4, 6, dtype=torch.float64)):
        with pytest.raises((TypeError, ValueError), match="out"):
            module(*tensors(), out=out)
