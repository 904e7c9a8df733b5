# CUDA_VISIBLE_DEVICES= gradsync run -n 1 {}
import sys

import gradsync as gs

sys.modules["cupy"] = None
gs.init_process_group("nccl")
