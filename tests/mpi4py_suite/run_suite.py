"""Runs modules of mpi4py's own test-suite against gradsync.mpi, on each rank: `run_suite.py FOLDER MODULE...`.

FOLDER is the folder `test` of mpi4py's source distribution. The last line of rank 0 has the numbers as JSON.
"""

import json
import sys
import types
import unittest
from fnmatch import fnmatch

from gradsync import GradsyncError
from gradsync.mpi import MPI

ERROR = 16

#: What is skipped, by module, class and method of mpi4py's suite, and why.
SKIPPED = {
    "*.test*Scan": "no Scan",
    "*.testExscan": "no Exscan",
    "*.testBcastTypeIndexed": "no derived types",
    "*.TestReduceLocal.*": "no Reduce_local",
    "*.testAlltoallw*": "no Alltoallw",
    "*.testISendrecv*": "no Isendrecv",
    "*.testProcNullISendrecv": "no Isendrecv",
    "*.testProcNullPersistent": "no persistent requests",
    "*.testProcNull": "Bsend; test_p2p_obj has the others",
    "*.testPersistent": "no persistent requests",
    "*.testProbe*": "no Probe",
    "*.testIProbe": "no Probe",
    "*.testCancel": "no Cancel",
    "test_p2p_buf.*.testSendRecv": "attaches a buffer, for Bsend; test_p2p_obj sends in the same ways",
    "test_p2p_buf.*.testConstructor": "persistent requests",
    "*.testIRecvAnd*BSend": "no Bsend",
    "*.testReductions": "Scan and Exscan; test_cco_buf has the others",
    "test_status.*.testSet*": "what only a library for MPI sets",
    "test_status.*.test*Pickle": "a status is not pickled",
    "test_status.*.testToMemory": "a status has no C structure",
    "test_status.*.testCopyConstructor": "a status is not copied",
    "test_status.*.testPyProps": "a message cannot be cancelled",
    "*.test*some": "no Waitsome, no Testsome",
    "*.test*Some*": "no Waitsome, no Testsome",
    "*.testManyI*AndRecv": "no Testsome",
    "*.testMixed": "an empty message is no object",
    "*.testCommLock": "of mpi4py's inner workings",
    "*.testRecvObjArg": "an object is received whatever its size, so a buffer for it is ignored",
    "*.testISSendAndRecv": "a message to the same rank is copied at once",
    "test_request.*Status*": "no Get_status",
}


class Standin(types.ModuleType):
    """mpi4py.MPI, with the few names that the suite's own helpers ask for."""

    LONG_DOUBLE = C_LONG_DOUBLE_COMPLEX = MPI.DATATYPE_NULL  # gradsync does not reduce them
    BOTTOM, THREAD_SINGLE, BSEND_OVERHEAD, ERR_ARG, ERR_OTHER, ERR_ROOT = None, 0, 0, *[ERROR] * 3

    OP_NULL = None
    REPLACE, NO_OP = staticmethod(lambda x, y: y), staticmethod(lambda x, y: x)

    @staticmethod
    def get_vendor():
        return "gradsync", (1, 0, 0)

    @staticmethod
    def Get_version():
        return 4, 0

    @staticmethod
    def Query_thread():
        return 0

    def __getattr__(self, name):
        return getattr(MPI, name)


class Result(unittest.TestResult):
    """Counts; each failure is printed at once, as the other ranks may now wait for this one."""

    def __init__(self):
        super().__init__()
        self.told = []

    def _tell(self, test, error):
        self.told.append(str(test))
        print(f"rank {MPI.COMM_WORLD.rank}: {test}\n{self._exc_info_to_string(error, test)}", flush=True)

    def addError(self, test, err):
        super().addError(test, err)
        self._tell(test, err)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self._tell(test, err)

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._tell(subtest, err)


def each_test(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from each_test(test)
        else:
            yield test


def main(folder, names):
    sys.path.insert(0, folder)
    package = types.ModuleType("mpi4py")
    package.__path__ = []
    package.MPI = sys.modules["mpi4py.MPI"] = Standin("mpi4py.MPI")
    sys.modules["mpi4py"] = package
    GradsyncError.Get_error_class = lambda self: ERROR  # the suite looks at that of a wrong root
    import arrayimpl

    arrayimpl.ArrayBackends[:] = arrayimpl.ArrayArray, arrayimpl.ArrayNumPy  # the others say that they are on a GPU
    MPI.Init()
    result, skipped = Result(), []
    for test in each_test(unittest.defaultTestLoader.loadTestsFromNames(names)):
        assert "_FailedTest" not in test.id(), test._exception
        reason = next((why for pattern, why in SKIPPED.items() if fnmatch(test.id(), pattern)), None)
        if reason is not None:
            skipped.append(test.id())
            continue
        test.run(result)
    counts = {
        "passed": result.testsRun - len({each.partition(" [")[0] for each in result.told}) - len(result.skipped),
        "failed": result.told,
        "skipped": len(skipped),
        "skipped by itself": [reason for _, reason in result.skipped],
    }
    world = MPI.COMM_WORLD
    if world.gather(counts) and world.rank == 0:
        print(json.dumps(counts), flush=True)
    MPI.Finalize()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
