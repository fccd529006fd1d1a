"""Nothing that is read from a file is executed: every place that could is listed here, with why."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    path
    for folder in ("timelyfreeze", "torchtitan", "benchmarks", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
# Modules that make objects of bytes by running what the bytes say, or code of text.
MODULES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__"}
# Calls of other modules that may do so, by the end of their dotted name.
METHODS = {
    "torch.load", "torch.jit.load", "torch.package", "np.load", "numpy.load", "read_pickle",
    "import_module", "runpy.run_path", "runpy.run_module", "run_path", "exec_module",
    "unsafe_load", "full_load", "from_string", "load_dataset", "read_metadata", "dcp.load",
}  # fmt: skip
# (file, what): why it is safe.
ALLOWED = {
    (
        "timelyfreeze/planning/background.py",
        "pickle",
    ): "a pipe between a process and its own child: the bytes never lie in a file, and nobody "
    "else can write into the pipe",
    (
        "timelyfreeze/runtime/reference/process.py",
        "pickle",
    ): "likewise the two ends of a pipe between a training process and its own child, which "
    "compares outputs: what these have written, never a file",
    (
        "timelyfreeze/runtime/reference/process.py",
        "import_module",
    ): "packages that the parent process has imported already, by what it says over that pipe",
    (
        "torchtitan/data/text/render_worker.py",
        "from_string",
    ): "a Jinja program of the tokenizer's folder, run in Jinja's immutable sandbox, as "
    "transformers does, in a process of limited memory and time: it sees texts, and no Python",
    (
        "torchtitan/data/rows/examples.py",
        "load_dataset",
    ): "hub data by name; datasets 4 and later run no code of a data set, and those before ask",
    (
        "torchtitan/images/sources.py",
        "load_dataset",
    ): "likewise; on this disk parquet, which is data alone",
    (
        "timelyfreeze/cli/overlay.py",
        "exec_module",
    ): "torchvision, as Python's own import of it would",
    (
        "torchtitan/hf/adapter.py",
        "read_metadata",
    ): "torch's reader of safetensors headers, which are JSON",
    (
        "torchtitan/data/loader.py",
        "pickle",
    ): "the data loader's place in a checkpoint, which TorchTitan pickles: read by an unpickler "
    "that refuses every name, so that nothing can be called",
    (
        "torchtitan/checkpoints/finished.py",
        "pickle",
    ): "the type of an error; values are read by torch.load with weights_only=True",
    (
        "timelyfreeze/__init__.py",
        "import_module",
    ): "rooms of this package by the table in that file, which no file adds to",
    (
        "timelyfreeze/cli/torchrun.py",
        "import_module",
    ): "our own module of checks, loaded once its folder is joined",
    (
        "timelyfreeze/cli/main.py",
        "import_module",
    ): "our commands by the table in that file, which no file adds to",
    (
        "timelyfreeze/cli/checker.py",
        "import_module",
    ): "a module of ours that our own command names on the command line",
    (
        "torchtitan/checkpoints/handover.py",
        "read_metadata",
    ): "what the processes of this run have just told each other, never a file",
    (
        "torchtitan/checkpoints/manager.py",
        "read_metadata",
    ): "likewise: from the memory of this run's processes",
    (
        "torchtitan/checkpoints/manager.py",
        "dcp.load",
    ): "likewise: from the memory of this run's processes",
    (
        "torchtitan/evaluation/pictures.py",
        "dcp.load",
    ): "through torch's reader of Hugging Face folders, which reads safetensors alone",
    (
        "timelyfreeze/cli/worker.py",
        "runpy.run_module",
    ): "torchtitan.freezing, named in the code, and nothing else",
    (
        "torchtitan/hf/weights.py",
        "dcp.load",
    ): "tensors alone, which torch reads with weights_only=True, after the table of contents",
    (
        "torchtitan/checkpoints/contents.py",
        "pickle",
    ): "a checkpoint's table of contents: read by an unpickler that refuses every name but those "
    "of torch's own types in it",
}


def dangers(tree: ast.AST) -> Iterator[str]:
    """Name everything in a file that may execute what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module.split(".")[0] in MODULES:
                yield node.module
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (_end(name) for name in names if _is_method(name))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS or (_is_method(name) and not _is_weights_only(node)):
                yield name if name in CALLS else _end(name)
        elif isinstance(node, ast.keyword) and node.arg in ("weights_only", "trust_remote_code"):
            safe = node.arg == "weights_only"
            if not (isinstance(node.value, ast.Constant) and node.value.value is safe):
                yield node.arg


def _is_method(name: str) -> bool:
    return any(name == method or name.endswith(f".{method}") for method in METHODS)


def _end(name: str) -> str:
    return max((m for m in METHODS if name == m or name.endswith(f".{m}")), key=len)


def _is_weights_only(call: ast.Call) -> bool:
    return any(
        keyword.arg == "weights_only"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is True
        for keyword in call.keywords
    )


def test_only_listed_places_can_execute_what_they_read() -> None:
    found = {
        (str(path.relative_to(ROOT)), danger)
        for path in SOURCES
        for danger in dangers(ast.parse(path.read_text()))
    }
    assert len(SOURCES) > 100
    assert found == set(ALLOWED)
    assert all(len(reason) > 40 for reason in ALLOWED.values())


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml\nyaml.safe_load(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "exec(compile(text, '', 'exec'))",
        "load(path, trust_remote_code=True)",
        "importlib.import_module(name)",
        "from importlib import import_module",
    ],
)
def test_a_new_place_would_be_found(source: str) -> None:
    assert list(dangers(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["torch.load(path, weights_only=True)", "json.loads(text)", "load_file(path)"]
)
def test_what_executes_nothing_is_left_alone(source: str) -> None:
    assert not list(dangers(ast.parse(source)))
