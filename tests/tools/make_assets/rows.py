"""Makers of instruction rows: each takes a generator and returns one row of correct English."""

import random
from collections.abc import Callable

from tests.tools.make_assets.advice import HOWTOS, REASONS
from tests.tools.make_assets.sentences import (
    an,
    animal_facts,
    clock,
    country_facts,
    element_facts,
    join,
    planet_facts,
    upper_first,
    without_zero,
)
from tests.tools.make_assets.tables import (
    ANIMALS,
    CATEGORIES,
    COUNTRIES,
    ELEMENTS,
    MARKET,
    NAMES,
    PLANETS,
    PREDICATES,
    SUBJECTS,
    TIMES,
    UNITS,
)

Row = tuple[str, str, str]  # instruction, input, output
Rng = random.Random


def make_arithmetic(rng: Rng) -> Row:
    """A sum, difference, product or quotient with its steps."""
    kind = rng.choice(["add", "subtract", "multiply", "divide"])
    ask = rng.choice(["Show the steps.", "Explain how you get there.", "Work it out step by step."])
    if kind == "add":
        a, b = rng.randrange(100, 900), without_zero(rng, 101, 900)
        hundreds, rest = b // 100 * 100, b % 100
        body = f"Split {b} into {hundreds} and {rest}. First, {a} + {hundreds} = {a + hundreds}. "
        body += f"Then, {a + hundreds} + {rest} = {a + b}."
        return f"What is {a} + {b}? {ask}", "", f"{body} So {a} + {b} = {a + b}."
    if kind == "subtract":
        a, b = rng.randrange(500, 999), without_zero(rng, 101, 499)
        hundreds, rest = b // 100 * 100, b % 100
        body = f"Take away {hundreds} first: {a} - {hundreds} = {a - hundreds}. Then take away "
        body += f"{rest}: {a - hundreds} - {rest} = {a - b}. To check, {a - b} + {b} = {a}."
        return f"What is {a} - {b}? {ask}", "", f"{body} So {a} - {b} = {a - b}."
    if kind == "multiply":
        a, b = without_zero(rng, 12, 99), rng.randrange(3, 10)
        tens, ones = a // 10 * 10, a % 10
        body = f"Split {a} into {tens} and {ones}. {tens} x {b} = {tens * b} and {ones} x {b} = "
        body += f"{ones * b}. Adding both parts gives {tens * b} + {ones * b} = {a * b}."
        return f"What is {a} x {b}? {ask}", "", f"{body} So {a} x {b} = {a * b}."
    b, q = rng.randrange(3, 10), without_zero(rng, 11, 60)
    a, tens, ones = b * q, q // 10 * 10, q % 10
    body = f"{b} goes into {a} at least {tens} times, because {b} x {tens} = {b * tens}. That "
    body += f"leaves {a} - {b * tens} = {a - b * tens}, and {a - b * tens} is {b} x {ones}. "
    return f"What is {a} / {b}? {ask}", "", f"{body}So {a} / {b} = {tens} + {ones} = {q}."


