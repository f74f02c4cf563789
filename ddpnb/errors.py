"""Every exception that ddpnb raises of its own.

    Exception
    ├── LaunchError          the workers could not be started, or died before they could speak
    ├── WorkerError          a rank failed; also a subclass of the worker's own exception type
    ├── RunStopped           stop() ended the run before it had a value
    │   └── RunKilled        kill() did
    ├── CheckpointError      a checkpoint is damaged, of another model, or could not be written
    └── UnpicklableError     (also a TypeError) something cannot travel between kernel and worker

A mistake in a call is a plain `ValueError` or `TypeError`, raised before any process starts.

Runs in: both
"""

from __future__ import annotations


class LaunchError(Exception):
    """The workers could not be started, or died before they could say why."""


class RunStopped(Exception):
    """`Run.stop()`, or an interrupt, ended a function that never asked `ddpnb.should_stop()`: there is no value."""


class RunKilled(RunStopped):
    """`Run.kill()`, or a second interrupt, ended the workers: there is no value."""


class CheckpointError(Exception):
    """A checkpoint is damaged, belongs to another model, or could not be written; the text names the file."""


class UnpicklableError(TypeError):
    """A function, an argument, a captured variable or a result cannot be pickled; the text names it and its type."""


class WorkerError(Exception):
    """A rank failed.

    What `Run.result()` raises is both this and the worker's own exception type, so that `except ValueError` and
    `except ddpnb.WorkerError` both catch a ValueError of rank 1. Its text is the whole report: rank, cell and line,
    the remote traceback, what the other ranks were doing.
    """

    rank: int
    """Global rank that is to blame."""

    exitcode: int | None
    """Exit code of that rank's process, negative for a signal; None when it raised and was still alive."""

    report: str
    """The whole text, as `str()` gives it."""

    def __str__(self) -> str:
        return self.report


# Mixing ours with these breaks who catches them: the interpreter's own control flow, `await`, generators.
_UNMIXABLE = {
    "SystemExit",
    "KeyboardInterrupt",
    "GeneratorExit",
    "StopIteration",
    "StopAsyncIteration",
    "CancelledError",
    "SyntaxError",  # IPython shows one by its fields, and not by its text
}

# Attributes that builtin exceptions keep outside of `__dict__`.
_FIELDS = (
    "errno",
    "strerror",
    "filename",
    "filename2",
    "name",
    "path",
    "obj",
    "encoding",
    "object",
    "start",
    "end",
    "reason",
)


def worker_error(report: str, *, rank: int, exitcode: int | None, cause: BaseException | None) -> WorkerError:
    """Build the exception that a cell sees: WorkerError mixed with the type of `cause` where the two can be mixed.

    `cause`, the worker's own exception object, becomes `__cause__`, and its attributes are copied, so that
    `error.args` and a user's own fields read as they did in the worker.

    Source: Ray's `RayTaskError.as_instanceof_cause` builds its errors the same way.
    """
    error = _mixed(cause) if cause is not None else WorkerError(report)
    error.rank, error.exitcode, error.report = rank, exitcode, report
    error.__cause__ = cause
    error.__suppress_context__ = True
    return error


def _mixed(cause: BaseException) -> WorkerError:
    own = type(cause)
    if isinstance(cause, WorkerError) or any(base.__name__ in _UNMIXABLE for base in own.__mro__):
        return WorkerError(*cause.args)
    try:
        mixed = type(own.__name__, (WorkerError, own), {"__module__": own.__module__, "__reduce__": _reduce})
        # `__init__` of the user's class may want anything: the object is made without it. (`MemoryError.__new__` wants
        # its own class alone.)
        make = BaseException.__new__ if isinstance(cause, MemoryError) else mixed.__new__
        error: WorkerError = make(mixed, *cause.args)
        error.args = cause.args
        error.__dict__.update(cause.__dict__)
    except Exception:
        # A class that forbids subclassing or a layout that cannot be combined: the plain type, which says it all too.
        return WorkerError(*cause.args)
    for name in _FIELDS:
        if hasattr(cause, name):
            setattr(error, name, getattr(cause, name))
    return error


def _reduce(error: WorkerError) -> tuple[object, ...]:
    """Pickle a mixed error by its parts: its class was made on the fly and has no name to be found by."""
    return _rebuild, (error.report, error.rank, error.exitcode, error.__cause__)


def _rebuild(report: str, rank: int, exitcode: int | None, cause: BaseException | None) -> WorkerError:
    return worker_error(report, rank=rank, exitcode=exitcode, cause=cause)
