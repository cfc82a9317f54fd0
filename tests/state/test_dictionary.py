"""Checkpoint dictionaries, taken apart and put together."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from ml_flashpoint.format.errors import LoadError
from ml_flashpoint.state.dictionary import put_together, take_apart
from tests.local.states import assert_equal


def there_and_back(value: Any) -> Any:
    rest, tensors = take_apart(value)
    return put_together(copy.deepcopy(rest), {path: tensor.clone() for path, tensor in tensors.items()})


def test_it_comes_back() -> None:
    weight = torch.ones(2)
    of_kinds: Any = defaultdict(list, {"x": [torch.ones(2), (torch.zeros(1), "text")]})
    value = {
        "a": {"b": torch.arange(3)},
        "a.b": torch.ones(1),  # reads like the one above
        7: [None, 1.5, ()],
        "default": of_kinds,
        "ordered": OrderedDict(z=torch.tensor(2.0)),
        "sparse": torch.eye(3).to_sparse(),
        "grad": [nn.Parameter(weight), nn.Parameter(weight, False), torch.ones(1, requires_grad=True), weight],
        "module": nn.BatchNorm1d(3).state_dict(),
    }
    found = there_and_back(value)
    assert_equal(found, value)
    assert found["module"]._metadata == value["module"]._metadata  # type: ignore[union-attr]


def test_nothing_is_copied_and_the_original_stays() -> None:
    weight = nn.Parameter(torch.ones(4))
    value = {"weight": weight, "list": [weight]}
    _, tensors = take_apart(value)
    assert {tensor.data_ptr() for tensor in tensors.values()} == {weight.data_ptr()}
    assert not any(tensor.requires_grad for tensor in tensors.values())
    assert value["weight"] is weight


def test_missing_tensor_is_named() -> None:
    rest, _ = take_apart({"state_dict": {"weight": torch.zeros(1)}})
    with pytest.raises(LoadError, match=r"state_dict\.weight"):
        put_together(rest, {})
