"""Put on PYTHONPATH, it replaces experiment and figures in every process, workers of launchers included."""

import os
import sys

from grpo_repro import config

config.EXPERIMENTS["mse-eval"] = "fake_experiment"
if os.environ.get("FAKE_PLOTS"):
    import fake_plots

    sys.modules["grpo_repro.plots"] = fake_plots
