#!/usr/bin/env python3
"""Write the small data sets and the tokenizer that the tests and the debug runs use.

Every row is composed by program (``asset_rows.py``) from our own words and facts
(``asset_tables.py``, ``asset_advice.py``) and a fixed seed. Nothing is copied from an existing data
set. Written under ``tests/assets``:

- ``tiny_instruct/train.jsonl``: ``instruction``, ``input``, ``output`` (data set ``alpaca``)
- ``tiny_chat/train.jsonl``: ``conversations`` (data set ``sharegpt``)
- ``c4_test/data.jsonl``: ``text`` (upstream's default data set ``c4_test``)
- ``tiny_pictures/``: ``image``, ``label`` of stripes (data set ``images``)
- ``tokenizer/``: a byte-level BPE of at most 2048 tokens, the vocabulary of upstream's debug model

Usage:
    python -m tests.tools.make_assets            # write the files
    python -m tests.tools.make_assets --check    # exit 1 if a file would change
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from pyarrow.parquet import read_table
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.tools.make_assets.advice import HOWTOS, REASONS
from tests.tools.make_assets.pictures import write_tiny
from tests.tools.make_assets.rows import MAKERS, Rng, Row, howto_prose
from tests.tools.make_assets.sentences import (
    animal_facts,
    country_facts,
    element_facts,
    planet_facts,
)
from tests.tools.make_assets.tables import (
    ANIMALS,
    COUNTRIES,
    ELEMENTS,
    PLANETS,
    PREDICATES,
    SUBJECTS,
    TIMES,
)
from timelyfreeze.files.options import status_of

SEED = 20260
PICTURES = ("tiny_pictures/train.parquet", "tiny_pictures/test.parquet")
VOCAB_SIZE = 2048
BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ASSETS = Path(__file__).resolve().parents[2] / "assets"


def unique_rows(
    rng: Rng, count: int, maker: Callable[[Rng], Row], seen: set[tuple[str, str]]
) -> list[Row]:
    """``count`` rows whose (instruction, input) is not in ``seen`` yet; adds them to it."""
    rows: list[Row] = []
    for _ in range(count * 50):
        row = maker(rng)
        if row[:2] not in seen:
            seen.add(row[:2])
            rows.append(row)
        if len(rows) == count:
            return rows
    raise RuntimeError(
        f"{maker.__name__}: its tables do not give {count} different rows; ask for fewer"
    )


def make_instruct(rng: Rng) -> list[dict]:
    """The rows of ``tiny_instruct``."""
    seen: set[tuple[str, str]] = set()
    rows = [row for maker, count in MAKERS for row in unique_rows(rng, count, maker, seen)]
    rng.shuffle(rows)
    return [dict(zip(("instruction", "input", "output"), row, strict=True)) for row in rows]


def make_chat(rng: Rng) -> list[dict]:
    """The rows of ``tiny_chat``."""
    systems = [
        "You are a patient teacher. Explain every step.",
        "You are a helpful assistant who answers in clear sentences.",
        "Answer as exactly as you can.",
    ]
    bridges = ["Thank you. {}", "Good. Now another question: {}", "I see. {}"]
    rows = []
    for _ in range(150):
        turns = []
        if rng.random() < 0.4:
            turns.append({"from": "system", "value": rng.choice(systems)})
        maker, _ = rng.choice(MAKERS)
        qas = unique_rows(rng, rng.choice([1, 1, 2, 2, 3]), maker, set())
        for i, (instruction, source, output) in enumerate(qas):
            question = f"{instruction}\n\n{source}" if source else instruction
            value = rng.choice(bridges).format(question) if i else question
            turns += [{"from": "human", "value": value}, {"from": "gpt", "value": output}]
        rows.append({"conversations": turns})
    return rows


def make_prose(rng: Rng) -> list[dict]:
    """The rows of ``c4_test``."""

    def countries() -> str:
        continent = rng.choice(["Europe", "Africa", "Asia", "South America"])
        rows = rng.sample([row for row in COUNTRIES if row[2] == continent], 4)
        return f"{continent} is home to many countries. " + " ".join(
            fact for row in rows for fact in country_facts(row)
        )

    def science() -> str:
        facts = [element_facts(row) for row in rng.sample(ELEMENTS, 2)]
        facts += [animal_facts(row) for row in rng.sample(ANIMALS, 2)]
        facts += [planet_facts(rng.randrange(len(PLANETS)))]
        return " ".join(" ".join(fact) for fact in rng.sample(facts, 4))

    def habits() -> str:
        topic = rng.choice(sorted(REASONS))
        reasons = " ".join(f"{item}: {why}." for item, why in rng.sample(REASONS[topic], 4))
        task = rng.choice(sorted(HOWTOS))
        lead = f"There is much to say about {topic}. {reasons}"
        return f"{lead} And here is how to {task}. {howto_prose(task)}"

    def diary() -> str:
        lines = []
        for _ in range(8):
            subject, (base, third, past, rest) = rng.choice(SUBJECTS), rng.choice(PREDICATES)
            now, before, later = rng.choice(TIMES)
            lines.append(
                rng.choice(
                    [
                        f"{subject} {third} {rest} {now}.",
                        f"{subject} {past} {rest} {before}.",
                        f"{subject} will {base} {rest} {later}.",
                    ]
                )
            )
        return " ".join(lines)

    return [{"text": rng.choice([countries, science, habits, diary])()} for _ in range(200)]


def train_tokenizer(texts: list[str]) -> str:
    """A byte-level BPE over ``texts`` as the text of a ``tokenizer.json``."""
    tokenizer = Tokenizer(models.BPE())
    # Digits apart, so that numbers neither fill the vocabulary nor hide their place values.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in (BOS, EOS, PAD)
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return dump(json.loads(tokenizer.to_str()))


def dump(value: object) -> str:
    """JSON with one key a line, and lists of strings (the merges) on one line each."""
    text = json.dumps(value, ensure_ascii=False, indent=1)
    return (
        text.replace('[\n    "', '["').replace('",\n    "', '", "').replace('"\n   ]', '"]') + "\n"
    )


def make_files() -> dict[str, str]:
    """Every asset: path below ``tests/assets`` -> text."""
    rng = random.Random(SEED)
    instruct, chat, prose = make_instruct(rng), make_chat(rng), make_prose(rng)
    texts = [
        "### Instruction:\n\n### Input:\n\n### Response:\n### System:\n### User:\n### Assistant:\n"
    ] * 50
    texts += [text for row in instruct for text in row.values()]
    texts += [turn["value"] for row in chat for turn in row["conversations"]]
    texts += [row["text"] for row in prose]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
    }
    files = {
        "tiny_instruct/train.jsonl": instruct,
        "tiny_chat/train.jsonl": chat,
        "c4_test/data.jsonl": prose,
    }
    result = {
        name: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        for name, rows in files.items()
    }
    result["tokenizer/tokenizer.json"] = train_tokenizer(texts)
    result["tokenizer/tokenizer_config.json"] = json.dumps(config, indent=2) + "\n"
    return result


def _is_stale(name: str, made: str, output: Path) -> bool:
    """Tell whether a file holds other rows; how they are packed is the library's."""
    old = output / name
    return not old.is_file() or not read_table(old).equals(read_table(Path(made, name)))


def main(argv: list[str] | None = None) -> int:
    """Write or check the assets; the return value is the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    parser.add_argument("--output", type=Path, default=ASSETS, help="folder of the assets")
    args = parser.parse_args(argv)
    if args.output.exists() and not args.output.is_dir():
        parser.error(f"--output is {args.output}, which is no folder")
    return status_of(lambda: _write_or_check(args))


def _write_or_check(args: argparse.Namespace) -> int:
    stale = []
    for name, text in make_files().items():
        path, data = args.output / name, text.encode()
        if args.check:
            if not path.is_file() or path.read_bytes() != data:
                stale.append(name)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            sys.stdout.write(f"{path}: {len(data)} bytes\n")
    with TemporaryDirectory() as made:
        write_tiny(Path(made) if args.check else args.output)
        stale += [name for name in PICTURES if args.check and _is_stale(name, made, args.output)]
    for name in stale:
        sys.stderr.write(
            f"{args.output / name} differs; run python -m tests.tools.make_assets to rewrite it\n"
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
