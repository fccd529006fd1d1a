"""AutoFreeze's model of data-parallel training (arXiv:2102.01386, Sec. 3.3)."""

from __future__ import annotations


def communication_ms(
    n_buckets: int,
    bucket_bytes: float,
    n_workers: int,
    bytes_per_ms: float,
    latency_ms: float = 0.0,
) -> float:
    """Return T_comm = k (a (p - 1) + 2 b (p - 1) / (p BW)): gradients of a step, summed by a ring.

    Args:
        n_buckets: Buckets of gradients, k; those of frozen layers are not sent.
        bucket_bytes: Size of each, b; of a last, smaller one the whole size counts.
        n_workers: Replicas, p, at least 1.
        bytes_per_ms: Bandwidth of a link, BW, above 0.
        latency_ms: Of a message, a.

    Raises:
        ValueError: If a number is out of range.
    """
    if n_workers < 1:
        raise ValueError(f"n_workers is {n_workers}; it must be 1 or more")
    if not bytes_per_ms > 0.0:
        raise ValueError(f"bytes_per_ms is {bytes_per_ms}; it must be above 0")
    for name, number in (
        ("n_buckets", n_buckets),
        ("bucket_bytes", bucket_bytes),
        ("latency_ms", latency_ms),
    ):
        if not number >= 0.0:
            raise ValueError(f"{name} is {number}; it must be 0 or more")
    others = n_workers - 1
    return n_buckets * (
        latency_ms * others + 2.0 * bucket_bytes * others / (n_workers * bytes_per_ms)
    )


def epoch_ms(n_rows: int, batch_rows: int, compute_ms: float, communicate_ms: float) -> float:
    """Return N / BS max(T_comp, T_comm): a pass over the rows, gradients sent meanwhile.

    Args:
        n_rows: Rows of the data, N.
        batch_rows: Rows of a step on all workers together, BS, above 0.
        compute_ms: A step's computation on a worker, T_comp.
        communicate_ms: A step's communication, T_comm.

    Raises:
        ValueError: If ``batch_rows`` is below 1.
    """
    if batch_rows < 1:
        raise ValueError(f"batch_rows is {batch_rows}; it must be 1 or more")
    return n_rows / batch_rows * max(compute_ms, communicate_ms)
