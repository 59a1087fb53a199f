"""The documentation names only what exists, and every metric that the code writes."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.site_tables import with_tables
from torchrl_grpo.config.resume import FREE_FROM, FREE_KEYS, is_changeable_on_resume
from torchrl_grpo.config.schema import keys

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "sota-implementations" / "grpo" / "README.md",
    ROOT / "benchmarks" / "MEASURED.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
# What is no key although it begins like one: train.jsonl, model.safetensors.
FILE_ENDS = (".jsonl", ".json", ".parquet", ".safetensors", ".pt", ".py", ".yaml", ".html")
TRAINING = ("grpo", "grpo-async", "grpo-sft")
TOP_FOLDERS = (
    "torchrl_grpo/",
    "config/",
    "docs/",
    "tests/",
    "scripts/",
    "sota-implementations/",
    "launch/",
    ".ci/",
)

_COMMAND = re.compile(rf"(\S*/)?(python3?|grpo\.py) |({'|'.join(TRAINING)}|make|pip install|bash) ")
_FENCE = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_METRIC = re.compile(r"[a-z]+/[a-z0-9_]+")
_METRIC_START = re.compile(r"[a-z]+/(?:[a-z]+/)?[a-z0-9_]*")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@functools.cache
def read(page: Path) -> str:
    """The text of a page, with its tables as the site has them."""
    return with_tables(page.read_text())


def fenced(text: str) -> list[str]:
    """The lines of all code blocks, without their comments."""
    return [line.split(" #")[0].strip() for block in _FENCE.findall(text) for line in block.splitlines()]


def inline(text: str) -> list[str]:
    """What stands in backticks outside code blocks; ``\\|`` is how a table writes a bar."""
    return [code.replace("\\|", "|") for code in _CODE.findall(_FENCE.sub("", text))]


def commands(text: str) -> Iterator[list[str]]:
    """Command lines in blocks and in backticks, split as a shell would."""
    for line in [*fenced(text), *inline(text)]:
        if _COMMAND.match(line):
            for part in line.split(" && "):
                yield shlex.split(part)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub derives them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", read(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def folder(page: Path) -> Path:
    """Where a page's commands are run: beside the scripts that it is about, or at the top."""
    return ROOT if page.parent.name in ("docs", "benchmarks") else page.parent


def is_key(word: str) -> bool:
    """Whether a word claims to be a configuration key, or one with a value."""
    key = word.split("=", 1)[0]
    return (
        re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", key) is not None
        and key.split(".")[0] in keys().sections
        and not key.endswith(FILE_ENDS)
    )


@pages
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_FENCE.sub("", read(page))):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: {target.name} has no such heading"


@pytest.mark.parametrize("name", ["openenv", "judges", "distillation"])
def test_pages_about_programs_of_others_stay_short(name: str) -> None:
    assert len((ROOT / f"docs/{name}.md").read_text().split()) <= 900


@pages
def test_paths_in_backticks_exist(page: Path) -> None:
    for code in inline(read(page)):
        if code.startswith(TOP_FOLDERS) and re.fullmatch(r"[\w./*-]+", code):
            assert list(ROOT.glob(code.rstrip("/"))), f"`{code}` does not exist"


@pages
def test_commands_name_what_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(read(page)):
        line, program = " ".join(words), words[0].rsplit("/", 1)[-1]
        if program == "make":
            goals = [word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)]
            assert set(goals) <= targets, f"{line}: no such target"
        elif program == "bash":
            assert (ROOT / words[1]).is_file(), f"{line}: no such script"
        elif program == "pip":
            for name in [word for word in words if word.endswith(".txt")]:
                assert (folder(page) / name).is_file(), f"{line}: no such file"
        elif "-m" in words:
            module = words[words.index("-m") + 1]
            path = ROOT / module.replace(".", "/")
            ours = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
            assert ours or not module.startswith("torchrl_grpo"), f"{line}: no such module"
        elif program.startswith("python"):
            script = next(word for word in words[1:] if not word.startswith("-"))
            assert (folder(page) / script).is_file(), f"{line}: no such script"


