"""How the command ends: interrupted, unread, with an error. One line at most, and the status that shells expect."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from damaged import damage

from centroidkv.cli.main import main
from centroidkv.errors import CommandError
from centroidkv.integrations.process import finish, one_line

COMMAND = [sys.executable, "-m", "centroidkv.cli.main"]


def start(*arguments, **more):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | more
    return subprocess.Popen([*COMMAND, *map(str, arguments)], **pipes)


def long_run(folder, prompt, **more):
    return start("generate", "--model", folder, "--prompt-file", prompt, "--max-new-tokens", 60000, **more)


# -- signals ----------------------------------------------------------------------------------------------------------


def test_an_interrupt_while_text_is_written_is_one_line(folder, prompt):
    process = long_run(folder, prompt)
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert (process.returncode, errors) == (130, b"centroidkv: interrupted\n")


@pytest.mark.parametrize("seconds", [0.5, 1.5])
def test_an_interrupt_while_pytorch_is_imported_is_one_line(folder, prompt, seconds):
    process = long_run(folder, prompt)
    time.sleep(seconds)  # Python itself has started by then; what is imported takes longer than that
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == b"centroidkv: interrupted\n"
    assert process.returncode == 130


def test_the_package_itself_loads_nothing_heavy():
    code = "import sys, centroidkv.cli.main; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def interrupt(number=signal.SIGINT):
    signal.raise_signal(number)
    time.sleep(5)


def hidden_by_a_library():
    try:
        interrupt()
    except KeyboardInterrupt as error:
        raise ImportError("numpy failed to import") from error


def dropped_by_a_destructor():
    class Fragile:
        def __del__(self):
            interrupt()

    Fragile()
    time.sleep(5)


@pytest.mark.parametrize("work", [interrupt, hidden_by_a_library, dropped_by_a_destructor])
def test_an_interrupt_is_known_by_whatever_it_became(work, capsys):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.unraisablehook
    begun = time.monotonic()
    assert finish("centroidkv", work) == 130
    assert time.monotonic() - begun < 4
    assert capsys.readouterr() == ("", "centroidkv: interrupted\n")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.unraisablehook) == before


def test_sigterm_is_no_exception_that_code_handles(capsys):
    def work():
        try:
            interrupt(signal.SIGTERM)
        except Exception:
            return 0

    assert finish("centroidkv", work) == 143
    assert capsys.readouterr().err == "centroidkv: terminated\n"


def test_a_hosts_own_handlers_stay_in_force(capsys):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        assert finish("centroidkv", lambda: signal.raise_signal(signal.SIGTERM) or 7) == 7
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


def test_a_second_interrupt_ends_the_process_at_once():
    code = (
        "import signal, time\n"
        "from centroidkv.integrations.process import finish\n"
        "def work():\n"
        "    try: signal.raise_signal(signal.SIGINT)\n"
        "    finally: signal.raise_signal(signal.SIGINT); time.sleep(30)\n"
        "finish('x', work)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_the_status_holds_also_where_python_remembers_the_interrupt():
    code = (
        "import sys\n"
        "from centroidkv.integrations.process import finish\n"
        "sys.exit(finish('x', lambda: exec('import signal; signal.raise_signal(signal.SIGINT)')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20)
    assert (done.returncode, done.stderr) == (130, b"x: interrupted\n")


def test_off_the_main_thread_errors_are_lines_all_the_same(capsys):
    found = []
    thread = threading.Thread(
        target=lambda: found.append(main(["generate", "--model", "/no/model", "--prompt-file", "p"]))
    )
    thread.start()
    thread.join()
    assert found == [2]
    assert "ModelError: there is no folder '/no/model'" in capsys.readouterr().err


# -- nobody reads on --------------------------------------------------------------------------------------------------


def test_a_reader_that_leaves_is_no_error(folder, prompt):
    process = start("generate", "--model", folder, "--prompt-file", prompt, "--max-new-tokens", 40)
    process.stdout.close()
    assert process.wait(timeout=120) == 141
    assert process.stderr.read() == b""


@pytest.mark.parametrize(
    ("work", "closed", "status"),
    [
        ("print('x' * 100)", "stdout", 141),
        ("raise SystemExit(print('help'))", "stdout", 141),
        ("raise ValueError(print('x') or 'wrong')", "stdout", 141),
        ("print('x', file=sys.stderr, flush=True)", "stderr", 141),
        ("raise ValueError('wrong')", "stderr", 2),
    ],
)
def test_nothing_is_said_where_nobody_reads(work, closed, status):
    code = (
        "import sys; from centroidkv.integrations.process import finish\n"
        f"def work(): {work}\n"
        "sys.stdin.read(1); sys.exit(finish('x', work))"
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", code], **pipes)
    getattr(process, closed).close()
    process.stdin.write(b".")
    process.stdin.close()
    assert process.wait(timeout=60) == status
    assert (process.stderr if closed == "stdout" else process.stdout).read() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_one_line():
    code = (
        "import sys; from centroidkv.integrations.process import finish\nsys.exit(finish('x', lambda: print('y') or 0))"
    )
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "No space left" in done.stderr


def test_another_pipe_that_breaks_is_an_error():
    code = (
        "import sys; from centroidkv.integrations.process import finish\n"
        "def work(): raise BrokenPipeError('the hub hung up')\n"
        "sys.exit(finish('x', work))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "x: BrokenPipeError: the hub hung up\n")


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "MemoryError"),
        (RuntimeError("first\n\n  second\tthird"), "RuntimeError: first second third"),
        (KeyError("model.norm"), "KeyError: 'model.norm'"),
        (FileNotFoundError(2, "No such file", "f"), "FileNotFoundError: [Errno 2] No such file: 'f'"),
    ],
)  # fmt: skip
def test_any_error_is_one_line_and_two(error, line, capsys):
    def work():
        raise error

    assert one_line(error) == line
    assert finish("centroidkv", work) == 2
    assert capsys.readouterr() == ("", f"centroidkv: {line}\n")
    with pytest.raises(type(error)):
        finish("centroidkv", work, errors=CommandError)


def test_the_traceback_is_there_for_whoever_asks(capsys):
    assert main(["--traceback", "generate", "--model", "/no/model", "--prompt-file", "p"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == lines[-2].replace("centroidkv.errors.", "centroidkv: ")


@pytest.mark.parametrize("how", ["cut", "none", "no json", "no tokenizer", "unknown", "text"])
def test_a_damaged_model_is_one_named_line(folder, prompt, how, tmp_path, capsys):
    model = damage(folder, how, tmp_path)
    assert main(["generate", "--model", str(model), "--prompt-file", str(prompt)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[-1].startswith(f"centroidkv: ModelError: the model '{model}' cannot be loaded: ")
    assert "Traceback" not in said.err


def test_what_torch_cannot_do_is_one_line(folder, prompt, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    monkeypatch.setattr("transformers.LlamaForCausalLM.generate", refuse)
    assert main(["generate", "--model", str(folder), "--prompt-file", str(prompt), "--dtype", "float16"]) == 2
    assert capsys.readouterr().err == "centroidkv: RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'\n"


def test_called_from_python_it_leaves_the_process_as_it_was(folder, prompt, capsys):
    import matplotlib
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    def state():
        return (list(warnings.filters), logging.is_progress_bar_enabled(), are_progress_bars_disabled(),
                matplotlib.get_backend(), signal.getsignal(signal.SIGINT), sys.unraisablehook)  # fmt: skip

    try:
        for hub in (enable_progress_bars, disable_progress_bars):
            hub()
            before = state()
            rest = ["--prompt-file", str(prompt), "--max-new-tokens", "3"]
            assert main(["generate", "--model", str(folder), *rest]) == 0
            assert state() == before
            assert main(["generate", "--model", "/no/model", *rest]) == 2
            assert state() == before
    finally:
        enable_progress_bars()