def make_word_problem(rng: Rng) -> Row:
    """A story about money, distance or sharing that asks for a number."""
    name = rng.choice(NAMES)
    kind = rng.randrange(3)
    if kind == 0:
        n, price = rng.randrange(3, 12), rng.randrange(2, 9)
        thing = rng.choice(["notebooks", "cups", "plants", "tickets", "pencil cases"])
        paid = (n * price // 10 + 1) * 10
        ask = f"{name} buys {n} {thing} for {price} coins each and pays with {paid} coins. "
        body = f"The {thing} cost {n} x {price} = {n * price} coins together. {name} pays {paid} "
        body += f"coins, so the change is {paid} - {n * price} = {paid - n * price} coin"
        return (
            f"{ask}How much change does {name} get?",
            "",
            body + "s" * (paid - n * price != 1) + ".",
        )
    if kind == 1:
        speed, hours = rng.choice([4, 5, 12, 15, 18, 60, 80, 90]), rng.randrange(2, 7)
        how = "walks" if speed < 6 else "cycles" if speed < 20 else "drives"
        ask = f"{name} {how} at {speed} kilometres per hour for {hours} hours. "
        ask += f"How far does {name} get?"
        body = (
            f"Distance is speed times time. In one hour {name} covers {speed} kilometres, and in "
        )
        body += f"{hours} hours {speed} x {hours} = {speed * hours} kilometres. "
        return ask, "", f"{body}So {name} gets {speed * hours} kilometres far."
    people, each, rest = rng.randrange(3, 9), rng.randrange(4, 15), rng.randrange(1, 3)
    total = people * each + rest
    thing = rng.choice(["sweets", "marbles", "cards", "stickers", "walnuts"])
    ask = (
        f"{name} shares {total} {thing} equally among {people} children. How many does each child "
    )
    body = f"Divide {total} by {people}. {people} x {each} = {people * each}, which is the largest "
    body += f"multiple of {people} that is not above {total}. Each child gets {each} {thing}, and "
    body += f"{total} - {people * each} = {rest} {'is' if rest == 1 else 'are'} left over."
    return f"{ask}get, and how many are left over?", "", body


def make_conversion(rng: Rng) -> Row:
    """A quantity in another unit."""
    big, small, factor = rng.choice(UNITS)
    n = rng.randrange(2, 60)
    one = {"feet": "foot", "inches": "inch"}.get(big, big.rstrip("s"))
    if rng.random() < 0.6:
        ask = rng.choice([f"Convert {n} {big} to {small}.", f"How many {small} are {n} {big}?"])
        body = (
            f"One {one} has {factor} {small}. To go from {big} to {small}, multiply by {factor}: "
        )
        return (
            ask,
            "",
            f"{body}{n} x {factor} = {n * factor}. So {n} {big} are {n * factor} {small}. "
            f"To check, divide again: {n * factor} / {factor} = {n}.",
        )
    ask = rng.choice(
        [f"Convert {n * factor} {small} to {big}.", f"How many {big} are {n * factor} {small}?"]
    )
    body = f"One {one} has {factor} {small}. To go from {small} to {big}, divide by {factor}: "
    body += f"{n * factor} / {factor} = {n}. So {n * factor} {small} are {n} {big}. "
    return ask, "", f"{body}To check, multiply again: {n} x {factor} = {n * factor}."


def make_sorting(rng: Rng) -> Row:
    """Words in alphabetical order or by length."""
    pool = sorted(word for words in CATEGORIES.values() for word in words)
    words = rng.sample(pool, rng.randrange(4, 8))
    if rng.random() < 0.6:
        back = rng.random() < 0.4
        done = sorted(words, reverse=back)
        ask = f"Sort these words {'from Z to A' if back else 'in alphabetical order'}."
        why = "last" if back else "first"
        body = f"{', '.join(done)}. The word '{done[0]}' comes first in this order, because among "
        body += f"these words it would stand {why} in a dictionary. "
        body += f"The word '{done[-1]}' ends the list."
        return ask, ", ".join(words), upper_first(body)
    done = sorted(words, key=lambda word: (len(word), word))
    body = (
        f"{', '.join(f'{word} ({len(word)})' for word in done)}. The number after each word counts "
    )
    body += "its letters. Words of equal length stand in alphabetical order."
    return "Sort these words by length, shortest first.", ", ".join(words), upper_first(body)


def make_table(rng: Rng) -> Row:
    """A small table and its summary."""
    title = rng.choice(sorted(MARKET))
    names = [
        name.replace("_", " ")
        for name in rng.sample(MARKET[title], rng.randrange(4, len(MARKET[title]) + 1))
    ]
    counts = rng.sample(range(5, 90), len(names))
    table = "\n".join(
        [title] + [f"{name}: {count}" for name, count in zip(names, counts, strict=True)]
    )
    high, low, total = max(counts), min(counts), sum(counts)
    ask = rng.choice(["Summarise this table.", "Describe the table in a few sentences."])
    body = f"The table lists {title}. The {len(names)} entries add up to {total}. The largest is "
    body += (
        f"{names[counts.index(high)]} with {high}, and the smallest is {names[counts.index(low)]} "
    )
    body += f"with {low}, a difference of {high - low}."
    order = sorted(names, key=lambda name: -counts[names.index(name)])
    body += f" From the largest to the smallest the order is {join(order)}."
    if total % len(names) == 0:
        body += f" On average an entry has {total // len(names)}."
    return ask, table, body


def make_tense(rng: Rng) -> Row:
    """A sentence in another tense, with the change explained."""
    subject, (base, third, past, rest) = rng.choice(SUBJECTS), rng.choice(PREDICATES)
    now, before, later = rng.choice(TIMES)
    forms = {
        "present": f"{subject} {third} {rest} {now}.",
        "past": f"{subject} {past} {rest} {before}.",
        "future": f"{subject} will {base} {rest} {later}.",
    }
    verb = {"present": third, "past": past, "future": f"will {base}"}
    time = {"present": now, "past": before, "future": later}
    old, new = rng.sample(sorted(forms), 2)
    ask = rng.choice(
        ["Rewrite the sentence in the {} tense.", "Put this sentence into the {} tense."]
    )
    body = f"{forms[new]}\n\nThe verb '{verb[old]}' becomes '{verb[new]}', and the time "
    body += f"'{time[old]}' is changed to '{time[new]}' so that it fits the {new} tense."
    return ask.format(new), forms[old], body


def make_reasons(rng: Rng) -> Row:
    """A list of three to five items with a reason each."""
    topic = rng.choice(sorted(REASONS))
    picked = rng.sample(REASONS[topic], rng.randrange(3, min(len(REASONS[topic]), 5) + 1))
    count = ["three", "four", "five"][len(picked) - 3]
    ask = rng.choice(
        [
            "List {} {}.",
            "Name {} {} and say why.",
            "Give me {} {}, with a short explanation.",
            "What are {} {}?",
            "Write down {} {} and explain each.",
        ]
    )
    if topic.startswith("signs") or rng.random() < 0.7:
        body = "\n".join(f"{i}. {item}: {why}." for i, (item, why) in enumerate(picked, 1))
    else:
        body = " ".join(f"{item}, because {why}." for item, why in picked)
    return ask.format(count, topic), "", body


def make_howto(rng: Rng) -> Row:
    """A task: its steps, as a list, as prose, after a given step, or put in order."""
    task = rng.choice(sorted(HOWTOS))
    steps = HOWTOS[task]
    kind = rng.randrange(4)
    if kind == 0:
        ask = rng.choice(
            [f"How do I {task}?", f"Explain how to {task}.", f"Tell me how to {task}."]
        )
        return ask, "", "\n".join(f"{i}. {step}." for i, step in enumerate(steps, 1))
    if kind == 1:
        ask = f"Describe in one paragraph how to {task}."
        return rng.choice([ask, f"How can one {task}? Answer in prose."]), "", howto_prose(task)
    if kind == 2:
        n = rng.randrange(len(steps) - 1)
        body = f"When you {task}, the next step is this: {steps[n + 1]}."
        left = len(steps) - n - 2
        body += (
            f" After that, {left} more step{'s' * (left != 1)} remain{'s' * (left == 1)}."
            if left
            else (" With that you are done.")
        )
        return f"I want to {task}. What comes after this step?", f"{steps[n]}.", body
    mixed = rng.sample(steps, len(steps))
    return (
        f"Put these steps into the right order to {task}.",
        "\n".join(f"- {step}" for step in mixed),
        "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1)),
    )


def howto_prose(task: str) -> str:
    """The steps of ``task`` as one paragraph."""
    lead = ["First", "Then", "Next", "After that", "Now"]
    steps = [step[0].lower() + step[1:] for step in HOWTOS[task]]
    body = [
        f"{word}, {step}." for word, step in zip(lead[: len(steps) - 1], steps[:-1], strict=True)
    ]
    return " ".join([*body, f"Finally, {steps[-1]}."])


def make_country(rng: Rng) -> Row:
    """A question about a country."""
    row = rng.choice(COUNTRIES)
    name, capital, continent, currency, _ = row
    facts = country_facts(row)
    kind = rng.randrange(4)
    if kind == 0:
        ask = rng.choice(
            [f"What is the capital of {name}?", f"Which city is the capital of {name}?"]
        )
        return ask, "", " ".join(facts)
    if kind == 1:
        return (
            rng.choice([f"Tell me about {name}.", f"Write three facts about {name}."]),
            "",
            " ".join(facts),
        )
    if kind == 2:
        body = f"In {name} you pay with the {currency}. {facts[1]} {facts[0]}"
        return f"Which currency do I need for a trip to {name}?", "", body
    others = [c for c in COUNTRIES if c[2] == continent and c is not row]
    more = rng.sample(others, min(2, len(others)))
    body = f"{name} is part of {continent}. " + (
        f"Other countries of the same continent are {join([c[0] for c in more])}. "
        if len(more) > 1
        else f"Another country there is {more[0][0]}. "
    )
    return (
        f"On which continent is {name}?",
        "",
        body + f"Its capital is {capital}, and its currency is the {currency}.",
    )


def make_science(rng: Rng) -> Row:
    """A question about planets, elements or animals."""
    kind = rng.randrange(5)
    if kind == 0:
        index = rng.randrange(len(PLANETS))
        name = PLANETS[index][0]
        ask = rng.choice(
            [f"Describe the planet {name}.", f"What do you know about {name}, the planet?"]
        )
        return ask, "", " ".join(planet_facts(index))
    if kind == 1:
        i, j = sorted(rng.sample(range(len(PLANETS)), 2))
        near, far = PLANETS[i], PLANETS[j]
        body = f"{near[0]} is closer. Counted from the Sun it is number {i + 1}, while {far[0]} is "
        body += f"number {j + 1}. {near[0]} is {an(near[1])} and {far[0]} is {an(far[1])}. "
        body += f"About {near[0]} one can add: {near[2]}"
        first, second = rng.sample([near[0], far[0]], 2)
        return f"Which planet is closer to the Sun, {first} or {second}?", "", body
    if kind == 2:
        row = rng.choice(ELEMENTS)
        asks = [f"What is {row[0]}?", f"Explain briefly what {row[0]} is and what it is used for."]
        return rng.choice(asks), "", " ".join(element_facts(row))
    if kind == 3:
        a, b = rng.sample(ELEMENTS, 2)
        body = f"{upper_first(a[0])} ({a[1]}) has the atomic number {a[2]} and {b[0]} ({b[1]}) "
        body += f"has {b[2]}. "
        body += f"At room temperature {a[0]} is a {a[3]} and {b[0]} is a {b[3]}. "
        body += f"{upper_first(a[0])} is used for {a[4]}, {b[0]} for {b[4]}."
        return f"Compare the elements {a[0]} and {b[0]}.", "", body
    row = rng.choice(ANIMALS)
    asks = [f"Tell me about the {row[0]}.", f"What does {an(row[0])} eat, and where does it live?"]
    return rng.choice(asks), "", " ".join(animal_facts(row))


def make_grouping(rng: Rng) -> Row:
    """Words sorted into two groups."""
    kinds = rng.sample(sorted(CATEGORIES), 2)
    members = {kind: rng.sample(CATEGORIES[kind], rng.randrange(2, 5)) for kind in kinds}
    words = [word for kind in kinds for word in members[kind]]
    rng.shuffle(words)
    body = ". ".join(
        f"{upper_first(kind)}: {', '.join(word for word in words if word in members[kind])}"
        for kind in kinds
    )
    sizes = [len(members[kind]) for kind in kinds]
    body += f". That makes {sizes[0]} in the first group and {sizes[1]} in the second, "
    body += f"{sum(sizes)} words in all."
    return f"Sort the words into two groups: {kinds[0]} and {kinds[1]}.", ", ".join(words), body


def make_letters(rng: Rng) -> Row:
    """A word spelled, with its vowels counted."""
    word = rng.choice(sorted(word for words in CATEGORIES.values() for word in words))
    vowels = [letter for letter in word if letter in "aeiou"]
    body = f"The word '{word}' is spelled {'-'.join(word.upper())}. It has {len(word)} letters. "
    body += f"{len(vowels)} of them {'is a vowel' if len(vowels) == 1 else 'are vowels'} "
    body += f"({', '.join(vowels)}), and the other {len(word) - len(vowels)} are consonants."
    ask = rng.choice(
        ["How many vowels does this word have?", "Spell the word and count its vowels."]
    )
    return ask, word, body


def make_clock(rng: Rng) -> Row:
    """The end of an event from its start and its length."""
    start, length = rng.randrange(7 * 12, 18 * 12) * 5, rng.randrange(13, 45) * 5
    what = rng.choice(
        ["A concert", "A film", "A train ride", "A lesson", "A meeting", "A football game"]
    )
    hours, rest = length // 60, length % 60
    span = f"{hours} hour{'s' * (hours != 1)}" + (f" and {rest} minutes" if rest else "")
    body = f"{length} minutes are {span}. Adding {hours} hour{'s' * (hours != 1)} to "
    body += f"{clock(start)} gives {clock(start + hours * 60)}. "
    if rest:
        body += f"Adding the other {rest} minutes gives {clock(start + length)}. "
    ask = f"{what} begins at {clock(start)} and lasts {length} minutes. When does it end?"
    return ask, "", f"{body}{what} that begins at {clock(start)} ends at {clock(start + length)}."


MAKERS: list[tuple[Callable[[Rng], Row], int]] = [
    (make_arithmetic, 130),
    (make_word_problem, 110),
    (make_conversion, 90),
    (make_sorting, 90),
    (make_table, 110),
    (make_tense, 100),
    (make_reasons, 120),
    (make_howto, 110),
    (make_country, 120),
    (make_science, 120),
    (make_grouping, 40),
    (make_letters, 30),
    (make_clock, 40),
]
