"""Whether the Hugging Face hub can be reached, told quickly."""

from __future__ import annotations

import os
import socket
import threading


def reachable() -> bool:
    """Whether the hub's name is known, within three seconds; True where a proxy or mirror makes that hard to tell."""
    if any(name.lower() in ("https_proxy", "all_proxy", "hf_endpoint") for name in os.environ):
        return True
    found: list[bool] = []

    def look() -> None:
        try:
            socket.getaddrinfo("huggingface.co", 443)
            found.append(True)
        except OSError:
            return

    # A name server that does not answer ignores every time limit: a thread that is left behind does not hold us up.
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(3.0)
    return bool(found)


def take_the_cache() -> None:
    """Tell the hub's client that there is no network: it would try five times, and print each."""
    import huggingface_hub

    huggingface_hub.constants.HF_HUB_OFFLINE = True
