"""The pump with real pipes and terminals: what a person sees of ranks that print."""

from __future__ import annotations

import os
import subprocess
import sys


def test_interpreter_ends_while_the_terminal_stands_still():
    code = """
import os, sys
from gradsync.launching.output import OutputPump

pump = OutputPump(sys.stdout, sys.stderr, prefix=True)
pump.start()
(out, to_out), (err, to_err) = os.pipe(), os.pipe()
pump.add(0, out, err)
os.set_blocking(to_out, False)
os.write(to_out, b"x\\n" * 20000)
pump.close(0.3)
"""
    reader, writer = os.pipe()  # with 40,000 bytes, and a prefix for each two of them, it is full
    process = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(writer)
    os.close(reader)
    assert (process.returncode, process.stderr) == (0, b"")
