"""Inside a rank process: runs the user's script, module or function, and reports how it ended.

The supervisor starts each rank as `python -c <shim> <start fd>,<report fd> ...`, and the shim calls `main`.
Until the user's code runs this file imports almost nothing, because every rank waits for it.
"""

from __future__ import annotations

import marshal
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from gradsync.launching import report_pipe

EXIT_CODE_INTERRUPTED = 130
#: What a function needs for a rank to find it, which imports the script under another name.
HOW_TO_DEFINE = "define it above the `if __name__` line, at the top level of its module"
_PR_SET_PDEATHSIG = 1
# Modules between the interpreter and the user's code: in a traceback they only hide the user's own lines.
_SHIM_MODULES = frozenset(
    {
        "__main__",
        __name__,
        "gradsync.launching.launcher",
        "importlib._bootstrap",
        "multiprocessing.spawn",
        "runpy",
    }
)
# What the surviving ranks raise when another one is gone: shown only where no rank tells more.
_CONSEQUENCES = (
    "RankFailed",
    "CommunicatorClosed",
    "GradientCancelled",
    "CollectiveTimeout",
    "RendezvousTimeout",
)

_importing_main = False
_keep: list[Any] = []


def main() -> NoReturn:
    """Runs this rank to its end; called by the shim, once."""
    start_descriptor, report_descriptor = (int(text) for text in sys.argv[1].split(","))
    # Programs that the user's code starts must not hold the launcher's pipe.
    os.set_inheritable(report_descriptor, False)
    start = _read_start(start_descriptor)
    process_id = os.getpid()
    try:
        _die_with_launcher(start["launcher_pid"])
        _accept_interrupts()
        from gradsync.environment import hold_secret

        hold_secret(start["secret"])
        result = _RUNNERS[start["kind"]](start)
        if result is not None and os.getpid() == process_id:
            report_pipe.write_frame(report_descriptor, report_pipe.RESULT, result)
    except SystemExit as error:
        if error.code not in (None, 0):
            _remember(error)
        raise
    except KeyboardInterrupt as error:
        _remember(error)
        sys.exit(EXIT_CODE_INTERRUPTED)
    except BaseException as error:
        if os.getpid() != process_id:
            raise  # a process that the user's code forked: not this rank
        _remember(error)
        _report_error(report_descriptor, error)
        sys.exit(1)
    sys.exit(0)


def is_importing_main() -> bool:
    """Tells whether this rank is importing the launching script again, to find a function in it."""
    return _importing_main


def _read_start(descriptor: int) -> dict[str, Any]:
    """Reads the start record; all ranks share the file, so the position in it is left alone."""
    size = os.fstat(descriptor).st_size
    content = b""
    while len(content) < size:  # one call reads at most 2 GiB
        content += os.pread(descriptor, size - len(content), len(content))
    os.close(descriptor)
    record: dict[str, Any] = marshal.loads(content)
    return record


def _die_with_launcher(launcher_pid: int) -> None:
    """Asks the kernel to kill this rank when the launcher dies, however it dies."""
    import signal

    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        return  # not Linux, or Python without ctypes: the launcher's own clean-up remains
    if os.getppid() != launcher_pid:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _accept_interrupts() -> None:
    """Lets SIGINT through, which the launcher blocked so that none arrives outside of `main`'s try."""
    import signal

    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _run_script(start: dict[str, Any]) -> None:
    """Runs a file as `python file args` would."""
    path = os.path.abspath(start["path"])
    module = _fresh_main([start["path"], *start["arguments"]])
    _prepend_path(path if os.path.isdir(path) else os.path.dirname(os.path.realpath(path)))
    if os.path.isdir(path):
        _run_as_main("__main__", is_module=False)
        return
    from importlib.machinery import SourceFileLoader

    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _run_module(start: dict[str, Any]) -> None:
    """Runs a module as `python -m module args` would."""
    _fresh_main([start["module"], *start["arguments"]])
    _prepend_path(os.getcwd())
    _run_as_main(start["module"], is_module=True)


def _run_as_main(name: str, *, is_module: bool) -> None:
    import runpy

    # What the interpreter itself calls: run_module() would not leave the module in place as __main__.
    runpy._run_module_as_main(name, alter_argv=is_module)  # type: ignore[attr-defined]


def _fresh_main(arguments: list[str]) -> Any:
    """Puts an empty module in the place of the shim's `__main__`."""
    _keep.append(sys.modules["__main__"])
    module = type(sys)("__main__")
    module.__dict__.update(__builtins__=__builtins__, __annotations__={})
    sys.modules["__main__"] = module
    sys.argv[:] = arguments
    return module


def _prepend_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _run_function(start: dict[str, Any]) -> bytes:
    """Calls the pickled function and pickles what it returns."""
    import pickle

    function, arguments, keywords = _load_call(start)
    result = function(*arguments, **keywords)
    try:
        return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        from gradsync.errors import InvalidArgument

        raise InvalidArgument(
            f"the return value of rank {os.environ['RANK']} needs to pickle to reach the launcher, "
            f"got {type(result).__name__}: {error}"
        ) from None


def _load_call(start: dict[str, Any]) -> Any:
    """Makes this process like its launcher (sys.path, `__main__`), then unpickles the call.

    The environment was there before the interpreter, so that what the unpickling imports sees it.
    """
    global _importing_main
    import pickle
    from multiprocessing import process, resource_tracker, spawn

    if start["tracker_descriptor"] is not None:
        resource_tracker._resource_tracker._fd = start["tracker_descriptor"]  # type: ignore[attr-defined]
    _keep.append(sys.modules["__main__"])
    current: Any = process.current_process()
    # multiprocessing then refuses to start processes from a script without the __main__ guard; so do we.
    current._inheriting = _importing_main = True
    try:
        spawn.prepare(pickle.loads(start["preparation"]))
        return pickle.loads(start["call"])
    except AttributeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # the user's own module raised it, not pickle
        from gradsync.errors import InvalidArgument

        raise InvalidArgument(f"{error}; {HOW_TO_DEFINE}") from None
    finally:
        del current._inheriting
        _importing_main = False


_RUNNERS: dict[str, Callable[[dict[str, Any]], bytes | None]] = {
    "script": _run_script,
    "module": _run_module,
    "function": _run_function,
}


def _remember(error: BaseException) -> None:
    """Leaves an error where the interpreter would: the exit hook of the process group tells it to the others."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error


def _report_error(descriptor: int, error: BaseException) -> None:
    """Sends an error as text: an exception that does not unpickle must not hide itself."""
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in _SHIM_MODULES:
        if trace.tb_frame.f_globals is sys.modules["__main__"].__dict__:
            break  # the user's own __main__
        trace = trace.tb_next
    error.__traceback__ = trace
    text = "".join(traceback.format_exception(type(error), error, trace))
    summary = traceback.format_exception_only(type(error), error)[-1].split("\n")[0]
    consequence = _consequence_in(error)
    body = {
        "text": text,
        "summary": summary,
        "is_consequence": consequence is not None,
        "missed_rank": getattr(consequence, "rank", None),
    }
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, trace)  # the user's crash reporter still runs
    try:
        report_pipe.write_frame(descriptor, report_pipe.ERROR, marshal.dumps(body))
    except OSError:
        sys.stderr.write(text)  # nobody is left to show it


def _consequence_in(error: BaseException | None) -> BaseException | None:
    """Gives the error, or the one among those that led to it, that says that another rank is gone."""
    errors = sys.modules.get("gradsync.errors")
    kinds: tuple[type[BaseException], ...] = tuple(getattr(errors, name) for name in _CONSEQUENCES) if errors else ()
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kinds):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
