"""The measurements of gpu.py on one GPU.

scale.py has sizes and rounds, clock.py times, rows.py and targets.py hold the results. The parts are
copying.py, packing.py, and steps.py with peers/ddp.py; hardware.py describes the machine. All but scale.py, rows.py and
targets.py import CuPy, and peers/ddp.py PyTorch.
"""
