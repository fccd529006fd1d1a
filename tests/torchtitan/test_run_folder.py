from torchtitan.freezing.config import JobConfig
from torchtitan.freezing.run_folder import describe, free_name


def test_two_runs_of_one_name_get_two_folders(tmp_path):
    assert free_name("run", tmp_path) == "run"
    (tmp_path / "run").mkdir()
    assert free_name("run", tmp_path) == "run_2"
    (tmp_path / "run_2").mkdir()
    assert free_name("run", tmp_path) == "run_3"


def test_name_says_what_ran():
    config = JobConfig()
    config.job.config_file = "somewhere/mine.toml"
    config.parallelism.pipeline_parallel_degree = 4
    config.parallelism.pipeline_parallel_schedule = "GPipe"
    config.freezing.method = "timelyfreeze"
    assert describe(config).endswith("_mine_GPipe_timelyfreeze")


def test_schedule_is_not_named_without_a_pipeline():
    assert "1F1B" not in describe(JobConfig())
