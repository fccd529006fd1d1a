"""Finds models impossible to cut into stages, and weights impossible to load."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools.logging import logger

from torchtitan.checkpoints.finished import finished_steps
from torchtitan.data.rows.kinds import is_image_dataset
from torchtitan.freezing.values.errors import FAMILIES, name_errors
from torchtitan.freezing.values.pipeline import pipeline_errors
from torchtitan.hf.adapter import tensor_errors
from torchtitan.hf.decoder import DecoderArgs, as_decoder
from torchtitan.hf.flavors import FROM_FOLDER, LLAMA, chosen_args, weights_folder
from torchtitan.hf.folder import file_numbers, misfits, stored_shapes
from torchtitan.hf.llama_config import differences, read_config, read_settings
from torchtitan.images.settings import (
    read_validation_images,
    training_place,
    validation_place,
)
from torchtitan.images.sources import (
    ImageExamples,
    ImagePlace,
    check_headers,
    check_labels,
    read_images,
)
from torchtitan.settings import IMAGE_MODELS, JobConfig, model_family, pipeline_order
from torchtitan.vision.adapter import name_in, new_tensors, places_in_folder
from torchtitan.vision.model import folder_settings
from torchtitan.vision.spec import base_spec

# What makes the same weights another model, in the words of both kinds.
_MEANING = (
    "depths", "hidden_act", "hidden_size", "hidden_sizes", "intermediate_size", "layer_norm_eps",
    "num_attention_heads", "num_hidden_layers", "patch_size", "qkv_bias",
)  # fmt: skip
# How a folder's model is unlike the one that is asked for, and what its tensors lack.
Compared = tuple[list[str], list[str]]


def image_errors(config: JobConfig) -> Iterator[str]:
    """Yield errors of pictures on this disk: all labels, and up to 10,000 headers."""
    if not is_image_dataset(config.training.dataset):
        return
    try:
        training = training_place(config)
        if not training.is_local:
            return
        images = read_images(training)
        _check(training, images, config.vision.classes or images.classes)
        if config.validation.enable:
            place = validation_place(config)
            if place.is_local and place.identity != training.identity:
                _check(place, *read_validation_images(config))
    except (FileNotFoundError, ValueError) as error:
        yield str(error)


def _check(place: ImagePlace, images: ImageExamples, classes: int) -> None:
    check_labels(images, classes)
    n = check_headers(images)
    if n < len(images):
        logger.info(
            f"{place.path}: looked at {n} of {len(images)} pictures; damage in the others "
            "is told when they are read"
        )


def reads_training_images(config: JobConfig) -> bool:
    """Return whether validation is on the very pictures of training."""
    kinds = (config.training.dataset, config.validation.dataset)
    if not all(map(is_image_dataset, kinds)) or not config.training.dataset_path:
        return False
    return validation_place(config).identity == training_place(config).identity


def _compared_images(kind: str, args: Any, folder: Path) -> Compared:
    found = replace(args, settings=folder_settings(kind, folder)).config()
    stored = stored_shapes(folder)
    expected = args.config()
    unlike = [
        f"{key} is {there}, not {here}"
        for key in _MEANING
        if (there := getattr(found, key, None)) != (here := getattr(expected, key, None))
    ]
    if unlike:
        return unlike, []
    places = places_in_folder(args)
    new = new_tensors(places, stored)
    needed = {name_in(stored, p): p.shape for name, p in places.items() if name not in new}
    return [], list(map(_NOT_HELD.format, misfits(needed, stored)))


Compare = Callable[[Path], Compared]

_NOT_HELD = "does not hold what its config.json says: {}"
_LOADS = "checkpoint.initial_load_in_hf is true"
_TRANSFORMERS = "transformers_modeling_backend"


def model_errors(config: JobConfig) -> Iterator[str]:
    """Yield errors of the model and of the folder of its weights."""
    low, high = config.model.rope_low_freq_factor, config.model.rope_high_freq_factor
    if low is not None and high is not None and low >= high:
        yield (
            f"model.rope_low_freq_factor is {low}; it must be below model.rope_high_freq_factor "
            f"({high}), or no wavelength lies in between"
        )
    name = config.model.name
    try:
        spec = base_spec(config)
    except ImportError as error:
        yield f"model.name is {name!r}, which cannot be imported ({error}); install what it needs"
        return
    except ValueError as error:
        if name in IMAGE_MODELS:
            yield f"model.flavor is {config.model.flavor!r}, and {error}"
        yield from name_errors(config)
        return
    if name == _TRANSFORMERS and int(version("transformers").partition(".")[0]) >= 5:
        yield (
            f"model.name is {name!r}, and transformers {version('transformers')} is installed; "
            "TorchTitan 0.2.2 builds this model with what transformers 4 has, so install "
            "'transformers<5'"
        )
    try:
        args = chosen_args(config, spec.model_args)
    except ValueError as error:
        yield str(error)
        return
    try:
        file_numbers(config.model.hf_assets_path)
    except ValueError as error:
        yield f"model.hf_assets_path is {config.model.hf_assets_path!r}, and {error}"
        return
    yield from _stage_errors(config, spec, args)
    compare: Compare = _compared_elsewhere
    if not model_family(config).reads_text:
        args.update_from_config(config)
        asked, size = config.vision.image_size, args.config().image_size
        if args.library.fixed_size and size != asked:
            yield (
                f"vision.image_size is {asked}; model.flavor {config.model.flavor!r} of {name!r} "
                f"has a position for each patch of {size} x {size} pixels, so it must be {size}"
            )
        compare = partial(_compared_images, name, args)
    elif name == LLAMA:
        decoder = as_decoder(args)
        yield from _family_errors(config, decoder)
        compare = partial(_compared_texts, decoder)
    yield from _loading_errors(config, compare)


def _stage_errors(config: JobConfig, spec: TrainSpec, args: Any) -> Iterator[str]:
    degree, model = config.parallelism.pipeline_parallel_degree, config.model
    if degree <= 1:
        return
    if spec.pipelining_fn is None:
        yield (
            f"model.name is {model.name!r} and parallelism.pipeline_parallel_degree is {degree}; "
            "upstream cannot cut this model into stages, so the degree must be 1"
            + (f"; {FAMILIES}" if model.name == "qwen3" else "")
        )
    elif spec.pipelining_fn is pipeline_llm and not any(pipeline_errors(config)):
        try:
            pipeline_order(config, args.n_layers)
        except ValueError as error:
            schedule = config.parallelism.pipeline_parallel_schedule
            yield (
                f"parallelism.pipeline_parallel_schedule is {schedule!r}, and the {args.n_layers} "
                f"layers of model.flavor {model.flavor!r} make other stages: {error}"
            )


def _family_errors(config: JobConfig, args: DecoderArgs) -> Iterator[str]:
    """Yield settings beyond the model's family."""
    length = config.training.seq_len
    if length > args.max_seq_len:
        yield (
            f"training.seq_len is {length}, and model.flavor {config.model.flavor!r} has "
            f"{args.max_seq_len} positions (max_position_embeddings), so it must be at most that"
        )
    if args.sliding_window is not None and length > args.sliding_window:
        yield (
            f"training.seq_len is {length}, and the model in {str(weights_folder(config))!r} has a "
            f"sliding_window of {args.sliding_window}; attention here sees all tokens before one, "
            "so the length must be at most the window"
        )
    degree = config.parallelism.tensor_parallel_degree
    if args.qk_norm and degree > 1:
        yield (
            f"parallelism.tensor_parallel_degree is {degree}, and the model norms its queries and "
            f"keys ({args.model_type}); the norms' gradients would not be summed over the ranks "
            "that share its heads, so the degree must be 1"
        )


