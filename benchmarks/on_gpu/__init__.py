"""What gpu.py measures on one GPU, part by part.

scale.py says how much of everything, clock.py times it, rows.py and targets.py say what came out of it. The parts are
copying.py, packing.py, and steps.py with ddp.py; hardware.py describes the machine. All but scale.py, rows.py and
targets.py import CuPy, and ddp.py PyTorch.
"""
