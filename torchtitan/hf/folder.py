"""The tensors of a Hugging Face folder, known from its index and the headers of its files.

No weight is read, so a folder of any size is looked through in a moment.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from timelyfreeze.files import listed, read_object
from torchtitan.checkpoints.finished import INDEX_FILE


def read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, empty without an index; ValueError for a broken index."""
    path = folder / INDEX_FILE
    try:
        files: dict[str, str] = read_object(path)["weight_map"]
        if not all(isinstance(name, str) for name in files.values()):
            raise ValueError("weight_map must give the file of each tensor")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} is no index of tensors: {error!r}") from error
    return files


def file_numbers(folder: str | None) -> dict[str, int] | None:
    """Return the number of each tensor's file from 1, for names of saved files.

    Upstream looks for digits in the files' names, which may have none, or others. None without an
    index: a single file then holds all.
    """
    files = {} if folder is None else read_index(Path(folder))
    places = {file: number for number, file in enumerate(sorted(set(files.values())), start=1)}
    return {name: places[file] for name, file in files.items()} or None


Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by name
SUFFIX = ".safetensors"
# What Mistral puts beside the files: the same weights by names of its own, which nothing reads.
_OTHER_FORM = "consolidated"


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a folder's files, each whole and in a single file."""
    paths = folder.glob(f"*{SUFFIX}")
    files = sorted(path for path in paths if not path.name.startswith(_OTHER_FORM))
    absent = sorted(set(read_index(folder).values()) - {file.name for file in files})
    if absent:
        raise ValueError(f"{str(folder)!r} lacks {listed(absent)}, which its {INDEX_FILE} names")
    if not files:
        raise ValueError(f"{str(folder)!r} has no {SUFFIX} files")
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, str] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                names = list(opened.keys())
                inside = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
        except (OSError, ValueError, SafetensorError) as error:
            # The error may be as long as the file.
            problem = f"is no whole safetensors file: {str(error)[:200]}"
            raise ValueError(f"{str(file)!r} {problem}") from error
        for name in sorted(inside.keys() & shapes.keys()):
            raise ValueError(
                f"{name} is in {places[name]} and in {file.name} of {str(folder)!r}; remove one of "
                "the files"
            )
        shapes |= inside
        places |= dict.fromkeys(inside, file.name)
    return shapes


def misfits(wanted: Shapes, stored: Shapes) -> Iterator[str]:
    """Yield a model's tensors missing in a folder, or of another shape."""
    if missing := [name for name in wanted if name not in stored]:
        yield f"it lacks {listed(missing)}"
    misshapen = [
        f"{name} {list(stored[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and stored[name] != shape
    ]
    if misshapen:
        yield f"it has {listed(misshapen)}"
