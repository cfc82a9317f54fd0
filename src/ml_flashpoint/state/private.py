"""Private names of torch that this package needs, each with the reason. Nothing else of torch's here is private.

Attributes and methods that cannot be imported are used where they are needed:

* ``DTensor._local_tensor``, ``DTensor._spec``: the shard of this rank, and the layout. ``to_local()`` makes a new
  tensor for autograd at each call, which costs ten times as much.
* ``DistributedDataParallel._get_ddp_logging_data``: the number of parameters whose gradients DDP synchronizes.
* ``DataLoader._get_iterator``: the random numbers that torchdata draws.
"""

from typing import Any

from torch.distributed._shard.sharded_tensor.api import ShardedTensor as ShardedTensor  # values of FSDP's state dicts
from torch.distributed.checkpoint._nested_dict import flatten_state_dict as flatten_state_dict  # the names DCP makes
from torch.distributed.checkpoint._traverse import set_element as set_element  # the way back from such a name
from torch.utils._pytree import SequenceKey as SequenceKey  # public only as torch.utils.pytree, of torch 2.8 on
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils.data._utils.worker import _generate_state

generate_state: Any = _generate_state
"""Makes the seeds of NumPy's generator in a loader's workers."""
