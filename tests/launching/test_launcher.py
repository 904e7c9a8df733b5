import socket
import subprocess
import sys
import threading

import command
import pytest
import rank_functions

import gradsync as gs


def test_what_a_rank_cannot_find_is_refused_before_any_process_starts(monkeypatch):
    monkeypatch.setattr("gradsync.launching.supervisor.RankProcess", None)
    lock = threading.Lock()

    @gs.launcher
    def inner():
        lock.acquire()

    advice = "define it at the top level of a module or script, and create inside it what it needs"
    with pytest.raises(gs.InvalidArgument, match=rf"inner needs to be picklable.*{advice}"):
        inner()
    with pytest.raises(gs.InvalidArgument, match=rf"<lambda> needs to be picklable.*{advice}"):
        gs.launcher(lambda: lock)()
    with pytest.raises(gs.InvalidArgument, match=r"args\[0\] of rank_in_group needs to be picklable"):
        rank_functions.rank_in_group(sys.stdout)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n_gpus": 0}, "n_gpus to be an integer of at least 1, got 0"),
        ({"n_gpus": "2"}, "got '2'"),
        ({"n_gpus": 4, "world_size": 2}, "below world_size 2, got rank_start 0 and n_gpus 4"),
        ({"world_size": 2, "rank_start": 2, "port": 4000}, "below world_size 2, got rank_start 2$"),
        ({"rank_start": 2, "port": 4000}, "rank_start 2 is one of several nodes and needs world_size"),
        ({"rank_start": -1}, "rank_start to be an integer of at least 0, got -1"),
        ({"master_ip": ""}, "master_ip to be an address or a host's name, got ''"),
        ({"port": -1}, "port to be an integer from 0 to 65535"),
        ({"backend": "ucc"}, "launcher needs backend to be one of auto, .*, got 'ucc'"),
        ({"start_method": "thread"}, "the start method to be one of 'spawn', 'fork', 'forkserver', got 'thread'"),
        ({"device_type": "tpu"}, "device_type 'auto', 'cpu' or 'gpu', got 'tpu'"),
        ({"device_type": "cpu", "backend": "nccl"}, "NCCL moves GPU arrays only"),
    ],
)
def test_bad_options_are_refused_at_decoration(options, text):
    with pytest.raises(gs.InvalidArgument, match=text):
        gs.launcher(**options)


def test_decorating_what_is_no_function():
    with pytest.raises(
        gs.InvalidArgument, match=r"needs a function, got 3; to use 3 ranks, write launcher\(n_gpus=3\)"
    ):
        gs.launcher(3)


def test_decorated_function_of_a_script(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import gradsync as gs
        @gs.launcher(n_gpus=2)
        def work(offset):
            return gs.get_communicator().rank + offset
        if __name__ == "__main__":
            print(work(5))
        """,
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[5, 6]\n", "")


def test_taken_port_is_told():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        run = gs.launcher(n_gpus=1, port=port)(rank_functions.plain)
        with pytest.raises(gs.RendezvousError, match=str(port)):
            run(1)


def test_closures_and_lambdas():
    secret_number = 41

    @gs.launcher(n_gpus=2)
    def add(offset):
        return gs.get_communicator().rank + secret_number + offset

    assert add(1) == [42, 43]
    assert gs.launcher(lambda: secret_number, n_gpus=1)() == [41]


def test_what_travels_with_its_code_uses_the_classes_of_the_script(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import gradsync as gs
        class Point:
            def __init__(self, x):
                self.x = x
        @gs.launcher(n_gpus=1)
        def work(make):
            point = make(1)
            return point, isinstance(point, Point)
        if __name__ == "__main__":
            number = 7
            [(point, is_of_rank)] = work(lambda x: Point(x + number))
            print(point.x, is_of_rank, type(point) is Point)
        """,
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "8 True True\n", "")


def test_function_below_the_main_guard_is_told_where_to_go(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import gradsync as gs
        if __name__ == "__main__":
            @gs.launcher(n_gpus=1)
            def below():
                return 1
            below()
        """,
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "this rank finds no below in __main__; define it above the `if __name__` line" in done.stderr


def test_functions_of_the_main_module_of_a_package(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    source = (
        "import gradsync as gs\ndef work(x): return x + 1\nif __name__ == '__main__': print(gs.launch(work, 1, 2))\n"
    )
    (tmp_path / "package" / "__main__.py").write_text(source)
    for line in (["-m", "package"], ["package"]):
        done = subprocess.run([sys.executable, *line], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "[2, 2]\n", "")


def run_interactive(source):
    return subprocess.run([sys.executable, "-"], input=source, capture_output=True, text=True, check=False)


def test_function_and_class_of_an_interactive_session():
    source = """
import gradsync as gs
class Point:
    def __init__(self, x): self.x = x
@gs.launcher(n_gpus=2)
def work(point): return Point(point.x + gs.get_communicator().rank)
results = work(Point(1))
print([point.x for point in results], all(type(point) is Point for point in results))
"""
    done = run_interactive(source)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1, 2] True\n", "")


def test_world_size_limits_the_processes_of_this_node(monkeypatch):
    monkeypatch.setattr("gradsync.machine.usable_cores", lambda: 8)
    assert gs.launcher(rank_functions.size_and_local_size, world_size=2)() == [(2, "2")] * 2


def test_set_start_method_is_the_default(monkeypatch, caplog):
    monkeypatch.setattr("gradsync.launching.launch._default", "fork")
    assert gs.launcher(lambda: 1, n_gpus=1)() == [1]
    assert gs.spawn(lambda: 2, (), 1).return_queues[0].get() == 2
    for who in ("launcher", "spawn"):
        assert f"{who}: gradsync starts ranks by spawn, not by fork: " in caplog.text


@pytest.mark.parametrize("run", [gs.launcher(rank_functions.raise_stubborn, n_gpus=1), None])
def test_exception_that_does_not_unpickle_is_told_as_text(run):
    run = run or (lambda: gs.spawn(rank_functions.raise_stubborn, (), 1))
    with pytest.raises(gs.RankFailed, match="Stubborn: 1"):
        run()


def test_decorating_loads_nothing_that_starts_ranks():
    source = "import sys, gradsync as gs; gs.launcher(n_gpus=2)(print); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "gradsync.launching.launcher" in loaded
    assert not loaded & {"gradsync.launching.supervisor", "multiprocessing", "subprocess", "socket", "numpy"}


def test_gloo_is_shared_memory_and_says_so(caplog):
    assert gs.launcher(rank_functions.backend_of_group, n_gpus=2, backend="gloo")() == ["shm"] * 2
    context = gs.spawn(rank_functions.backend_of_own_group, nprocs=2, backend="gloo")
    assert [results.get() for results in context.return_queues] == ["shm"] * 2
    assert [record.message.partition(":")[0] for record in caplog.records] == ["launcher", "spawn"]
