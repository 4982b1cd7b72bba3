"""Where a node's model lives."""

import torch

from sapo.core.config.load import Config
from sapo.core.errors import UserError


def resolve_device(config: Config) -> torch.device:
    """The device that `config.device` means on this machine. Raises `UserError` where it is not there, or
    where a setting of the learner makes no sense on it."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        problem = f"torch finds {torch.cuda.device_count()} NVIDIA GPUs here"
        raise UserError("device", config.device, problem, 'set device to "auto" or "cpu"')
    if device.type == "cpu" and config.learn.compile:
        problem = "the node learns on the CPU, where a compiled round's bits would not repeat"
        raise UserError("learn.compile", True, problem, "leave it out")
    return device
