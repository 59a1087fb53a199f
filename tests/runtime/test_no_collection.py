"""Pauses of garbage collection: what is switched off is switched on again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from torchrl_grpo.runtime.no_collection import no_collection


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_pause_and_go_on_also_if_the_block_fails(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with no_collection():
        assert not gc.isenabled()
    assert gc.isenabled() == enabled
    with pytest.raises(ImportError), no_collection():
        raise ImportError
    assert gc.isenabled() == enabled
