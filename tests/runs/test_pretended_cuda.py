"""Pretended GPUs: by which rules operators are refused, and that nothing of the pretense stays behind."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from pretended_cuda import DeviceMismatch, PretendedCuda
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers.utils import is_torch_cuda_available

from torchrl_grpo.runtime import hardware

HAS_GPU = torch.cuda.is_available()


def on(device: str, *shape: int) -> torch.Tensor:
    return torch.ones(shape, device=device)


def positions(device: str) -> torch.Tensor:
    return torch.tensor([0, 1], device=device)


def draw(tensor: str, generator: str) -> torch.Tensor:
    return torch.empty(2, device=tensor).exponential_(generator=torch.Generator(generator).manual_seed(0))


REFUSED: dict[str, Callable[[], Any]] = {
    "two GPUs": lambda: on("cuda:0", 2) + on("cuda:1", 2),
    "a GPU and the CPU": lambda: on("cuda", 2) * torch.ones(2),
    "a number on a GPU, and the CPU": lambda: on("cuda") * torch.ones(2),
    "numbers on two GPUs": lambda: on("cuda:0") + on("cuda:1"),
    "a stack of numbers": lambda: torch.stack([on("cuda"), torch.ones(())]),
    "a sum on the CPU of what is on a GPU": lambda: torch.zeros(()).add_(on("cuda")),
    "a matrix product": lambda: on("cuda", 2, 2) @ torch.ones(2, 2),
    "a choice": lambda: torch.where(on("cuda", 2) > 0, on("cuda", 2), torch.ones(2)),
    "a gather": lambda: on("cuda", 2).gather(0, positions("cpu")),
    "an index on another GPU": lambda: on("cuda:0", 2)[positions("cuda:1")],
    "an index on a GPU": lambda: torch.ones(2)[positions("cuda")],
    "a value put from the CPU": lambda: on("cuda", 2).index_put_((positions("cuda"),), torch.ones(2)),
    "a generator for the CPU": lambda: draw("cuda", "cpu"),
    "a generator for a GPU": lambda: draw("cpu", "cuda"),
    "numbers drawn on a GPU": lambda: torch.rand(2, device="cuda", generator=torch.Generator()),
    "numpy": lambda: on("cuda", 2).numpy(),
    "a GPU that is not there": lambda: on("cuda:2", 2),
}
ALLOWED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "a number on the CPU": (lambda: on("cuda:1", 2) + torch.ones(()), "cuda:1"),
    "a number that fills": (lambda: on("cuda", 2).masked_fill(on("cuda", 2) > 0, torch.zeros(())), "cuda:0"),
    "an index on the CPU": (lambda: on("cuda", 2)[positions("cpu")], "cuda:0"),
    "a mask on the CPU": (lambda: on("cuda", 2)[positions("cpu") > 0], "cuda:0"),
    "a copy": (lambda: on("cuda:1", 2).copy_(torch.ones(2)), "cuda:1"),
    "a copy to the CPU": (lambda: torch.ones(2).copy_(on("cuda", 2)), "cpu"),
    "a slice": (lambda: on("cuda:1", 2)[1:], "cuda:1"),
    "a shape": (lambda: torch.zeros_like(on("cuda:1", 2)), "cuda:1"),
    "a shape elsewhere": (lambda: torch.zeros_like(on("cuda:1", 2), device="cpu"), "cpu"),
    "more of its kind": (lambda: on("cuda:1", 2).new_zeros(3), "cuda:1"),
    "another format": (lambda: on("cuda:1", 2).to(torch.bfloat16), "cuda:1"),
    "as another": (lambda: torch.ones(2).to(on("cuda:1", 2, 2)), "cuda:1"),
    "away": (lambda: on("cuda:1", 2).cpu(), "cpu"),
    "a deep copy": (lambda: copy.deepcopy(on("cuda:1", 2)), "cuda:1"),
    "numbers drawn": (lambda: torch.rand(2, device="cuda:1", generator=torch.Generator("cuda:1")), "cuda:1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_gpu_refuses(name: str) -> None:
    with pytest.raises(DeviceMismatch, match=r"at test_pretended_cuda\.py"), PretendedCuda(gpus=2):
        REFUSED[name]()


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_gpu_allows(name: str) -> None:
    make, device = ALLOWED[name]
    with PretendedCuda(gpus=2):
        made = make()
        assert made.device == torch.device(device)
        assert (made.is_cuda, made.get_device()) == (
            device != "cpu",
            torch.device(device).index or -(device == "cpu"),
        )


def test_devices_follow_contexts_and_the_current_device() -> None:
    with PretendedCuda(gpus=3):
        with torch.device("cuda:2"):
            assert torch.zeros(2).device == torch.tensor(1.0).device == torch.device("cuda:2")
        torch.cuda.set_device(1)
        with torch.cuda.device(2):
            assert on("cuda", 2).device == torch.device("cuda:2")
        assert on("cuda", 2).cuda().device == torch.device("cuda:1")
        assert len(hardware.present().gpus) == torch.cuda.device_count() == 3


def test_gradients_go_back_to_where_a_tensor_was_moved_from() -> None:
    with PretendedCuda(gpus=2):
        here, there = (on(device, 2).requires_grad_() for device in ("cpu", "cuda:0"))
        ((here.to("cuda:1") + there.to("cuda:1")) ** 2).sum().backward()
        assert here.grad is not None and there.grad is not None
        assert (here.grad.device, there.grad.device) == (torch.device("cpu"), torch.device("cuda:0"))
        assert here.grad.tolist() == there.grad.tolist() == [4.0, 4.0]


class LateMix(torch.autograd.Function):
    """Mixes devices, and only on its way back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * torch.ones(2)


