"""What a device's errors mean: memory that a smaller launch may find, or a context that takes no more work."""

from __future__ import annotations

import torch

# torch raises its own class for its allocator only. cuBLAS and cuDNN allocate for themselves, and so do the driver
# (events, graphs, page-locked memory) and the CPU.
OUT_OF_MEMORY = ("CUDA error: out of memory", "_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: ")
CONTEXT_LOST = "CUDA error: "  # an assertion, an illegal address, a lost card: every later call fails as well


def cuda_index(device: torch.device) -> int:
    """The number of a CUDA device, -1 for a CPU."""
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def is_out_of_memory(error: BaseException) -> bool:
    """Whether giving memory back, or asking for less, may help."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def is_context_lost(error: BaseException) -> bool:
    """Whether the process can do nothing more on its device."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or (isinstance(error, RuntimeError) and CONTEXT_LOST in str(error))