@pages
def test_command_lines_of_the_recipe_use_keys_and_configurations_that_exist(page: Path) -> None:
    text = read(page)
    own = set(
        re.findall(r"^# \S+/(\w+)\.yaml$", text, re.MULTILINE)
    )  # written by the reader, as the page shows
    for words in commands(text):
        if words[0] not in TRAINING and not any(word.endswith("grpo.py") for word in words):
            continue
        for word, following in zip(words, [*words[1:], ""], strict=True):
            if word in ("--config-name", "-cn"):
                known = (ROOT / "config" / f"{following}.yaml").is_file()
                assert known or following in own, f"{' '.join(words)}: no such configuration"
            # A group may be added to those of a primary configuration.
            key = word.split("=", 1)[0].removeprefix("+")
            if "=" in word and not word.startswith("-") and not key.startswith("hydra."):
                # Several, as a sweep has them.
                options = word.split("=", 1)[1].split(",")
                group = all((ROOT / "config" / key / f"{option}.yaml").is_file() for option in options)
                assert group or key in keys().leaves or keys().free_form_parent(key), (
                    f"{' '.join(words)}: no key {key}"
                )


@pages
def test_keys_in_backticks_are_in_the_schema(page: Path) -> None:
    for word in [part for code in inline(read(page)) for part in code.split()]:
        if is_key(word):
            assert keys().knows(word.split("=", 1)[0]), f"`{word}`: the schema has no such key"


@pages
def test_files_of_requirements_in_backticks_exist(page: Path) -> None:
    for word in re.findall(r"requirements\w*\.txt", read(page)):
        assert (ROOT / word).is_file() or (page.parent / word).is_file(), word


def test_a_stable_key_that_lists_its_choices_lists_them_all() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    seen = 0
    for key, text in re.findall(r"^\| `([\w.]+)` \| ([^|]*) \|", page, re.MULTILINE):
        choices = set(keys().choices(key)) if key in keys().leaves else set()
        if len(named := choices & set(_CODE.findall(text))) > 1:
            seen += 1
            assert named == choices, f"{key}: without {', '.join(choices - named)}"
    assert seen


def test_the_groups_are_listed_with_all_their_files() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    for group, cell in re.findall(r"^\| `(\w+)/\*\.yaml` \| [^|]* \| ([^|]*) \|$", page, re.MULTILINE):
        files = {path.stem for path in (ROOT / "config" / group).glob("*.yaml")}
        assert {name.rpartition("=")[2] for name in _CODE.findall(cell)} >= files, group
    primaries = {path.stem for path in (ROOT / "config").glob("*.yaml") if "defaults:" in path.read_text()}
    (row,) = re.findall(r"^\| (.*) \| primary configurations \|", page, re.MULTILINE)
    assert {name.removesuffix(".yaml") for name in _CODE.findall(row)} == primaries


def test_every_page_is_listed() -> None:
    text = (ROOT / "docs" / "README.md").read_text()
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - set(_LINK.findall(text)) == {"README.md"}


def test_the_readers_of_this_file_find_something_to_check() -> None:
    texts = [read(page) for page in PAGES]
    readme = (ROOT / "README.md").read_text()
    assert len(list(commands(readme))) > 10 and len(_LINK.findall(readme)) > 10
    assert sum(len(list(commands(text))) for text in texts) > 60
    assert sum(is_key(word) for text in texts for word in inline(text)) > 400


def test_a_misspelt_key_would_be_seen() -> None:
    assert is_key("policy.kl_coeff=0.1") and not keys().knows("policy.kl_coeff")
    assert is_key("env.fields={question:q}") and not is_key("train.jsonl") and not is_key("torch.load")


def test_every_key_that_a_resumed_run_may_change_is_listed() -> None:
    page = read(ROOT / "docs" / "checkpoints.md")
    assert [key for key in (*FREE_KEYS, *FREE_FROM) if f"`{key}`" not in page] == []
    # The page's table is made from these, so a key that was freed by mistake is seen by its number alone.
    assert len(FREE_KEYS) == 49
    sections = {key.partition(".")[0] for key in FREE_KEYS}
    assert sections.isdisjoint({"policy", "optimizer", "env", "reward", "model", "seed"})


