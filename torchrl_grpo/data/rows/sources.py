"""Read rows from a file, a folder of splits, a saved data set, or the Hugging Face hub.

Every row keeps its number and its source for error messages. The modules of the data sets interpret the
columns.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import held_out_problems
from torchrl_grpo.data.rows import streams
from torchrl_grpo.errors import DataError
from torchrl_grpo.runtime.hub import why_unreachable

_SUFFIXES = (".jsonl", ".json", ".parquet")
_TEST_NAMES = ("test", "validation", "valid", "dev", "eval")
# Parquet files that hold a part of a split, as the hub names them.
_PIECE = re.compile(r"(train|test|validation|valid|dev|eval|\w+(?=-\d+-of-\d+))-.*\.parquet")
# Metadata files that the datasets library writes beside the rows.
_METADATA_FILES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


@dataclass(frozen=True)
class Row:
    """One row: its columns and its origin.

    Attributes:
        values: the columns.
        number: 1-based row number; the line number in a JSONL file.
        source: name of the file or hub data set.
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
    """A data set on the hub.

    Attributes:
        name: name on the hub.
        subsets: subsets that are concatenated; ``(None,)`` for a data set without subsets.
    """

    name: str
    subsets: tuple[str | None, ...] = (None,)


@dataclass(frozen=True)
class Splits:
    """The rows of a source.

    Attributes:
        train: rows to train on.
        test: rows of the test split, or None if the source has none.
        train_source: name of the source of ``train``, for messages.
        notes: what the user should know about what was read.
        train_of_hub: whether ``train`` is from the hub, so that its author must not name files here.
        test_of_hub: the same of ``test``.
    """

    train: list[Row]
    test: list[Row] | None
    train_source: str
    notes: Sequence[str] = ()
    train_of_hub: bool = False
    test_of_hub: bool = False


@dataclass(frozen=True)
class Source:
    """A place that holds rows.

    Attributes:
        key: configuration key that named the source, or ``""``.
        label: name of the source in messages.
        names: names of its splits; empty if it has no splits.
        read: function from a split's name to its rows. A source without splits returns all rows.
    """

    key: str
    label: str
    names: tuple[str, ...]
    read: Callable[[str], list[Row]]

    def first(self, *names: str) -> str | None:
        """Return the first of ``names`` that is a split of this source, or None."""
        return next((name for name in names if name in self.names), None)

    def check(self, key: str, split: str) -> None:
        """Reject a split that this source does not have.

        Args:
            key: configuration key that named the split, for the message.
            split: name of the split.

        Raises:
            DataError: the source has no such split.
        """
        if not self.names:
            raise DataError(
                f"{key}={split}: {self.label} has no splits; write {key}=null to use its rows without a split"
            )
        if split not in self.names:
            raise DataError(f"{key}={split}: {self.label} has no such split; {_list_splits(self.names, key)}")


def resolve(cfg: Config, hub: Hub) -> Splits:
    """Read the rows that the configuration names.

    Args:
        cfg: configuration. The keys of ``env`` that name files, hub data sets and splits are read. With
            ``eval.num_problems=0`` no test split is read.
        hub: default place of the data set on the hub, used if ``env.data_path`` is not set.

    Returns:
        The splits. ``env.eval_data_path`` replaces the test split. ``test`` is None if ``env.eval_split`` is
        the split that is trained on.

    Raises:
        DataError: something is missing, malformed or empty, or the hub cannot be reached.
    """
    env = cfg.env
    if env.data_path is not None:
        source = open_path(env.data_path, "env.data_path")
    else:
        limit = None if env.shuffle_buffer is None else streams.of_stream(cfg)
        source = open_hub(_overridden(hub, env.hub_name, env.hub_subset), limit)
    train = "train" if env.train_split is None else env.train_split
    if env.train_split is not None:
        source.check("env.train_split", train)
    elif source.names and train not in source.names:
        raise DataError(f"{source.label} has no train split; {_list_splits(source.names, 'env.train_split')}")
    test: list[Row] | None = None
    if held_out_problems(cfg) > 0 and env.eval_data_path is not None:
        test = read_held_out(env.eval_data_path, env.eval_split)
    elif held_out_problems(cfg) > 0:
        split = env.eval_split
        if split is None:
            split = source.first(*(name for name in _TEST_NAMES if name != train))
        else:
            source.check("env.eval_split", split)
        test = None if split in (None, train) else source.read(split)
    rows = source.read(train)
    cut = env.data_path is None and env.shuffle_buffer is not None and len(rows) == streams.of_stream(cfg)
    notes = [streams.note(source.label, len(rows))] if cut else []
    of_hub = env.data_path is None
    return Splits(rows, test, source.label, notes, of_hub, of_hub and env.eval_data_path is None)


