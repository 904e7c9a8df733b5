"""The same as first_all_reduce.py, for PyTorch over gloo, started by torchrun."""

import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
sys.stdout.write(f"{time.monotonic()}\n")
sys.stdout.flush()
dist.destroy_process_group()
