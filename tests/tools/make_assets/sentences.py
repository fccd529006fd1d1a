"""Sentences about one fact, and the small words between them."""

import random

from tests.tools.make_assets.tables import GROUP_MARKS, ORDINALS, PLANETS


def an(noun: str) -> str:
    """``noun`` with its indefinite article."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def join(items: list[str]) -> str:
    """``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def upper_first(text: str) -> str:
    """``text`` with its first letter a capital and the rest as it is."""
    return text[0].upper() + text[1:]


def clock(minutes: int) -> str:
    """Minutes since midnight as ``HH:MM``."""
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def without_zero(rng: random.Random, low: int, high: int) -> int:
    """A number in ``[low, high)`` that does not end in 0, so that no step adds nothing."""
    return rng.choice([n for n in range(low, high) if n % 10])


def country_facts(row: list[str]) -> list[str]:
    """Three sentences about a row of ``COUNTRIES``."""
    name, capital, continent, currency, neighbour = row
    border = f"shares a border with {neighbour}" if neighbour else "is surrounded by the sea"
    return [
        f"The capital of {name} is {capital}.",
        f"{name} belongs to {continent} and {border}.",
        f"People there pay with the {currency}.",
    ]


def element_facts(row: list[str]) -> list[str]:
    """Three sentences about a row of ``ELEMENTS``."""
    name, symbol, number, state, use = row
    return [
        f"{upper_first(name)} is a chemical element with the symbol {symbol}.",
        f"Its atomic number is {number}, so each atom has {number} proton{'s' * (number != '1')}.",
        f"At room temperature it is a {state}, and one of its uses is {use}.",
    ]


def animal_facts(row: list[str]) -> list[str]:
    """Three sentences about a row of ``ANIMALS``."""
    name, group, food, home, young = row
    return [
        f"{upper_first(an(name))} is {an(group)}, and {GROUP_MARKS[group]}.",
        f"It eats {food} and lives {home}.",
        f"Its young is called {an(young)}." if young != "fry" else "Its young are called fry.",
    ]


def planet_facts(index: int) -> list[str]:
    """Three sentences about the planet at ``index`` of ``PLANETS``."""
    name, kind, remark = PLANETS[index]
    return [f"{name} is the {ORDINALS[index]} planet from the Sun.", f"It is {an(kind)}.", remark]
