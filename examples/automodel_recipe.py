"""NeMo AutoModel 0.7 with freezing: its fine-tuning, with a section ``freezing`` in the YAML file.

    PYTHONPATH=. torchrun --nproc_per_node=4 examples/automodel_recipe.py --config run.yaml

``distributed.pp_size`` is above 1, and the section has what TimelyFreeze takes (docs/library.md):

    freezing: {last_warmup_step: 60, last_monitor_step: 100, last_ramp_step: 200}
"""

from typing import Any

from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

from timelyfreeze import TimelyFreeze


class FreezingRecipe(TrainFinetuneRecipeForNextTokenPrediction):
    """Upstream's fine-tuning, whose pipeline freezes by a plan."""

    def load_checkpoint(self, restore_from: str | None = None) -> None:
        """Build the freezer, as all else is built and nothing is loaded yet, and load."""
        section = self.cfg.freezing.to_dict()
        self.freezer = TimelyFreeze(self.pp.info.schedule, optimizer=self.optimizer, **section)
        # Upstream saves an attribute with a state from all ranks together only where it says so.
        self.freezer.use_distributed_checkpointing = True
        super().load_checkpoint(restore_from)

    def _run_train_optim_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take an optimizer step, with all its batches; upstream counts from 0."""
        with self.freezer.step(self.step_scheduler.step + 1):
            return super()._run_train_optim_step(*args, **kwargs)

    def run_train_validation_loop(self) -> None:
        """Train, and print what freezing has brought."""
        with self.freezer:
            super().run_train_validation_loop()
            report = self.freezer.report()  # of all ranks together
        if self.dist_env.is_main:
            print(report, flush=True)


if __name__ == "__main__":
    recipe = FreezingRecipe(parse_args_and_load_config())
    recipe.setup()
    recipe.run_train_validation_loop()
