"""AutoFreeze's model of communication, by hand."""

import pytest

from timelyfreeze.front.plan import communication_ms


def test_communication_by_hand() -> None:
    # 3 buckets: 2 ms of latency to each of 3 others; 2 * 100 * 3 / (4 * 50) = 3 ms.
    assert communication_ms(3, 100.0, 4, 50.0, 2.0) == 3 * (2 * 3 + 3)
    assert communication_ms(3, 100.0, 1, 50.0, 2.0) == 0.0
    assert communication_ms(0, 100.0, 4, 50.0, 2.0) == 0.0


def test_more_replicas_send_ever_closer_to_twice_the_gradients() -> None:
    sent = [communication_ms(1, 100.0, n, 1.0) for n in (2, 4, 100)]
    assert sent == [100.0, 150.0, 198.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 1.0, 0, 1.0), "n_workers is 0; it must be 1 or more"),
        ((1, 1.0, 2, 0.0), "bytes_per_ms is 0.0; it must be above 0"),
        ((-1, 1.0, 2, 1.0), "n_buckets is -1; it must be 0 or more"),
        ((1, -1.0, 2, 1.0), "bucket_bytes is -1.0; it must be 0 or more"),
        ((1, 1.0, 2, 1.0, -1.0), "latency_ms is -1.0; it must be 0 or more"),
    ],
)
def test_numbers_of_communication_that_make_no_sense(
    arguments: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        communication_ms(*arguments)  # type: ignore[arg-type]
