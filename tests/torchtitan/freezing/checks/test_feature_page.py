"""What works with what, as docs/configuration.md says it."""

from __future__ import annotations

from pathlib import Path

from torchtitan.freezing.checks import requirements as needs
from torchtitan.freezing.checks.features import DEVICE, FEATURES, MEMORY, PROFILE
from torchtitan.freezing.checks.requirements import Feature, Requirement

ROOT = Path(__file__).resolve().parents[4]
FLOAT8, GROUPED = "quantize.linear.float8", "quantize.grouped_mm.float8"
PP = "parallelism.pipeline_parallel_"

# fmt: off
# How a feature is called, by the beginning of its reason, where the key does not say it.
TITLES = {
    "torch cannot split": "a schedule that splits backwards, with freezing",
    "actions that overlap": f"DualPipeV with `{PP}expert_parallel_overlap`",
    "torch loses gradients": "a schedule that splits backwards",
    "torch has attention": "context parallelism",
    "this torch fails": "tensor parallelism",
    "torchao multiplies": f"`{FLOAT8}` in `model.converters`",
    "torchao and upstream": f"`{GROUPED}` in `model.converters`",
    "it reads pictures": "a model of pictures",
    "pictures are read": '`training.dataset` `"images"`',
    "templates are": "`data.chat_template` by name",
    "freezing works": 'any `freezing.method` but `"none"` and `"lora"`',
    "a compiled block": "`apf` or another policy that chooses single tensors",
    "the first batches": "a plan with compiled blocks",
    "each rank compares": "`egeria` or another policy that compares outputs",
    "an epoch has": "`checks_per_epoch` of a policy",
    "adapters of peft": '`freezing.method` `"lora"`',
    "a frozen front": '`freezing.elastic.partition` `"time"`',
    "only an elastic": "half a block in `module_fqns_per_model_part`",
    "somebody has": '`freezing.packing.mode` `"efficiency"`',
    "torch counts": "a `model.flavor` with experts, where a run trains",
    "what freezing saves": "`timelyfreeze profile`",
    "the estimate is": "`timelyfreeze estimate`",
}
# What a feature with a need cannot be with, where the key does not say it.
WITHOUT = {
    needs.NO_PLAN: "a `freezing.method` with a plan",
    needs.A_POLICY: '`freezing.method` `"timelyfreeze"` alone',
    needs.ONE_RATIO: "a plan with a `freezing.max_freeze_ratio` for each stage",
    needs.NO_ADAPTERS: '`freezing.method` `"lora"`',
    needs.DISCARDS: "`freezing.discard_batches` 0",
    needs.TENSORS: "tensor parallelism",
    needs.CONTEXTS: "context parallelism",
    **dict(zip(needs.ONE_PIPELINE, (
        "replicas", "shards", "tensor parallelism", "context parallelism", "expert parallelism",
        "expert tensor parallelism"), strict=True)),
    needs.NO_REPLICAS: "more processes than ranks of the pipeline",
    needs.PIPELINE: "no pipeline",
    needs.NO_PIPELINE: "a pipeline",
    **dict(zip(needs.ONE_STAGE, (
        "a schedule other than GPipe and 1F1B", "a schedule CSV"), strict=True)),
    needs.EAGER: "compiled blocks",
    needs.ONE_PROCESS: "several processes",
    needs.ONE_NODE: "several nodes",
    needs.LAUNCHER: "a start by torchrun alone",
    needs.INSTRUCTIONS: "text and pictures",
    needs.ROWS: "text",
    needs.SAME_INPUTS[1]: "pictures with a `vision.augmentation` other than 'none'",
    needs.PICTURES: "text and instructions",
    needs.VALIDATION_OF_PICTURES: "validation on text or instructions",
    needs.PLACE: "no `training.dataset_path`",
    needs.SEVERAL_PICTURES: "microbatches of one picture",
    needs.PLAIN_MASKS: "a `model.flavor` that attends by flex attention",
    needs.ACCELERATOR: "a machine without an accelerator",
    needs.FLOAT8: "no GPU of compute capability 8.9, but for `quantize.linear.float8.emulate`",
    needs.PEFT: "no package peft",
    needs.TORCHAO: "no package torchao",
    **dict(zip(needs.VISION, ("no package pillow", "no package torchvision"), strict=True)),
}
# fmt: on


def without(need: Requirement) -> str:
    """Return what a feature with this need cannot be with, in the words of the page."""
    _, is_one_of, values = need.rule.partition("it must be ")
    off = ("''", "[]", "0", "false", "unset")
    other = f" other than {values}" if is_one_of and not values.startswith(off) else ""
    return WITHOUT.get(need, f"`{need.found}`{other}")


def title(feature: Feature) -> str:
    """Return what the page calls a feature."""
    named = (title for why, title in TITLES.items() if feature.why.startswith(why))
    return next(named, f"`{feature.key}`")


def feature_table() -> str:
    """Return the features and what each cannot be with, as docs/configuration.md has them."""
    rows = ["| setting | refused with | why |", "|---|---|---|"]
    for feature in (*FEATURES, DEVICE, PROFILE, MEMORY):
        refused = "<br>".join(map(without, feature.needs))
        rows.append(f"| {title(feature)} | {refused} | {feature.why} |")
    return "\n".join(rows) + "\n"


def test_the_page_for_users_has_the_table() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    assert feature_table() in page, f"write it again:\n{feature_table()}"
