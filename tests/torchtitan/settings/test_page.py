"""The tables of keys in docs/configuration.md are what the fields say."""

from dataclasses import fields, is_dataclass

import pytest
from torchtitan.config import Model as TitanModel
from torchtitan.config import Parallelism as TitanParallelism
from torchtitan.config.job_config import DataLoader as TitanDataLoader

from tests.tools.configuration_page import PAGE, SECTIONS, sentences, with_tables


def test_the_page_has_the_tables() -> None:
    page = PAGE.read_text()
    assert with_tables(page) == page, "python -m tests.tools.configuration_page writes it again"


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_has_a_sentence(name: str) -> None:
    theirs = TitanModel, TitanParallelism, TitanDataLoader
    upstream = {field.name for kind in theirs for field in fields(kind)}
    keys = {f.name for f in fields(SECTIONS[name]) if not is_dataclass(f.default_factory)}
    assert keys - upstream - sentences(SECTIONS[name]).keys() == set()


def test_a_section_says_more_than_what_it_inherits() -> None:
    told = sentences(SECTIONS["freezing"])
    assert "text models" in told["gradient_rank"], "the nearest class speaks"
    assert told["seed"].startswith("Seed of the random choice")
