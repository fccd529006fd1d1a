"""Lines through responses, worked out by hand."""

import pytest

from timelyfreeze.schedule.order import ActionKind
from torchtitan.freezing.profile.bench import Point, Response, fit_line, spread


def point(ratio: float, *times_ms: float, fraction: float | None = None) -> Point:
    return Point(ratio, (ratio if fraction is None else fraction,) * len(times_ms), times_ms)


def test_a_straight_line_is_one() -> None:
    line = fit_line([point(r, 10.0 - 6.0 * r) for r in (0.0, 0.25, 0.5, 1.0)])
    assert (line.unfrozen_ms, line.frozen_ms) == (10.0, 4.0)
    assert line.largest_miss_ms == pytest.approx(0.0, abs=1e-12)
    assert (line.fit_unfrozen_ms, line.fit_frozen_ms) == (pytest.approx(10.0), pytest.approx(4.0))
    assert line.fit_residual_ms == pytest.approx(0.0, abs=1e-12)
    assert line.r_squared == pytest.approx(1.0)


def test_the_farthest_point_from_the_assumed_line() -> None:
    # On the line from 10 to 4: 7 at 0.5, 5.5 at 0.75. The best line through (0, 10), (0.5, 9),
    # (0.75, 5), (1, 4), by hand: mean share 0.5625, mean 7, slope -3.625 / 0.546875.
    points = [point(0.0, 10.0), point(0.5, 9.0), point(0.75, 5.0), point(1.0, 4.0)]
    line = fit_line(points)
    assert line.largest_miss_ms == pytest.approx(2.0)
    assert line.largest_miss == pytest.approx(0.2)
    slope = ((-0.5625 * 3) + (-0.0625 * 2) + (0.1875 * -2) + (0.4375 * -3)) / 0.546875
    assert line.fit_frozen_ms - line.fit_unfrozen_ms == pytest.approx(slope)
    assert line.fit_unfrozen_ms == pytest.approx(7.0 - 0.5625 * slope)
    residuals = [y - 7.0 - slope * (x - 0.5625) for x, y in [(0, 10), (0.5, 9), (0.75, 5), (1, 4)]]
    assert line.fit_residual_ms == pytest.approx(max(map(abs, residuals)))
    assert line.r_squared == pytest.approx(1.0 - sum(r * r for r in residuals) / 26.0)


def test_a_miss_below_the_line_is_negative() -> None:
    line = fit_line([point(0.0, 10.0), point(0.5, 4.0), point(1.0, 4.0)])
    assert line.largest_miss_ms == pytest.approx(-3.0)


def test_the_fraction_that_was_frozen_counts_and_not_the_ratio() -> None:
    line = fit_line([point(0.0, 10.0), point(0.5, 8.0, fraction=0.2), point(1.0, 0.0)])
    assert line.largest_miss_ms == pytest.approx(0.0)


def test_medians_are_compared() -> None:
    line = fit_line([point(0.0, 10.0, 11.0, 90.0), point(1.0, 4.0, 0.0, 5.0)])
    assert (line.unfrozen_ms, line.frozen_ms) == (11.0, 4.0)
    assert (line.largest_miss_ms, line.largest_miss) == (0.0, 0.0)


def test_flat_responses_are_explained() -> None:
    line = fit_line([point(0.0, 3.0), point(0.5, 3.0), point(1.0, 3.0)])
    assert (line.r_squared, line.fit_residual_ms) == (1.0, pytest.approx(0.0, abs=1e-12))
    assert fit_line([point(0.0, 0.0), point(1.0, 0.0)]).largest_miss == 0.0


def test_a_line_needs_both_ends() -> None:
    with pytest.raises(ValueError, match=r"the ratios \[0.0, 0.5\] do not tell the line"):
        fit_line([point(0.0, 1.0), point(0.5, 1.0)])


def test_spread_of_measurements() -> None:
    found = spread([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (found.median_ms, found.quartiles_ms, found.n) == (3.0, (2.0, 4.0), 5)


def test_ends_of_a_response() -> None:
    kind = ActionKind.FULL_BACKWARD
    curve = (point(0.0, 10.0, 12.0), point(0.5, 7.0), point(1.0, 4.0))
    response = Response(1, 3, None, (1.0,), (), {kind: curve})
    assert response.ends(kind) == ((4.0,), (10.0, 12.0))
