"""The end of an actor's process with its cluster's control process; Ray would end it a minute later."""

import logging
import os
import threading

import ray

from actors.transport.network import host_and_port
from actors.transport.server_watch import ServerWatch

logger = logging.getLogger(__name__)


def end_with_gcs(patience_s: float) -> None:
    """From now on: end this process when the control process (GCS) is lost, as ServerWatch tells."""
    address = ray.get_runtime_context().gcs_address
    watch = ServerWatch(host_and_port(address), patience_s=patience_s)

    def wait() -> None:
        if watch.wait_lost(lambda: False):
            logger.error("Ray's control process (GCS) at %s is gone; this process ends with it", address)
            logging.shutdown()
            os._exit(1)  # no clean end is left: Ray's own waits for the control process

    threading.Thread(target=wait, name="gcs-watch", daemon=True).start()
