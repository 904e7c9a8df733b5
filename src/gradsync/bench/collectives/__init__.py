"""`gradsync bench collectives`: each collective over a range of sizes, in the columns of NVIDIA's nccl-tests.

The controller's side: command.py (from options to output), systems.py (who is compared, and how ranks start),
measuring.py (who measures when), rows.py (bandwidths), report.py and picture.py (what a person sees).
The ranks' side: rank.py, with over_gradsync.py, over_torch.py or over_mpi.py. Both: kinds.py, cases.py, values.py.
"""
