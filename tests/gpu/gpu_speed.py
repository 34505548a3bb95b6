"""Prints how fast each GPU of this machine copies and multiplies: are servers on two of them comparable?"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch


def median_ms(work: Callable[[], object]) -> float:
    """Median of 30 runs behind 10 that warm up."""
    times = []
    for i in range(40):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        if i >= 10:
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def speed(index: int) -> dict[str, float | str]:
    """Copied bytes (read and written) and bf16 multiplications a second."""
    with torch.cuda.device(index):
        source = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
        target = torch.empty_like(source)
        left, right = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return {
            "gpu": torch.cuda.get_device_name(index),
            "copy_tb_s": 4 * source.numel() / median_ms(lambda: target.copy_(source)) / 1e9,
            "bf16_tflop_s": 2 * 4096**3 / median_ms(lambda: left @ right) / 1e9,
        }


if __name__ == "__main__":
    print(json.dumps([speed(index) for index in range(torch.cuda.device_count())], indent=1))
