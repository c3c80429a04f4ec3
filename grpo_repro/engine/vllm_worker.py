"""What is added to vLLM's workers; it runs in their processes."""

from __future__ import annotations

import os
import select
import threading
from typing import Any


class PushedWeights:
    """Mixed into vLLM's worker by its `worker_extension_cls`."""

    def watch_owner(self, process: int) -> None:
        """End this worker, and with it the engine, when the process that owns the engine is gone.

        vLLM's engine outlives an owner that is killed, and would keep its memory for good.

        Args:
            process: The owner's id.
        """
        handle = os.pidfd_open(process)

        def wait() -> None:
            select.select([handle], [], [])  # readable once the process has ended
            os._exit(1)

        threading.Thread(target=wait, daemon=True, name="watch-owner").start()

    def load_pushed(self: Any, folder: str) -> None:
        """Load new weights from a folder, in place.

        On a CPU vLLM multiplies by a packed copy of the output matrix. Where that matrix is the embedding's (tied
        weights), reloading renews the embedding and leaves the copy as it was: it is made again here.

        Args:
            folder: Holds `*.safetensors` with a checkpoint's names.
        """
        self.reload_weights(weights_path=folder)
        head: Any = getattr(self.get_model(), "lm_head", None)
        if hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)
