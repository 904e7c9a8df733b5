"""`gradsync bench collectives`: each collective over a range of sizes, in the columns of NVIDIA's nccl-tests.

The controller's side: command.py (from options to output), measuring.py (starts and asks the ranks), rows.py
(bandwidths), report.py and picture.py (what a person sees). The ranks' side: rank.py with over_gradsync.py. Both:
kinds.py, cases.py, values.py, operation.py.
"""
