"""AutoFreeze's model of communication, by hand."""

from timelyfreeze.front.plan import communication_ms


def test_communication_by_hand() -> None:
    # 3 buckets: 2 ms of latency to each of 3 others; 2 * 100 * 3 / (4 * 50) = 3 ms.
    assert communication_ms(3, 100.0, 4, 50.0, 2.0) == 3 * (2 * 3 + 3)
    assert communication_ms(3, 100.0, 1, 50.0, 2.0) == 0.0
    assert communication_ms(0, 100.0, 4, 50.0, 2.0) == 0.0


def test_more_replicas_send_ever_closer_to_twice_the_gradients() -> None:
    sent = [communication_ms(1, 100.0, n, 1.0) for n in (2, 4, 100)]
    assert sent == [100.0, 150.0, 198.0]