def test_a_backward_pass_is_watched() -> None:
    with pytest.raises(DeviceMismatch, match="backward"), PretendedCuda():
        LateMix.apply(on("cuda", 2).requires_grad_()).sum().backward()  # type: ignore[no-untyped-call]


def test_what_makes_a_program_slow_is_counted() -> None:
    with PretendedCuda() as machine:
        tensor = torch.ones(4).to("cuda")
        assert (machine.launches, sum(machine.uploads.values())) == (0, 1)
        (tensor[1:] + 1).view(3, 1).mul_(2)
        assert (machine.launches, sum(machine.syncs.values())) == (2, 0)
        waits: tuple[Any, ...] = (
            lambda: bool(tensor.sum()),
            tensor.tolist,
            tensor.cpu,
            lambda: tensor[tensor > 0],
            tensor.nonzero,
            torch.cuda.synchronize,
        )
        for number, wait in enumerate(waits, start=1):
            wait()
            assert sum(machine.syncs.values()) == number, machine.syncs
        assert all("test_pretended_cuda.py" in place for place in machine.syncs), machine.syncs


def test_a_refusal_that_is_swallowed_is_said_at_the_end() -> None:
    with pytest.raises(DeviceMismatch, match=r"swallowed: aten\.add\.Tensor"), PretendedCuda():
        try:
            on("cuda", 2) + torch.ones(2)
        except RuntimeError:
            torch.ones(2)


def originals() -> list[tuple[Any, str, Any]]:
    """What stands where the pretense replaces something; None where it is inherited."""
    from pretended_torch import replacements  # which imports PEFT

    return [(owner, name, vars(owner).get(name)) for owner, name, _ in replacements(PretendedCuda())]


def assert_untouched(before: list[tuple[Any, str, Any]]) -> None:
    for owner, name, value in before:
        assert vars(owner).get(name) is value, f"{owner}.{name}"
    assert not _get_current_dispatch_mode_stack()
    assert torch.cuda.is_available() == is_torch_cuda_available() == HAS_GPU
    assert torch.ones(2).device == torch.device("cpu") and not torch.ones(2).is_cuda
    if not torch.backends.cuda.is_built():
        with pytest.raises(AssertionError, match="not compiled with CUDA"):
            torch.ones(2, device="cuda")


def test_nothing_of_it_stays_behind() -> None:
    before = originals()
    assert_untouched(before)
    with pytest.raises(ZeroDivisionError), PretendedCuda(gpus=2):
        assert is_torch_cuda_available() and "device" in vars(torch.Tensor)
        kept = on("cuda:1", 2)
        with pytest.raises(DeviceMismatch), PretendedCuda(gpus=1):
            assert torch.cuda.device_count() == 1
            on("cuda:1", 2)
        # The outer one is as it was.
        assert torch.cuda.device_count() == 2 and kept.device == torch.device("cuda:1")
        assert (kept + 1).device == torch.device("cuda:1")
        _ = 1 / 0
    assert_untouched(before)
    # Tensors that are left over are the plain ones they were.
    assert (kept + torch.ones(2)).tolist() == [2.0, 2.0] and kept.device == torch.device("cpu")


def test_an_error_while_it_begins_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = originals()

    def fail(self: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("pretended_cuda.Watch.__enter__", fail)
    with pytest.raises(ZeroDivisionError), PretendedCuda():
        pass
    assert_untouched(before)


def test_threads_that_are_started_inside_are_watched() -> None:
    before = originals()
    release, outlived = threading.Event(), []

    def late() -> None:
        release.wait(timeout=60)
        outlived.append((on("cpu", 2) + 1).device)

    with pytest.raises(DeviceMismatch, match="swallowed"), PretendedCuda(gpus=2):
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(lambda name: (on(name, 2) + 1).device.index, ["cuda:0", "cuda:1"])) == [
                0,
                1,
            ]
            wrong = threads.submit(lambda: on("cuda:0", 2) + on("cuda:1", 2))
        assert isinstance(wrong.exception(), DeviceMismatch)
        thread = threading.Thread(target=late)
        thread.start()
    assert_untouched(before)
    release.set()
    thread.join(timeout=60)
    assert outlived == [torch.device("cpu")]


def test_another_thread_does_not_pretend_at_the_same_time() -> None:
    before = originals()

    def enter() -> None:
        with PretendedCuda():
            pass

    with ThreadPoolExecutor(1) as threads:
        with PretendedCuda(), pytest.raises(RuntimeError, match="pretends already"):
            threads.submit(enter).result()
        threads.submit(enter).result()
    assert_untouched(before)
