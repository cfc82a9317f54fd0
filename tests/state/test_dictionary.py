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


def there_and_back(value: Any) -> Any:
    rest, tensors = take_apart(value)
    return put_together(copy.deepcopy(rest), {path: tensor.clone() for path, tensor in tensors.items()})


def test_parameters_stay_parameters_and_gradients_wanted() -> None:
    weight = torch.ones(2)
    value = [torch.nn.Parameter(weight), torch.nn.Parameter(weight, False), torch.ones(1, requires_grad=True), weight]
    found = there_and_back(value)
    assert [type(each) for each in found] == [type(each) for each in value]
    assert [each.requires_grad for each in found] == [True, False, True, False]


def test_nested_containers_come_back() -> None:
    of_kinds: Any = defaultdict(list, {"x": [torch.ones(2), (torch.zeros(1), "text")]})
    value = {"a": {"b": torch.arange(3)}, 7: [None, 1.5, ()], "d": of_kinds, "o": OrderedDict(z=torch.tensor(2.0))}
    found = there_and_back(value)
    assert list(found) == list(value)
    assert torch.equal(found["a"]["b"], torch.arange(3))
    assert found[7] == [None, 1.5, ()]
    assert type(found["d"]) is defaultdict
    assert torch.equal(found["d"]["x"][0], torch.ones(2))
    assert found["d"]["x"][1][1] == "text"
    assert type(found["o"]) is OrderedDict


def test_nothing_is_copied_and_the_original_stays() -> None:
    weight = nn.Parameter(torch.ones(4))
    value = {"weight": weight, "list": [weight]}
    _, tensors = take_apart(value)
    assert {tensor.data_ptr() for tensor in tensors.values()} == {weight.data_ptr()}
    assert not any(tensor.requires_grad for tensor in tensors.values())
    assert value["weight"] is weight


def test_versions_of_modules_in_state_dicts_are_kept() -> None:
    state: Any = nn.BatchNorm1d(3).state_dict()
    assert there_and_back(state)._metadata == state._metadata


def test_places_that_read_alike_stay_apart() -> None:
    found = there_and_back({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)})
    assert (found["a"]["b"].item(), found["a.b"].item()) == (0, 1)


def test_tensors_that_are_more_than_memory_stay_in_place() -> None:
    rest, tensors = take_apart({"sparse": torch.eye(3).to_sparse()})
    assert not tensors
    assert torch.equal(rest["sparse"].to_dense(), torch.eye(3))


def test_missing_tensor_is_named() -> None:
    rest, _ = take_apart({"state_dict": {"weight": torch.zeros(1)}})
    with pytest.raises(LoadError, match=r"state_dict\.weight"):
        put_together(rest, {})
