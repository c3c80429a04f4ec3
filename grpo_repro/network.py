"""Whether the Hugging Face hub can be reached, told quickly."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

HUB = "huggingface.co"
SECONDS = 3.0


def reachable() -> bool:
    """Whether the hub's name is known, within three seconds; True where a proxy or mirror makes that hard to tell."""
    if any(name.lower() in ("https_proxy", "all_proxy", "hf_endpoint") for name in os.environ):
        return True
    return answers(lambda: socket.getaddrinfo(HUB, 443))


def answers(ask: Callable[[], Any], seconds: float = SECONDS) -> bool:
    """Whether a question to the network has an answer in time.

    A name server that does not answer ignores every time limit: a thread that is left behind does not hold us up.

    Args:
        ask: Raises OSError where there is none.
        seconds: How long it may take.
    """
    found: list[bool] = []

    def look() -> None:
        with suppress(OSError):
            ask()
            found.append(True)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(found)


def take_the_cache() -> None:
    """Tell the hub's client that there is no network: it would try five times, and print each."""
    import huggingface_hub

    huggingface_hub.constants.HF_HUB_OFFLINE = True
