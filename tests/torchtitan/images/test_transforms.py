"""What becomes of a picture, against pixels moved by hand; and what its draws depend on."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tools.make_assets.pictures import pixels
from torchtitan.images.transforms import PADDED_CROP, RESIZED_CROP, ImageTransform

pytest.importorskip("torchvision", reason="torchvision is not installed: the extra vision has it")
from PIL import Image

NO_COLORS = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
PICTURE = Image.fromarray(pixels(1, 2))


def tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.copy()).permute(2, 0, 1).float() / 255


def test_colors_are_taken_off_and_divided() -> None:
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    made = ImageTransform(32, mean, std)(PICTURE)
    expected = (tensor(pixels(1, 2)) - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[
        :, None, None
    ]
    assert type(made) is Tensor
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, expected)


@pytest.mark.slow
def test_a_padded_crop_is_the_picture_moved_and_perhaps_flipped() -> None:
    transform = ImageTransform(32, *NO_COLORS, PADDED_CROP, is_training=True)
    padded = np.pad(pixels(1, 2), ((4, 4), (4, 4), (0, 0)))
    moved = {
        (down, right, flip): tensor(padded[down : down + 32, right : right + 32][:, :: -flip or 1])
        for down, right, flip in product(range(9), range(9), (0, 1))
    }
    found = []
    for number in range(120):
        made = transform(PICTURE, 7, 0, number)
        near = [at for at, expected in moved.items() if torch.allclose(made, expected, atol=1e-6)]
        (place,) = near
        found.append(place)
    down, right, flips = zip(*found, strict=True)
    assert set(down) == set(right) == set(range(9))
    assert 40 < sum(flips) < 80


def test_a_resized_crop_is_a_part_of_the_picture_made_larger() -> None:
    """Of a picture whose red grows to the right and green downwards, what is seen tells the part.

    Parts have 8% to all of the area; sides from 3/4 to 4/3 of each other.
    """
    ramp = np.zeros((60, 60, 3), dtype=np.uint8)
    ramp[..., 0] = np.arange(60)[None, :] * 4
    ramp[..., 1] = np.arange(60)[:, None] * 4
    transform = ImageTransform(16, *NO_COLORS, RESIZED_CROP, is_training=True)
    areas, flips = [], 0
    for number in range(200):
        made = transform(Image.fromarray(ramp), number) * 255 / 4
        right, down = made[0, 8, -1] - made[0, 8, 0], made[1, -1, 8] - made[1, 0, 8]
        width, height = abs(float(right)) * 16 / 15, float(down) * 16 / 15
        flips += bool(right < 0)
        areas.append(width * height / 3600)
        assert 0.65 < width / height < 1.55
    assert 0.05 < min(areas) < 0.15
    assert 0.8 < max(areas) < 1.1
    assert 70 < flips < 130


def test_validation_looks_at_the_middle() -> None:
    array = np.zeros((40, 64, 3), dtype=np.uint8)
    array[:, 12:52] = 255  # the middle square
    inside = ImageTransform(40, *NO_COLORS, PADDED_CROP)(Image.fromarray(array))
    assert inside.shape == (3, 40, 40)
    assert torch.equal(inside, torch.ones(3, 40, 40))
    # 35 of 40 pixels of the shorter side, as training's parts look larger than they are.
    marked = np.zeros((40, 40, 3), dtype=np.uint8)
    marked[3:37, 3:37] = 255
    closer = ImageTransform(35, *NO_COLORS, RESIZED_CROP)(Image.fromarray(marked))
    assert closer.shape == (3, 35, 35)
    assert closer[:, 1:-1, 1:-1].min() == 1
    assert closer[:, 0].max() < 1


@pytest.mark.parametrize("augmentation", [RESIZED_CROP, PADDED_CROP])
def test_draws_depend_on_the_key_alone_and_leave_no_trace(augmentation: str) -> None:
    transform = ImageTransform(32, *NO_COLORS, augmentation, is_training=True)
    first = transform(PICTURE, 1, 2, 3)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert torch.equal(transform(PICTURE, 1, 2, 3), first)
    assert torch.equal(torch.get_rng_state(), state)
    others = [transform(PICTURE, *key) for key in [(0, 2, 3), (1, 0, 3), (1, 2, 0), (1, 3, 2)]]
    assert not any(torch.equal(other, first) for other in others)


def test_without_augmentation_training_sees_what_validation_sees() -> None:
    training = ImageTransform(24, *NO_COLORS, is_training=True)
    assert torch.equal(training(PICTURE, 1), ImageTransform(24, *NO_COLORS)(PICTURE))