def read_held_out(path: str, split: str | None = None) -> list[Row]:
    """Read the rows of ``env.eval_data_path``: a file, or a split of a folder.

    Args:
        path: path as for :func:`open_path`.
        split: name of the split. None takes the test split, or the train split if there is no test split.

    Raises:
        DataError: there is no such path or split, or a row is malformed.
    """
    source = open_path(path, "env.eval_data_path")
    if split is not None:
        source.check("env.eval_split", split)
        return source.read(split)
    first_split = source.first(*_TEST_NAMES, "train")
    if source.names and first_split is None:
        raise DataError(f"{source.label} has no test split; {_list_splits(source.names, 'env.eval_split')}")
    return source.read(first_split or "")


def open_path(path: str, key: str) -> Source:
    """Open a local file or folder, relative to the working directory.

    Args:
        path: a ``.jsonl``, ``.json`` or ``.parquet`` file; a folder with one such file per split
            (``train.jsonl``, ``test.jsonl``) or with the hub's Parquet files
            (``data/train-00000-of-00001.parquet``); or a folder written by ``save_to_disk`` of ``datasets``.
        key: configuration key that named the path, for messages.

    Raises:
        DataError: the path does not exist, or is a folder without rows.
    """
    place = Path(path)
    if not place.exists():
        raise DataError(
            f"{key}={path!r} does not exist (working directory {Path.cwd()}); name a file or folder"
        )
    if place.is_file():
        return Source(key, path, (), lambda _: read_file(place))
    if (place / "state.json").is_file() and (place / "dataset_info.json").is_file():
        import datasets

        saved = datasets.load_from_disk(str(place))
        return Source(key, path, (), lambda _: _number((dict(row) for row in saved), path))
    label = f"{key}={path!r}"
    if (place / "dataset_dict.json").is_file():
        import datasets

        splits = datasets.load_from_disk(str(place))
        return Source(
            key, label, tuple(splits), lambda name: _number(map(dict, splits[name]), f"{path}/{name}")
        )
    files = _split_files(place)
    if not files:
        entries = ", ".join(sorted(entry.name for entry in place.iterdir())[:10]) or "nothing"
        raise DataError(
            f"{label} has neither a test nor a train split but {entries}; write each split to a file, "
            "e.g. train.jsonl"
        )
    return Source(
        key, label, tuple(files), lambda name: _read_pieces(files[name], f"{place}/{name}-*.parquet")
    )


