"""No worker of an engine outlives its driver, so that after `kill -9` none keeps holding a GPU.

vLLM imports this module in every worker process before the model loads, since `engine.start` names `Extension` to it.
The engine's own process ends when its workers do.
"""

import os
import select
import signal
import threading

from eagle3.engine import DRIVER


class Extension:
    """Adds nothing to vLLM's worker; importing it has started the watch."""


def die_with(driver_pid: int) -> None:
    """End this process when the driver has ended, however it ended."""
    try:
        descriptor = os.pidfd_open(driver_pid)
        select.select([descriptor], [], [])
    except ProcessLookupError:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if int(os.environ[DRIVER]) != os.getpid():  # else the engine runs inside its driver
    threading.Thread(target=die_with, args=(int(os.environ[DRIVER]),), daemon=True).start()
