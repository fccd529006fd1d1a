"""What ``method`` can say."""

from dataclasses import dataclass

import pytest

from timelyfreeze.policies import policy
from timelyfreeze.policies.methods import Method, known_methods, parse_method
from timelyfreeze.policies.policy import register_policy, registered_policies


def test_names_by_hand() -> None:
    assert parse_method("none") is None
    assert parse_method("lora") is None
    assert parse_method("timelyfreeze") == Method(plans=True, policy=None)
    assert parse_method("apf") == Method(plans=False, policy="apf")
    assert parse_method("timelyfreeze+apf") == Method(plans=True, policy="apf")
    assert parse_method("timelyfreeze+autofreeze") == Method(plans=True, policy="autofreeze")


def test_every_policy_comes_alone_and_under_a_plan() -> None:
    wanted: dict[str, Method | None] = {"none": None, "timelyfreeze": Method(True, None)}
    wanted["lora"] = None
    for name in registered_policies():
        wanted[name] = Method(False, name)
        wanted[f"timelyfreeze+{name}"] = Method(True, name)
    known = known_methods()
    assert sorted(known) == sorted(wanted)
    assert {name: parse_method(name) for name in known} == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "afp",
        "APF",
        " apf",
        "apf+",
        "+apf",
        "timelyfreeze+",
        "timelyfreeze+none",
        "timelyfreeze+timelyfreeze",
        "timelyfreeze + apf",
        "timelyfreeze+apf+autofreeze",
        "apf+timelyfreeze",
        "apf+autofreeze",
        "none+apf",
    ],
)
def test_an_unknown_name_is_told_with_all_that_are_known(text: str) -> None:
    with pytest.raises(ValueError, match=r"^method is .*; known: ") as error:
        parse_method(text)
    told, listed = str(error.value).split("; known: ")
    assert told.split(", nearest to ")[0] == f"method is {text!r}"
    assert {"none", "timelyfreeze", "apf", "timelyfreeze+apf"} < set(listed.split(", "))
    assert listed.split(", ") == known_methods()


def test_the_nearest_method_is_named() -> None:
    with pytest.raises(ValueError, match=r"^method is 'timelyfreze', nearest to 'timelyfreeze'; "):
        parse_method("timelyfreze")


def test_a_policy_registered_elsewhere_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Mine:
        """Registered for this test only."""

    before = known_methods()
    with monkeypatch.context() as patch:
        patch.setattr(policy, "_POLICIES", registered_policies())
        register_policy("mine")(Mine)
        assert set(known_methods()) - set(before) == {"mine", "timelyfreeze+mine"}
        assert parse_method("mine") == Method(plans=False, policy="mine")
        assert parse_method("timelyfreeze+mine") == Method(plans=True, policy="mine")
    assert known_methods() == before
