"""AutoFreeze's model of communication, by hand."""

import pytest

from timelyfreeze.front.plan import communication_ms, epoch_ms


def test_communication_by_hand() -> None:
    # 3 buckets: 2 ms of latency to each of 3 others; 2 * 100 * 3 / (4 * 50) = 3 ms.
    assert communication_ms(3, 100.0, 4, 50.0, 2.0) == 3 * (2 * 3 + 3)
    assert communication_ms(3, 100.0, 1, 50.0, 2.0) == 0.0
    assert communication_ms(0, 100.0, 4, 50.0, 2.0) == 0.0


def test_more_replicas_send_ever_closer_to_twice_the_gradients() -> None:
    sent = [communication_ms(1, 100.0, n, 1.0) for n in (2, 4, 100)]
    assert sent == [100.0, 150.0, 198.0]


def test_an_epoch_takes_the_slower_of_both() -> None:
    assert epoch_ms(120, 10, 5.0, 3.0) == 12 * 5.0
    assert epoch_ms(120, 10, 5.0, 7.0) == 12 * 7.0


def test_an_epoch_of_the_paper() -> None:
    """Sec. 3.3, 4.5: 120,000 rows in batches of 3,456 at 1.05 s, or of 384 at 0.42 s."""
    assert epoch_ms(120_000, 3456, 1050.0, 0.0) == pytest.approx(36e3, rel=0.02)
    assert epoch_ms(120_000, 384, 420.0, 0.0) == pytest.approx(131e3, rel=0.005)


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


def test_a_batch_without_rows() -> None:
    with pytest.raises(ValueError, match="batch_rows is 0; it must be 1 or more"):
        epoch_ms(1, 0, 1.0, 1.0)
