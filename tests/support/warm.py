"""Python programs that start in milliseconds: forked from a template that has imported what takes seconds to import.

Owns the templates, one for each set of imports, and the ends of what they start. A template is a process with one
thread that has only imported: it has no process group, no generator that was used, no folder. What it forks is made to
look like a program of its own: session, environment, standard streams, folder, arguments and ``__main__`` are its own,
it ends as the interpreter ends, and a torchrun agent that starts so starts its ranks so, too.

Other than after a cold start: strings hash alike in all processes of a template, ``/proc/PID/cmdline`` is the
template's, modules are there that the program did not import, and so are variables that are read at import; see
``_AT_IMPORT``. A test about any of this starts its processes cold. ``/proc/PID/environ`` is the template's too:
`environment_of` knows better. All processes end with the template, and it with the process that started it.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib.machinery
import importlib.util
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

START_DEADLINE_S = 240.0
# For those who doubt the templates: everything starts as a user starts it.
ALL_COLD = bool(os.environ.get("MLF_TEST_COLD"))

# What nearly all ranks import, and what takes an agent of torchrun its time.
_PRELOADED = (
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.nn.parallel",
    "torch._dynamo",  # which the first step of any optimizer imports
    "ml_flashpoint.flashpoint",
    "ml_flashpoint.adapter.pytorch.memory_storage_reader",
    "ml_flashpoint.adapter.pytorch.memory_storage_writer",
    "tests.support.worker",
)
LIGHTNING = ("lightning.pytorch", "lightning.pytorch.strategies", "ml_flashpoint.adapter.lightning")
HUGGING_FACE = (
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "ml_flashpoint.adapter.accelerate",
    "ml_flashpoint.adapter.transformers",
)
TITAN = ("tests.support.titan",)
MEGATRON = ("tests.support.eager", "tests.support.megatron", "tests.support.megatron_gpt")
NEMO = (
    "tests.support.eager",
    "nemo.lightning",
    "nemo.collections.llm",
    "tests.support.megatron",
    "ml_flashpoint.adapter.nemo",
)
# Read when the interpreter starts, or a library is loaded: such processes have a template of their own.
_AT_IMPORT = re.compile(
    r"(PYTHON|OMP_|MKL_|OPENBLAS_|LD_|MALLOC_|GLIBC_|KMP_|TORCH_(LOGS|CPP|SHOW|TRACE)|TORCHINDUCTOR_|CUDA_|NEMO_|HF_)"
)
_LAUNCHERS = ("torch.distributed.run", "accelerate.commands.launch")
_MESSAGE_BYTES = 1 << 20
_MARK_NAME = "mlf-test-environment"
_MARK_DESCRIPTOR = 700
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


# -- who starts programs ----------------------------------------------------------------------------------------------


class WarmProcess:
    """The part of `subprocess.Popen` that its users here need, for a program that a template forks.

    Args:
        address: Of the template.
        argv: As of a cold start, interpreter first: a script, ``-m`` with a module, or ``-c`` with code.
        env: The whole environment.
        streams: Descriptors for its standard streams.
        cwd: Its folder, of this process by default.
    """

    def __init__(
        self,
        address: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        streams: tuple[int, int, int],
        cwd: str | None = None,
    ) -> None:
        self.args = list(argv)
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = None
        request = json.dumps({"argv": self.args, "env": dict(env), "cwd": cwd or os.getcwd()}).encode()
        self._ending = threading.Lock()
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._line.settimeout(START_DEADLINE_S)
            self._line.connect(address)
            socket.send_fds(self._line, [request], streams)
            said, descriptors, _, _ = socket.recv_fds(self._line, 64, 1)
        except BaseException:
            self._line.close()
            raise
        if not said:
            self._line.close()
            raise ChildProcessError(f"the template has ended before it started {self.args}")
        self.pid = int(said)
        (self._pidfd,) = descriptors

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._pidfd)
            self._line.close()

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative for signals.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._line, select.POLLIN)
            if not waiting.poll(None if timeout is None else max(0.0, timeout) * 1000):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            with self._ending:
                if self.returncode is None:
                    said = self._line.recv(64)
                    if not said:  # the template has been killed, and it with it, in a moment
                        ending = select.poll()
                        ending.register(self._pidfd, select.POLLIN)
                        ending.poll()
                    self.returncode = int(said) if said else -signal.SIGKILL
        return self.returncode

    def poll(self) -> int | None:
        """Its exit code, or None if it goes on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Template:
    """A process that has imported modules, and forks programs. Starts when made, and is not waited for."""

    def __init__(self, preload: Iterable[str], env: Mapping[str, str]) -> None:
        self.address = f"\0mlf-template-{uuid.uuid4().hex}"
        self._log = tempfile.TemporaryFile(prefix="mlf-template-")  # noqa: SIM115 - closed in `close`
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.address)
            listener.listen(64)
            # It ends when nobody holds the other end any more.
            theirs, self._life = os.pipe()
            program = "from tests.support import warm; warm.main()"
            argv = [sys.executable, "-c", program, str(listener.fileno()), str(theirs), json.dumps([*preload])]
            self._process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[listener.fileno(), theirs],
                start_new_session=True,
            )
            os.close(theirs)
        self.pid = self._process.pid

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], streams: tuple[int, int, int], cwd: str | None = None
    ) -> WarmProcess:
        """Fork a program; see `WarmProcess`."""
        try:
            return WarmProcess(self.address, argv, env, streams, cwd)
        except OSError as error:
            raise ChildProcessError(
                f"{error} (a template that ended with {self._process.poll()})\n{self.log}"
            ) from None

    @property
    def log(self) -> str:
        """What it has written itself, mostly while importing."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        """End it, with all that it has forked."""
        os.close(self._life)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


_templates: dict[tuple[Any, ...], Template] = {}
_owner = 0


def template(env: Mapping[str, str], preload: Sequence[str] = ()) -> Template:
    """The template of this process for programs with that environment."""
    global _owner
    if _owner != os.getpid():
        _templates.clear()
        _owner = os.getpid()
        atexit.register(close_all)
    at_import = {name: value for name, value in sorted(env.items()) if _AT_IMPORT.match(name)}
    key = (*preload, *at_import.items())
    if key not in _templates:
        others = {name: value for name, value in os.environ.items() if not _AT_IMPORT.match(name)}
        _templates[key] = Template([*_PRELOADED, *preload], others | at_import)
    return _templates[key]


def pids() -> set[int]:
    """The templates of this process."""
    return {each.pid for each in _templates.values()}


def close_all() -> None:
    """End all templates of this process."""
    if _owner == os.getpid():
        while _templates:
            _templates.popitem()[1].close()


def popen(
    argv: Sequence[str], env: Mapping[str, str], preload: Sequence[str] = (), cwd: str | None = None
) -> WarmProcess:
    """A warm program without input, whose ``stdout`` is read here, with its stderr in it."""
    reading, writing = os.pipe()
    with open(os.devnull, "rb") as nothing:
        try:
            process = template(env, preload).start(argv, env, (nothing.fileno(), writing, writing), cwd)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
    process.stdout = os.fdopen(reading, "rb")
    return process


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    preload: Sequence[str] = (),
    timeout_s: float = 100.0,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with ``capture_output`` and ``text``, for a warm program without input."""
    with open(os.devnull, "rb") as nothing, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = template(env, preload).start(argv, env, (nothing.fileno(), out.fileno(), err.fileno()))
        try:
            code = process.wait(timeout_s)
        except BaseException:
            process.kill()
            process.wait()
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    if check and code:
        raise AssertionError(f"{list(argv)} ended with {code}\n{texts[0]}\n{texts[1]}")
    return subprocess.CompletedProcess(argv, code, *texts)


