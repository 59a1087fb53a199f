"""The file of a report: a page in which only its own scripts can run, and the command that writes it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from run_files import HOSTILE, Elements, inflated, payload, rollout, write_lines, write_run

from torchrl_grpo.cli import report as command
from torchrl_grpo.report import chart_library, page_file, write
from torchrl_grpo.report.reader import RunReader
from torchrl_grpo.report.serve import ReportServer
from torchrl_grpo.report.write import ReportWriter


@pytest.fixture
def page(tmp_path: Path) -> str:
    write_run(tmp_path / "run", steps=3)
    hostile: dict[str, Any] = {
        "response": HOSTILE,
        "rewards": {HOSTILE: 1.0},
        "errors": {HOSTILE: HOSTILE},
        "verdicts": {HOSTILE: HOSTILE},
        "messages": [{"role": HOSTILE, "content": HOSTILE}],
    }
    with (tmp_path / "run/rollouts.jsonl").open("a") as file:
        file.write(json.dumps(rollout(3, 99, prompt=HOSTILE, **hostile)) + "\n")
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, HOSTILE: 1.0}) + "\n")
    (tmp_path / "run/summary.json").write_text(json.dumps({"grader": HOSTILE, "seconds": float("nan")}))
    reader = RunReader(tmp_path / "run")
    reader.update()
    return page_file.render([reader.contents()])


def test_only_scripts_whose_checksum_the_policy_names_can_run(page: str) -> None:
    elements = Elements(page)
    policy = next(
        a["content"] for tag, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["connect-src"] == "'none'" and rules["img-src"] == "data:"
    for tag in ("script", "style"):
        texts = [text for kind, text in elements.content if kind == tag and not text.startswith("{")]
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert rules[f"{tag}-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    assert not any(name in ("src", "href") or name.startswith("on") for _, a in elements.tags for name in a)


def test_text_of_a_model_makes_no_element(page: str) -> None:
    tags = [tag for tag, _ in Elements(page).tags]
    assert tags.count("script") == 3 and not {"img", "iframe", "object"} & set(tags)
    assert "@@" not in re.sub(r"<script type=.*?</script>", "", page, flags=re.DOTALL)


def test_the_page_has_the_data_of_the_run(page: str) -> None:
    (run,) = payload(page)["runs"]
    texts = json.loads(inflated(run["texts"]))
    assert texts["rollouts"][-1]["response"] == HOSTILE.replace("\ud800", "?")
    assert inflated(run["rollouts"]["step"]["deflate"])[-4:] == bytes([3, 0, 0, 0])
    assert run["summary"]["seconds"] is None


def test_a_page_of_several_runs_has_each(tmp_path: Path) -> None:
    readers = [RunReader(write_run(tmp_path / name, steps=2)) for name in ("a", "b")]
    for reader in readers:
        reader.update()
    page = page_file.render([reader.contents() for reader in readers])
    assert [run["name"] for run in payload(page)["runs"]] == ["a", "b"]


def test_without_the_drawing_library_the_page_says_what_is_missing(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not payload(page)["missing"] and "uPlot" in page
    monkeypatch.setattr(chart_library, "PACKAGE", "no-such-package")
    with_none = page_file.render([RunReader(tmp_path / "run").contents()])
    assert "pip install no-such-package==" in payload(with_none)["missing"]


def test_a_drawing_library_of_other_content_is_not_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chart_library.load().script and not chart_library.load().missing
    monkeypatch.setitem(chart_library._SHA256, "uplot.iife.min.js", "0" * 64)
    library = chart_library.load()
    assert library.script == library.style == "" and "another uPlot" in library.missing


def test_the_command_writes_the_report_from_the_files_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", steps=2)
    command.main([str(run)])
    assert payload((run / "report.html").read_text())["runs"][0]["name"] == "run"
    note, written = capsys.readouterr().out.splitlines()
    assert note.startswith(f"note: {run}: .hydra/config.yaml is missing, ")
    assert written.startswith(f"Written to {run}/report.html (")
    assert not [path for path in run.iterdir() if path.name.startswith(".")], "nothing was left aside"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "RUN=nowhere: there is no metrics.jsonl"),
        ([], "the following arguments are required: RUN"),
        (["RUN", "--watch", "--port", "70000"], "--port=70000: ports are 0 to 65535"),
    ],
)
def test_a_mistake_ends_the_command_with_what_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    run = write_run(tmp_path / "run", steps=1)
    with pytest.raises(SystemExit) as ended:
        command.main([str(run) if word == "RUN" else word for word in words])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_the_command_names_the_file_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", steps=1)
    (run / "rollouts.jsonl").unlink()
    (run / "rollouts.jsonl").mkdir()
    with pytest.raises(SystemExit) as ended:
        command.main([str(run)])
    message = capsys.readouterr().err
    assert ended.value.code == 2 and "rollouts.jsonl cannot be read: is not a regular file; " in message
    assert "report.html" not in message


def test_a_report_that_cannot_be_written_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    writer = ReportWriter(write_run(tmp_path / "run", steps=2), warnings.append)
    writer.write()
    before = (tmp_path / "run/report.html").read_text()

    def fail(path: Path, content: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(write, "replace", fail)
    writer.write()
    writer.write()
    (warning,) = warnings
    assert "No space left on device" in warning and "grpo-report" in warning
    assert (tmp_path / "run/report.html").read_text() == before


def test_a_failed_upload_has_a_message_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    run = write_run(tmp_path / "run {x}", steps=1)
    writer = ReportWriter(run, warnings.append)
    monkeypatch.setattr(
        write, "replace", lambda path, content: (_ for _ in ()).throw(OSError(28, "No space"))
    )
    writer.write()
    for _ in range(2):
        # There is nothing to upload to.
        writer.upload(None)  # type: ignore[arg-type]
    assert len(warnings) == 2 and "could not be written" in warnings[0]
    upload = f"warning: {run}/report.html could not be uploaded (AttributeError: "
    assert warnings[1].startswith(upload) and warnings[1].endswith("the file stays in its folder")


def get(url: str, method: str = "GET", host: str | None = None) -> tuple[int, bytes, str | None]:
    request = urllib.request.Request(url, method=method, headers={} if host is None else {"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read(), answer.headers["ETag"]
    except urllib.error.HTTPError as error:
        return error.code, b"", None


def test_a_watched_run_is_served_to_this_machine_at_a_secret_address(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    with ReportServer(run, 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            assert server.server_address[0] == "127.0.0.1" and len(server.path) > 20
            status, page, tag = get(server.url)
            assert status == 200 and payload(page.decode())["watched"]
            assert get(server.url, "HEAD") == (200, b"", tag)
            for url, host in [
                (server.url.replace(server.path, "/"), None),
                (server.url.replace(server.path, "/other/"), None),
                (server.url, "evil.example"),
                (server.url, "[bad"),
            ]:
                assert get(url, host=host)[0] == 404
            write_lines(run / "metrics.jsonl", [{"step": step, "reward/mean": 0.5} for step in range(30)])
            assert get(server.url, "HEAD")[2] != tag
            assert (
                len(inflated(payload(get(server.url)[1].decode())["runs"][0]["steps"]["deflate"])) == 4 * 30
            )
        finally:
            server.shutdown()
