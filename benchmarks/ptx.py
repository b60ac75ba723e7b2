"""Hashes of the kernels' compiled code, to see whether a commit changed it; needs no GPU.

    git worktree add /tmp/before COMMIT
    python benchmarks/ptx.py > now.txt
    python benchmarks/ptx.py --source /tmp/before > before.txt
    cmp before.txt now.txt

Prints a line for each kernel that training steps, evaluation and a folded layer launch, in several
shapes, precisions and layouts: its name and the hash of its PTX without debug lines. Kernels of
SyncCE are left out. It takes minutes, because all kernels are compiled; --capability selects the
compute capability, by default 9.0.
"""

import argparse
import hashlib
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DEBUG = re.compile(r"\s*(\.loc|\.file|//|\.section|\.b(8|16|32|64)\s|\$L__(info|func|tmp))")
SHARED_MEMORY = 227 * 1024


def without_gpu(capability: int) -> None:
    """Have Triton compile for a GPU that is not there."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
        )
    )
    torch.cuda.current_device = lambda: 0


def launched() -> dict[Any, Any]:
    """Every kernel that the layers below would launch, by its key."""
    import torch
    from torch import nn

    from _kernels import kernels_on
    from cenet import (
        BatchDecorrelation2d,
        ChannelEquilibrium2d,
        InstanceReweighting2d,
        NormCE2d,
        fold_ce,
    )
    from cenet.kernels import tiles
    from cenet.kernels.launch import collecting

    if hasattr(tiles, "room_for"):  # not in earlier versions
        tiles.room_for = lambda x: SHARED_MEMORY
    half, last = torch.bfloat16, torch.channels_last

    def train(
        n: int, channels: int, side: int, dtype: torch.dtype, layout: torch.memory_format,
        kind: Any = ChannelEquilibrium2d, act: Any = nn.ReLU, *, residual: bool = False,
        evaluate: bool = False, **settings: Any,
    ) -> None:  # fmt: skip
        x = torch.zeros(n, channels, side, side, dtype=dtype).contiguous(memory_format=layout)
        layer = NormCE2d(nn.BatchNorm2d(channels), kind(channels, **settings), act())
        layer.train(not evaluate)
        y = layer(x.requires_grad_(), residual=torch.zeros_like(x) if residual else None)
        y.backward(torch.zeros_like(y))

    with kernels_on("cpu"), collecting() as found:
        for layout in (last, torch.contiguous_format):
            train(8, 64, 112, half, layout)
            train(64, 256, 56, half, layout)
            train(64, 512, 28, half, layout, residual=True)
            train(64, 1024, 14, half, layout, residual=True)
            train(32, 2048, 7, half, layout)
            train(128, 512, 2, half, layout)
            train(8, 64, 32, half, layout, pool=2)
            train(8, 58, 14, torch.float32, layout)
            network = nn.Sequential(
                nn.Conv2d(3, 64, 1), NormCE2d(nn.BatchNorm2d(64), ChannelEquilibrium2d(64))
            )
            with torch.no_grad():
                fold_ce(network.eval())(torch.zeros(2, 3, 14, 14).to(memory_format=layout))
        train(64, 256, 14, torch.float16, last)
        train(64, 256, 14, half, last, BatchDecorrelation2d)
        train(64, 256, 14, half, last, InstanceReweighting2d)
        train(64, 256, 14, half, last, act=lambda: nn.LeakyReLU(0.1))
        train(64, 256, 14, half, last, evaluate=True)
    return found


def main() -> None:
    """Compile, and print a line for each kernel."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root = Path(__file__).resolve().parents[1]
    parser.add_argument(
        "--source", type=Path, default=root, help="checkout of cenet to hash; default: this one"
    )
    parser.add_argument(
        "--capability", type=int, default=90, help="compute capability times ten: 80 for 8.0"
    )
    given = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "0"
    for folder in ("tests", "tests/helpers", "src"):
        sys.path.insert(0, str(given.source.resolve() / folder))
    without_gpu(given.capability)
    found = launched()

    from cenet.kernels.launch import compile_kernel

    for key, one in found.items():
        lines = compile_kernel(key, one).asm["ptx"].splitlines()
        code = "\n".join(line.split("//")[0] for line in lines if not DEBUG.match(line))
        name = one.kernel.__name__
        print(name, hashlib.sha256(code.encode()).hexdigest()[:16], flush=True)


if __name__ == "__main__":
    main()
