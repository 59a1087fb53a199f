"""Pictures of problems: where a row has them, and what is refused.

A picture stays as it is stored, and is decoded when it is used. In the text of a message, :data:`MARK` stands
for a picture.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_grpo.data.example import Example
from torchrl_grpo.data.rows.sources import Row
from torchrl_grpo.errors import DataError, first_line

if TYPE_CHECKING:
    from PIL.Image import Image

#: Stands for a picture in the text of a message. Unicode reserves the character for a program's own use.
MARK = "\ufdd1"
# Marks that data sets write where a picture belongs.
_WRITTEN = "<image>"
_LARGEST_FILE = 50 * 2**20
_MOST_PIXELS = 50_000_000
_LEAST_SIDE = 2
# Others may start programs: Pillow gives EPS to Ghostscript, which executes it.
_FORMATS = ("PNG", "JPEG", "MPO", "GIF", "WEBP", "AVIF", "TIFF", "BMP", "DIB", "PPM", "JPEG2000")
# Columns of pictures, without env.fields.images.
_COLUMNS = ("images", "image")


@dataclass(frozen=True)
class Picture:
    """A picture of a problem.

    Attributes:
        digest: checksum of the encoded picture, its name in files.
        size: width and height in pixels.
        stored: the encoded picture, or the file that has it.
        place: where it was read, for messages.
    """

    digest: str
    size: tuple[int, int]
    stored: bytes | Path
    place: str

    def read(self) -> bytes:
        """Return the encoded picture.

        Raises:
            DataError: the file has changed or cannot be read.
        """
        if isinstance(self.stored, bytes):
            return self.stored
        try:
            data = self.stored.read_bytes()
        except OSError as error:
            raise DataError(f"{self.place}: {first_line(error)}; put the file back, or start anew") from error
        if _digest(data) != self.digest:
            raise DataError(
                f"{self.place}: {self.stored} has changed since the run started; start a new run with it"
            )
        return data


def decode(data: bytes) -> Image:
    """Decode a picture as RGB, upright, with white behind what is transparent.

    Raises:
        ValueError: it cannot be decoded.
    """
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            # Sizes are checked here.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(data))
        if opened.format not in _FORMATS:
            raise ValueError(f"its format {opened.format} is not read; save it as PNG or JPEG")
        width, height = opened.size
        if width * height > _MOST_PIXELS:
            raise ValueError(f"it has {width} x {height} pixels, more than {_MOST_PIXELS:,}")
        if min(width, height) < _LEAST_SIDE:
            raise ValueError(f"it has {width} x {height} pixels, fewer than {_LEAST_SIDE} on a side")
        opened.load()
        upright = ImageOps.exif_transpose(opened)
        if upright.mode.startswith("I;16"):
            # Pillow would cut all values above 255, which makes the picture white.
            upright = upright.convert("I").point(lambda value: value / 257).convert("L")
        if upright.mode in ("I", "F"):
            raise ValueError(
                f"its pixels are numbers of unknown range (mode {upright.mode}); save it with 8 or 16 bits"
            )
        if upright.has_transparency_data:
            upright = upright.convert("RGBA")
            white = Image.new("RGBA", upright.size, "white")
            upright = Image.alpha_composite(white, upright)
        return upright.convert("RGB")
    except ValueError:
        raise
    except Exception as error:
        # Pillow's decoders raise errors of many types for broken files.
        raise ValueError(f"it cannot be decoded ({first_line(error)})") from error


def encode(picture: Image) -> bytes:
    """Encode a picture without loss, the same every time."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def from_bytes(data: bytes, place: str) -> Picture:
    """Make a picture of an encoded one."""
    return Picture(_digest(data), decode(data).size, data, place)


def take_out(row: Row, fields: Mapping[str, str], of_hub: bool = False) -> tuple[Row, list[Picture]]:
    """Return a row without its pictures, and the pictures.

    Columns of pictures become checksums. Messages with parts become text, with ``<image>`` for a picture.

    Args:
        row: the row.
        fields: ``env.fields``. ``images`` names the column of pictures, which otherwise is ``images`` or
            ``image``. A row may have none.
        of_hub: whether the data set is on the hub. Its author must not choose which files here are read.

    Raises:
        DataError: a picture cannot be read, or the parts of messages do not fit the pictures.
    """
    column = fields.get("images") or next((name for name in _COLUMNS if name in row.values), None)
    if column is not None and column not in row.values:
        present = ", ".join(map(repr, row.values)) or "none"
        raise DataError(
            f"env.fields.images={column!r}: {row.where} has no such column; its columns are {present}"
        )
    folder = None if of_hub else Path(row.source).parent
    value = None if column is None else row.values[column]
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    pictures = [
        _read(item, folder, f"{row.where}: picture {number} of column {column!r}")
        for number, item in enumerate(values, 1)
    ]
    left = dict(row.values) if column is None else {**row.values, column: [p.digest for p in pictures]}
    waiting = iter(pictures)
    shown: list[Picture] = []
    has_parts = False
    for name in dict.fromkeys([fields.get("messages", "messages"), "prompt"]):
        turns = row.values.get(name)
        if isinstance(turns, list) and any(isinstance(_content(turn), list) for turn in turns):
            has_parts = True
            left[name] = [_flat(turn, row, folder, waiting, shown) for turn in turns]
    unused = list(waiting) if has_parts else []
    if unused:
        raise DataError(
            f"{row.where}: column {column!r} has {len(unused)} more pictures than the messages have parts "
            "for; add parts of the type image, or remove the pictures"
        )
    return Row(left, row.number, row.source), shown if has_parts else pictures


