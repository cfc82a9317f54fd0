"""What is tracked comes back: buffers of all kinds, values, generators; and what cannot be saved is named."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ml_flashpoint import Flashpoint
from ml_flashpoint.format.errors import FlashpointError
from tests.support.loops import Stored, resumed, save, save_and_wait, trained_model
from tests.support.tensors import OVERLAPPING


class Buffered(nn.Module):
    """A layer, and buffers of whatever kind."""

    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


def complex_numbers() -> torch.Tensor:
    return torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).reshape(2, 3)


# Lazy views, and those whose elements share memory, are loaded into such views.
_VIEWS = {"conjugate": torch.Tensor.conj, "negative": lambda each: each.conj().imag, **OVERLAPPING}
_BUFFERS = {
    "sparse": torch.eye(3).to_sparse(),
    "csr": torch.eye(3).to_sparse_csr(),
    "conjugate_into_plain": complex_numbers().conj(),
    "negative_into_plain": complex_numbers().conj().imag,
    "expanded_into_plain": torch.arange(3.0).expand(2, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
}


def test_buffers_of_all_kinds(base: Path) -> None:
    saved = {name.replace(" ", "_"): view(complex_numbers()) for name, view in _VIEWS.items()} | _BUFFERS
    saved["quantized"] = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    blank = {name.replace(" ", "_"): view(torch.zeros_like(complex_numbers())) for name, view in _VIEWS.items()}
    blank |= {name: buffer.clone().zero_() for name, buffer in _BUFFERS.items()}
    blank["quantized"] = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.quint8)
    save(base, model=Buffered(**saved))
    assert resumed(base, model=Buffered(**blank)) == 1
    for name, buffer in saved.items():
        dense = [each.dequantize() if each.is_quantized else each.to_dense() for each in (buffer, blank[name])]
        assert torch.equal(*dense), name


_RAGGED = [torch.ones(2, 3), torch.ones(4, 3)]


@pytest.mark.parametrize(
    "buffer",
    [
        torch.nested.nested_tensor(_RAGGED),
        torch.nested.nested_tensor(_RAGGED, layout=torch.jagged),
        torch.ones(3, 4).to_mkldnn(),
        torch.empty(3, device="meta"),
    ],
    ids=["nested", "jagged", "mkldnn", "meta"],
)
def test_a_buffer_that_cannot_be_saved_is_told_by_name(base: Path, buffer: torch.Tensor) -> None:
    with Flashpoint(base, strict=True) as fp:
        assert fp.track(model=Buffered(buffer=buffer)).resume() == 0
        with pytest.raises(FlashpointError, match=r"'model\.buffer'"):
            save_and_wait(fp)


def test_memory_that_was_let_go_of_fails_the_save_and_nothing_else(base: Path) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with Flashpoint(base) as fp:
        fp.track(model=model).resume()
        save_and_wait(fp)
        storage = model[0].weight.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        save_and_wait(fp)
        assert "no memory" in str(fp.health.last_error)
        storage.resize_(size)
        save_and_wait(fp)
        assert (fp.health.saves, fp.health.failures) == (2, 1)


def test_saves_in_inference_mode(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of callbacks that are called at the end of an evaluation; and saves outside of it that use the same memory."""
    monkeypatch.setenv("FLASHPOINT_COPY_THREADS", "4")

    def make() -> dict[str, Any]:
        model = nn.Linear(3000, 1000)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9)}

    saved, again = make(), make()
    with Flashpoint(base, strict=True) as fp:
        fp.track(**saved).resume()
        for number in range(6):
            saved["model"](torch.randn(2, 3000)).square().mean().backward()
            saved["optimizer"].step()
            with torch.inference_mode(number % 3 < 2):
                fp.step()
            fp.wait()
    with torch.inference_mode():
        assert resumed(base, **again) == 6
    assert torch.equal(saved["model"].weight, again["model"].weight)


def test_values_of_all_sorts_come_back_as_they_were_at_the_save(base: Path) -> None:
    value = {
        "a": [1, (2.5, None)],
        "b": {3, 4},
        "c": b"\0\xff",
        "d": np.arange(3),
        "e": torch.ones(2, dtype=torch.bool),
    }
    stored, again = Stored(value), Stored()
    with Flashpoint(base, strict=True) as fp:
        fp.track(stored=stored).save(1)
        value["a"].append(2)  # type: ignore[attr-defined]
        value["d"][0] = 9  # type: ignore[index]
    assert resumed(base, stored=again) == 1
    assert [again.value[key] for key in "abc"] == [[1, (2.5, None)], {3, 4}, b"\0\xff"]
    assert again.value["d"].tolist() == [0, 1, 2]
    assert again.value["e"].tolist() == [True, True]


def test_a_job_without_a_module_or_an_optimizer_saves_again_and_again(base: Path) -> None:
    stored, again = Stored(), Stored()
    with Flashpoint(base, strict=True) as fp:
        fp.track(stored=stored).resume()
        for stored.value in (1, 2, 3):
            fp.step()
            assert fp.wait()
    assert resumed(base, stored=again) == again.value == 3


class WithExtra(nn.Linear):
    extra: Any = 0

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


def test_modules_of_all_sorts(base: Path) -> None:
    def make() -> dict[str, Any]:
        tied = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        tied[1].weight = tied[0].weight
        return {"extra": WithExtra(3, 2), "tied": tied, "stateless": nn.GELU()}

    saved, fresh = make(), make()
    saved["extra"].extra = [1, "two"]
    save(base, **saved)
    assert resumed(base, **fresh) == 1
    assert fresh["extra"].extra == [1, "two"]
    for name, module in saved.items():
        assert all(map(torch.equal, fresh[name].parameters(), module.parameters()))


def test_generators_are_restored_and_left_alone_otherwise(base: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    def seed(value: int) -> None:
        random.seed(value)
        np.random.seed(value)
        torch.manual_seed(value)

    model = trained_model()
    seed(7)
    fresh_draw = draw()
    seed(7)
    with Flashpoint(base) as fp:
        assert fp.track(**model).resume() == 0
        assert draw() == fresh_draw
        fp.save(1)
        expected = draw()
        fp.wait()
    seed(8)
    resumed(base, **model)
    assert draw() == expected
