"""Configurations that pass, schedules and files of the user's own, and the settings they give."""

from pathlib import Path
from typing import Any

import pytest
from torchtitan.config import ConfigManager

from tests.torchtitan.helpers.job_configs import config, errors
from timelyfreeze.schedule.order import gpipe_order, one_f_one_b_order, order_to_csv
from timelyfreeze.settings.phases import PhaseSchedule
from torchtitan.freezing.checks import (
    ConfigError,
    check,
)
from torchtitan.freezing.values.freezing import freeze_settings
from torchtitan.freezing.values.pipeline import n_microbatches
from torchtitan.settings.job_config import Freezing, JobConfig, job_config_class

ROOT = Path(__file__).resolve().parents[4]
ONE_F_ONE_B = one_f_one_b_order(4, 8)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"freezing__max_freeze_ratio": [0.1, 0.2, 0.3, 1.0]},
        {"freezing__monitoring": "mixed", "freezing__discard_batches": 37},
        {"freezing__solver_time_limit_s": 150.0, "comm__train_timeout_seconds": 151},
        {"freezing__solver_time_limit_s": 1000.0, "emulation__enable": True},
        {"parallelism__pipeline_parallel_schedule": "zbvzerobubble"},
        {"parallelism__pipeline_parallel_schedule": "DualPipeV"},
        {"parallelism__pipeline_parallel_schedule": "GPipe", "validation__enable": True},
        {"parallelism__pipeline_parallel_schedule": "ZBVZeroBubble", "validation__enable": True},
        {
            "parallelism__pipeline_parallel_schedule": "Interleaved1F1B",
            "freezing__max_freeze_ratio": [0.5] * 8,
            "activation_checkpoint__mode": "full",
            "parallelism__fsdp_reshard_after_forward": "always",
        },
        {"compile__enable": True, "compile__components": ["loss"]},
        {"compile__enable": True},
        {"compile__enable": True, "freezing__method": "fixed"},
        {"compile__enable": True, "freezing__method": "timelyfreeze+autofreeze"},
        {"training__local_batch_size": 12, "parallelism__pipeline_parallel_microbatch_size": 3},
        # Without freezing its keys do not matter, and a single rank is fine.
        {"freezing__method": "none", "freezing__last_monitor_step": -5, "freezing__seed": -1},
        {"freezing__method": "none", "parallelism__pipeline_parallel_degree": 1},
    ],
    ids=str,
)
def test_a_configuration_without_errors_passes(changes: dict[str, Any]) -> None:
    check(config(**changes))


# -- schedules of the user's own -------------------------------------------------------------------


def with_csv(path: Path, text: str, **changes: Any) -> JobConfig:
    path.write_text(text)
    return config(parallelism__pipeline_parallel_schedule_csv=str(path), **changes)


def test_a_csv_schedule_that_fits_passes(tmp_path: Path) -> None:
    check(with_csv(tmp_path / "own.csv", order_to_csv(ONE_F_ONE_B)))


SPLIT_ROWS = "".join(
    f"{s}F0,{s}I0,{s}W0\n".replace("F0", f"F0,{s}F1").replace("W0", f"W0,{s}I1,{s}W1")
    for s in range(4)
)

CIRCLE = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n" + "2F0,2F1,2B0,2B1\n3F0,3F1,3B0,3B1\n"


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        (CIRCLE, {"training__local_batch_size": 2}, "the schedule would hang: each of these "
         "actions waits for the one before it: "),
        (order_to_csv(one_f_one_b_order(2, 8)), {}, "has 2 ranks; it needs "
         "parallelism.pipeline_parallel_degree (4)"),
        (order_to_csv(gpipe_order(4, 6)), {}, "has 6 microbatches; it needs training.local_batch_"
         "size / parallelism.pipeline_parallel_microbatch_size (8)"),
        ("0F0,0B0\n1F0\n", {"training__local_batch_size": 1}, "action 1I0 is missing"),
        ("0F0,0SEND_F0\n", {}, "'0SEND_F0' is not an action"),
        (
            SPLIT_ROWS,
            {"activation_checkpoint__mode": "full", "training__local_batch_size": 2},
            "activation_checkpoint.mode is 'full'",
        ),
        (
            "".join(order_to_csv(gpipe_order(4, 8)).splitlines(keepends=True)[::-1]),
            {},
            "whose stages lie on ranks [3, 2, 1, 0]; upstream places stage s of a CSV schedule on "
            "rank s modulo 4",
        ),
    ],
)  # fmt: skip
def test_a_csv_schedule_that_does_not_fit_is_refused(
    text: str, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "own.csv"
    with pytest.raises(ConfigError) as error:
        check(with_csv(path, text, **changes))
    assert expected in str(error.value)
    if "activation_checkpoint" not in expected:
        assert f"parallelism.pipeline_parallel_schedule_csv is {str(path)!r}" in str(error.value)


def test_a_csv_schedule_that_is_no_text_file_is_refused(tmp_path: Path) -> None:
    missing = config(parallelism__pipeline_parallel_schedule_csv=str(tmp_path / "none.csv"))
    assert errors(missing) == [
        f"parallelism.pipeline_parallel_schedule_csv is '{tmp_path}/none.csv', which is not a file"
    ]
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    binary = config(parallelism__pipeline_parallel_schedule_csv=str(tmp_path / "binary.csv"))
    (error,) = errors(binary)
    assert "binary.csv': 'utf-8' codec can't decode" in error


def test_validation_is_allowed_under_a_csv_schedule(tmp_path: Path) -> None:
    """Its stages are laid out in turn, so no rank holds neighbours."""
    check(with_csv(tmp_path / "own.csv", order_to_csv(ONE_F_ONE_B), validation__enable=True))


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "train_configs").glob("*.toml")), ids=str)
def test_every_configuration_we_ship_parses_and_passes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    job_config = ConfigManager(job_config_class()).parse_args([f"--job.config_file={path}"])
    assert isinstance(job_config.freezing, Freezing)
    if job_config.training.dataset == "images":
        pytest.importorskip("torchvision", reason="it needs the extra vision")
        pytest.importorskip("transformers", reason="it needs the extra vision")
    # Weights are not in the repository.
    job_config.checkpoint.initial_load_in_hf = False
    check(job_config)
    if job_config.parallelism.pipeline_parallel_degree > 1:
        assert n_microbatches(job_config) >= 1


