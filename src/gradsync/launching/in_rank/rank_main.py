"""Inside a rank process: runs the user's script, module or function, and tells the launcher its result or error.

`rank_process` starts the process, which calls `main` and forks: the parent becomes the guard, the child is the rank.
Almost nothing is imported before the user's code runs: imports delay the start of every rank.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from gradsync.launching.in_rank.guard import Descriptors, start_guard
from gradsync.launching.in_rank.result import ErrorReport, Reporter, UnsendableResult

if TYPE_CHECKING:
    from traceback import StackSummary

#: Exit code of a rank or a command that Ctrl-C has ended: 128 + the number of SIGINT, as in shells.
EXIT_CODE_INTERRUPTED = 130
#: For a function that a rank does not find: it imports the script, whose `__name__` is then not "__main__".
HOW_TO_DEFINE = "define it above the `if __name__` line, at the top level of its module"

_BUSY_AFTER_SECONDS = 1.0
_LINGERING_SECONDS = 5.0  # how long after its program a process may end, before a line says what holds it up
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "")
_PYTHON = os.path.join(os.path.dirname(os.__file__), "")
_PATH = sys.path[:]  # before the user's folders come first

# Modules whose frames come before the user's code in a traceback: reports leave them out.
_SHIM_MODULES = frozenset(
    {
        "gradsync.launching.in_rank.rank_main",
        "gradsync.launching.faces",
        "importlib._bootstrap",
        "multiprocessing.spawn",
        "runpy",
    }
)
# Errors that the other ranks raise when a rank is gone: the cause only if no rank has failed in another way.
_CONSEQUENCES = (
    "RankFailed",
    "CommunicatorClosed",
    "GradientCancelled",
    "CollectiveTimeout",
    "RendezvousTimeout",
)

#: Whether this rank is importing the launching script again, to find a function in it.
is_importing_main = False
#: Whether this rank runs a function (`launch`, `spawn` or `launcher`), not a script or module.
runs_function = False
_keep: list[Any] = []


def main() -> NoReturn:
    """Runs this rank to its end, in a fresh interpreter; called once, by `rank_process._SHIM`."""
    rank, *numbers = (int(text) for text in sys.argv[1].split(","))
    descriptors = Descriptors(*numbers)
    start_guard(rank, descriptors)
    # Programs that the user's code starts must not inherit, and so keep open, the pipe to the launcher.
    os.set_inheritable(descriptors.report, False)
    os.set_inheritable(descriptors.result, False)
    _run(rank, _read_start(descriptors.record), Reporter(descriptors.report, descriptors.result))


def _run(rank: int, start: dict[str, Any], reporter: Reporter) -> NoReturn:
    global runs_function
    process_id = os.getpid()
    try:
        _set_interrupts("UNBLOCK")  # blocked by the launcher: no SIGINT was to come before this `try` block
        if start["shows_lines"] and hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(line_buffering=True)  # else Python would buffer lines for a pipe
        if start["has_others"]:
            from gradsync.rendezvous import connection

            def report(error: BaseException) -> None:
                _report_failure_of_world(reporter, error)

            if start["goes_on"]:  # this rank, too, unless the others have given it up
                connection.on_loss = report
            else:
                connection.on_failure = report
        runs_function = start["kind"] == "function"
        result = _RUNNERS[start["kind"]](start)
        if runs_function and os.getpid() == process_id and reporter.claim():
            reporter.send_result(result)
    except SystemExit as error:
        if error.code not in (None, 0):
            _remember(error)
        raise
    except KeyboardInterrupt as error:
        _remember(error)
        sys.exit(EXIT_CODE_INTERRUPTED)
    except UnsendableResult as error:  # the run has not failed: other ranks go on
        from gradsync.errors import InvalidArgument

        refusal = InvalidArgument(f"the return value of rank {rank} {error}")
        _send_error(reporter, _report_of(refusal)._replace(is_unsendable=True))
        sys.exit(1)
    except BaseException as error:
        if os.getpid() != process_id:
            raise  # this process is not the rank: the user's code has forked it
        _set_interrupts("BLOCK")  # a Ctrl-C that comes now must not hide the error; a second one kills
        _remember(error)
        _fail(reporter, error)
        sys.exit(1)
    finally:
        if os.getpid() == process_id:
            _watch_end(rank)
    sys.exit(0)


def _read_start(descriptor: int) -> dict[str, Any]:
    """Reads the start record without moving the file's position, because all ranks share the file."""
    size = os.fstat(descriptor).st_size
    content = b""
    while len(content) < size:  # one call reads at most 2 GiB
        content += os.pread(descriptor, size - len(content), len(content))
    os.close(descriptor)
    record: dict[str, Any] = marshal.loads(content)
    return record


