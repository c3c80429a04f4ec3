"""Policies: tabular ones, exact in closed form, and causal language models."""
