"""Nothing is compiled in this process from now on: what megatron-core has compiled takes a minute on a CPU.

Importing this does it; programs that a template forks have it in their ``preload``.
"""

from __future__ import annotations

import torch

torch.compiler.set_stance("force_eager")
