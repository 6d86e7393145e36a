"""What a checkpoint would give back, without one."""

from __future__ import annotations

import json
from typing import Any

import safetensors.torch

from actorlearner.contracts import Stateful
from actorlearner.statetree import Packed, decode


def saved(stateful: Stateful) -> Any:
    """The state of ``stateful``, to the file format and back."""
    packed = Packed.of(stateful.state_dict(), "saved")
    tensors = safetensors.torch.load(b"".join(bytes(chunk) for chunk in packed.safetensors()))
    return decode(json.loads(packed.skeleton), tensors, packed.files.__getitem__)