def _set_interrupts(how: str) -> None:
    """Blocks SIGINT, or unblocks it."""
    import signal

    signal.pthread_sigmask(getattr(signal, f"SIG_{how}"), {signal.SIGINT})


# -- What a rank runs --------------------------------------------------------------------------------------------------


def _run_script(start: dict[str, Any]) -> None:
    """Runs a file like `python file args`."""
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    path = os.path.abspath(start["path"])
    module = _fresh_main([start["path"], *start["arguments"]])
    _prepend_path(os.path.dirname(os.path.realpath(path)))
    loader: Any = (SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader)("__main__", path)
    module.__file__ = path
    module.__loader__ = loader
    if path.endswith(".pyc"):
        code = loader.get_code("__main__")
    else:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _run_folder(start: dict[str, Any]) -> None:
    """Runs the __main__.py of a folder or zip archive like `python folder args`."""
    _fresh_main([start["path"], *start["arguments"]])
    _prepend_path(os.path.abspath(start["path"]))
    _run_as_main("__main__", is_module=False)


def _run_module(start: dict[str, Any]) -> None:
    """Runs a module like `python -m module args`."""
    _fresh_main([start["module"], *start["arguments"]])
    _prepend_path(os.getcwd())
    _run_as_main(start["module"], is_module=True)


def _run_as_main(name: str, *, is_module: bool) -> None:
    import runpy

    # `python -m` uses this function too. After runpy.run_module() the module would no longer be `__main__`.
    runpy._run_module_as_main(name, alter_argv=is_module)  # type: ignore[attr-defined]


def _fresh_main(arguments: list[str]) -> Any:
    """Replaces `__main__`, which runs `rank_process._SHIM`, by an empty module."""
    _keep.append(sys.modules["__main__"])
    module = type(sys)("__main__")
    module.__dict__.update(__builtins__=__builtins__, __annotations__={})
    sys.modules["__main__"] = module
    sys.argv[:] = arguments
    return module


def _prepend_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _run_function(start: dict[str, Any]) -> Any:
    """Calls the pickled function; returns its result."""
    function, arguments, keywords = _load_call(start)
    return function(*arguments, **keywords)


def _load_call(start: dict[str, Any]) -> Any:
    """Gives this process the launcher's sys.path and `__main__`, then unpickles the call.

    The rank's environment variables were set before its interpreter started, so modules that this function imports see
    these variables.
    """
    global is_importing_main
    import pickle
    from multiprocessing import process, resource_tracker, spawn

    if start["tracker_descriptor"] is not None:
        resource_tracker._resource_tracker._fd = start["tracker_descriptor"]  # type: ignore[attr-defined]
    _keep.append(sys.modules["__main__"])
    current: Any = process.current_process()
    # With these flags, multiprocessing and gradsync refuse to start processes from a script without the __main__ guard.
    current._inheriting = is_importing_main = True
    try:
        spawn.prepare(pickle.loads(start["preparation"]))
        return pickle.loads(start["call"])
    except AttributeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # the user's own module raised the error, not pickle
        from gradsync.errors import InvalidArgument

        raise InvalidArgument(f"{error}; {HOW_TO_DEFINE}") from None
    finally:
        del current._inheriting
        is_importing_main = False


_RUNNERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "script": _run_script,
    "folder": _run_folder,
    "module": _run_module,
    "function": _run_function,
}


# -- How a rank fails --------------------------------------------------------------------------------------------------


def _fail(reporter: Reporter, error: BaseException) -> None:
    """Tells the launcher and the other ranks of an error; then the user's crash reporter (sys.excepthook) may run.

    A crash reporter may need seconds, raise an error of its own, or end the process.
    """
    if reporter.claim():
        _send_error(reporter, _report_of(error))
    group = sys.modules.get("gradsync.process_group")
    if group is not None:
        group.report_error(error)
    if sys.excepthook is sys.__excepthook__:
        return  # the launcher shows the error
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as broken:
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(broken), broken, broken.__traceback__)


