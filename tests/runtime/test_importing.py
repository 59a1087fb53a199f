"""Imports without garbage collections: what is switched off is switched on again, and kept out only once."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from torchrl_grpo.runtime.importing import importing


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


class Knot:
    """An object that refers to itself."""

    itself: Knot


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_imported_objects_are_kept_out_of_collections_once(
    is_first: bool, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gc.enable if enabled else gc.disable)()
    if is_first:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "torch", sys)
    frozen = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
        made = [[number] for number in range(1_000)]
        garbage = Knot()
        garbage.itself, seen = garbage, weakref.ref(garbage)
        del garbage
    assert gc.isenabled() == enabled
    assert seen() is None or not is_first
    assert (gc.get_freeze_count() >= frozen + len(made)) == is_first


def test_collections_go_on_after_an_import_that_fails() -> None:
    gc.enable()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
