"""Mutants are faults of what is there now, and there is one for each claim of the documentation."""

import re

import pytest

from tests.tools.mutants import ROOT, Mutant, chosen, first_failure, read_mutants

MUTANTS = read_mutants()


def claims() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("\n## What is compared with what\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| (.*?) \|", table, re.M)[1:]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_what_is_there(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert mutant.put_into(text) != text
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).exists(), test
        assert not name or f"def {name}(" in (ROOT / path).read_text(), test
    assert len([claim for claim in claims() if claim.startswith(mutant.claim)]) == 1


def test_names_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("claim", claims())
def test_every_claim_has_a_mutant(claim: str) -> None:
    assert any(claim.startswith(mutant.claim) for mutant in MUTANTS)


def test_words_choose_by_name_and_file() -> None:
    one = MUTANTS[0]
    assert chosen(MUTANTS, []) == MUTANTS
    assert one in chosen(MUTANTS, [one.name])
    assert one in chosen(MUTANTS, ["nothing has this name", one.file])
    assert chosen(MUTANTS, ["nothing has this name"]) == []


def test_an_old_text_that_is_gone_or_twice_there_is_refused() -> None:
    mutant = MUTANTS[0]._replace(old="a", new="b")
    assert mutant.put_into("cac") == "cbc"
    for text in ("ccc", "aca"):
        with pytest.raises(ValueError, match="times there"):
            mutant.put_into(text)


@pytest.mark.parametrize(
    ("said", "test"),
    [
        (
            "..F\nFAILED tests/a.py::test_b[c - d] - assert 1 == 2\n1 failed",
            "tests/a.py::test_b[c - d]",
        ),
        ("ERROR tests/a.py::test_b\n", "tests/a.py::test_b"),
        ("2 passed", None),
    ],
)
def test_the_first_failure_is_read(said: str, test: str | None) -> None:
    assert first_failure(said) == test
