"""Where rows come from: a file, a folder of splits, a saved data set, or the Hugging Face hub.

Every row remembers its number and its file, so that a complaint about it can say where it is. What the
columns mean is left to the modules of the single data sets.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_grpo.config import Config
from torchrl_grpo.errors import DataError

_SUFFIXES = (".jsonl", ".json", ".parquet")
_TEST_NAMES = ("test", "validation", "valid", "dev", "eval")


@dataclass(frozen=True)
class Row:
    """One row: its columns and where it stands.

    Attributes:
        values: the columns.
        number: 1-based; the line number in a JSONL file.
        source: the file or hub data set.
    """

    values: dict[str, Any]
    number: int
    source: str

    @property
    def where(self) -> str:
        """``"row 17 of FILE"``, for messages."""
        return f"row {self.number} of {self.source}"


@dataclass(frozen=True)
class Hub:
    """A data set on the hub: its name and the subsets that together make it (``(None,)``: it has none)."""

    name: str
    subsets: tuple[str | None, ...] = (None,)


@dataclass(frozen=True)
class Splits:
    """The rows of a source; ``test`` is None where the source has no test split."""

    train: list[Row]
    test: list[Row] | None
    train_source: str


def resolve(cfg: Config, hub: Hub) -> Splits:
    """Read the rows that the configuration names.

    Args:
        cfg: ``env.data_path``, ``env.eval_data_path``, ``env.hub_name`` and ``env.hub_subset`` are read.
        hub: the data set's own place on the hub, used when ``env.data_path`` is not set.

    Returns:
        The splits; ``env.eval_data_path`` takes the place of a test split.

    Raises:
        DataError: something is missing, malformed or empty, or the hub cannot be reached.
    """
    env = cfg.env
    test: list[Row] | None
    if env.data_path is not None:
        source = env.data_path
        train = read_path(env.data_path, "train", "env.data_path")
        if train is None:
            raise DataError(
                f"env.data_path={env.data_path!r} has no train split; {_holds(Path(env.data_path))}"
            )
        test = None if env.eval_data_path is not None else read_path(env.data_path, "test", "env.data_path")
    else:
        hub = _overridden(hub, env.hub_name, env.hub_subset)
        source = hub.name
        train = read_hub(hub, "train")
        test = None if env.eval_data_path is not None else read_hub(hub, "test")
    if env.eval_data_path is not None:
        test = read_held_out(env.eval_data_path)
    return Splits(train=train, test=test, train_source=source)


def read_held_out(path: str) -> list[Row]:
    """The rows of ``env.eval_data_path``: a file, or the test split of a folder (else its train split)."""
    rows = _whole(path, "env.eval_data_path")
    if rows is None:
        rows = read_path(path, "test", "env.eval_data_path") or read_path(path, "train", "env.eval_data_path")
    if rows is None:
        raise DataError(f"env.eval_data_path={path!r} has no test split; {_holds(Path(path))}")
    return rows


def read_path(path: str, split: str, key: str) -> list[Row] | None:
    """Read one split of a local source.

    Args:
        path: a ``.jsonl``, ``.json`` or ``.parquet`` file, a folder with one such file a split
            (``train.jsonl``, ``test.jsonl``), or a folder written by ``datasets`` ``save_to_disk``;
            relative to the working directory.
        split: ``"train"`` or ``"test"``; a lone file is all train.
        key: the configuration key that named the path, for messages.

    Returns:
        The rows, or None where the source has no such split.

    Raises:
        DataError: the path does not exist, a row is malformed, or the split is empty.
    """
    whole = _whole(path, key)
    if whole is not None:
        return whole if split == "train" else None
    folder = Path(path)
    names = (split,) if split == "train" else _TEST_NAMES
    if (folder / "dataset_dict.json").is_file():
        return _read_saved_dict(folder, names)
    for name in names:
        for suffix in _SUFFIXES:
            if (folder / f"{name}{suffix}").is_file():
                return read_file(folder / f"{name}{suffix}")
        parts = sorted(folder.glob(f"{name}-*.parquet"))  # how the hub names the pieces of a split
        if parts:
            return _number(
                (row.values for part in parts for row in read_file(part)), f"{folder}/{name}-*.parquet"
            )
    return None


def read_file(path: Path) -> list[Row]:
    """All rows of one file.

    Raises:
        DataError: the kind of file is unknown, or its content is malformed or empty.
    """
    if path.suffix not in _SUFFIXES:
        raise DataError(
            f"{path}: cannot read a {path.suffix or 'suffix-less'!r} file; give {', '.join(_SUFFIXES)}"
        )
    if path.suffix == ".parquet":
        return _read_parquet(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    if path.suffix == ".json" and text.lstrip().startswith("["):
        return _read_json_array(path, text)
    rows = []
    # Not splitlines(): JSON strings may hold U+2028 and other characters that it would break a line at.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            rows.append(Row(_json_object(line, f"line {number} of {path}"), number, str(path)))
    return _not_empty(rows, str(path))


def read_hub(hub: Hub, split: str) -> list[Row]:
    """One split of a hub data set, its subsets one after the other.

    Raises:
        DataError: the hub cannot be reached or has no such data set, subset or split.
    """
    import datasets  # heavy, and only wanted for the hub

    rows: list[dict[str, Any]] = []
    for subset in hub.subsets:
        try:
            rows.extend(dict(row) for row in datasets.load_dataset(hub.name, subset, split=split))
        except Exception as error:  # the hub client raises dozens of kinds; the mend is the same for all
            label = hub.name if subset is None else f"{hub.name} ({subset})"
            raise DataError(
                f"cannot load the {split} split of {label} from the Hugging Face hub: "
                f"{type(error).__name__}: {str(error)[:300]}; set env.data_path to a JSONL file, "
                "a folder of splits or a saved data set, or check env.hub_name and env.hub_subset"
            ) from error
    return _number(rows, f"{hub.name}/{split}")


def _overridden(hub: Hub, name: str | None, subset: str | None) -> Hub:
    """The hub place after the overrides; another name forgets the default subsets."""
    if name is not None:
        return Hub(name, (subset,))
    return hub if subset is None else Hub(hub.name, (subset,))


def _whole(path: str, key: str) -> list[Row] | None:
    """The rows of a source that has no splits (a file, a saved ``Dataset``); None for a folder of splits."""
    place = Path(path)
    if not place.exists():
        raise DataError(
            f"{key}={path!r} does not exist (working directory {Path.cwd()}); name a file or folder"
        )
    if place.is_file():
        return read_file(place)
    if (place / "state.json").is_file() and (place / "dataset_info.json").is_file():
        import datasets

        return _number((dict(row) for row in datasets.load_from_disk(str(place))), path)
    return None


def _read_saved_dict(folder: Path, names: tuple[str, ...]) -> list[Row] | None:
    import datasets

    saved = datasets.load_from_disk(str(folder))
    for name in names:
        if name in saved:
            return _number((dict(row) for row in saved[name]), f"{folder}/{name}")
    return None


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}; write it again") from error
    return _number(table.to_pylist(), str(path))


def _read_json_array(path: Path, text: str) -> list[Row]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not valid JSON: {error}; give one array of objects") from error
    for number, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise DataError(f"row {number} of {path} is not a JSON object: {_short(json.dumps(value))}")
    return _number(values, str(path))


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not valid JSON: {error.msg}: {_short(line)}; give one object a line"
        ) from error
    if not isinstance(value, dict):
        raise DataError(f"{where} is not a JSON object: {_short(line)}; give one object a line")
    return value


def _number(values: Iterable[dict[str, Any]], source: str) -> list[Row]:
    return _not_empty([Row(value, number, source) for number, value in enumerate(values, 1)], source)


def _not_empty(rows: list[Row], source: str) -> list[Row]:
    if not rows:
        raise DataError(f"{source} is empty; give at least one row")
    return rows


def _holds(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())[:10]
    found = ", ".join(names) if names else "nothing"
    return f"it holds {found}; a split is a file such as train.jsonl or test.jsonl"


def _short(text: str) -> str:
    return repr(text if len(text) <= 120 else text[:117] + "...")