@pytest.mark.parametrize("path", sorted((ROOT / "train_configs").glob("*.toml")), ids=str)
def test_no_configuration_we_ship_decays_its_weights_away(path: Path) -> None:
    """One without gradient loses 1 - exp(-0.25) at most; SGD's decay goes through its momentum."""
    config = ConfigManager(job_config_class()).parse_args([f"--job.config_file={path}"])
    optimizer, is_sgd = config.optimizer, config.optimizer.name == "SGD"
    pace = optimizer.lr / (1.0 - optimizer.beta1) if is_sgd else optimizer.lr
    assert pace * optimizer.weight_decay * config.training.steps <= 0.25


def test_a_file_of_upstreams_sections_alone_parses(tmp_path: Path) -> None:
    path = tmp_path / "upstream.toml"
    path.write_text('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nsteps = 7\n')
    job_config = ConfigManager(job_config_class()).parse_args([f"--job.config_file={path}"])
    check(job_config)
    assert (job_config.model.flavor, job_config.training.steps) == ("8B", 7)
    assert job_config.freezing == type(job_config.freezing)()
    assert job_config.freezing.method == "none"
    assert job_config.model.rope_scaling_factor is None


def test_command_line_values_come_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text("[freezing]\nmax_freeze_ratio = 0.5\nlast_ramp_step = 300\n")
    file, by_hand = f"--job.config_file={path}", "--freezing.max_freeze_ratio=0.25"
    freezing = ConfigManager(job_config_class()).parse_args([file, by_hand]).freezing
    assert (freezing.max_freeze_ratio, freezing.last_ramp_step) == (0.25, 300)
    listed = ConfigManager(job_config_class()).parse_args(
        [file, "--freezing.max_freeze_ratio", "0.5", "1"]
    )
    assert listed.freezing.max_freeze_ratio == [0.5, 1.0]


# -- settings --------------------------------------------------------------------------------------


def test_settings_are_those_of_the_section() -> None:
    settings = freeze_settings(
        Freezing(
            last_warmup_step=1,
            last_monitor_step=5,
            last_ramp_step=9,
            max_freeze_ratio=[0.0, 1.0, 0.5],
            gradient_rank=16,
            seed=7,
            first_stage="per_tensor",
            discard_batches=3,
            solver_time_limit_s=1.5,
            monitoring="mixed",
            solver_delay_steps=3,
            replan_every=7,
            replan_threshold=0.5,
            min_gain=0.25,
        )
    )
    assert settings.phases == PhaseSchedule(1, 5, 9, "mixed", control_every=20)
    assert (settings.solver_delay_steps, settings.replan_every) == (3, 7)
    assert (settings.replan_threshold, settings.min_gain) == (0.5, 0.25)
    assert settings.gradient_rank == 16
    assert freeze_settings(Freezing(gradient_rank=0)).solver_delay_steps is None
    assert settings.max_freeze_ratio == [0.0, 1.0, 0.5]
    assert freeze_settings(Freezing(method="apf", gradient_rank=16)).gradient_rank == 0
    assert (settings.seed, settings.first_stage) == (7, "per_tensor")
    assert (settings.discard_batches, settings.solver_time_limit_s) == (3, 1.5)
