# python {}
import sys

import gradsync as gs

sys.modules["cloudpickle"] = None

if __name__ == "__main__":
    gs.spawn(lambda rank: rank, nprocs=2)
