"""The shipped spaces are found in a checkout and in an installed wheel; a wrong file is one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from kronsched import doctor
from kronsched.errors import ArgumentError
from kronsched.space import load_knobs, space_path, spaces_dir
from kronsched.space import toml as module


def test_the_shipped_spaces_are_read() -> None:
    names = {p.stem for p in spaces_dir().glob("*.toml")}
    assert {"kron_cpu", "kron_cuda_simt"} <= names
    for name in names:
        assert all(k.values and k.help for k in load_knobs(name))


def test_an_installed_wheel_has_them_inside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "_data" / "search_spaces"
    inside.mkdir(parents=True)
    (inside / "only.toml").write_text('space = "only"\n[knobs.a]\nvalues = [1]\n')
    monkeypatch.setattr(module, "files", lambda package: tmp_path)
    assert spaces_dir() == inside and space_path("only").is_file()
    assert doctor._shipped().startswith("1 search spaces (only)")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "space=None"),
        ("space = 3", "space=3"),
        ('space = "kron_cpu"', r"\[knobs"),
        ('space = "kron_cpu"\n[knobs.a]\nvalues = []', "at least one"),
        ('space = "kron_cpu"\n[knobs.a]\nvalues = [1, 1]', "repeats"),
        ('space = "kron_cpu"\n[knobs.a]\nvalues = [[1]]', "knobs.a.values"),
        ("space = [", "TOML"),
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=says) as error:
        load_knobs("kron_cpu", path)
    assert "\n" not in str(error.value).strip()
