"""The page of a model on the hub: data, method and figures of its run."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from timelyfreeze.cli.hub import is_hub_id
from timelyfreeze.records.summary import RunSummary, as_shown


def model_card(name: str, summary: RunSummary) -> str:
    """Return a model card; only the last part of paths is shown."""
    data = " ".join(w if is_hub_id(w) else Path(w).name for w in summary.dataset.split())
    method = f"`{summary.method}`, {summary.schedule or 'no pipeline'}"
    length = f"{summary.n_devices} processes; {summary.steps_done} of {summary.steps} steps"
    shown = as_shown(summary)
    metrics = [each.name for each in fields(summary) if each.metadata and each.name in shown]
    figures = [f"| {name.replace('_', ' ')} | {shown[name]} |" for name in metrics]
    return "\n".join(
        [
            *("---", "library_name: transformers", "tags:", "- timelyfreeze", "---", ""),
            f"# {name.rpartition('/')[2]}",
            "",
            f"- **Model**: {summary.model}",
            f"- **Data**: {data}, seed {summary.data_seed}",
            f"- **Method**: {method}, {length}",
            f"- **Machine**: {summary.device}, torch {summary.torch_version}",
            *("", "| figure | value |", "| --- | --- |", *figures, ""),
        ]
    )


def check_hub(repo: str, hub: Any) -> None:
    """Raise ValueError where a model cannot be sent to the hub, before anything is made."""
    if not is_hub_id(repo):
        raise ValueError(f"--push is {repo!r}; it must be OWNER/NAME, as on the hub")
    if hub.get_token() is None:
        raise ValueError("--push needs a token that may write; set HF_TOKEN or run hf auth login")


def push(folder: Path, card: str, repo: str, hub: Any) -> str:
    """Send a folder with its card to the hub, where a new model is private; return its address."""
    (folder / "README.md").write_text(card)
    try:
        hub.create_repo(repo, private=True, exist_ok=True)
        return str(hub.upload_folder(repo_id=repo, folder_path=folder))
    except Exception as error:  # of the hub or of the network: all have their own
        raise ValueError(
            f"{error}; {folder} is whole, so try: hf upload {repo} {folder}"
        ) from error
