"""A pipeline stage whose linear layers compute backward products from a sample of the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from timelyfreeze.planning import VarianceCurve
from timelyfreeze.runtime.entering.stage import EnteringStage
from timelyfreeze.runtime.sampling.linear import TokenSample, TokenSampler
from timelyfreeze.runtime.sampling.variance import VarianceMeter


class SamplingStage(EnteringStage):
    """Pipeline stage that samples what :meth:`sample` says, if it was prepared for it."""

    _sampler: TokenSampler | None = None

    def _prepare_samples(self, *, wanted: bool) -> None:
        """Find the linear layers, parallelisms applied."""
        self._sampler = TokenSampler(self.submod) if wanted else None
        self._samples: Mapping[int, TokenSample] = {}
        self._meter: VarianceMeter | None = None

    @property
    def n_sampled_layers(self) -> int:
        """Number of layers whose products can be computed from a sample of the tokens."""
        return 0 if self._sampler is None else self._sampler.n_layers

    def sample(self, samples: Mapping[int, TokenSample], *, measures: bool = False) -> None:
        """Set how the coming batch's backward products are sampled.

        Args:
            samples: By microbatch; one that is missing is computed exactly.
            measures: Whether to measure what samples would add to exact ones.
        """
        self._samples = samples
        self._meter = VarianceMeter() if measures else None

    def take_variance(self) -> VarianceCurve | None:
        """Return what the last batch measured, once; None where nothing was."""
        meter, self._meter = self._meter, None
        return None if meter is None else meter.curve()

    @property
    def _samples_tokens(self) -> bool:
        return self._sampler is not None

    def _sampled_ratio(self, microbatch: int) -> float:
        """Return which fraction of a microbatch's tokens is left out."""
        sample = self._samples.get(microbatch)
        return 0.0 if sample is None else sample.ratio

    def _forget_samples(self) -> None:
        """End a batch."""
        self._samples = {}
        if self._sampler is not None:
            self._sampler.end_batch()

    def _sampled(
        self, microbatch: int, backward_type: str = "full"
    ) -> AbstractContextManager[None]:
        """Return what an action runs in, so that linear layers know what to sample."""
        if self._sampler is None or not self._active:
            return nullcontext()
        sample = self._samples.get(microbatch)
        meter = self._meter if sample is None else None
        if sample is None and meter is None:
            return nullcontext()
        return self._sampler.sampling(
            sample,
            inputs=backward_type != "weight",
            weights=backward_type != "input",
            meter=meter,
        )