def open_hub(hub: Hub, limit: int | None = None) -> Source:
    """Open a data set on the hub and concatenate its subsets. The name may also be a local folder.

    Args:
        hub: the data set.
        limit: most rows of a split that are read, of a data set that is streamed; None reads all.

    Raises:
        DataError: the hub cannot be reached or has no such data set or subset.
    """
    why = None if Path(hub.name).is_dir() else why_unreachable()
    import datasets  # slow to import, and needed for the hub only

    subsets = []
    for subset in hub.subsets:
        try:
            # Load all splits: the result lists their names, and the client downloads all of them anyway.
            streamed = {} if limit is None else {"streaming": True}
            subsets.append(datasets.load_dataset(hub.name, subset, **streamed))
        except Exception as error:  # the hub client raises dozens of types, and the fix is the same for all
            label = hub.name if subset is None else f"{hub.name} ({subset})"
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            if why is not None and isinstance(error, ConnectionError):
                reason = f"it cannot be reached ({why}), and its cache on this machine does not have it"
            raise DataError(
                f"cannot load {label} from the Hugging Face hub: {reason}; set env.data_path to a JSONL "
                "file, a folder of splits or a saved data set, or check env.hub_name and env.hub_subset"
            ) from error
    names = tuple(name for name in subsets[0] if all(name in splits for splits in subsets))
    if not names:
        have = "; ".join(
            f"{subset}: {', '.join(splits)}" for subset, splits in zip(hub.subsets, subsets, strict=True)
        )
        raise DataError(
            f"{hub.name}: its subsets have no split in common ({have}); choose one subset with env.hub_subset"
        )

    def read(name: str) -> list[Row]:
        rows = (dict(row) for splits in subsets for row in splits[name])
        return _number(itertools.islice(rows, limit), f"{hub.name}/{name}")

    return Source("env.hub_name", hub.name, names, read)


def read_file(path: Path) -> list[Row]:
    """Read all rows of one file.

    Raises:
        DataError: the file type is unknown, or the content is malformed or empty.
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
    # Not splitlines(), which also breaks lines at U+2028 and other characters that JSON strings may contain.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            rows.append(Row(_json_object(line, f"line {number} of {path}"), number, str(path)))
    return _not_empty(rows, str(path))


def _overridden(hub: Hub, name: str | None, subset: str | None) -> Hub:
    """Apply the overrides. A new name drops the default subsets."""
    if name is not None:
        return Hub(name, (subset,))
    return hub if subset is None else Hub(hub.name, (subset,))


def _split_files(folder: Path) -> dict[str, list[Path]]:
    """Return split name -> files, from a folder and its subfolder ``data``."""
    splits: dict[str, list[Path]] = {}
    for suffix in _SUFFIXES:
        for path in sorted(folder.glob(f"*{suffix}")):
            if not _PIECE.fullmatch(path.name) and path.name not in _METADATA_FILES:
                splits.setdefault(path.stem, [path])
    whole = set(splits)
    for path in sorted([*folder.glob("*.parquet"), *folder.glob("data/*.parquet")]):
        piece = _PIECE.fullmatch(path.name)
        if piece is not None and piece[1] not in whole:
            splits.setdefault(piece[1], []).append(path)
    return splits


def _read_pieces(files: list[Path], source: str) -> list[Row]:
    if len(files) == 1 and not _PIECE.fullmatch(files[0].name):
        return read_file(files[0])
    return _number((row.values for file in files for row in read_file(file)), source)


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
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}; give one array of objects") from error
    for number, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise DataError(f"row {number} of {path} is not a JSON object: {_short(json.dumps(value))}")
    return _number(values, str(path))


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not valid JSON ({error.msg}): {_short(line)}; correct it to one JSON object a line"
        ) from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or lists within lists.
        raise DataError(f"{where} cannot be read: {error}: {_short(line)}; shorten it") from error
    if not isinstance(value, dict):
        raise DataError(f"{where} is not a JSON object: {_short(line)}; give one object a line")
    return value


def _number(values: Iterable[dict[str, Any]], source: str) -> list[Row]:
    return _not_empty([Row(value, number, source) for number, value in enumerate(values, 1)], source)


def _not_empty(rows: list[Row], source: str) -> list[Row]:
    if not rows:
        raise DataError(f"{source} is empty; give at least one row")
    return rows


def _list_splits(names: Sequence[str], key: str) -> str:
    begins = ("train",) if key == "env.train_split" else _TEST_NAMES
    likely = next((name for name in names if name.startswith(begins)), names[0])
    return f"its splits are {', '.join(names)}; write for example {key}={likely}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 120 else text[:117] + "...")