def put_in(example: Example, pictures: Sequence[Picture], row: Row) -> Example:
    """Return an example with its pictures, and :data:`MARK` for each in its messages.

    ``<image>`` marks the place of a picture. Without such marks, the pictures come before the last message.

    Raises:
        DataError: the number of marks is not that of the pictures.
    """
    messages = [{**turn, "content": turn["content"].replace(MARK, "")} for turn in example.messages]
    marks = sum(turn["content"].count(_WRITTEN) for turn in messages)
    if marks == 0:
        messages[-1]["content"] = MARK * len(pictures) + messages[-1]["content"]
    elif marks != len(pictures):
        raise DataError(
            f"{row.where}: the question has {marks} times {_WRITTEN} and {len(pictures)} pictures; write "
            f"{_WRITTEN} once for each picture, or nowhere"
        )
    messages = [{**turn, "content": turn["content"].replace(_WRITTEN, MARK)} for turn in messages]
    question = identity(example.question, pictures) if pictures else example.question
    return replace(
        example,
        messages=messages,
        solution=example.solution.replace(MARK, ""),
        question=question,
        pictures=tuple(pictures),
    )


def identity(text: str, pictures: Sequence[Picture]) -> str:
    """Return what tells a question with pictures from others."""
    return " ".join([text.replace(MARK, _WRITTEN), *(picture.digest for picture in pictures)])


def _content(turn: Any) -> Any:
    return turn.get("content") if isinstance(turn, Mapping) else None


def _flat(turn: Any, row: Row, folder: Path | None, waiting: Iterator[Picture], shown: list[Picture]) -> Any:
    """Return a message with its parts as one text, and add its pictures to ``shown``."""
    content = _content(turn)
    if not isinstance(content, list):
        return turn
    text = ""
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            text += str(part.get("text"))
            continue
        if kind not in ("image", "image_url"):
            raise DataError(
                f"{row.where}: a part of a message has the type {kind!r}; parts may be of the types text and "
                "image"
            )
        inline = [value for name, value in part.items() if name != "type" and value is not None]
        where = f"{row.where}: picture {len(shown) + 1} of the messages"
        picture = _read(inline[0], folder, where) if inline else next(waiting, None)
        if picture is None:
            raise DataError(
                f"{where} is neither in its part nor in the column images; give it in one of them"
            )
        shown.append(picture)
        text += _WRITTEN
    return {**turn, "content": text}


def _read(value: Any, folder: Path | None, where: str) -> Picture:
    try:
        stored = _stored(value, folder)
        length = len(stored) if isinstance(stored, bytes) else stored.stat().st_size
        if length > _LARGEST_FILE:
            raise ValueError(f"it has {length:,} bytes, more than {_LARGEST_FILE:,}")
        data = stored if isinstance(stored, bytes) else stored.read_bytes()
        size = decode(data).size
    except (ValueError, OSError) as error:
        raise DataError(f"{where}: {first_line(error)}; correct it or remove the row") from error
    return Picture(_digest(data), size, stored, where)


def _stored(value: Any, folder: Path | None) -> bytes | Path:
    """Return the encoded picture of a value, or its file: from a folder, or None for no files.

    Raises:
        ValueError: the value is no picture.
    """
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, Mapping):
        # The form of the datasets library for pictures that are not decoded.
        inner = next((value[name] for name in ("bytes", "path", "url") if value.get(name) is not None), None)
        if inner is None:
            raise ValueError("it has neither 'bytes' nor 'path'")
        return _stored(inner, folder)
    if hasattr(value, "save") and hasattr(value, "mode"):
        return encode(value)
    if not isinstance(value, str | Path):
        raise ValueError(
            f"a {type(value).__name__} is no picture; write a path, bytes or a picture of Pillow"
        )
    text = str(value)
    if text.startswith("data:"):
        try:
            return base64.b64decode(text.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise ValueError(f"its base64 is broken ({error})") from error
    if "://" in text:
        raise ValueError(f"{text[:80]} is a URL, which is not fetched; download it and write its path")
    if folder is None:
        raise ValueError(
            f"{text[:80]} is a path, and a data set on the hub must have the pictures themselves; download "
            "them, and write a file of rows with their paths as env.data_path"
        )
    path = Path(text) if Path(text).is_absolute() else folder / text
    if not path.is_file() and Path(text).is_file():
        path = Path(text).absolute()
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    return path


def file_name(data: bytes) -> str:
    """Return the name of an encoded picture among stored ones."""
    known = ((b"\x89PNG", ".png"), (b"\xff\xd8", ".jpg"), (b"GIF8", ".gif"), (b"RIFF", ".webp"))
    return _digest(data) + next((suffix for start, suffix in known if data.startswith(start)), "")


def by_name(files: Iterable[bytes]) -> dict[str, bytes]:
    """Return encoded pictures by the names that they have among stored ones."""
    return {file_name(data): data for data in files}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
