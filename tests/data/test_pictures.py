"""Problems with pictures: the forms in which data sets have them, mistakes in them, and drawn ones."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import EpsImagePlugin, Image, PngImagePlugin
from tiny_vlm import picture

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks.pictures import PICTURE_KINDS
from torchrl_grpo.config.schema import EnvConfig, EvalConfig, ModelConfig
from torchrl_grpo.data import picture_tasks, pictures, problems
from torchrl_grpo.data.identity import keys
from torchrl_grpo.data.load import load
from torchrl_grpo.data.problems import Problems
from torchrl_grpo.data.rows import sources
from torchrl_grpo.errors import DataError


def _png(seed: int = 0, size: tuple[int, int] = (8, 6), mode: str = "RGB", kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    picture(*size, seed).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def _config(folder: Path, **env: Any) -> Config:
    env = {"dataset": "jsonl", "data_path": str(folder / "rows.jsonl"), "answer_format": "plain"} | env
    return Config(env=EnvConfig(**env), model=ModelConfig(pictures=True), eval=EvalConfig(num_problems=1))


def _load(folder: Path, *rows: dict[str, Any], **env: Any) -> Problems:
    folder.joinpath("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return load(_config(folder, **env))


def _data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def _by_answer(problems: Problems) -> dict[str, Any]:
    return {each.truth["answer"]: each for each in [*problems.train, *problems.held_out]}


def test_rows_have_pictures_as_paths_and_data_urls(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(_png(1))
    rows = [
        {"problem": "<image> and <image>: equal?", "answer": "no", "images": ["one.png", _data_url(_png(2))]},
        {"problem": "What is it?", "answer": "noise", "images": [str(tmp_path / "one.png")]},
        {"problem": "What is 1 + 1?", "answer": "2", "images": []},
    ]
    by_answer = _by_answer(_load(tmp_path, *rows, fields={"question": "problem"}))
    mark = pictures.MARK
    assert by_answer["no"].messages[-1]["content"] == f"{mark} and {mark}: equal?"
    assert [each.read() for each in by_answer["no"].pictures] == [_png(1), _png(2)]
    assert by_answer["noise"].messages[-1]["content"] == f"{mark}What is it?"
    assert by_answer["2"].pictures == ()
    # Rewards see which pictures a problem has, and not their bytes.
    digests = [each.digest for each in by_answer["no"].pictures]
    assert by_answer["no"].columns["images"] == digests
    assert by_answer["no"].plain()["columns"]["images"] == digests


def test_parquet_rows_have_pictures_as_bytes(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"question": "What is it?", "answer": str(seed), "image": {"bytes": _png(seed), "path": None}}
        for seed in range(3)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    problems = load(_config(tmp_path, data_path=str(tmp_path / "rows.parquet")))
    # The same question about other pictures is another problem.
    assert len(problems.train) == 2
    by_answer = _by_answer(problems)
    assert {name: each.pictures[0].read() for name, each in by_answer.items()} == {
        str(seed): _png(seed) for seed in range(3)
    }


@pytest.mark.parametrize("form", ["parquet", "saved"])
@pytest.mark.parametrize("name", ["geometry3k", "clevr_count"])
def test_data_sets_of_the_hub_as_folders(tmp_path: Path, name: str, form: str) -> None:
    import datasets

    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    splits = {
        split: datasets.Dataset.from_list(
            [
                {
                    "images": [{"bytes": _png(seed), "path": None}],
                    "problem": "<image>Count!",
                    "answer": str(seed),
                }
                for seed in seeds
            ],
            features,
        )
        for split, seeds in {"train": (1, 2), "test": (3,)}.items()
    }
    if form == "saved":
        datasets.DatasetDict(splits).save_to_disk(tmp_path / "data")
    else:
        (tmp_path / "data").mkdir()
        for split, rows in splits.items():
            rows.to_parquet(tmp_path / f"data/{split}-00000-of-00001.parquet")
    loaded = load(_config(tmp_path, dataset=name, data_path=str(tmp_path / "data"), answer_format="tags"))
    assert [example.truth["answer"] for example in loaded.train] == ["1", "2"]
    (held_out,) = loaded.held_out
    (shown,) = held_out.pictures
    assert pictures.decode(shown.read()) == pictures.decode(_png(3))
    assert held_out.messages[-1]["content"].startswith(f"{pictures.MARK}Count!\n\nThink step by step")
    assert held_out.solution == "<answer>3</answer>"


def test_messages_have_pictures_as_parts(tmp_path: Path) -> None:
    parts = [
        {"type": "text", "text": "First "},
        {"type": "image"},
        {"type": "text", "text": ", then "},
        {"type": "image_url", "image_url": {"url": _data_url(_png(2))}},
    ]
    rows = [
        {"prompt": [{"role": "user", "content": parts}], "answer": "a", "images": [_data_url(_png(1))]},
        {"prompt": [{"role": "user", "content": "No picture"}], "answer": "b", "images": []},
    ]
    example = _by_answer(_load(tmp_path, *rows))["a"]
    assert example.messages[-1]["content"] == f"First {pictures.MARK}, then {pictures.MARK}"
    assert [each.read() for each in example.pictures] == [_png(1), _png(2)]


def test_functions_of_the_user_return_pictures_of_pillow(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from PIL import Image\n"
        "def rows(split):\n"
        "    colors = [Image.new('RGB', (4, 4), (n, 0, 0)) for n in range(4)]\n"
        "    return [{'question': 'Which?', 'answer': str(n), 'image': c} for n, c in enumerate(colors)]\n"
    )
    problems = load(_config(tmp_path, dataset=f"{tmp_path / 'mine.py'}:rows", data_path=None))
    example = _by_answer(problems)["3"]
    assert pictures.decode(example.pictures[0].read()).getpixel((0, 0)) == (3, 0, 0)


def test_text_runs_do_not_read_pictures(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "1", "images": ["no.png"]}\n' * 2)
    cfg = Config(
        env=EnvConfig(dataset="jsonl", data_path=str(tmp_path / "rows.jsonl")),
        eval=EvalConfig(num_problems=0),
    )
    assert load(cfg).train[0].pictures == ()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK"])
def test_pictures_of_any_mode_become_rgb(mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    source = Image.new("RGBA", (5, 3), (10, 20, 30, 0)) if mode == "RGBA" else Image.new(mode, (5, 3))
    buffer = io.BytesIO()
    source.save(buffer, kind)
    decoded = pictures.decode(buffer.getvalue())
    assert (decoded.mode, decoded.size) == ("RGB", (5, 3))
    if mode == "RGBA":
        assert decoded.getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_pictures_of_16_bits_keep_their_shades(kind: str) -> None:
    source, buffer = Image.new("I;16", (3, 2)), io.BytesIO()
    for column, value in enumerate((0, 128 * 257, 65_535)):
        source.putpixel((column, 0), value)
    source.save(buffer, kind)
    decoded = pictures.decode(buffer.getvalue())
    assert [decoded.getpixel((column, 0)) for column in range(3)] == [(0,) * 3, (128,) * 3, (255,) * 3]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_numbers_of_unknown_range_are_no_picture(mode: str) -> None:
    buffer = io.BytesIO()
    Image.new(mode, (5, 3), 1).save(buffer, "TIFF")
    with pytest.raises(ValueError, match=f"numbers of unknown range .mode {mode}.; save it with 8 or 16"):
        pictures.decode(buffer.getvalue())


def test_postscript_is_not_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments: started.append(arguments))
    with pytest.raises(ValueError, match="its format EPS is not read; save it as PNG or JPEG"):
        pictures.decode(_png(kind="EPS"))
    assert not started


def test_any_error_of_a_decoder_means_a_broken_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(picture: Image.Image) -> None:
        raise RuntimeError("Failed to decode image")

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", broken)
    with pytest.raises(ValueError, match=r"it cannot be decoded \(Failed to decode image\)"):
        pictures.decode(_png())


def test_pictures_are_turned_upright() -> None:
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    picture(8, 6).save(buffer, "JPEG", exif=exif)
    assert pictures.decode(buffer.getvalue()).size == (6, 8)


_GOOD = _data_url(_png())
_MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "missing file": ({"images": ["no.png"]}, "picture 1 of column 'images': there is no file .*no.png"),
    "folder": ({"images": ["."]}, "picture 1 of column 'images': there is no file"),
    "broken bytes": ({"images": [_data_url(b"nothing")]}, "it cannot be decoded .*cannot identify"),
    "cut off": ({"images": [_data_url(_png(size=(64, 64))[:-2000])]}, "it cannot be decoded"),
    "empty": ({"images": [_data_url(b"")]}, "it cannot be decoded"),
    "broken base64": ({"images": ["data:image/png;base64,???"]}, "its base64 is broken"),
    "url": ({"images": ["https://x.org/a.png"]}, "is a URL, which is not fetched; download it"),
    "url in a mapping": ({"images": [{"url": "http://x.org/a.png"}]}, "is a URL, which is not fetched"),
    "number": ({"images": [7]}, "a int is no picture"),
    "mapping without bytes": ({"images": [{"bytes": None, "path": None}]}, "neither 'bytes' nor 'path'"),
    "null": ({"images": [None]}, "a NoneType is no picture"),
    "second picture": ({"images": [_GOOD, "no.png"]}, "picture 2 of column 'images'"),
    "too small": ({"images": [_data_url(_png(size=(1, 9)))]}, "it has 1 x 9 pixels, fewer than 2"),
    "too many marks": ({"question": "<image><image>", "images": [_GOOD]}, "2 times <image> and 1 pictures"),
    "too few marks": (
        {"question": "<image>", "images": [_GOOD, _GOOD]},
        "1 times <image> and 2 pictures; write <image> once for each",
    ),
    "marks alone": ({"question": "a <image>", "images": []}, "1 times <image> and 0 pictures"),
    "parts without pictures": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "picture 1 of the messages is neither in its part nor in the column images",
    ),
    "pictures without parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "images": [_GOOD]},
        "1 more pictures than the messages have parts for",
    ),
    "video": (
        {"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]},
        "the type 'video'; parts may be of the types text and image",
    ),
    "broken picture in a part": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "no.png"}]}]},
        "picture 1 of the messages: there is no file",
    ),
}


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_mistake_names_its_row_in_one_line(tmp_path: Path, mistake: str) -> None:
    row, message = _MISTAKES[mistake]
    rows: list[dict[str, Any]] = [{"answer": "1", **row}]
    if "messages" not in row:
        rows[0] = {"question": "What is it?", **rows[0]}
    with pytest.raises(DataError, match=message) as caught:
        _load(tmp_path, *rows)
    assert re.search(r"row 1 of .*rows\.jsonl", str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("in_message", [False, True])
@pytest.mark.parametrize("form", ["path", "mapping"])
def test_a_data_set_on_the_hub_reads_no_files_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, in_message: bool
) -> None:
    private = tmp_path / "private.png"
    private.write_bytes(_png())
    value = {"bytes": None, "path": str(private)} if form == "mapping" else str(private)
    part = [{"type": "image", "image": value}]
    row = {"messages": [{"role": "user", "content": part}]} if in_message else {"images": [value]}
    rows = [sources.Row({"question": "a", "answer": "1", **row}, 1, "org/set (train)")]
    with pytest.raises(DataError, match=r"row 1 of org/set .*is a path, and a data set on the hub"):
        pictures.take_out(rows[0], {}, of_hub=True)
    splits = sources.Splits(rows, None, "org/set", train_of_hub=True)
    with pytest.raises(DataError, match="must have the pictures themselves"):
        problems.build(
            _config(tmp_path, data_path=None), splits, lambda row, env, id: pytest.fail("it was read")
        )


@pytest.mark.parametrize("dataset", ["jsonl", "geometry3k", "clevr_count"])
def test_rows_of_the_hub_are_known_as_such_and_held_out_rows_of_a_file_too(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"problem": "a", "question": "a", "answer": "1"}
    config = _config(tmp_path, data_path=None, hub_name="org/set" if dataset == "jsonl" else None)
    config.env.dataset = dataset
    monkeypatch.setattr(
        sources,
        "open_hub",
        lambda hub, limit: sources.Source(
            "", "org/set", ("train", "test"), lambda _: [sources.Row(row, 1, "org/set")]
        ),
    )
    splits = sources.resolve(config, sources.Hub("org/set"))
    assert splits.train_of_hub and splits.test_of_hub
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps(row) + "\n")
    config.env.eval_data_path = str(held_out)
    splits = sources.resolve(config, sources.Hub("org/set"))
    assert splits.train_of_hub and not splits.test_of_hub


def test_column_of_pictures_must_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"env\.fields\.images='photo': row 1 .* columns are 'question'"):
        _load(tmp_path, {"question": "a"}, fields={"question": "question", "images": "photo"})


def test_limits_of_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_MOST_PIXELS", 40)
    with pytest.raises(DataError, match="it has 8 x 6 pixels, more than 40"):
        _load(tmp_path, {"question": "a", "answer": "1", "images": [_GOOD]})
    monkeypatch.setattr(pictures, "_LARGEST_FILE", 10)
    with pytest.raises(DataError, match="bytes, more than 10"):
        _load(tmp_path, {"question": "a", "answer": "1", "images": [_GOOD]})


def test_file_that_changes_during_a_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    path.write_bytes(_png(1))
    first = {"question": "a", "answer": "1", "images": ["one.png"]}
    shown = _by_answer(_load(tmp_path, first, {"question": "b", "answer": "2"}))["1"].pictures[0]
    path.write_bytes(_png(2))
    with pytest.raises(DataError, match=r"picture 1 .* has changed since the run started"):
        shown.read()
    path.unlink()
    with pytest.raises(DataError, match="put the file back"):
        shown.read()


def _generated(**arguments: Any) -> Callable[[int, bool], picture_tasks.Generated]:
    env = EnvConfig(dataset="pictures", task_args=arguments)
    return lambda seed, is_held_out: picture_tasks.Generated(
        env, seed, "test" if is_held_out else "train", is_held_out
    )


@pytest.mark.parametrize("kind", PICTURE_KINDS)
def test_drawn_problems_depend_on_seed_and_number_alone(kind: str) -> None:
    make = _generated(kinds=[kind], size=48)
    first, again, other = (make(seed, False) for seed in (0, 0, 1))
    examples = [first[number] for number in range(6)]
    assert [again[number] for number in reversed(range(6))][::-1] == examples
    assert [other[number].pictures for number in range(6)] != [each.pictures for each in examples]
    for example in examples:
        assert pictures.decode(example.pictures[0].read()).size == (48, 48)
        assert example.messages[-1]["content"].startswith(pictures.MARK)
        assert example.truth["answer"]


@pytest.mark.parametrize("kind", PICTURE_KINDS)
def test_no_drawn_problem_is_trained_on_and_held_out(kind: str) -> None:
    make = _generated(kinds=[kind], size=32)
    train = {key for number in range(60) for key in keys(make(0, False)[number])}
    held_out = {key for number in range(60) for key in keys(make(7, True)[number])}
    assert train.isdisjoint(held_out)


@pytest.mark.slow
def test_answers_are_those_of_the_picture() -> None:
    """Of bars of one unit each, the taller has as many colored rows more as the answer says."""
    for number in range(20):
        example = _generated(kinds=["bars"], size=200)(3, False)[number]
        shown = pictures.decode(example.pictures[0].read())
        colors = re.findall("red|green|blue|orange|purple", example.question)
        unit = 0.095 * 200
        tops = []
        for name in colors:
            color = picture_tasks._COLORS[name]
            rows = [y for y in range(200) for x in range(0, 200, 4) if shown.getpixel((x, y)) == color]
            tops.append(min(rows))
        height = round((tops[-1] - tops[0]) / unit) if len(colors) == 2 else round((190 - tops[0]) / unit)
        assert str(height) == example.truth["answer"]


@pytest.mark.slow
def test_held_out_problems_are_different() -> None:
    env = EnvConfig(dataset="pictures", task_args={"kinds": ["fraction"], "size": 32})
    # More than this kind has; 20 times as many are drawn.
    cfg = Config(env=env, model=ModelConfig(pictures=True), eval=EvalConfig(num_problems=20))
    problems = load(cfg)
    identities = [example.identity for example in problems.held_out]
    assert len(set(identities)) == len(identities) < 20
    assert problems.notes == [
        f"env.dataset=pictures has {len(identities)} different held-out problems of these kinds"
    ]
