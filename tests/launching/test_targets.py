import subprocess
import sys
import textwrap

import pytest

FORK = 'gs.set_start_method("fork")'
CLOUDPICKLE = "pip install cloudpickle"


# What a rank does with a record, see rank_main.
RANK = """
import marshal, pickle, sys
from multiprocessing import spawn
record = marshal.load(sys.stdin.buffer)
spawn.prepare(pickle.loads(record["preparation"]))
function, arguments, keywords = pickle.loads(record["call"])
print(function(*arguments, **keywords))
"""

SESSION = """
import marshal, subprocess, sys
sys.modules.update({absent})
from gradsync.launching.targets import function_target

class Batch:
    def __init__(self, value):
        self.value = value
    def double(self):
        return Batch(2 * self.value)

factor = 5

def work(batch):
    return helper(batch).value, type(batch).__module__, type(batch) is Batch

def helper(batch):
    return Batch(factor * batch.value)

class Work:
    def __call__(self, batch):
        return work(batch)

if __name__ == "__main__":
    try:
        target = function_target({function}, {arguments}, {{}}, "work")
    except Exception as error:
        print(error)
        sys.exit()
    record = marshal.dumps(target.record)
    subprocess.run([sys.executable, "-c", {rank!r}], input=record, check=True, pass_fds=target.descriptors)
"""


def run_session(way, folder, function="work", arguments="(Batch(2),)", absent=""):
    source = textwrap.dedent(SESSION.format(function=function, arguments=arguments, rank=RANK, absent=absent))
    options = {"capture_output": True, "text": True, "cwd": folder}
    if way == "-c":
        done = subprocess.run([sys.executable, "-c", source], **options)
    elif way == "stdin":
        done = subprocess.run([sys.executable, "-"], input=source, **options)
    else:
        (folder / "session.py").write_text(source)
        done = subprocess.run([sys.executable, *way.split()], **options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.rstrip()


WAYS = ["-c", "stdin", "session.py", "-m session"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function", ["work", "Work()", "lambda batch: work(batch)"])
def test_functions_and_classes_of_main_reach_the_rank(tmp_path, way, function):
    name = "__mp_main__" if "session" in way else "__main__"
    assert run_session(way, tmp_path, function) == f"(10, '{name}', True)"


@pytest.mark.parametrize("way", ["session.py", "-m session"])
def test_a_script_needs_no_cloudpickle(tmp_path, way):
    assert run_session(way, tmp_path, absent="cloudpickle=None") == "(10, '__mp_main__', True)"


@pytest.mark.parametrize("way", ["-c", "stdin"])
@pytest.mark.parametrize(
    ("function", "arguments", "part", "culprit", "remedy"),
    [
        ("work", "()", "work", "work", "define it at the top level of a module or script"),
        ("Work()", "()", "work", "Work", "define it at the top level of a module or script"),
        ("print", "(1, [Batch(2)])", "args[1] of work", "Batch", "make it inside the function"),
    ],
)
def test_an_interactive_session_without_cloudpickle(tmp_path, way, function, arguments, part, culprit, remedy):
    assert run_session(way, tmp_path, function, arguments, absent="cloudpickle=None") == (
        f"{part} needs to pickle to reach the ranks: {culprit} is defined in an interactive session, "
        f"which ranks cannot import; {remedy}, {CLOUDPICKLE}, or start ranks by fork ({FORK})"
    )