def environment_of(pid: int) -> dict[str, str] | None:
    """The environment that a warm program, or what it forked, started with. None for all others, and for the dead."""
    path = f"/proc/{pid}/fd/{_MARK_DESCRIPTOR}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_MARK_NAME}"):
            return None
        return dict(json.loads(Path(path).read_bytes()))
    except (OSError, ValueError):
        return None


# -- in the template --------------------------------------------------------------------------------------------------


@dataclass
class _Forked:
    pid: int
    line: socket.socket


class _IsChild(Exception):
    """Unwinds the loop of a template in what it has forked."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__()
        self.request = request


def main() -> None:
    """Serve until nobody asks any more; in what is forked, be the program."""
    listening, life, preload = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    for name in preload:
        importlib.import_module(name)
    threads = [Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task")]
    # jemalloc, which pyarrow brings, stops its own thread to fork.
    threads = [name for name in threads if name != "jemalloc_bg_thd\n"]
    assert len(threads) == 1, f"an import has started a thread, which what is forked would lack: {threads}"
    gc.collect()
    gc.freeze()  # need not be looked through again in every child
    listener = socket.socket(fileno=listening)
    try:
        _serve(listener, life)
    except _IsChild as child:
        request = child.request
    _be(request["argv"])


def _serve(listener: socket.socket, life: int) -> NoReturn:
    address = listener.getsockname().decode()
    events = select.poll()
    lines: dict[int, socket.socket] = {}
    forked: dict[int, _Forked] = {}
    events.register(listener, select.POLLIN)
    events.register(life, select.POLLIN)
    while True:
        for descriptor, _ in events.poll():
            if descriptor == life:
                os._exit(0)
            if descriptor == listener.fileno():
                line, _ = listener.accept()
                lines[line.fileno()] = line
                events.register(line, select.POLLIN)
            elif descriptor in forked:
                events.unregister(descriptor)
                _tell_end(forked.pop(descriptor))
                os.close(descriptor)
            elif descriptor in lines:
                events.unregister(descriptor)
                line = lines.pop(descriptor)
                try:
                    pid = _fork(line, address)
                except _IsChild:
                    for other in (listener, *lines.values(), *(each.line for each in forked.values())):
                        other.close()
                    for other_end in (life, *forked):
                        os.close(other_end)
                    raise
                if pid is None:
                    line.close()
                    continue
                watched = os.pidfd_open(pid)
                forked[watched] = _Forked(pid, line)
                events.register(watched, select.POLLIN)


def _tell_end(child: _Forked) -> None:
    _, status = os.waitpid(child.pid, 0)
    with contextlib.suppress(OSError):  # who started it has ended
        child.line.send(str(os.waitstatus_to_exitcode(status)).encode())
    child.line.close()


def _fork(line: socket.socket, address: str) -> int | None:
    try:
        said, streams, _, _ = socket.recv_fds(line, _MESSAGE_BYTES, 3)
    except OSError:
        return None
    if not said:
        return None
    request = json.loads(said)
    parent = os.getpid()
    if pid := os.fork():
        for stream in streams:
            os.close(stream)
        return pid
    _become(request, line, address, streams, parent)
    raise _IsChild(request)


def _become(request: dict[str, Any], line: socket.socket, address: str, streams: list[int], parent: int) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    _mark(request["env"])
    own = os.pidfd_open(os.getpid())
    try:
        # After the mark: whoever kills all that is marked finds this, or this finds that who has asked for it is dead.
        socket.send_fds(line, [str(os.getpid()).encode()], [own])
    except OSError:
        os._exit(1)
    os.close(own)
    line.close()
    _have_secrets_of_ones_own()
    if request["argv"][1] == "-m" and request["argv"][2] in _LAUNCHERS:
        _start_ranks_warm(address)


def _mark(env: Mapping[str, str]) -> None:
    written = os.memfd_create(_MARK_NAME)
    os.write(written, json.dumps(env).encode())
    os.dup2(written, _MARK_DESCRIPTOR, inheritable=False)
    os.close(written)


def _have_secrets_of_ones_own() -> None:
    # `random` does this by itself.
    import multiprocessing

    import numpy
    import torch

    numpy.random.seed()
    torch.default_generator.seed()
    multiprocessing.current_process().authkey = os.urandom(32)


def _start_ranks_warm(address: str) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    def start(self: Any, args: Sequence[str], env: Mapping[str, str]) -> WarmProcess:
        out, err = (1 if self._stdout is None else self._stdout.fileno()), self._stderr
        return WarmProcess(address, args, env, (0, out, 2 if err is None else err.fileno()))

    def close(self: Any, death_sig: signal.Signals | None = None, *, torchs: Any = SubprocessHandler.close) -> None:
        # A template reaps at once what has ended; the child of an agent can be sent signals until that has asked.
        with contextlib.suppress(ProcessLookupError):
            torchs(self, death_sig)
        for stream in (self._stdout, self._stderr):
            if stream:
                stream.close()

    SubprocessHandler._popen = start
    SubprocessHandler.close = close


def _be(argv: Sequence[str]) -> None:
    """Run a program, as the interpreter does."""
    arguments = [argument for argument in argv[1:2] if argument != "-u"] + list(argv[2:])
    main_module = types.ModuleType("__main__")
    if arguments[0] == "-m":
        spec = importlib.util.find_spec(arguments[1])
        assert spec is not None, arguments
        assert spec.origin is not None, arguments
        assert spec.loader is not None, arguments
        code = spec.loader.get_code(arguments[1])  # type: ignore[attr-defined]
        main_module.__spec__, main_module.__package__, main_module.__file__ = spec, spec.parent, spec.origin
        sys.argv, sys.path[0] = [spec.origin, *arguments[2:]], os.getcwd()
    elif arguments[0] == "-c":
        code = compile(arguments[1], "<string>", "exec")
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
    else:
        path = os.path.abspath(arguments[0])
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        code = loader.source_to_code(Path(path).read_bytes(), path)  # type: ignore[arg-type]
        main_module.__file__, main_module.__loader__ = path, loader
        sys.argv, sys.path[0] = arguments, os.path.dirname(path)
    main_module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)