def _loading_errors(config: JobConfig, compare: Compare) -> Iterator[str]:
    checkpoint = config.checkpoint
    if not (checkpoint.initial_load_in_hf and checkpoint.enable):
        return
    if finished_steps(Path(config.job.dump_folder) / checkpoint.folder):
        return  # the run resumes, and needs the folder no more
    folder = weights_folder(config)
    try:
        unlike, wrong = compare(folder)
    except ValueError as error:
        yield (
            f"{_LOADS}, and {error}; the folder is named by checkpoint.initial_load_path or, "
            "without it, model.hf_assets_path"
        )
        return
    if unlike:
        yield (
            f"{_LOADS}, and the model in {str(folder)!r} is not that of model.flavor "
            f"{config.model.flavor!r}: {'; '.join(unlike)}; choose the flavor that matches, or "
            f'model.flavor = "{FROM_FOLDER}" without model.vocab_size and model.rope_* for what '
            "the folder says"
        )
    for misfit in wrong:
        yield f"{_LOADS}, and {str(folder)!r} {misfit}"


def _compared_texts(expected: DecoderArgs, folder: Path) -> Compared:
    found = read_config(folder)
    wrong = map(_NOT_HELD.format, tensor_errors(found, stored_shapes(folder)))
    return differences(expected, found), list(wrong)


def _compared_elsewhere(folder: Path) -> Compared:
    """Refuse tied embeddings of other models: stages cannot share a tensor."""
    tied = False
    with suppress(ValueError):  # upstream's loader says what is wrong with the folder
        tied = folder.is_dir() and bool(read_settings(folder).get("tie_word_embeddings"))
    why = (
        f"has tie_word_embeddings, which this layer can load for model.name {LLAMA!r} only: the "
        "file has no output layer of its own; use a folder saved with tie_word_embeddings = false"
    )
    return [], [why] if tied else []
