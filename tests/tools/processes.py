"""Scripts on eight devices, in one process or in several that talk over the loopback device."""

import os
import socket
import subprocess
import sys
from typing import Any


def on_devices(script: str, processes: int, *arguments: Any, timeout: int = 300) -> None:
    """Runs `script *arguments PROCESSES RANK PORT` in each process, which is to print "the same"."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={8 // processes}"
    runs = [
        subprocess.Popen(
            [sys.executable, script, *map(str, (*arguments, processes, rank, port))],
            env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": "."},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    for run in runs:
        out, error = run.communicate(timeout=timeout)
        assert run.returncode == 0, error
        assert "the same" in out
