"""Reads the command line and its TOML file into the configuration of a run."""

from collections.abc import Sequence

from timelyfreeze.cli.hub import fetch_model, is_hub_id
from torchtitan.freezing.checks import with_rank
from torchtitan.freezing.partition.cut import check_live_times, with_partition
from torchtitan.freezing.values.command_line import ConfigError, read_values
from torchtitan.settings import JobConfig, with_preset


def read_config(args: Sequence[str], *, weights: bool = False) -> JobConfig:
    """Return the configuration of ``args`` and of their TOML file.

    A model named by its id on the hub is fetched, if its folder is not there yet, with ``weights``
    too, should the run begin from them. A ConfigError names every wrong key.
    """
    job_config, given = read_values(args)
    try:
        model, checkpoint = job_config.model, job_config.checkpoint
        if is_hub_id(model.hf_assets_path):
            weights &= checkpoint.initial_load_in_hf and not checkpoint.initial_load_path
            model.hf_assets_path = fetch_model(model.hf_assets_path, weights=weights)
        job_config = with_rank(with_partition(with_preset(job_config, given)))
        check_live_times(job_config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return job_config
