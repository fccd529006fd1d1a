"""What a block costs: the table of the benchmark, and counts that no machine changes."""

from collections.abc import Iterator

import pytest
import torch
from block_cost import HEAD, Block, Way, main, ways

from tests.torchtitan.helpers.gpu_kernels import as_on_a_gpu
from torchtitan.freezing.profile.profile import quiet_process
from torchtitan.settings.job_config import job_config_class
from torchtitan.upstream import fixes

RANK = 16
WAYS = {way.name: way for way in ways([RANK])}
# Kernels of a block, forward and backward, at most.
KERNELS = {"exact": 67, f"rank {RANK}": 61, "nothing": 50, "LoRA": 90}


def test_every_way_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft", reason="peft is not installed: the extra lora has it")
    options = ["--models", "8M", "--rows", "2", "--tokens", "4", "--repeats", "1"]
    main([*options, "--dtype", "float32", "--ranks", "2", "3"])
    _, _, head, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert head == f"| {' | '.join(HEAD)} |"
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:2] for row in cells] == [["8M, 2", way.name] for way in ways([2, 3])]
    for row in cells:
        assert all(float(row[place]) > 0.0 for place in (2, 3, 4, 6, 7))


@pytest.fixture
def group() -> Iterator[None]:
    fixes.install()
    with quiet_process(job_config_class()()):
        yield


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_a_block(name: str) -> None:
    if name == "LoRA":
        pytest.importorskip("peft", reason="peft is not installed: the extra lora has it")
    block = Block("8M", WAYS[name], 2, 8, "bfloat16")
    with as_on_a_gpu():
        assert 30 < block.kernels()[0] <= KERNELS[name]


@pytest.mark.usefixtures("group")
def test_operations_are_counted_of_the_measured_microbatch_alone() -> None:
    """A float32 block: each product of a weight forward and both backward, no cast anywhere."""
    block, products, casts = Block("8M", WAYS["exact"], 2, 8, "float32"), [], []

    class Noting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            products.extend([func] if func._schema.name == "aten::mm" else [])
            casts.extend([func] if func._schema.name == "aten::_to_copy" else [])
            return func(*args, **(kwargs or {}))

    with as_on_a_gpu():
        block.watch(lambda number: Noting())
    n_linear, n_microbatches = 7, 3
    assert len(products) == 3 * n_linear * n_microbatches
    assert casts == []


@pytest.mark.usefixtures("group")
def test_what_a_block_saves() -> None:
    """In float32: what each operation needs, by hand."""
    rows, tokens = 2, 8
    with as_on_a_gpu():
        saved = Block("8M", Way("exact"), rows, tokens, "float32").saved_bytes()
    width, keys, inner, heads = 256, 128, 768, 8
    norms = 2 * (width + 1 + width)  # input, its scale, and the output, which three or two read
    attention = width + 2 * keys + width + heads  # the output is what wo reads
    feed_forward = 4 * inner  # both inputs of silu and product, and what w2 reads
    assert saved == 4 * rows * tokens * (norms + attention + feed_forward)
