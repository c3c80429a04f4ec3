"""How many outputs per prompt should GRPO sample? Estimators, theory and experiments."""

__version__ = "0.1.0"
