"""What a checkpoint's JSON configs say about its 4-bit weights: `QuantConfig`.

Sources of the fields: AutoGPTQ and GPTQModel (quantize_config.json), AutoAWQ (quant_config.json), and `quantization_config` in
Hugging Face's config.json for gptq, awq, compressed-tensors and hqq. Read first: `read_config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kronsched.errors import ArgumentError, UnsupportedError, choose

METHODS = ("gptq", "awq", "compressed-tensors", "hqq")
_OTHER_LAYOUTS = ("marlin", "marlin_24", "marlin-24", "bitblas", "gemv", "gemv_fast", "exllama", "ipex")


@dataclass(frozen=True)
class QuantConfig:
    """What was said; the defaults stand for nothing said.

    method: one of `METHODS`.  group_sizes: those that layers may have.  gptq_version: 1 or 2 by the label.  where: the file.
    """

    method: str | None = None
    group_sizes: tuple[int, ...] = ()
    gptq_version: int | None = None
    where: str = ""


def read_config(configs: Mapping[str, Mapping[str, Any]]) -> QuantConfig:
    """One config out of the files that are there; ArgumentError when one is not for 4-bit weights or two disagree."""
    found = [_parse(section, where) for where, content in configs.items() if (section := _section(content, where)) is not None]
    result = QuantConfig()
    for config in found:
        result = _merged(result, config)
    return result


def _section(content: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    if not where.endswith("/config.json"):
        return content
    section = content.get("quantization_config", content.get("compression_config"))
    if section is not None and not isinstance(section, dict):
        raise ArgumentError(f"{where}: quantization_config is a {type(section).__name__}, an object is needed")
    return section


def _merged(a: QuantConfig, b: QuantConfig) -> QuantConfig:
    if not a.where:
        return b
    for field in ("method", "group_sizes", "gptq_version"):
        one, other = getattr(a, field), getattr(b, field)
        if one and other and one != other:
            raise ArgumentError(f"{b.where}: {field} is {other}, but {one} in {a.where}: make them agree")
    return QuantConfig(
        a.method or b.method, a.group_sizes or b.group_sizes, a.gptq_version or b.gptq_version, f"{a.where} and {b.where}"
    )


def _parse(content: Mapping[str, Any], where: str) -> QuantConfig:
    method = content.get("quant_method")
    if method is None and "w_bit" in content:
        method = "awq"
    if method is not None and method not in METHODS:
        raise UnsupportedError(f"{where}: {choose('quant_method', method, METHODS)}")
    layout = str(content.get("checkpoint_format") or content.get("format") or content.get("version") or "").lower()
    if layout in _OTHER_LAYOUTS:
        raise UnsupportedError(f"{where}: weights laid out for {layout} are not supported: the checkpoint's original is needed")
    if method == "compressed-tensors":
        if layout != "pack-quantized":
            raise UnsupportedError(f"{where}: {choose('format', layout, ('pack-quantized',))}")
        return QuantConfig(method, tuple(sorted(set(_compressed_groups(content, where)))), None, where)
    if method == "hqq":
        content = _hqq_params(content)
    bits = content.get("bits", content.get("w_bit", content.get("nbits")))
    if bits is not None and bits != 4:
        raise UnsupportedError(f"{where}: bits={bits!r} is not supported: 4 is needed")
    size = content.get("group_size", content.get("q_group_size"))
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or not (size == -1 or size > 0)):
        raise ArgumentError(f"{where}: group_size={size!r} is not allowed: -1 or an int ≥ 1 is needed")
    # With per-layer overrides the sizes that layers may have are not known: their shapes have to say it.
    sizes = () if size is None or content.get("dynamic") else (size,)
    version = {"gptq": 1, "gptq_v2": 2}.get(layout)
    return QuantConfig(method, sizes, version, where)


def _compressed_groups(content: Mapping[str, Any], where: str) -> Iterator[int]:
    groups = content.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ArgumentError(f"{where}: config_groups is missing")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise ArgumentError(f"{where}: config_groups.{name}.weights is missing")
        bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
        if (bits, kind) != (4, "int"):
            raise UnsupportedError(f"{where}: config_groups.{name}: {bits} bits of type {kind}: 4 bits of type int are needed")
        if strategy not in ("group", "channel"):
            raise UnsupportedError(f"{where}: config_groups.{name}: {choose('strategy', strategy, ('group', 'channel'))}")
        size = weights.get("group_size") if strategy == "group" else -1
        if not isinstance(size, int) or not (size == -1 or size > 0):
            raise ArgumentError(f"{where}: config_groups.{name}: group_size={size!r} is not allowed: an int ≥ 1 is needed")
        yield size


def _hqq_params(content: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = content.get("quant_config", content)
    params = inner.get("weight_quant_params", {}) if isinstance(inner, dict) else {}
    return params if isinstance(params, dict) else {}  # per-layer settings: the tensors say it
