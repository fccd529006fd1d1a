"""Random pictures instead of a data set, and image classifiers of a few thousand parameters."""

import torch
from imported import tiny_images  # noqa: F401

import torchtitan.vision.spec as vision_spec
from tests.torchtitan.helpers.image_models import CLASSES, some_pictures


class Pictures:
    """A loader that comes back to the same rows; it goes on where it stopped."""

    def __init__(self, rank, batch_size, mixes):
        self.dp_rank = rank
        self._batch_size, self._mixes, self._step = batch_size, mixes, 0

    def __iter__(self):
        while True:
            seed = 1000 * self.dp_rank + self._step % 4
            self._step += 1
            pictures = some_pictures(self._batch_size, seed)
            labels = (7 * torch.arange(self._batch_size) + seed) % CLASSES
            if self._mixes:
                shares = torch.nn.functional.one_hot(labels, CLASSES).float()
                labels = 0.7 * shares + 0.3 * shares.flip(0)
            yield {"input": pictures}, labels

    def state_dict(self):
        return {"step": self._step}

    def load_state_dict(self, state):
        self._step = state["step"]


def build(dp_world_size, dp_rank, job_config, **place):
    return Pictures(dp_rank, job_config.training.local_batch_size, job_config.vision.mixup > 0.0)


vision_spec.build_image_dataloader = build
