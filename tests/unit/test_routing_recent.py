"""The window of last values, against sorting it anew."""

import math

from hypothesis import given
from hypothesis import strategies as st

from weighbridge.routing.recent import Recent


@given(
    st.lists(st.floats(0, 1e6), max_size=60),
    st.integers(1, 20),
    st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
)
def test_all_but_a_share_of_the_last_values_are_at_most_the_value(
    values: list[float], count: int, share: float
) -> None:
    recent = Recent(count, share)
    assert recent.value() == 0.0
    for n, value in enumerate(values):
        recent.add(value)
        last = values[max(0, n + 1 - count) : n + 1]
        assert recent.value() in last
        assert sum(each > recent.value() for each in last) <= math.ceil(len(last) * share)
        assert sum(each >= recent.value() for each in last) >= len(last) * share
