"""Sizes of image classifiers, counted by hand."""

import pytest
import torch

from tests.torchtitan.helpers.image_models import CLASSES, SIZE, args_of
from torchtitan.settings import JobConfig
from torchtitan.vision.model import FLAVORS, VisionModel, described

pytest.importorskip("transformers")


def counted(kind: str) -> tuple[int, int]:
    args = args_of(kind)
    with torch.device("meta"):
        return args.get_nparams_and_flops(VisionModel(args), seq_len=2048)


def test_flops_of_a_vit_are_those_of_its_products() -> None:
    width, inner, tokens = 32, 64, (SIZE // 4) ** 2 + 1
    block = tokens * (4 * width * width + 2 * width * inner) + 2 * tokens * tokens * width
    products = (tokens - 1) * 3 * 4 * 4 * width + 8 * block + width * CLASSES
    assert counted("vit")[1] == 3 * 2 * products


def test_flops_of_a_convnext_are_those_of_its_products() -> None:
    pixels = [(SIZE // 2) ** 2, (SIZE // 4) ** 2, (SIZE // 8) ** 2]
    widths, depths = [8, 12, 16], [2, 4, 2]
    products = pixels[0] * 3 * 2 * 2 * widths[0] + widths[-1] * CLASSES
    for n, width, depth in zip(pixels, widths, depths, strict=True):
        products += depth * n * (49 * width + 8 * width * width)
    for n, before, after in zip(pixels[1:], widths, widths[1:], strict=False):
        products += n * 4 * before * after
    assert counted("convnextv2")[1] == 3 * 2 * products


@pytest.mark.slow
def test_the_papers_models_have_their_published_sizes() -> None:
    """Of the publications: 306 million parameters and 4.4 GFLOPs; 198 million and 34.4 GFLOPs."""
    for kind, flavor, millions, giga in (
        ("vit", "B-16", 86.6, 17.6),
        ("vit", "L-32", 306, 15.4),
        ("convnextv2", "L", 198, 34.4),
    ):
        args = described(kind, FLAVORS[kind][flavor])
        with torch.device("meta"):
            parameters, flops = args.get_nparams_and_flops(VisionModel(args), seq_len=1)
        assert parameters / 1e6 == pytest.approx(millions, rel=0.01)
        assert flops / 6e9 == pytest.approx(giga, rel=0.01)


def test_a_run_says_how_many_classes_and_pixels_there_are() -> None:
    args, config = args_of("vit"), JobConfig()
    config.vision.image_size, config.vision.classes = 48, 7
    args.update_from_config(config)
    assert (args.image_size, args.classes) == (48, 7)
    config.vision.classes = 0
    args.update_from_config(config)
    assert args.classes == 7
    assert args.config().num_labels == 7


def test_names_of_classes_stay_if_they_are_as_many() -> None:
    names = {str(i): f"class {i}" for i in range(3)}
    args = described("vit", {**FLAVORS["vit"]["4M"], "id2label": names})
    assert args.config().id2label == {i: f"class {i}" for i in range(3)}
    args.classes = 4
    assert args.config().num_labels == 4


def test_what_the_library_refuses_is_told() -> None:
    with pytest.raises(ValueError, match=r"ViTConfig: .*hidden_size"):
        described("vit", {**FLAVORS["vit"]["4M"], "hidden_size": "wide"})
    with pytest.raises(ValueError, match=r"image_size is \[32, 16\]"):
        described("vit", {**FLAVORS["vit"]["4M"], "image_size": [32, 16]})


def test_a_number_of_classes_that_is_null_is_not_there() -> None:
    assert described("vit", {"num_labels": None, "id2label": None}).classes == 1000