def test_no_comment_says_that_a_run_is_resumed_with_the_same_value_of_a_free_key() -> None:
    section, comment, seen = "", "", set()
    for line in (ROOT / "config/base.yaml").read_text().splitlines():
        if line.lstrip().startswith("#"):
            comment += f" {line.strip(' #')}"
            continue
        name, colon, value = line.strip().partition(":")
        if colon and not line.startswith(" "):
            section = "" if value.strip() else f"{name}."
        if "resumed" in comment:
            seen.add(f"{section}{name}")
            assert ("resumed with the same" in comment) is not is_changeable_on_resume(f"{section}{name}"), (
                comment
            )
        comment = ""
    assert "inference_model.engine_args" in seen


def test_the_arrows_between_subpackages_are_the_imports() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    drawn = set(re.findall(r"^ +(\w+)(?:\[.*?\])? --> (\w+)", page, re.MULTILINE))
    real: set[tuple[str, str]] = set()
    for path in (ROOT / "torchrl_grpo").glob("*/**/*.py"):
        importer = path.relative_to(ROOT / "torchrl_grpo").parts[0]
        imported = re.findall(r"^ *(?:from|import) torchrl_grpo\.(\w+)", path.read_text(), re.MULTILINE)
        real |= {(importer, name) for name in imported if name != importer}
    assert drawn <= real
    # Every import follows the arrows.
    reached = set(drawn)
    while more := {(a, d) for a, b in reached for c, d in drawn if b == c} - reached:
        reached |= more
    assert real <= reached


# -- metrics


def documented() -> set[str]:
    """The first column of the tables in docs/metrics.md, with ``<...>`` where a part varies."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    cells = re.findall(r"^\| (`[^|]+`) \|", page, re.MULTILINE)
    return {name for cell in cells for name in _CODE.findall(cell)}


def written() -> dict[str, str]:
    """Metric names in the code, by a name as the documentation has it, and where they stand.

    A name that is put together, ``f"reward/{name}"``, ends in ``<``.
    """
    places: dict[str, str] = {}
    folders = [
        ROOT / "torchrl_grpo" / name for name in ("envs", "rollout", "training", "weight_sync", "distributed")
    ]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        inside = {
            id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr) and len(node.values) == 2:
                first, second = node.values
                start = str(first.value) if isinstance(first, ast.Constant) else ""
                if isinstance(second, ast.FormattedValue) and _METRIC_START.fullmatch(start):
                    places[f"{start}<"] = path.name
            elif (
                isinstance(node, ast.Constant)
                and id(node) not in inside
                and _METRIC.fullmatch(str(node.value))
            ):
                places[str(node.value)] = path.name
    return places


def test_every_metric_written_is_documented() -> None:
    names = {name.partition("<")[0] + "<" if "<" in name else name for name in documented()}
    # Printed at the start, and said on the page to be in no line.
    missing = {name: file for name, file in written().items() if name not in names | {"publish/perturbation"}}
    assert not missing


@pytest.mark.slow
def test_every_documented_metric_is_written() -> None:
    names = {name: name.partition("<")[0] + "<" if "<" in name else name for name in documented()}
    assert len(names) > 35
    code_names = written()
    assert not {name for name, start in names.items() if start not in code_names}


def test_the_table_of_shapes_is_that_of_the_schema() -> None:
    row = re.compile(r'^\|? ?`?(\("\w+", "\w+"\)|"\w+")`?[ |]+`?(\[[\w, ]+\])`?[ |]+(\w+)', re.MULTILINE)
    code = row.findall((ROOT / "torchrl_grpo" / "batch" / "schema.py").read_text())
    page = row.findall(read(ROOT / "docs" / "step.md"))
    assert code == page and len(code) == 21


def test_the_bounds_of_weight_verification_are_those_of_the_code() -> None:
    tree = ast.parse((ROOT / "torchrl_grpo" / "weight_sync" / "publisher.py").read_text())
    values: dict[str, dict[str, float]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            names = [ast.unparse(key).removeprefix("torch.") for key in node.value.keys if key is not None]
            numbers = [ast.literal_eval(value) for value in node.value.values]
            values[ast.unparse(node.targets[0])] = dict(zip(names, numbers, strict=True))
    text = " ".join((ROOT / "docs" / "step.md").read_text().split())
    match = re.search(
        r"at least ([\d.]+) nats in float32, ([\d.]+) in float16 and ([\d.]+) in bfloat16", text
    )
    assert match is not None
    formats = ("float32", "float16", "bfloat16")
    assert dict(zip(formats, map(float, match.groups()), strict=True)) == values["_MIN_BOUND"]
