"""What is tracked comes back: buffers of all kinds, generators, devices; and what cannot be tracked."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ml_flashpoint import Flashpoint
from ml_flashpoint.format.errors import (
    FlashpointError,
    InvalidArgumentError,
)
from tests.support.loops import Stored, assert_same_state, resumed, trained_model
from tests.support.tensors import OVERLAPPING


class Buffered(nn.Module):
    """A layer, and a buffer of whatever kind."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("buffer", buffer)


_COMPLEX = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).reshape(2, 3)
_BUFFERS = {
    "sparse": torch.eye(3).to_sparse(),
    "csr": torch.eye(3).to_sparse_csr(),
    "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "conjugate": _COMPLEX.conj(),
    "negative": _COMPLEX.conj().imag,
    "expanded": torch.arange(3.0).expand(2, 3),
    "overlapping": torch.arange(6.0).as_strided((3, 3), (1, 1)),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
}


@pytest.mark.parametrize("kind", _BUFFERS)
def test_buffers_of_all_kinds(base: Path, kind: str) -> None:
    buffer = _BUFFERS[kind]
    with Flashpoint(base, strict=True) as fp:
        assert fp.track(model=Buffered(buffer)).resume() == 0
        fp.step()
    again = Buffered(buffer.clone())
    with torch.no_grad():
        again.buffer.zero_() if kind != "quantized" else None
    with Flashpoint(base, strict=True) as fp:
        assert fp.track(model=again).resume() == 1
    dense = [each.dequantize() if each.is_quantized else each.to_dense() for each in (buffer, again.buffer)]
    assert torch.equal(*dense)


_VIEWS = {"conjugate": torch.Tensor.conj, "negative": lambda each: each.conj().imag, **OVERLAPPING}


@pytest.mark.parametrize("view", _VIEWS.values(), ids=_VIEWS)
def test_a_lazy_view_or_one_whose_elements_share_memory_is_loaded_into_such_a_view(
    base: Path, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = Buffered(view(_COMPLEX.clone()))
    with Flashpoint(base, strict=True) as fp:
        assert fp.track(model=model).resume() == 0
        fp.step()
    again = Buffered(view(torch.zeros_like(_COMPLEX)))
    with Flashpoint(base, strict=True) as fp:
        assert fp.track(model=again).resume() == 1
    assert torch.equal(again.state_dict()["buffer"], model.state_dict()["buffer"])


def _save_and_wait(fp: Flashpoint) -> None:
    fp.step()
    fp.wait()


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
        assert fp.track(model=Buffered(buffer)).resume() == 0
        with pytest.raises(FlashpointError, match=r"'model\.buffer'"):
            _save_and_wait(fp)


def test_state_is_that_of_the_moment_of_saving(base: Path) -> None:
    model, stored = nn.Linear(64, 64), Stored([1])
    with Flashpoint(base) as fp:
        fp.track(model=model, stored=stored).save(1)
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            model.weight.zero_()
        stored.value.append(2)
    fresh = nn.Linear(64, 64)
    resumed(base, model=fresh, stored=stored)
    torch.testing.assert_close(dict(fresh.state_dict()), expected, rtol=0, atol=0)
    assert stored.value == [1]


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


@pytest.mark.cuda
def test_on_cuda(base: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(64, 64, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        return {"model": model, "optimizer": optimizer, "stored": Stored(torch.rand(3, device="cuda"))}

    saved = make(1)
    with Flashpoint(base, strict=True) as fp:
        fp.track(**saved).resume()
        for _ in range(3):
            saved["model"](torch.rand(8, 64, device="cuda")).square().sum().backward()
            saved["optimizer"].step()
            saved["optimizer"].zero_grad()
            fp.step()
        drawn = torch.rand(5, device="cuda")
    fresh = make(2)
    assert resumed(base, **fresh) == 3
    assert torch.equal(torch.rand(5, device="cuda"), drawn)
    assert_same_state(fresh["optimizer"], saved["optimizer"])
    assert fresh["stored"].value.is_cuda
    assert torch.equal(fresh["stored"].value, saved["stored"].value)
    torch.testing.assert_close(fresh["model"].state_dict(), saved["model"].state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["1st", "with space", "_hidden", "a.b", ""])
def test_names_must_be_identifiers(base: Path, name: str) -> None:
    with Flashpoint(base) as fp, pytest.raises(InvalidArgumentError, match=r"name='") as caught:
        fp.track(**{name: Stored()})
    assert caught.value.value == repr(name)


def test_tracking_is_checked(base: Path) -> None:
    with Flashpoint(base) as fp:
        stored = Stored()
        assert fp.track(stored=stored) is fp
        with pytest.raises(InvalidArgumentError, match="name='stored'"):
            fp.track(stored=Stored())
        with pytest.raises(InvalidArgumentError, match="already, under another name"):
            fp.track(again=stored)
        for value in (3, object(), Stored):
            with pytest.raises(InvalidArgumentError, match="loader must have"):
                fp.track(loader=value)
        fp.resume()
        with pytest.raises(FlashpointError, match="before resume"):
            fp.track(late=Stored())


def test_tracking_ends_with_the_first_save(base: Path) -> None:
    with Flashpoint(base) as fp:
        fp.track(stored=Stored(1)).step()
        with pytest.raises(FlashpointError, match="tracking ends"):
            fp.track(late=Stored())


@pytest.mark.parametrize("call_it", [Flashpoint.resume, Flashpoint.step, Flashpoint.save])
def test_nothing_tracked(base: Path, call_it: Callable[[Flashpoint], Any]) -> None:
    with Flashpoint(base) as fp, pytest.raises(FlashpointError, match="nothing is tracked"):
        call_it(fp)
