"""One thread per worker: the tensors are small and the workers share the cores.

Without a GPU, Triton's interpreter runs the kernels: to be asked for before triton is imported.
"""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
