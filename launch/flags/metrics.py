"""`--metrics_port`: a Prometheus endpoint for programs that train or synthesise, served from a separate thread.

Services have `/metrics` on their own port. Of a training run on several hosts, the first host serves the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from absl import flags

from astra_jax.base.metrics import METRICS, MetricRegistry
from astra_jax.base.settings import Port
from astra_jax.base.terminal import say
from launch.flags import cli
from launch.flags.numbers import number_flag

if TYPE_CHECKING:  # --help does not wait for it
    from astra_jax.base.http_service import HttpService

PORT = number_flag("metrics_port", None, Port, "Port to serve metrics on for Prometheus; 0 takes a free one.")
_HOST = flags.DEFINE_string(
    "metrics_host", "127.0.0.1", "Address to serve metrics on; any but loopback needs --metrics_key_file."
)
_TOKEN_FILE = flags.DEFINE_string(
    "metrics_key_file", None, "File whose first line is the key that clients of --metrics_port must send."
)


@contextlib.contextmanager
def shown(*, first: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Serve this process's metrics while the context is open, if --metrics_port is given.

    Args:
        first: returns whether this host serves the metrics. Called only with --metrics_port, since the answer starts
            the devices, before a run's inputs are checked.

    Raises:
        UsageError: a flag is missing, or the address is not available.
        SettingError: others could reach the endpoint without a token.
    """
    for flag in (_HOST, _TOKEN_FILE):
        if flag.present and PORT.value is None:
            raise cli.UsageError(f"--{flag.name} needs --metrics_port; give it too")
    if PORT.value is None or not first():
        yield
        return
    service = _service(METRICS, _HOST.value or "", PORT.value, cli.token_of(_TOKEN_FILE))
    ready: Future[str] = Future()
    stop = threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(_serve(service, ready, stop),), name="metrics", daemon=True)
    thread.start()
    try:
        say(f"metrics on {ready.result()}/metrics")
        yield
    finally:
        stop.set()
        thread.join(timeout=10)


def _service(figures: MetricRegistry, host: str, port: int, token: str | None) -> HttpService:
    """Return the service, not yet started. Raises `SettingError`."""
    # Here, so that --help does not wait for them.
    from aiohttp import web
    from prometheus_client import CollectorRegistry, exposition
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector

    from astra_jax.base.access import ReachConfig
    from astra_jax.base.http_service import HttpRefusal, HttpService

    class _Reach(ReachConfig):
        RISK = "read how far this run is"

    class _Shown(Collector):
        def collect(self) -> Iterator[GaugeMetricFamily]:
            family: GaugeMetricFamily | None = None
            for one in figures.all():
                if family is None or family.name != one.name:
                    if family is not None:
                        yield family
                    family = GaugeMetricFamily(one.name, "", labels=[name for name, _ in one.labels])
                family.add_metric([value for _, value in one.labels], one.value)
            if family is not None:
                yield family

    class _Service(HttpService):
        def __init__(self) -> None:
            self._registry = CollectorRegistry()
            self._registry.register(_Shown())
            routes = [web.get("/metrics", self._show), web.get("/health", self._health)]
            reach = _Reach(host=host, port=port, token=token, drain_seconds=2.0)
            super().__init__(reach, routes, most_bytes=1 << 10)

        def refusal(self, request: web.Request, refused: HttpRefusal) -> web.StreamResponse:
            return web.json_response({"error": refused.text}, status=refused.status, headers=refused.headers)

        async def _health(self, request: web.Request) -> web.Response:
            return web.json_response({"status": "ok"})

        async def _show(self, request: web.Request) -> web.Response:
            text = exposition.generate_latest(self._registry)
            return web.Response(body=text, headers={"Content-Type": exposition.CONTENT_TYPE_LATEST})

    return _Service()


async def _serve(service: HttpService, ready: Future[str], stop: threading.Event) -> None:
    config = service.config
    try:
        await service.start()
    except OSError as error:
        at = f"--metrics_host={config.host} --metrics_port={config.port}"
        ready.set_exception(cli.UsageError(f"{at}: {error.strerror or error}"))
        return
    except BaseException as error:  # whoever waits for it raises it
        ready.set_exception(error)
        return
    host = f"[{config.host}]" if ":" in config.host else config.host
    ready.set_result(f"{config.scheme}://{host}:{service.port}")
    while not stop.is_set():
        await asyncio.sleep(0.1)
    await service.stop()
