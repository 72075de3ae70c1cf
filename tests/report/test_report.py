from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kronsched import KronMatmul
from kronsched.errors import ArgumentError
from kronsched.hardware import PRESETS
from kronsched.measure.base import STATUSES
from kronsched.records import Journal, TuningRecord
from kronsched.report import write_report
from kronsched.report.curves import over_trials
from kronsched.report.html import render
from kronsched.report.summary import TOP, sections_of
from kronsched.report.svg import MAX_DOTS, draw
from tests.records.record_factory import A100, KRON, make_record

DOCUMENT_TAGS = {"html", "head", "meta", "title", "style", "body", "section", "footer", "div", "span", "a"}
TEXT_TAGS = {"h1", "h2", "h3", "p", "b", "code", "ul", "li", "table", "tr", "th", "td"}
ALLOWED_TAGS = DOCUMENT_TAGS | TEXT_TAGS | {"svg", "line", "text", "path", "circle"}
EVIL = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"' {{ 7777*7 }}\x00\x1b[31m"


class Page(HTMLParser):
    """Collects tags, attributes and text; checks that every tag is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def write(tmp_path: Path, records: list[TuningRecord]) -> Path:
    log = tmp_path / "log.jsonl"
    for record in records:
        Journal(log).append(record)
    return log


def some_records() -> list[TuningRecord]:
    ok = [make_record(30.0 - i, config={"rows": i % 5, "pad": bool(i % 2), "groups": f"g{i}"}) for i in range(25)]
    bad = [make_record(status=s, config={"rows": 99, "pad": True, "groups": "x"}) for s in (*STATUSES[1:], "timeout", "timeout")]
    return [*ok, *bad]


def test_page(tmp_path):
    out = write_report(write(tmp_path, some_records()), tmp_path / "new" / "report.html")
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    assert set(page.tags) <= ALLOWED_TAGS and page.tags.count("svg") == 2
    assert KRON.label in page.words and "NVIDIA H200 sm_90a" in page.words
    assert "6 µs" in page.words  # 30 - 24, the best
    assert "25 of 34" in page.words and "ab" * 32 in page.words and "timeout: made up" in page.words
    assert "rows=4 pad=False groups=g24" in " ".join(page.words.split())


def test_no_network_resources(tmp_path):
    text = write_report(write(tmp_path, some_records()), tmp_path / "r.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not {name for name, _ in page.attributes} & {"src", "srcset", "data", "xlink:href", "action"}
    assert all(value is not None and value.startswith("#") for name, value in page.attributes if name == "href")
    assert not re.search(r"https?:|//\w|url\(|@import", text)


@pytest.mark.parametrize("family", ["kron", EVIL])
def test_everything_from_the_log_is_escaped(tmp_path, family):
    # An unknown field makes the family reject the workload, so its JSON is shown.
    workload = {**KRON.to_dict(), "family": family, EVIL: EVIL}
    record = make_record(
        config={EVIL: EVIL, "b": 1},
        target={"kind": "cuda", "name": EVIL, "arch": EVIL, "driver": EVIL},
        space={"name": EVIL},
        kernel={"source_sha256": EVIL, "registers": 1},
        search={"strategy": EVIL},
        versions={EVIL: EVIL, "list": [EVIL]},
        timestamp=EVIL,
    )
    record.workload.clear()
    record.workload.update(workload)
    failed = make_record(status="crash", result={"status": "crash", "error": EVIL}, config={EVIL: 2})
    failed.workload.clear()
    failed.workload.update(workload)
    log = write(tmp_path, [record, failed, make_record()])
    page = Page(write_report(log, tmp_path / "r.html").read_text(encoding="utf-8"))
    assert set(page.tags) <= ALLOWED_TAGS
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.words.count("<script>alert(1)</script>") >= 8 and "54439" not in page.words
    assert "\x1b" not in page.words and "\x00" not in page.words


def test_title_is_escaped():
    assert "<script>" not in render([make_record()], EVIL)


def test_sections():
    other = KronMatmul(m=65, factors=[(8, 8)] * 4)
    records = [make_record(5.0), make_record(4.0, device=A100), make_record(3.0, workload=other), make_record(status="crash")]
    sections = sections_of(records)
    assert [(s.label, s.records, s.ok) for s in sections] == [(KRON.label, 2, 1), (KRON.label, 1, 1), (other.label, 1, 1)]
    assert [s.device for s in sections] == ["NVIDIA H200 sm_90a", "NVIDIA A100-SXM4-80GB sm_80", "NVIDIA H200 sm_90a"]
    floor = KRON.min_bytes / PRESETS["nvidia/h200"].bandwidth_gbs / 1e3
    assert sections[0].floor_us == pytest.approx(floor) and sections[0].roofline_fraction == pytest.approx(floor / 5.0)
    page = Page(render(records, "log"))
    assert page.words.count(KRON.label) == 4  # overview and heading of each of two devices


def test_section_contents():
    (section,) = sections_of(some_records())
    assert section.best is not None and section.best.median_us == 6.0
    assert len(section.top) == TOP and [r.median_us for r in section.top] == [6.0 + i for i in range(TOP)]
    assert (section.failures[0].status, section.failures[0].count) == ("timeout", 3)
    assert sum(f.count for f in section.failures) == section.records - section.ok == 9
    knobs = dict(section.knobs)
    assert [v.value for v in knobs["rows"]] == ["0", "1", "2", "3", "4", "99"]
    four, failed = knobs["rows"][4], knobs["rows"][5]
    assert (four.tried, four.ok, four.best_us, four.in_best) == (5, 5, 6.0, True)
    assert (failed.tried, failed.ok, failed.best_us, failed.in_best) == (9, 0, None, False)
    assert dict(section.versions) == {"kronsched": "0.1.0"} and section.strategies == ("random",)


def test_the_same_config_is_listed_once_with_its_best_time():
    (section,) = sections_of([make_record(5.0), make_record(3.0), make_record(4.0)])
    assert [r.median_us for r in section.top] == [3.0]


def test_only_failures():
    page = Page(render([make_record(status="crash"), make_record(status="invalid")], "log"))
    assert "No candidate was measured successfully" in page.words and "0 of 2" in page.words


@pytest.mark.parametrize("times", [[5.0], [5.0, 5.0], [1e-299, 1e299], [0.001, 4.0, 70.0], [1e-300], [3.0, 2.9]])
@pytest.mark.parametrize("floor", [None, 1e-3, 2.0])
def test_figures_stay_inside_their_box(times, floor):
    figure = str(draw(over_trials([make_record(t) for t in times], floor)))
    dots, line = re.findall(r'c[xy]="([^"]*)"', figure), re.findall(r"[MHV ](-?[\d.]+)", figure.split('class="best"')[1])
    numbers = [float(n) for n in dots + line]
    assert len(numbers) >= 4 and all(0 <= n <= 560 for n in numbers)
    assert "nan" not in figure and "inf" not in figure


def test_long_logs_draw_a_limited_number_of_dots():
    record = make_record()
    assert str(draw(over_trials([record] * 5000))).count("<circle") == MAX_DOTS


def test_bad_arguments(tmp_path):
    with pytest.raises(ArgumentError, match="is not a file"):
        write_report(tmp_path / "none.jsonl", tmp_path / "r.html")
    log = write(tmp_path, [make_record()])
    for out in (tmp_path, log / "r.html", "bad\0name.html"):
        with pytest.raises(ArgumentError, match="cannot be written"):
            write_report(log, out)
