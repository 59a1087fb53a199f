"""Variables that this process sets for itself."""

from __future__ import annotations

import os

import pytest

from torchrl_grpo.runtime.own_variables import hidden, inherited, set_own


@pytest.mark.parametrize("theirs", [None, "1", "own"])
def test_children_get_what_the_user_has_set(theirs: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"TORCHRL_GRPO_TEST_{theirs}"
    # It is removed after the test.
    monkeypatch.setenv(name, str(theirs))
    if theirs is None:
        monkeypatch.delenv(name)
    for value in ("earlier", "own"):
        set_own(name, value)
        assert os.environ[name] == value
        assert inherited().get(name) == theirs
        with hidden():
            assert os.environ.get(name) == theirs
        assert os.environ[name] == value
    monkeypatch.setenv(name, "later")
    assert inherited()[name] == "later"
