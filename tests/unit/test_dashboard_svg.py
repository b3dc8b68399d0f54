"""The pictures: exact markup for the small ones, geometry for the rest."""

from __future__ import annotations

import re

from weighbridge.dashboard import svg


def test_a_bar_is_clipped_and_carries_its_number_as_text() -> None:
    assert svg.bar(1.3, "load 130 %", 0.5, "bad") == (
        '<svg class="bad bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="load 130 %">'
        '<rect class="track" width="100" height="10"></rect><rect class="fill" width="100" height="10"></rect>'
        '<rect class="tick" x="49" width="2" height="10"></rect></svg>'
    )


def test_terms_stand_one_after_the_other_and_the_diamond_on_its_own_time() -> None:
    made = svg.stack(
        [("wait", 1.0), ("decode", 2.0), ("zero", 0.0)], svg.StackScale(10.0), "x", error_s=0.5, observed_s=4.0
    )
    rects = re.findall(r'class="(t-\w+)" x="([\d.]+)%" y="4" width="([\d.]+)%"', made)
    assert rects == [("t-wait", "0", "10"), ("t-decode", "10", "20")]
    assert 'x1="25%" x2="35%"' in made
    assert 'x="40%"' in made


def test_a_strip_beyond_its_range_is_an_arrow_not_a_new_scale() -> None:
    inside, beyond = svg.strip(-0.1, 0.0, 0.1, 0.2, "x"), svg.strip(-0.1, 0.5, 0.9, 0.2, "x")
    assert "arrow" not in inside
    assert "arrow" in beyond
    assert 'class="out strip"' in beyond


def test_the_band_of_a_strip_does_not_depend_on_the_errors() -> None:
    band = re.compile(r'<rect class="band" x="([\d.]+)"')
    assert band.findall(svg.strip(0, 0, 0, 0.2, "a")) == band.findall(svg.strip(-0.4, 0.1, 0.4, 0.2, "b"))


def test_axes_end_on_round_numbers() -> None:
    assert [text for _, text in svg.nice_axis(0.37, "s").marks] == ["0.0", "0.1", "0.2", "0.3", "0.4"]
    assert svg.nice_axis(0.0, "s").high > 0
    assert svg.nice_axis(float("nan"), "s").high == 1.0


def test_a_distribution_ends_at_the_share_that_got_there() -> None:
    line = svg.cdf("x", [1.0, 2.0, float("inf"), float("inf")], "s0")
    assert list(line.xs) == [1.0, 2.0]
    assert list(line.ys) == [0.25, 0.5]


def test_nothing_is_styled_inline() -> None:
    made = svg.chart(
        [svg.Line("<a>", [0, 1], [1, 2])],
        svg.nice_axis(1, "x"),
        svg.nice_axis(2, "s"),
        "label",
        band=[(0, 0, 1), (1, 1, 2)],
    )
    assert "style=" not in made
    assert "<a>" not in made
