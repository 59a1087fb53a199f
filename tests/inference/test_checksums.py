"""Checksums that see every bit and its place, and layouts learned from fingerprints."""

from __future__ import annotations

import pytest
import torch

from torchrl_grpo.inference import checksums
from torchrl_grpo.inference.checksums import (
    Checksums,
    Part,
    checksum,
    collect_parts,
    compute_checksums,
    merge_ranks,
    ordered_column_sums,
    ordered_row_sums,
    part_checksum,
)
from torchrl_grpo.inference.layout import Seen, fingerprint, in_format, locate_weights

CPU = torch.device("cpu")
FORMATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [*FORMATS, torch.float64])
@pytest.mark.parametrize("shape", [(6, 5), (4, 8), (3, 7, 3), (9,), (16,)])
def test_a_checksum_sees_one_bit_and_the_order_and_not_the_layout(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.randn(shape).to(dtype)
    assert checksum(tensor) == checksum(tensor.clone())
    for at in range(tensor.numel()):
        other = tensor.clone()
        flat = other.view(-1)
        flat[at] = torch.nextafter(flat[at], torch.tensor(9.0, dtype=dtype))
        assert checksum(other) != checksum(tensor)
    assert checksum(tensor.flip(-1)) != checksum(tensor)
    if tensor.dim() > 1:
        assert checksum(tensor.flip(0)) != checksum(tensor)
        turned = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
        assert not turned.is_contiguous() and checksum(turned) == checksum(tensor)


def by_hand(tensor: torch.Tensor) -> int:
    """The same sums over Python's own integers, from the definition; how often a word counts is measured."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    words = rows.contiguous().view(torch.int64)
    total = 0
    for at, word in enumerate(words.flatten().tolist()):
        unit = torch.zeros_like(words)
        unit.view(-1)[at] = 1
        weight = checksum(unit.view(torch.float32))
        assert weight % 2 == 1
        total += weight * word
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


def test_a_checksum_is_the_sum_that_its_docstring_says() -> None:
    for tensor in (torch.randn(5, 6), torch.randn(3, 8).bfloat16(), torch.randn(2, 3, 4)):
        assert checksum(tensor) == by_hand(tensor)
    ones = torch.eye(8 * 64, dtype=torch.int64).view(-1, 8, 64).view(torch.float32)
    # Four segments of 16 words in each of eight rows.
    assert len({checksum(tensor) for tensor in ones}) == 8 * 4
    assert len(ordered_row_sums(torch.eye(64, dtype=torch.int64).view(torch.float32)).unique()) == 64


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_checksum_does_not_depend_on_where_in_memory_a_tensor_begins(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 16).to(dtype)
    for start in range(1, 5):
        room = torch.zeros(start + tensor.numel(), dtype=dtype)
        room[start:] = tensor.flatten()
        assert checksum(room[start:].view(3, 16)) == checksum(tensor)


def test_parts_of_two_rows_that_change_places_change_a_checksum() -> None:
    tensor = torch.randn(4, 16)
    for columns in (slice(0, 2), slice(4, 10), slice(0, 16)):
        other = tensor.clone()
        other[1, columns], other[3, columns] = tensor[3, columns], tensor[1, columns]
        assert checksum(other) != checksum(tensor)


def test_the_order_in_a_segment_counts_where_layouts_are_learned() -> None:
    tensor = torch.randn(3, 128)
    other = tensor.clone()
    # A word is two numbers of float32, and a segment 16 words.
    other[:, :2], other[:, 2:4] = tensor[:, 2:4], tensor[:, :2]
    assert checksum(other) == checksum(tensor)
    assert bool((ordered_row_sums(other) != ordered_row_sums(tensor)).all())
    apart = tensor.clone()
    apart[:, :2], apart[:, 32:34] = tensor[:, 32:34], tensor[:, :2]
    assert checksum(apart) != checksum(tensor)


@pytest.mark.parametrize("shape", [(6, 10), (3, 6, 10), (0, 4), (4, 0)])
def test_sums_of_columns_are_those_of_the_transposed_tensor(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "_PIECE_BYTES", 3 * 4 * 6)  # three columns of six numbers
    tensor = torch.randn(shape)
    assert torch.equal(ordered_column_sums(tensor), ordered_row_sums(tensor.transpose(-1, -2)))


def test_what_is_packed_or_empty_is_read_as_one_row() -> None:
    packed = torch.arange(512).to(torch.uint8).view(-1, 1)
    assert checksum(packed) == checksum(packed.flatten())
    other = packed.clone()
    other[[3, 70]] = packed[[70, 3]]
    assert checksum(other) != checksum(packed)
    assert checksum(torch.empty(0)) == checksum(torch.empty(0, 4)) == 0


def test_copies_of_a_name_are_listed_one_by_one() -> None:
    first, other = torch.randn(2, 4), torch.randn(3)
    checksums = compute_checksums([("a", first), ("b", other), ("a", first)], torch.float32)
    assert checksums.values == {"a": (checksum(first),) * 2, "b": (checksum(other),)}
    assert checksums.dtype == "float32" and compute_checksums([], torch.float16).values == {}


SHAPES = {
    "q": (8, 16),
    "k": (4, 16),
    "v": (4, 16),
    "q.bias": (8,),
    "k.bias": (8,),
    "turned": (6, 10),
    "experts": (3, 4, 8),
    "heads": (12, 16),
    "scale": (1,),
    "lost": (5, 16),
}


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_layout_is_learned_whatever_the_engine_does_with_rows(dtype: torch.dtype) -> None:
    order = torch.tensor([0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11])

    def engine(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            "qkv": torch.cat([tensors["q"], tensors["k"], tensors["v"]]),
            "qkv.bias": torch.cat([tensors["q.bias"], tensors["k.bias"]]).float(),
            "conv": tensors["turned"].T.contiguous(),
            "w13": torch.cat([tensors["experts"], torch.zeros(1, 4, 8, dtype=dtype)]),
            "mixed": tensors["heads"][order],
            "mixed_again": tensors["heads"],
            "scale": tensors["scale"],
            "computed": -tensors["lost"].float().exp().to(dtype),
        }

    prints = {name: fingerprint(name, shape, dtype, CPU) for name, shape in SHAPES.items()}
    seen = {key: Seen.of(in_format(tensor, dtype)) for key, tensor in engine(prints).items()}
    layout = locate_weights(SHAPES, dtype, seen, CPU)
    assert layout.unreadable(SHAPES) == ["lost"]
    weights = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}

    def read(held: dict[str, torch.Tensor]) -> dict[str, list[int]]:
        values: dict[str, list[int]] = {}
        for key, tensor in held.items():
            for name, part, value in layout.read_parts(key, tensor):
                assert part is None
                values.setdefault(name, []).append(int(value))
        return values

    expected = {name: [checksum(tensor)] for name, tensor in weights.items() if name != "lost"}
    expected["heads"] *= 2
    assert read(engine(weights)) == expected
    for name in expected:
        spoiled = {**weights, name: weights[name].clone()}
        spoiled[name].view(-1)[-1] += 1
        wrong = {other for other, values in read(engine(spoiled)).items() if values != expected[other]}
        assert wrong == {name}
    # What float32 holds beyond the published format is another number too.
    held = engine(weights)
    held["qkv.bias"] = held["qkv.bias"] + 1e-4
    if dtype is not torch.float32:
        assert read(held)["q.bias"] != expected["q.bias"]


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_layout_says_what_arrived_in_part(dtype: torch.dtype) -> None:
    shapes = {"matrix": (6, 16), "vector": (30,), "split": (8, 16), "split.bias": (16,), "gone": (4, 16)}
    prints = {name: fingerprint(name, shape, dtype, CPU) for name, shape in shapes.items()}

    def torn(**changes: torch.Tensor) -> list[str]:
        tensors = {**prints, **changes}
        held = {
            "turned": tensors["matrix"].T.contiguous(),
            "vector": tensors["vector"],
            "one": tensors["split"][:5],
            "other": tensors["split"][5:],
            "one.bias": tensors["split.bias"][:8],
            "other.bias": tensors["split.bias"][8:],
        }
        return locate_weights(shapes, dtype, {key: Seen.of(tensor) for key, tensor in held.items()}, CPU).torn

    assert torn() == [], "in several places, or nowhere, is not in part"
    for name in ("matrix", "vector"):
        spoiled = prints[name].clone()
        spoiled.view(-1)[7] = 1000.0
        assert torn(**{name: spoiled}) == [name]
        spoiled.fill_(1000.0)
        assert torn(**{name: spoiled}) == []


# -- parts of tensors on several ranks


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", [(8, 16), (12, 2048), (6, 1152), (3, 4, 192), (768,)])
def test_checksums_of_parts_add_up_to_that_of_the_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    matrix = tensor.reshape(-1, shape[-1])
    rows, columns = matrix.shape
    cuts = [((0, rows), (0, columns // 4), (columns // 4, columns)), ((0, rows // 2), (0, columns))]
    for (top, bottom), *spans in cuts:
        parts = [Part((top, bottom), span) for span in spans]
        if bottom < rows:
            parts.append(Part((bottom, rows), (0, columns)))
        if any(part.size == 0 for part in parts):
            continue
        ranks = []
        for part in parts:
            piece = matrix[slice(*part.rows), slice(*part.columns)]
            value = part_checksum(piece, part, columns)
            assert value is not None
            ranks.append(Checksums("x", {}, {"t": ((part, int(value)),)}))
        assert merge_ranks(ranks, {"t": shape}).values == {"t": (checksum(tensor),)}
        # A part that two ranks hold counts twice, so that one wrong copy is seen.
        wrong = Checksums("x", {}, {"t": ((parts[0], 7),)})
        copies = merge_ranks([*ranks, wrong], {"t": shape}).values["t"]
        assert len(copies) == 2 and copies[0] == checksum(tensor) != copies[1]
        assert merge_ranks(ranks[1:], {"t": shape}).values == {}, "a part is missing"


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_layout_of_two_ranks_is_learned(dtype: torch.dtype) -> None:
    shapes = {"up": (8, 32), "down": (6, 64), "norm": (16,), "up.bias": (32,), "kept": (4, 32)}

    def rank(tensors: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
        half = slice(number * 4, number * 4 + 4)
        return {
            "fused": torch.cat([tensors["up"][half], tensors["kept"]]),
            "down": tensors["down"][:, number * 32 : number * 32 + 32].contiguous(),
            "norm": tensors["norm"],
            "bias": tensors["up.bias"][number * 16 : number * 16 + 16],
        }

    prints = {name: fingerprint(name, shape, dtype, CPU) for name, shape in shapes.items()}
    weights = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    ranks = []
    for number in range(2):
        seen = {key: Seen.of(tensor) for key, tensor in rank(prints, number).items()}
        layout = locate_weights(shapes, dtype, seen, CPU, shards=2)
        assert layout.torn == [] and layout.unreadable(shapes) == []
        held = [
            part for key, tensor in rank(weights, number).items() for part in layout.read_parts(key, tensor)
        ]
        ranks.append(collect_parts(held, dtype))
    merged = merge_ranks(ranks, shapes)
    for name, tensor in weights.items():
        copies = 2 if name in ("norm", "kept") else 1
        assert merged.values[name] == (checksum(tensor),) * copies, name
