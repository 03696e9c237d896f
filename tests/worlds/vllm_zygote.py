"""`vllm serve`, many times over in one process's children: run by vLLM's own Python, it imports vLLM once.

Three processes of a server import for 8 to 11 CPU seconds each; all else that a server of a tiny model does at its
start takes 7. Here every server, and what it starts itself, is a fork of one process that has imported everything.

One JSON object a line on standard input starts a server: its `command`, what is added to the `environment`, and the
`log` that its output goes to; with a `script`, Python that is run instead. The answer is its process, which leads a
session of its own. The zygote ends with its input; its servers do not.

Given arguments it is `vllm` with these, whose further processes are its forks.
"""

import json
import multiprocessing
import os
import signal
import sys
import traceback


def main() -> None:
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.openai.api_server
    import vllm.model_executor.models.qwen3
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.engine.utils
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    for module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")  # the platform forces "spawn" on it
    if sys.argv[1:]:
        vllm.entrypoints.cli.main.main()
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            serve(asked["command"], asked["environment"], asked["log"], asked.get("script", ""))
        print(child, flush=True)


def serve(command: list[str], environment: dict[str, str], log: str, script: str) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, out), (2, out)):
        os.dup2(source, target)
    os.environ |= environment
    sys.argv = command
    from vllm.entrypoints.cli.main import main as run

    code = 1
    try:
        exec(script, {"__name__": "__main__"}) if script else run()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


main()
