"""`gradsync doctor`: whether this machine can run each backend, and what to do where it cannot.

facts.py collects what there is to look at, and probes.py asks libraries in processes of their own, for what is broken
may crash or hang; checks.py judges from these facts; command.py runs an all-reduce over each backend and shows all.
"""