def _remember(error: BaseException) -> None:
    """Stores an error in `sys`, like the interpreter; at exit the process group reports this error to other ranks."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error


def _report_failure_of_world(reporter: Reporter, error: BaseException) -> None:
    """Sends the failure of the world, for a rank that is busy: its launcher hears nothing of ranks on other machines.

    A rank that waits in a collective raises the failure itself, within the second.
    """
    import time

    time.sleep(_BUSY_AFTER_SECONDS)
    if reporter.claim():
        _send_error(reporter, _report_of(error))


def _send_error(reporter: Reporter, report: ErrorReport) -> None:
    try:
        with _pythons_own_modules():
            reporter.send_error(report)
    except OSError:
        sys.stderr.write(report.text)  # the launcher cannot show the text


@contextlib.contextmanager
def _pythons_own_modules() -> Iterator[None]:
    """Makes imports find Python's own modules, also if the user has a module of that name, such as a json.py."""
    hidden = {name: module for name, module in sys.modules.items() if _hides_another(name, module)}
    for name in hidden:
        del sys.modules[name]
    path, sys.path = sys.path, _PATH
    try:
        yield
    finally:
        sys.path = path
        sys.modules.update(hidden)


def _hides_another(name: str, module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return name.partition(".")[0] in sys.stdlib_module_names and file is not None and not file.startswith(_PYTHON)


def _report_of(error: BaseException) -> ErrorReport:
    """Returns the report of an error, and takes gradsync's frames from the beginning of the error's traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in _SHIM_MODULES:
        trace = trace.tb_next
    error.__traceback__ = trace
    with _pythons_own_modules():
        import traceback

        shown = traceback.TracebackException(type(error), error, trace)
        if _is_raised_by_gradsync(error):
            del shown.stack[_outer_frames(shown.stack) :]
        text = "".join(shown.format())
        shown.__notes__ = None
        summary = list(shown.format_exception_only())[-1].split("\n")[0]
    consequence = _consequence_in(error)
    return ErrorReport(
        text,
        summary,
        is_consequence=consequence is not None,
        missed_rank=_missed_rank(consequence),
        is_timeout=isinstance(consequence, TimeoutError) or getattr(consequence, "was_silent", False),
    )


def _is_raised_by_gradsync(error: BaseException) -> bool:
    errors = sys.modules.get("gradsync.errors")
    return errors is not None and isinstance(error, errors.GradsyncError)


def _outer_frames(stack: StackSummary) -> int:
    """Returns the number of frames to show: all frames up to the last frame that is not gradsync's own."""
    ours = (_PACKAGE, contextlib.__file__)
    count = len(stack)
    while count and stack[count - 1].filename.startswith(ours):
        count -= 1
    return count or len(stack)


def _consequence_in(error: BaseException | None) -> BaseException | None:
    """Returns the error that reports another rank as gone: this error, or the first such error among its causes."""
    errors = sys.modules.get("gradsync.errors")
    kinds: tuple[type[BaseException], ...] = tuple(getattr(errors, name) for name in _CONSEQUENCES) if errors else ()
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kinds):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _missed_rank(consequence: BaseException | None) -> int | None:
    """Returns the rank, as at launch, that an error reports as gone: the first that is missing, or a RankFailed's."""
    missing = getattr(consequence, "missing_ranks", ())
    rank: int | None = missing[0] if missing else getattr(consequence, "rank", None)
    group = sys.modules.get("gradsync.process_group")
    return rank if rank is None or group is None else group.rank_at_launch(rank)


# -- How a rank ends ---------------------------------------------------------------------------------------------------


def _watch_end(rank: int) -> None:
    """Starts a thread that says, if this process is still there in some seconds, what holds it up."""
    import _thread
    import time

    def tell() -> None:
        time.sleep(_LINGERING_SECONDS)
        with contextlib.suppress(Exception):
            os.write(2, f"gradsync: rank {rank}: the program has ended, but {_what_lingers()}\n".encode())

    with contextlib.suppress(RuntimeError):  # no more threads
        _thread.start_new_thread(tell, ())


def _what_lingers() -> str:
    """Returns a text that names a thread and where it stands: one that the interpreter waits for, else the main one."""
    threading = sys.modules["threading"]
    main = threading.main_thread()
    others = [thread for thread in threading.enumerate() if thread is not main and not thread.daemon]
    frame = sys._current_frames()[(others or [main])[0].ident]
    where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    if not others:
        return f"something that runs at its exit has not ended ({where})"
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return f"the thread {others[0].name!r}{more} has not, and its process waits for it ({where})"
